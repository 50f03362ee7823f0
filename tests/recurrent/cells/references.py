"""Formulas that the tests compare the zoo with, and the ways in which they compare."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, gradients
from weft.core.pytree import map_leaves
from weft.recurrent import Recurrent

Step = Callable[[Tensor, Any], tuple[Any, Any]]


def scattered(cell: nn.Module) -> nn.Module:
    """The cell in float64, every parameter at random, so that none is hidden behind a zero or a one."""
    torch.manual_seed(7)
    cell.double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.normal_(0.1, 0.6)
    return cell


def by_hand(step: Step, x: Tensor, state: Any) -> tuple[Any, Any]:
    """Outputs, T x ..., and the last state, by a bare loop."""
    outputs = []
    for x_t in x:
        y, state = step(x_t, state)
        outputs.append(y)
    return map_leaves(lambda *ys: torch.stack(ys), *outputs), state


def follows(cell: nn.Module, step: Step, shape: tuple[int, ...]) -> None:
    """Fail unless the cell does what the formula does: values, and gradients of input and parameters."""
    x = torch.randn(5, 2, *shape, dtype=torch.float64, requires_grad=True)
    wanted = by_hand(step, x, cell.initial_state(x[0]))
    seen = Recurrent(cell)(x)
    close(seen[:2], wanted)
    close(gradients(seen[:2], [x, *cell.parameters()]), gradients(wanted, [x, *cell.parameters()]), 1e-10)


def blocks(cell: Any, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``weight_ih``, ``weight_hh`` and ``bias`` with a first axis of gates."""
    return tuple(each.view(count, -1, *each.shape[1:]) for each in (cell.weight_ih, cell.weight_hh, cell.bias))


def products(weights: Tensor, x: Tensor) -> Tensor:
    """K x N x H: every gate's product, entry by entry."""
    return torch.einsum("khd,nd->knh", weights, x)
