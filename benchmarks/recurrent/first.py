"""Duration of the first call, in which the step is captured, planned, compiled and checked against the eager loop.

    a fresh process, an empty cache     matrix products | tracing | cell | cell | cell ...       compiled
    a fresh process, the same cache     matrix products | tracing | cell | cell | cell ...       loaded from disk
                                        '- once per ----'
                                           machine  process

The time of the second call, over the same number of steps, is subtracted. The difference must not depend on T.
`tracing` is the extra time of the first plan of a process, which imports PyTorch's tracing. It is not part of the times
of cells. `batch size` is the third number of rows that a network gets. A plan for more rows is reused for it.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.harness import FOREIGN, progress
from benchmarks.recurrent.apart import Found, in_a_fresh_process
from benchmarks.recurrent.cells import LSTMCell, eager
from benchmarks.recurrent.work import training
from benchmarks.recurrent.zoo import WIDTH, ZOO
from benchmarks.table import Row, Table, at_most
from torchweft.core.pytree import flatten
from torchweft.recurrent import Recurrent, cells
from torchweft.recurrent.cpp.cpp_backend import kernels

STEPS, ROWS = (50, 1000), 8
REQUIRED = 1.5
TRIES = 2
"""A disturbed process is run once more, and the less disturbed run counts."""
QUICK = ("torch's LSTM, residual",)


@dataclass(frozen=True)
class First:
    """Seconds of first calls, and the backend that runs each cell afterwards."""

    products: float
    tracing: float
    batch: float
    cells: dict[str, float]
    backends: dict[str, str]


Results = dict[tuple[int, str], Found]
"""The `First` of each number of steps and each cache state, "cold" or "warm"."""


def run(quick: bool) -> Table:
    """Seconds of the first call of every zoo cell, at two lengths, with an empty and with a full cache."""
    names, lengths = (QUICK, (5,)) if quick else (tuple(ZOO), STEPS)
    results: Results = {}
    for steps in lengths:
        results |= _measure(names, steps)
    rows = [*_cell_rows(names, results), *_shared_rows(results)]
    if not quick:
        progress("torch.compile of the unrolled loop")
        rows.append(_torch_row(STEPS[0]))
    notes = [f"  cold: empty cache; warm: everything was compiled before; {_disturbed(results)}"]
    return Table(f"seconds of the first call minus those of the second: batch {ROWS}, width {WIDTH}", rows, notes)


def _measure(names: tuple[str, ...], steps: int) -> Results:
    with tempfile.TemporaryDirectory(prefix="torchweft-first-") as folder:
        caches: list[str] = []

        def cold() -> Found:
            caches.append(tempfile.mkdtemp(dir=folder))
            return in_a_fresh_process(first_calls, names, steps, caches[-1])

        def warm() -> Found:
            return in_a_fresh_process(first_calls, names, steps, caches[-1])

        results: Results = {}
        for cache, attempt in (("cold", cold), ("warm", warm)):
            progress(f"{len(names)} cells, {steps} steps, {cache}")
            results[steps, cache] = _least_disturbed(attempt)
        return results


def _least_disturbed(attempt: Callable[[], Found]) -> Found:
    attempts = [attempt()]
    while len(attempts) < TRIES and attempts[-1].foreign > FOREIGN:
        attempts.append(attempt())
    return min(attempts, key=lambda result: result.foreign)


def first_calls(names: tuple[str, ...], steps: int, cache: str) -> First:
    """Time the first call of every cell. Must run in a fresh process."""
    os.environ["TORCHWEFT_CACHE"] = cache
    torch.set_num_threads(1)
    torch.manual_seed(0)
    products = _seconds(kernels)
    early, late = (_plan_seconds(cells.ElmanCell(WIDTH, width), (WIDTH,), lambda: None, steps)[0] for width in (24, 40))
    plans = {name: _zoo_plan_seconds(name, steps) for name in names}
    seconds = {name: extra for name, (extra, _) in plans.items()}
    backends = {name: backend for name, (_, backend) in plans.items()}
    return First(products, max(0.0, early - late), _batch_seconds(steps), seconds, backends)


def _batch_seconds(steps: int) -> float:
    """Extra time of the first call with a third batch size, which is padded to the first one."""
    net = Recurrent(LSTMCell(WIDTH, WIDTH))

    def call(rows: int) -> object:
        state = tuple([torch.zeros(rows, WIDTH) for _ in range(2)])
        return net(torch.randn(steps, rows, WIDTH), state).outputs.sum().backward()

    call(ROWS)
    call(ROWS // 2 + 1)
    first, second = (_seconds(lambda: call(ROWS - 1)) for _ in range(2))
    return first - second


def _zoo_plan_seconds(name: str, steps: int) -> tuple[float, str]:
    entry = ZOO[name]
    cell = entry.make()
    return _plan_seconds(cell, entry.shape, lambda: entry.state(cell, ROWS), steps)


def _plan_seconds(cell: nn.Module, shape: tuple[int, ...], begin: Callable[[], Any], steps: int) -> tuple[float, str]:
    """Extra time of the first call over the second one, and the backend of the cell."""
    net = Recurrent(cell)
    x = torch.randn(steps, ROWS, *shape, requires_grad=True)
    leaves = [x, *cell.parameters()]

    def call() -> object:
        ends = [output for output in flatten(net(x, begin()).outputs)[0] if output.requires_grad]
        return torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)

    first, second = _seconds(call), _seconds(call)
    return first - second, net.why()[0][1]


def compile_unrolled(steps: int, cache: str) -> float:
    """Extra seconds of the first call of a loop that torch.compile unrolls. Must run in a fresh process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    cell = LSTMCell(WIDTH, WIDTH)
    x = torch.randn(steps, ROWS, WIDTH, requires_grad=True)
    state = tuple([torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2)])
    seeds = [torch.randn_like(x), *map(torch.randn_like, state)]
    work = training(torch.compile(eager(cell, x, state)), [x, *state, *cell.parameters()], seeds)
    first, second = _seconds(work), _seconds(work)
    return first - second


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cell_rows(names: tuple[str, ...], results: Results) -> Iterator[Row]:
    for name in names:
        seconds = {key: result.value.cells[name] for key, result in results.items()}
        backends = dict.fromkeys(result.value.backends[name] for result in results.values())
        yield {
            "first call": name,
            "by": ", ".join(backends),
            **_columns(seconds),
            **at_most(max(seconds.values()), REQUIRED),
        }


def _shared_rows(results: Results) -> Iterator[Row]:
    products = {key: result.value.products for key, result in results.items()}
    tracing = {key: result.value.tracing for key, result in results.items()}
    batch = {key: result.value.batch for key, result in results.items()}
    yield {"first call": "matrix products, once per machine", **_columns(products)}
    yield {"first call": "tracing, once per process", **_columns(tracing)}
    yield {"first call": "third batch size", **_columns(batch)}


def _torch_row(steps: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="torchweft-first-") as folder:
        result = in_a_fresh_process(compile_unrolled, steps, folder)
    return {"first call": "torch.compile, LSTM unrolled", "by": "inductor", **_columns({(steps, "cold"): result.value})}


def _columns(seconds: dict[tuple[int, str], float]) -> Row:
    return {f"T {steps} {cache} s": f"{extra:.2f}" for (steps, cache), extra in seconds.items()}


def _disturbed(results: Results) -> str:
    worst = max(result.foreign for result in results.values())
    return "undisturbed" if worst <= FOREIGN else f"DISTURBED: other processes used up to {worst:.2f} cores"
