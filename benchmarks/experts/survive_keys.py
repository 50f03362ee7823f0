"""The cost of many remembered requests for a server: bytes on the disk, its start, its end, and calls while it saves.

8 experts, N keys each ──> torchweft serve: started ── trained while it saves every 30 s, as by default ── SIGTERM
                       ──> the same, saving all the time and never: what it is compared with
8 experts, no keys     ──> started and ended alone
"""

import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.experts.survive_common import PATIENCE, Verdict, quantile
from torchweft.experts import ExpertBackend, IdempotencyOptions, make_expert
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import RemoteExpert
from torchweft.experts.idempotency import IdempotencyTable
from torchweft.experts.server import ServerOptions
from torchweft.experts.task import Task

EXPERTS, TRAINERS, PER_SECOND, HIDDEN, ROWS = 8, 4, 28.0, 32, 16
DEFAULT_SECONDS = ServerOptions().checkpoint_seconds
MOST_BYTES, MOST_START, MOST_END, MOST_RATIO = 6_000_000, 1.0, 5.0, 2.0
_CONFIG = """
address = "127.0.0.1:0"
checkpoints = "{folder}"
options = {{ checkpoint_seconds = {seconds} }}
[[experts]]
name = "ffn.{{}}"
count = {experts}
kind = "ffn"
arguments = {{ hidden = {hidden} }}
optimizer = "Adam"
"""


def many_keys(keys: int, seconds: float, starts: int = 3) -> Verdict:
    """Servers whose experts remember ``keys`` requests each, trained for ``seconds``; started so often."""
    with TemporaryDirectory() as root:
        plain, full = Path(root) / "plain", Path(root) / "full"
        _save(plain, 0)
        _save(full, keys)
        more = _bytes(full) - _bytes(plain)
        idle = [_served(plain, 3600.0, 0.0) for _ in range(starts)]
        busy = [_served(full, 3600.0, 0.0) for _ in range(starts)]
        start = statistics.median(each[0] for each in busy) - statistics.median(each[0] for each in idle)
        _, _, before = _served(full, 3600.0, seconds)
        _, end, saving = _served(full, DEFAULT_SECONDS, seconds)
        _, last, always = _served(full, 0.05, seconds)
        end = max([end, last, *(each[1] for each in busy)])
    ratio = quantile(saving) / quantile(before)
    return Verdict(
        f"{EXPERTS} experts that remember {keys} requests each",
        f"{len(before) + len(saving) + len(always)} backwards",
        f"{MOST_BYTES / 1e6:g} MB each, start within {MOST_START:g} s of one without, SIGTERM within {MOST_END:g} s, "
        f"p99 with saves every {DEFAULT_SECONDS:g} s at most {MOST_RATIO:g} times",
        f"{more / 1e6:.2f} MB, {start:+.2f} s, {end:.1f} s, p99 {quantile(before):.1f} and {quantile(saving):.1f} ms "
        f"({ratio:.1f} times; {quantile(always) / quantile(before):.1f} times where it saves without pause)",
        more <= MOST_BYTES and start <= MOST_START and end <= MOST_END and ratio <= MOST_RATIO,
    )


def _save(folder: Path, keys: int) -> None:
    """The first checkpoint of every expert, with so many keys of a few trainers."""
    store, records = FolderCheckpointStore(folder), IdempotencyTable(IdempotencyOptions(max_client_keys=max(1, keys)))
    for number in range(keys):
        task = Task((), 1, client=f"trainer-{number % TRAINERS}", key=f"{number:032x}")
        records.begin("backward", task)
        records.record("backward", task, [torch.zeros(ROWS, HIDDEN)] if number >= keys - 1000 else [], 0)
        records.abandon("backward", task)
    state = records.state_dict()
    state["now"] += 60.0  # the keys are older: a retry of them is not expected any more
    for number in range(EXPERTS):
        backend: ExpertBackend = make_expert("ffn", hidden=HIDDEN).backend(f"ffn.{number}", torch.optim.Adam)
        store.save(backend.name, backend.state_dict(), 0, {"records": state, "token": 0})


def _bytes(folder: Path) -> int:
    return max(file.stat().st_size for file in folder.rglob("*.safetensors"))


def _served(folder: Path, checkpoint_seconds: float, seconds: float) -> tuple[float, float, list[float]]:
    """Seconds of the start, seconds from SIGTERM to the end, and milliseconds of every backward in between."""
    copy = folder.with_name("served")
    shutil.copytree(folder, copy)
    file = folder.with_name("serve.toml")
    file.write_text(
        _CONFIG.format(folder=copy, seconds=checkpoint_seconds, experts=EXPERTS, hidden=HIDDEN), encoding="utf-8"
    )
    try:
        began = time.monotonic()
        with _process(file) as process:
            line = process.stdout.readline()
            start = time.monotonic() - began
            taken = _trained(line.split()[-1], seconds) if seconds else []
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            if process.wait(10 * PATIENCE):
                raise RuntimeError(f"the server ended with {process.returncode}")
            return start, time.monotonic() - began, taken
    finally:
        shutil.rmtree(copy)


@contextmanager
def _process(file: Path) -> Generator[Any]:
    process = subprocess.Popen(
        [sys.executable, "-m", "torchweft", "serve", "--insecure", str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _trained(address: str, seconds: float) -> list[float]:
    """A few trainers that call all experts in turn, so many times a second together."""
    taken: list[float] = []

    def train(number: int) -> None:
        remotes = [RemoteExpert(f"ffn.{each}", address) for each in range(EXPERTS)]
        x = torch.randn(ROWS, HIDDEN)
        due = time.monotonic() + number / PER_SECOND
        end = due + seconds
        turn = number
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            y = remotes[turn % EXPERTS](x.clone().requires_grad_())
            began = time.monotonic()
            y.sum().backward()
            taken.append(1e3 * (time.monotonic() - began))
            due, turn = due + TRAINERS / PER_SECOND, turn + 1
        for remote in remotes:
            remote.close()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(TRAINERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken
