"""The recurrent highway network by its formula."""

import pytest
import torch
from torch import Tensor

from tests.recurrent.cells.references import follows, scattered
from weft.recurrent import cells


@pytest.mark.parametrize("depth", [1, 3])
def test_the_highway_network_follows_its_formula(depth: int) -> None:
    cell = scattered(cells.RHNCell(3, 4, depth))

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        for layer in range(depth):
            mixed = torch.einsum("khd,nd->knh", cell.weight_hh[layer].view(2, 4, 4), h)
            mixed = mixed + cell.bias[layer].view(2, 1, 4)
            if layer == 0:
                mixed = mixed + torch.einsum("khd,nd->knh", cell.weight_ih.view(2, 4, 3), x)
            h = h + torch.sigmoid(mixed[0]) * (torch.tanh(mixed[1]) - h)
        return h, h

    follows(cell, step)


def test_a_new_highway_network_keeps_most_of_its_state_in_every_layer() -> None:
    cell = cells.RHNCell(3, 4, depth=2)
    assert (cell.bias[:, :4] == -2).all() and not cell.bias[:, 4:].any()
