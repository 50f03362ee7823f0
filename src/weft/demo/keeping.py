"""The memory of a sequence by its length: predicted for many lengths, measured for some, in each mode.

bytes |      ╱ full          predicted: memory.size_of, a pure function of the plan and T
      |   ╱     ╱ states     measured:  the peak of bytes alive in a forward with its backward, beyond its inputs
      |╱ ╱  __──  sqrt
      +--------------- T
"""

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weft.core.errors import UsageError
from weft.demo.peak import peak_bytes
from weft.demo.speller import IntegratingCell
from weft.demo.stage import ProofError
from weft.recurrent import Recurrent
from weft.recurrent.capture import capture
from weft.recurrent.cpp.backend import NativeEngine
from weft.recurrent.cpp.decompositions import composed
from weft.recurrent.engine import Engine
from weft.recurrent.memory import Memory, keeping, size_of
from weft.recurrent.python_engine import PythonEngine

Planned = Literal["c", "python"]
"""The backends that have a plan, and so a prediction."""
ROWS = 8
BUDGET = 64 << 20
MEMORIES: dict[str, Memory] = {"full": "full", "states": "states", "sqrt": "sqrt", "64 MiB": BUDGET}
LOOP = "eager loop"
MEASURED: dict[Planned, tuple[int, ...]] = {"c": (128, 512, 2048), "python": (128, 512)}
"""The lengths that are run; by Python, and by the eager loop, the longest would take seconds each."""
_LENGTHS = [round(64 * 2 ** (i / 2)) for i in range(18)]  # to 23,170


class Kept(NamedTuple):
    """One measurement: of so many steps, the way that was chosen, peak bytes as predicted and measured, seconds."""

    mode: str
    steps: int
    way: str
    predicted: int
    measured: int
    seconds: float


class Curves(NamedTuple):
    """By mode, predicted points (steps, bytes); measurements; and those of the eager loop, which has no prediction."""

    predicted: dict[str, list[tuple[float, float]]]
    measured: list[Kept]
    loop: list[tuple[float, float]]


def engine_of(cell: IntegratingCell, backend: Planned, rows: int = ROWS) -> Engine:
    """The plan of a cell for sequences of so many rows."""
    x = torch.zeros(rows, cell.input.in_features)
    state = cell.initial_state(x)
    if backend == "c":
        return NativeEngine(capture(cell, x, state, composed=composed()))
    return PythonEngine(capture(cell, x, state))


def curves(cell: IntegratingCell, backend: Planned, lengths: Sequence[int]) -> Curves:
    """Predict and measure. Raises ProofError if the gradients of two modes differ in any bit."""
    engine = engine_of(cell, backend)
    predicted = {name: _predicted(cell, engine, memory) for name, memory in MEMORIES.items()}
    nets = {name: Recurrent(cell, backend=backend, memory=memory, verify="never") for name, memory in MEMORIES.items()}
    measured: list[Kept] = []
    for steps in lengths:
        found: dict[str, list[Tensor]] = {}
        for name, net in nets.items():
            kept, found[name] = _measured(cell, engine, net, name, steps)
            measured.append(kept)
        _check_same(found, steps)
    loop = Recurrent(cell, backend="eager")
    peaks = [(float(steps), float(_peak(loop, steps)[0])) for steps in lengths if steps in MEASURED["python"]]
    return Curves(predicted, measured, peaks)


def _predicted(cell: IntegratingCell, engine: Engine, memory: Memory) -> list[tuple[float, float]]:
    states = cell.initial_state(torch.zeros(ROWS, cell.input.in_features))
    points: list[tuple[float, float]] = []
    for steps in _LENGTHS:
        size = size_of(engine, steps, states)
        try:
            points.append((float(steps), float(size.peak(keeping(memory, size)))))
        except UsageError:  # the budget is too small from here on
            break
    return points


def _measured(
    cell: IntegratingCell, engine: Engine, net: Recurrent, name: str, steps: int
) -> tuple[Kept, list[Tensor]]:
    size = size_of(engine, steps, cell.initial_state(torch.zeros(ROWS, cell.input.in_features)))
    way = keeping(MEMORIES[name], size)
    _peak(net, steps)  # makes the plan
    start = time.perf_counter()
    x, seed = _given(net, steps)
    net(x).outputs.backward(seed)
    seconds = time.perf_counter() - start
    peak, gradients = _peak(net, steps)
    return Kept(name, steps, str(way), size.peak(way), peak, seconds), gradients


def _peak(net: Recurrent, steps: int) -> tuple[int, list[Tensor]]:
    """Peak bytes beyond inputs and parameters, and the gradients of both."""
    net.zero_grad()
    x, seed = _given(net, steps)

    def run() -> None:
        net(x).outputs.backward(seed)

    peak = peak_bytes(run, [x, seed, *net.parameters()])
    assert x.grad is not None
    gradients = [x.grad, *(each.grad for each in net.parameters() if each.grad is not None)]
    net.zero_grad()
    return peak, gradients


def _given(net: Recurrent, steps: int) -> tuple[Tensor, Tensor]:
    """The same inputs and gradients of outputs at every call."""
    cell = net.cell
    assert isinstance(cell, IntegratingCell)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(steps, ROWS, cell.input.in_features, generator=random)
    return x.requires_grad_(), torch.randn(steps, ROWS, cell.recurrent.in_features, generator=random)


def _check_same(found: dict[str, list[Tensor]], steps: int) -> None:
    (first, wanted), *others = found.items()
    for name, seen in others:
        if not all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True)):
            raise ProofError(f"over {steps} steps memory {name!r} gives other gradients than {first!r}")
