"""Formulas that the tests compare cells with, and the comparison."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, gradients
from torchweft.core.pytree import map_leaves
from torchweft.recurrent import Recurrent

Step = Callable[[Tensor, Any], tuple[Any, Any]]


def randomized(cell: nn.Module) -> nn.Module:
    """The cell in float64 with random parameters, so that a zero or a one hides none of them."""
    torch.manual_seed(7)
    cell.double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.normal_(0.1, 0.6)
    return cell


def run_formula(step: Step, x: Tensor, state: Any) -> tuple[Any, Any]:
    """Outputs, T x ..., and the last state, by a plain loop."""
    outputs = []
    for x_t in x:
        y, state = step(x_t, state)
        outputs.append(y)
    return map_leaves(lambda *ys: torch.stack(ys), *outputs), state


def assert_follows(cell: nn.Module, step: Step, shape: tuple[int, ...]) -> None:
    """Compare a cell with its formula: values, and gradients of input and parameters."""
    x = torch.randn(5, 2, *shape, dtype=torch.float64, requires_grad=True)
    expected = run_formula(step, x, cell.initial_state(x[0]))
    result = Recurrent(cell)(x)
    close(result[:2], expected)
    close(gradients(result[:2], [x, *cell.parameters()]), gradients(expected, [x, *cell.parameters()]), 1e-10)


def gate_blocks(cell: Any, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``weight_ih``, ``weight_hh`` and ``bias`` with a first axis of gates."""
    return tuple(p.view(count, -1, *p.shape[1:]) for p in (cell.weight_ih, cell.weight_hh, cell.bias))


def gate_products(weights: Tensor, x: Tensor) -> Tensor:
    """K x N x H: every gate's product, entry by entry."""
    return torch.einsum("khd,nd->knh", weights, x)
