"""A trainer process of the act: its own stem, router and head; experts that it shares with the other trainer.

    stdin   first line: what to do; then who serves what, see machines_following.py
    stdout  {"said": "ready"}
            {"said": "steps", "losses": [[t, loss], ...], "checks": [[t, accuracy], ...], "answered": {address: t}}
            {"said": "result", "accuracy": ..., "calls": ..., "given_up": ..., "ledger": {...}}

Times are of `time.monotonic`, which is one clock for all processes of a machine. An exception ends the process with
an exit code that is not 0: the act counts on that.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.demo.machines_following import Following
from weft.demo.machines_ledger import Ledger
from weft.demo.machines_model import UIDS, Classifier, Labelled, accuracy, loss_of, mixture, read_labelled
from weft.experts.client import Connections
from weft.experts.directory import LocalDirectory
from weft.experts.mixture import RemoteSwitchMixtureOfExperts

ROWS = 64
_RATE = 1e-3
_LOSE_EVERY = 20  # of the answers to backwards
_TELL = 0.2  # seconds between two lines
_CHECK = 0.5  # seconds between two looks at the held-out digits
_NICE = 10  # where there are few cores, a server that starts or answers goes first
_FIRST = 20.0  # seconds for all experts to be seen


@dataclass
class _Notes:
    """What is to be told next."""

    losses: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    checks: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    told: float = 0.0
    checked: float = 0.0


def main() -> None:
    """The process."""
    task = json.loads(sys.stdin.readline())
    os.nice(_NICE)
    torch.set_num_threads(task["threads"])
    torch.manual_seed(task["seed"])
    ledger = Ledger(_LOSE_EVERY)
    digits = read_labelled(Path(task["digits"])).half(task["number"])
    directory = LocalDirectory()
    with Connections(directory, open_transport=ledger.open) as connections:
        follow = Following(directory, sys.stdin, connections.close)
        middle = mixture(connections)
        model = Classifier(middle)
        optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
        _say(said="ready")
        follow.begin.wait()
        try:
            _see_all(connections, follow)
            batches = _batches(digits, torch.Generator().manual_seed(task["seed"] + task["number"]))
            _train(model, optimizer, batches, digits, follow, ledger)
            if not follow.over.is_set():
                _say(said="result", accuracy=accuracy(model, digits), ledger=ledger.told(), **_calls(middle))
        except Exception:
            if not follow.over.is_set():  # otherwise nobody is there any more to hear of it
                raise
        follow.close()
    directory.close()


def _batches(digits: Labelled, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        rows = torch.randint(len(digits.images), (ROWS,), generator=generator)
        yield digits.images[rows], digits.digits[rows]


def _calls(middle: RemoteSwitchMixtureOfExperts) -> dict[str, int]:
    figures = middle.statistics()
    return {"calls": figures.forward_calls + figures.backward_calls, "given_up": sum(figures.failed.values())}


def _see_all(connections: Connections, follow: Following) -> None:
    """The snapshot follows the directory from a thread, so it may be a moment behind."""
    end = time.monotonic() + _FIRST
    while len(connections.snapshot()) < len(UIDS):
        if follow.over.is_set() or time.monotonic() > end:
            seen = ", ".join(connections.snapshot().uids) or "none"
            raise TimeoutError(f"of {len(UIDS)} experts these were seen within {_FIRST:g} s: {seen}")
        time.sleep(0.01)


def _train(
    model: Classifier,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    digits: Labelled,
    follow: Following,
    ledger: Ledger,
) -> None:
    """Steps until it is told to finish."""
    notes = _Notes()
    while not follow.finish.is_set():
        whole, loss = loss_of(model, *next(batches))
        optimizer.zero_grad()
        whole.backward()  # the experts step, elsewhere
        optimizer.step()
        now = time.monotonic()
        notes.losses.append((now, loss.item()))
        if now - notes.checked >= _CHECK:
            notes.checks.append((now, accuracy(model, digits)))
            notes.checked = now
        if now - notes.told >= _TELL:
            _tell(notes, ledger)
    _tell(notes, ledger)


def _tell(notes: _Notes, ledger: Ledger) -> None:
    _say(said="steps", losses=notes.losses, checks=notes.checks, answered=ledger.first_answers())
    notes.losses, notes.checks, notes.told = [], [], time.monotonic()


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the thread that reads the input would hold Python up
    os._exit(0)  # all was told; to take Python apart with gRPC in it may take seconds
