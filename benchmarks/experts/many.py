"""Many small experts on one server that is started by `torchweft serve FILE`: processes, seconds, memory.

start       from the command to the line with the address: Python, torch and all experts
bare        Python that imports torch and makes one Adam, which every server must do
memory      resident bytes of all processes after one step of every expert, without parameters and the two
            moments of Adam
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


class StartFigures(NamedTuple):
    """Figures of one start. ``nbytes`` are resident in all processes after a step of every expert."""

    seconds: float
    processes: int
    nbytes: int
    foreign: float


def run(quick: bool) -> Table:
    """Processes, seconds of the start, and bytes beyond parameters and optimizer."""
    count, starts = (4, 1) if quick else (256, 3)
    results = [_start(count, number) for number in range(starts)]
    one = None if quick else _start(1, 0)
    state_bytes = 3 * count * sum(parameter.nbytes for parameter in feed_forward(WIDTH).parameters())
    seconds = median(result.seconds for result in results)
    beyond = max(result.nbytes for result in results) - state_bytes
    processes = max(result.processes for result in results)
    foreign = max(result.foreign for result in results)
    note = f"{len(results)} starts" + (f"; DISTURBED: other processes used up to {foreign:.2f} cores" * (foreign > 0.1))
    rows: list[Row] = [
        {"figure": "processes", "measured": f"{processes}", **at_most(processes, REQUIRED_PROCESSES)},
        {"figure": "start, s", "measured": f"{seconds:.2f}", **at_most(seconds, REQUIRED_SECONDS), "rounds": note},
        {
            "figure": "memory beyond parameters and optimizer, MB",
            "measured": f"{beyond / MB:.0f}",
            **at_most(beyond / MB, REQUIRED_MB),
        },
    ]
    notes = [f"  parameters and optimizer take {state_bytes / MB:.0f} MB"]
    if one is not None:
        bare, nbytes = _bare()
        notes.append(f"  Python that imports torch and makes one Adam: {bare:.2f} s, {nbytes / MB:.0f} MB")
        notes.append(f"  with one expert: {one.seconds:.2f} s, {one.nbytes / MB:.0f} MB in all")
    return Table(f"{count} experts ffn{WIDTH} with Adam on one server", rows, notes)


def _start(count: int, number: int) -> StartFigures:
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
            foreign = max(0.0, meter.foreign() - _cpu_seconds(processes) / seconds)
            _train(address, count)
            return StartFigures(seconds, len(processes), sum(map(_resident, family(server.pid))), foreign)
        finally:
            _stop(server)


def _bare() -> tuple[float, int]:
    """Median seconds and largest resident bytes of three processes that import torch and make one Adam."""
    samples: list[tuple[float, int]] = []
    for _ in range(3):
        begun = time.perf_counter()
        with subprocess.Popen([sys.executable, "-c", _BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            samples.append((time.perf_counter() - begun, _resident(process.pid)))
            process.kill()
    return median(seconds for seconds, _ in samples), max(nbytes for _, nbytes in samples)


def _address(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], _DEADLINE)
    line = server.stdout.readline() if ready else ""
    if " at " not in line:
        raise RuntimeError(f"the server did not print its address within {_DEADLINE:.0f} s, but {line!r}")
    return line.split(" at ")[1].strip()


def _train(address: str, count: int) -> None:
    """Take one step of every expert, so that moments and buffers are allocated."""
    x = torch.randn(ROWS, WIDTH)
    with GrpcTransport(address) as transport:
        for number in range(count):
            expert = RemoteExpert(f"ffn.{number}", transport)
            expert(x).sum().backward()
            if expert.steps != 1:
                raise RuntimeError(f"expert {number} has taken {expert.steps} steps, not 1")


def _stop(server: "subprocess.Popen[str]") -> None:
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


def _cpu_seconds(processes: list[int]) -> float:
    """CPU seconds of processes that were started after the measurement began."""
    return sum(map(_seconds_of, processes))
