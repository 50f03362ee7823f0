"""Many small experts at one server, started as users start it (`torchweft serve FILE`): processes, seconds, memory.

start       from the command to the line that says where it listens: Python, torch and all experts
bare        Python that imports torch and makes one Adam, which every server of theirs must do
memory      resident bytes of all its processes after every expert has taken one step, beyond parameters and
            the two moments of Adam
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.experts.helper import ROOT, family
from benchmarks.experts.processes.module import feed_forward
from benchmarks.harness import progress
from benchmarks.load import LoadMeter, _seconds_of
from benchmarks.table import Row, Table, at_most
from torchweft.experts.client import GrpcTransport, RemoteExpert

MB = 1_000_000
WIDTH, ROWS = 64, 4
REQUIRED_PROCESSES, REQUIRED_SECONDS, REQUIRED_MB = 3, 3.0, 400.0
_DEADLINE = 120.0
_CONFIG = """
address = "127.0.0.1:0"
[[experts]]
name = "ffn.{}"
count = COUNT
kind = "ffn"
arguments = { hidden = WIDTH }
optimizer = "Adam"
optimizer_arguments = { lr = 0.001 }
"""
_BARE = """
import torch
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
print(flush=True)
input()
"""


class Seen(NamedTuple):
    """Of one start. ``nbytes`` are resident, of all processes, after a step of every expert."""

    seconds: float
    processes: int
    nbytes: int
    foreign: float


def run(quick: bool) -> Table:
    """Processes, seconds and bytes."""
    count, starts = (4, 1) if quick else (256, 3)
    seen = [_start(count, number) for number in range(starts)]
    one = None if quick else _start(1, 0)
    own = 3 * count * sum(each.numel() * each.element_size() for each in feed_forward(WIDTH).parameters())
    seconds = median(each.seconds for each in seen)
    beyond = max(each.nbytes for each in seen) - own
    processes = max(each.processes for each in seen)
    foreign = max(each.foreign for each in seen)
    told = f"{len(seen)} starts" + (f"; DISTURBED: other processes used up to {foreign:.2f} cores" * (foreign > 0.1))
    rows: list[Row] = [
        {"figure": "processes", "seen": f"{processes}", **at_most(processes, REQUIRED_PROCESSES)},
        {"figure": "start, s", "seen": f"{seconds:.2f}", **at_most(seconds, REQUIRED_SECONDS), "rounds": told},
        {
            "figure": "memory beyond parameters and optimizer, MB",
            "seen": f"{beyond / MB:.0f}",
            **at_most(beyond / MB, REQUIRED_MB),
        },
    ]
    notes = [f"  parameters and optimizer take {own / MB:.0f} MB"]
    if one is not None:
        bare, nbytes = _bare()
        notes.append(f"  Python that imports torch and makes one Adam: {bare:.2f} s, {nbytes / MB:.0f} MB")
        notes.append(f"  with one expert: {one.seconds:.2f} s, {one.nbytes / MB:.0f} MB in all")
    return Table(f"{count} experts ffn{WIDTH} with Adam at one server", rows, notes)


def _start(count: int, number: int) -> Seen:
    progress(f"{count} experts, start {number + 1}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts.toml"
        path.write_text(_CONFIG.replace("COUNT", str(count)).replace("WIDTH", str(WIDTH)))
        meter = LoadMeter()
        meter.start()
        begun = time.perf_counter()
        server = subprocess.Popen(
            [sys.executable, "-m", "torchweft", "serve", str(path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            address = _address(server)
            seconds = time.perf_counter() - begun
            processes = family(server.pid)
            foreign = max(0.0, meter.foreign() - _used(processes) / seconds)
            _train(address, count)
            return Seen(seconds, len(processes), sum(map(_resident, family(server.pid))), foreign)
        finally:
            _end(server)


def _bare() -> tuple[float, int]:
    """Seconds and resident bytes of the unavoidable part of any such server; of three, the median and the most."""
    seen: list[tuple[float, int]] = []
    for _ in range(3):
        begun = time.perf_counter()
        with subprocess.Popen([sys.executable, "-c", _BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            seen.append((time.perf_counter() - begun, _resident(process.pid)))
            process.kill()
    return median(seconds for seconds, _ in seen), max(nbytes for _, nbytes in seen)


def _address(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], _DEADLINE)
    line = server.stdout.readline() if ready else ""
    if " at " not in line:
        raise RuntimeError(f"the server did not say within {_DEADLINE:.0f} s where it listens, but {line!r}")
    return line.split(" at ")[1].strip()


def _train(address: str, count: int) -> None:
    """One step of every expert: so optimizers have their moments, and pools their buffers."""
    x = torch.randn(ROWS, WIDTH)
    with GrpcTransport(address) as transport:
        for number in range(count):
            expert = RemoteExpert(f"ffn.{number}", transport)
            expert(x).sum().backward()
            if expert.steps != 1:
                raise RuntimeError(f"expert {number} has taken {expert.steps} steps, wanted 1")


def _end(server: "subprocess.Popen[str]") -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    if server.stdout is not None:
        server.stdout.close()


def _resident(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS:"))


def _used(processes: list[int]) -> float:
    """CPU seconds of processes that began with the measurement."""
    return sum(map(_seconds_of, processes))
