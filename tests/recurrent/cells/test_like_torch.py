"""The LSTM, GRU and Elman cells are PyTorch's: weights load both ways, values and gradients are the same."""

from typing import Any

import torch
from torch import nn

from tests.recurrent.cells.references import scattered
from tests.recurrent.recurrent_cases import at_once, close, gradients, grid
from weft.recurrent import Recurrent, cells

PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "LSTM": (cells.LSTMCell, nn.LSTMCell, {}),
    "GRU": (cells.GRUCell, nn.GRUCell, {}),
    "Elman": (cells.ElmanCell, nn.RNNCell, {}),
    "Elman relu": (cells.ElmanCell, nn.RNNCell, {"nonlinearity": "relu"}),
}


@grid(name=list(PAIRS), bias=[True, False])
def test_weights_load_both_ways_and_give_the_same_numbers(name: str, bias: bool) -> None:
    mine, theirs, options = PAIRS[name]
    one, other = (scattered(make(3, 4, bias, **options)) for make in (mine, theirs))
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    for target, source in ((one, other), (other, one)):
        scattered(source)
        target.load_state_dict(source.state_dict())
        seen, wanted = Recurrent(one)(x), Recurrent(other)(x)
        close(seen, wanted)
        close(gradients(seen, [x, *one.parameters()]), gradients(wanted, [x, *other.parameters()]), 1e-10)
        with torch.no_grad():
            next(source.parameters()).mul_(2.0)


@at_once("name", PAIRS)
def test_cells_begin_at_random_as_pytorchs_do(name: str) -> None:
    mine, theirs, options = PAIRS[name]
    drawn = []
    for make in (mine, theirs):
        torch.manual_seed(3)
        drawn.append(make(3, 4, **options).state_dict())
    assert list(drawn[0]) == list(drawn[1])
    assert all(torch.equal(drawn[0][key], drawn[1][key]) for key in drawn[0])
