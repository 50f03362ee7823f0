"""Duration of the first call: the step is captured, planned, compiled and checked against the eager loop.

    a fresh process, an empty cache     matrix products | tracing | cell | cell | cell ...       compiled
    a fresh process, the same cache     matrix products | tracing | cell | cell | cell ...       found on the disk
                                        '- once per ----'
                                           machine  process

From every first call the time of the second one, over as many steps, is subtracted. The rest must not depend on T.
`tracing` is the extra time of the very first plan of a process: PyTorch's tracing is imported. The times of cells
exclude it. `batch size` is the third number of rows that a network sees, which a plan for more rows serves.
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
WANTED = 1.5
TRIES = 2
"""A disturbed process is run again, once; then the less disturbed one counts."""
QUICK = ("torch's LSTM, residual",)


@dataclass(frozen=True)
class First:
    """Seconds of first calls. `backends` has the backend of each cell from then on."""

    products: float
    tracing: float
    batch: float
    cells: dict[str, float]
    backends: dict[str, str]


Results = dict[tuple[int, str], Found]
"""By steps, and cold or warm: a `First` each."""


def run(quick: bool) -> Table:
    """Seconds of the first call of every zoo cell, at two lengths, with nothing compiled and with all of it."""
    names, lengths = (QUICK, (5,)) if quick else (tuple(ZOO), STEPS)
    found: Results = {}
    for steps in lengths:
        found |= _at(names, steps)
    rows = [*_cells(names, found), *_once(found)]
    if not quick:
        progress("torch.compile of the unrolled loop")
        rows.append(_by_torch(STEPS[0]))
    notes = [f"  cold: nothing was compiled before; warm: all was; {_disturbed(found)}"]
    return Table(f"seconds that a first call takes beyond a second one: batch {ROWS}, width {WIDTH}", rows, notes)


def _at(names: tuple[str, ...], steps: int) -> Results:
    """With sequences of this length."""
    with tempfile.TemporaryDirectory(prefix="torchweft-first-") as folder:
        caches: list[str] = []

        def cold() -> Found:
            caches.append(tempfile.mkdtemp(dir=folder))
            return in_a_fresh_process(first_calls, names, steps, caches[-1])

        def warm() -> Found:
            return in_a_fresh_process(first_calls, names, steps, caches[-1])

        found: Results = {}
        for way, attempt in (("cold", cold), ("warm", warm)):
            progress(f"{len(names)} cells, {steps} steps, {way}")
            found[steps, way] = _least_disturbed(attempt)
        return found


def _least_disturbed(attempt: Callable[[], Found]) -> Found:
    found = [attempt()]
    while len(found) < TRIES and found[-1].foreign > FOREIGN:
        found.append(attempt())
    return min(found, key=lambda each: each.foreign)


def first_calls(names: tuple[str, ...], steps: int, cache: str) -> First:
    """To be run in a fresh process: the first call of every cell."""
    os.environ["TORCHWEFT_CACHE"] = cache
    torch.set_num_threads(1)
    torch.manual_seed(0)
    products = _seconds(kernels)
    early, late = (_plan_seconds(cells.ElmanCell(WIDTH, width), (WIDTH,), lambda: None, steps)[0] for width in (24, 40))
    plans = {name: _of_zoo(name, steps) for name in names}
    seconds = {name: each for name, (each, _) in plans.items()}
    backends = {name: backend for name, (_, backend) in plans.items()}
    return First(products, max(0.0, early - late), _batch_seconds(steps), seconds, backends)


def _batch_seconds(steps: int) -> float:
    """The first call beyond the second one with a third batch size, which is filled up to the first one."""
    net = Recurrent(LSTMCell(WIDTH, WIDTH))

    def call(rows: int) -> object:
        state = tuple([torch.zeros(rows, WIDTH) for _ in range(2)])
        return net(torch.randn(steps, rows, WIDTH), state).outputs.sum().backward()

    call(ROWS)
    call(ROWS // 2 + 1)
    first, second = (_seconds(lambda: call(ROWS - 1)) for _ in range(2))
    return first - second


def _of_zoo(name: str, steps: int) -> tuple[float, str]:
    entry = ZOO[name]
    cell = entry.make()
    return _plan_seconds(cell, entry.shape, lambda: entry.state(cell, ROWS), steps)


def _plan_seconds(cell: nn.Module, shape: tuple[int, ...], begin: Callable[[], Any], steps: int) -> tuple[float, str]:
    """Extra time of the first call over the second one, and the backend of the cell."""
    net = Recurrent(cell)
    x = torch.randn(steps, ROWS, *shape, requires_grad=True)
    wants = [x, *cell.parameters()]

    def call() -> object:
        ends = [each for each in flatten(net(x, begin()).outputs)[0] if each.requires_grad]
        return torch.autograd.grad(ends, wants, [torch.ones_like(each) for each in ends], allow_unused=True)

    first, second = _seconds(call), _seconds(call)
    return first - second, net.why()[0][1]


def compile_unrolled(steps: int, cache: str) -> float:
    """To be run in a fresh process: seconds of the first call, less a second one's, of a loop that torch unrolls."""
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


def _cells(names: tuple[str, ...], found: Results) -> Iterator[Row]:
    for name in names:
        seconds = {at: each.value.cells[name] for at, each in found.items()}
        backends = dict.fromkeys(each.value.backends[name] for each in found.values())
        yield {"what": name, "by": ", ".join(backends), **_columns(seconds), **at_most(max(seconds.values()), WANTED)}


def _once(found: Results) -> Iterator[Row]:
    products = {at: each.value.products for at, each in found.items()}
    tracing = {at: each.value.tracing for at, each in found.items()}
    yield {"what": "matrix products, once per machine", **_columns(products)}
    yield {"what": "tracing, once per process", **_columns(tracing)}
    yield {"what": "batch size, the third", **_columns({at: each.value.batch for at, each in found.items()})}


def _by_torch(steps: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="torchweft-first-") as folder:
        found = in_a_fresh_process(compile_unrolled, steps, folder)
    return {"what": "torch.compile, LSTM unrolled", "by": "inductor", **_columns({(steps, "cold"): found.value})}


def _columns(seconds: dict[tuple[int, str], float]) -> Row:
    return {f"T {steps} {way} s": f"{each:.2f}" for (steps, way), each in seconds.items()}


def _disturbed(found: Results) -> str:
    worst = max(each.foreign for each in found.values())
    return "undisturbed" if worst <= FOREIGN else f"DISTURBED: other processes used up to {worst:.2f} cores"
