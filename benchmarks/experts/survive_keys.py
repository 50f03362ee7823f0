"""Cost of many remembered requests for a server: bytes on disk, start, shutdown, and calls while it saves.

8 experts, N keys each ──> torchweft serve: start ── train while it saves every 30 s, as by default ── SIGTERM
                       ──> the same with continuous saves and without saves, for comparison
8 experts, no keys     ──> start and shutdown only
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
    """Train for ``seconds`` on servers whose experts remember ``keys`` requests each."""
    with TemporaryDirectory() as root:
        plain, full = Path(root) / "plain", Path(root) / "full"
        _save(plain, 0)
        _save(full, keys)
        extra = _bytes(full) - _bytes(plain)
        idle = [_measure_server(plain, 3600.0, 0.0) for _ in range(starts)]
        busy = [_measure_server(full, 3600.0, 0.0) for _ in range(starts)]
        start = statistics.median(figures[0] for figures in busy) - statistics.median(figures[0] for figures in idle)
        _, _, unsaved = _measure_server(full, 3600.0, seconds)
        _, end, saving = _measure_server(full, DEFAULT_SECONDS, seconds)
        _, last, continuous = _measure_server(full, 0.05, seconds)
        end = max([end, last, *(figures[1] for figures in busy)])
    ratio = quantile(saving) / quantile(unsaved)
    return Verdict(
        f"{EXPERTS} experts that remember {keys} requests each",
        f"{len(unsaved) + len(saving) + len(continuous)} backwards",
        f"{MOST_BYTES / 1e6:g} MB each, start at most {MOST_START:g} s slower, SIGTERM within {MOST_END:g} s, "
        f"p99 with saves every {DEFAULT_SECONDS:g} s at most {MOST_RATIO:g} times",
        f"{extra / 1e6:.2f} MB, {start:+.2f} s, {end:.1f} s, p99 {quantile(unsaved):.1f} and {quantile(saving):.1f} ms "
        f"({ratio:.1f} times; {quantile(continuous) / quantile(unsaved):.1f} times with continuous saves)",
        extra <= MOST_BYTES and start <= MOST_START and end <= MOST_END and ratio <= MOST_RATIO,
    )


def _save(folder: Path, keys: int) -> None:
    """Write the first checkpoint of every expert, with `keys` keys of a few trainers."""
    store, records = FolderCheckpointStore(folder), IdempotencyTable(IdempotencyOptions(max_client_keys=max(1, keys)))
    for number in range(keys):
        task = Task((), 1, client=f"trainer-{number % TRAINERS}", key=f"{number:032x}")
        records.begin("backward", task)
        records.record("backward", task, [torch.zeros(ROWS, HIDDEN)] if number >= keys - 1000 else [], 0)
        records.abandon("backward", task)
    state = records.state_dict()
    state["now"] += 60.0  # ages the keys, so that no retry of them is expected
    for number in range(EXPERTS):
        backend: ExpertBackend = make_expert("ffn", hidden=HIDDEN).backend(f"ffn.{number}", torch.optim.Adam)
        store.save(backend.name, backend.state_dict(), 0, {"records": state, "token": 0})


def _bytes(folder: Path) -> int:
    return max(file.stat().st_size for file in folder.rglob("*.safetensors"))


def _measure_server(folder: Path, checkpoint_seconds: float, seconds: float) -> tuple[float, float, list[float]]:
    """Seconds of the start, seconds from SIGTERM to the end, and milliseconds of every backward."""
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
            milliseconds = _train(line.split()[-1], seconds) if seconds else []
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            if process.wait(10 * PATIENCE):
                raise RuntimeError(f"the server ended with {process.returncode}")
            return start, time.monotonic() - began, milliseconds
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


def _train(address: str, seconds: float) -> list[float]:
    """Train all experts in turn, with a few threads and a fixed total rate. Return milliseconds of backwards."""
    milliseconds: list[float] = []

    def train(number: int) -> None:
        remotes = [RemoteExpert(f"ffn.{expert}", address) for expert in range(EXPERTS)]
        x = torch.randn(ROWS, HIDDEN)
        due = time.monotonic() + number / PER_SECOND
        end = due + seconds
        turn = number
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            y = remotes[turn % EXPERTS](x.clone().requires_grad_())
            began = time.monotonic()
            y.sum().backward()
            milliseconds.append(1e3 * (time.monotonic() - began))
            due, turn = due + TRAINERS / PER_SECOND, turn + 1
        for remote in remotes:
            remote.close()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(TRAINERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return milliseconds
