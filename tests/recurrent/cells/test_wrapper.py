"""Wrappers hold any cell as their child, begin where it begins, and are cells themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.cells.references import equal_leaves
from tests.recurrent.recurrent_cases import close, grid
from weft.core.errors import UsageError
from weft.recurrent import Recurrent, cells


class Homeless(nn.Module):
    """A cell that must be given its state."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state + x, state + x


WRAPPERS: dict[str, Any] = {
    "residual": cells.Residual,
    "zoneout": lambda cell: cells.Zoneout(cell, 0.0),
    "dropout": cells.SequenceDropout,
}


@grid(wrap=WRAPPERS, make=[nn.LSTMCell, nn.GRUCell, cells.SLSTMCell])
def test_any_cell_can_be_wrapped_and_keeps_its_keys(wrap: Any, make: Any) -> None:
    cell = make(4, 4).double()
    x = torch.randn(5, 2, 4).double()
    plain, wrapped = Recurrent(cell)(x), Recurrent(wrap(cell))(x)
    close(wrapped.outputs, plain.outputs + x if wrap is cells.Residual else plain.outputs)
    assert list(wrap(cell).state_dict()) == [f"cell.{key}" for key in cell.state_dict()]


def test_wrappers_can_be_wrapped() -> None:
    cell = cells.LSTMCell(4, 4)
    x = torch.randn(5, 2, 4)
    nested = Recurrent(cells.Residual(cells.Zoneout(cells.SequenceDropout(cell, inputs=0.5), 0.5)).eval())
    state = (torch.zeros(1, 4), torch.zeros(1, 4))
    h, c = state
    for x_t in x:
        _, (new_h, new_c) = cell(x_t, (h, c))
        h, c = (h + new_h) / 2, (c + new_c) / 2
    close(nested(x).last.cell, (h, c), 1e-6)
    close(nested(x).outputs[-1], h + x[-1], 1e-6)


@pytest.mark.parametrize("wrap", [cells.Residual, lambda cell: cells.Zoneout(cell, 0.5)])
def test_a_cell_that_must_be_given_its_state_must_be_so_when_wrapped(wrap: Any) -> None:
    net = Recurrent(wrap(Homeless()).eval())
    with pytest.raises(UsageError, match="there is no initial state: give state="):
        net(torch.ones(3, 2, 4))
    assert net(torch.ones(3, 2, 4), torch.zeros(2, 4), reset=torch.ones(3, 2, dtype=torch.bool)).last.shape == (2, 4)


def test_dropout_of_a_cell_that_must_be_given_its_state_says_how() -> None:
    dropout = cells.SequenceDropout(Homeless(), inputs=0.5)
    net = Recurrent(dropout)
    x = torch.ones(3, 2, 4)
    with pytest.raises(UsageError, match=r"Homeless in SequenceDropout has no initial state: .*initial_state\(x"):
        net(x)
    last = net(x, dropout.initial_state(x[0], torch.zeros(2, 4))).last
    assert equal_leaves(last.cell, last.masks[0] * 3)
