"""Cells for the tests of plans: PyTorch's own cells, and typical custom ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from torchweft.recurrent.capture import capture
from torchweft.recurrent.cells import LayerNormLSTMCell
from torchweft.recurrent.cpp.cpp_backend import CppBackend
from torchweft.recurrent.cpp.lowering import decomposition_table
from torchweft.recurrent.plan_backends import Backend
from torchweft.recurrent.python_backend import PythonBackend


class Case(NamedTuple):
    """A cell with an input and a state of one step."""

    cell: Callable[[Any, Any], tuple[Any, Any]]
    x: Any
    state: Any
    parameters: list[nn.Parameter]


class TorchCell(nn.Module):
    """A cell of PyTorch with the interface of torchweft's cells."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: Any) -> tuple[Any, Any]:
        after = self.cell(x, state)
        return (after[0] if isinstance(after, tuple) else after), after


class SumFirst(nn.Module):
    """Begins and ends with a sum, and has an output that is not a state and a state that is not an output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        mixed = (x + state) * torch.softmax(self.linear(x + state), 1)
        return mixed.exp() + x, mixed + 0.5 * state


class Inplace(nn.Module):
    """Writes into its own intermediates, as fast code does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, width))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ self.weight
        y.add_(state).tanh_()
        return y, y.mul(0.9)


def _case(cell: nn.Module, state: Any, inputs: int = 5) -> Case:
    cell = cell.double()
    return Case(cell, torch.randn(3, inputs, dtype=torch.float64), state, list(cell.parameters()))


def _state(width: int = 4) -> Tensor:
    return torch.randn(3, width, dtype=torch.float64)


CASES: dict[str, Callable[[], Case]] = {
    "LSTM": lambda: _case(TorchCell(nn.LSTMCell(5, 4)), (_state(), _state())),
    "GRU": lambda: _case(TorchCell(nn.GRUCell(5, 4)), _state()),
    "RNN": lambda: _case(TorchCell(nn.RNNCell(5, 4)), _state()),
    "normed LSTM": lambda: _case(LayerNormLSTMCell(5, 4), (_state(), _state())),
    "sum first": lambda: _case(SumFirst(5), _state(5)),
    "in place": lambda: _case(Inplace(5), _state(5)),
}


SAMPLE = ("LSTM", "normed LSTM", "in place")
every_case = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=[] if name in SAMPLE else [pytest.mark.long]) for name, make in CASES.items()],
)
"""Parametrize by all cases. Those outside `SAMPLE` are `long`."""


def engine_of(backend: str, case: Case) -> Backend:
    """The backend that runs the plan of a case."""
    captured = capture(
        case.cell, case.x, case.state, case.parameters, composed=decomposition_table() if backend == "c" else None
    )
    return CppBackend(captured) if backend == "c" else PythonBackend(captured)
