"""What a derived plan is held against: the eager loop for its numbers, and for its speed that loop and torch.nn.LSTM.

round 1   weft  loop  nn.LSTM        taken by turns, so that a busy moment hits all of them;
round 2   weft  loop  nn.LSTM        the medians are compared
"""

import copy
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.core.tree import flatten
from weft.demo.speller import IntegratingCell
from weft.recurrent import Recurrent
from weft.recurrent.backends import Name

LIMIT = 1e-10
"""What rounding in float64 can explain, with room; a wrong gradient is off by orders of magnitude more."""
SHAPES = ((64, 32), (200, 1))
"""Steps and rows of the sequences that are timed: those of training, and a single long row."""
_ROUNDS, _WARM_UP = 9, 2
_CHECKED = (20, 4)
_LOOP: Name = "eager"


class Speed(NamedTuple):
    """Median seconds of a forward with its backward over a sequence of so many steps and rows."""

    steps: int
    rows: int
    weft: float
    loop: float
    lstm: float


def largest_difference(cell: IntegratingCell, backend: Name) -> float:
    """Of any output, state or gradient (of inputs, initial states and parameters) between a plan and the eager loop,
    in float64, on a copy."""
    cell = copy.deepcopy(cell).double()
    steps, rows = _CHECKED
    x = torch.randn(steps, rows, cell.input.in_features, dtype=torch.float64, requires_grad=True)
    state = tuple(torch.randn_like(each).requires_grad_() for each in cell.initial_state(x[0]))
    seen, wanted = (_numbers(Recurrent(cell, backend=each), x, state) for each in (backend, _LOOP))
    return max(torch.dist(a, b, p=float("inf")).item() for a, b in zip(seen, wanted, strict=True))


def _numbers(net: Recurrent, x: Tensor, state: tuple[Tensor, ...]) -> list[Tensor]:
    result = net(x, state)
    ends = [leaf for part in (result.outputs, result.last, result.states) for leaf in flatten(part)[0]]
    seeds = [torch.linspace(0.5, 1.5, end.numel(), dtype=end.dtype).view_as(end) for end in ends]
    return [*ends, *torch.autograd.grad(ends, [x, *state, *net.parameters()], seeds)]


def speeds(cell: IntegratingCell) -> list[Speed]:
    """For each of SHAPES, with gradients of inputs and parameters, on copies."""
    width, hidden = cell.input.in_features, cell.recurrent.in_features
    nets = {
        "weft": Recurrent(copy.deepcopy(cell)),
        "loop": Recurrent(copy.deepcopy(cell), backend="eager"),
        "lstm": nn.LSTM(width, hidden),
    }
    return [Speed(steps, rows, **_medians(nets, steps, rows, width)) for steps, rows in SHAPES]


def _medians(nets: Mapping[str, nn.Module], steps: int, rows: int, width: int) -> dict[str, float]:
    x = torch.randn(steps, rows, width, requires_grad=True)
    taken: dict[str, list[float]] = {name: [] for name in nets}
    for _ in range(_WARM_UP + _ROUNDS):
        for name, net in nets.items():
            net.zero_grad()
            taken[name].append(seconds(net, x))
    return {name: median(each[_WARM_UP:]) for name, each in taken.items()}


def seconds(net: nn.Module, x: Tensor) -> float:
    """How long one forward with its backward takes; the first result is the output."""
    start = time.perf_counter()
    outputs: Sequence[Tensor] = net(x)
    outputs[0].sum().backward()
    return time.perf_counter() - start
