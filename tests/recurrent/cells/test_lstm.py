"""The peephole LSTM by its formula, and recurrent dropout; that the LSTM is PyTorch's stands in test_like_torch.py."""

import torch
from torch import Tensor

from tests.recurrent.cells.references import blocks, follows, products, scattered
from weft.recurrent import cells


def test_the_peephole_lstm_follows_its_formula() -> None:
    cell = scattered(cells.PeepholeLSTMCell(3, 4))
    W, U, b = blocks(cell, 4)

    def step(x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, g, o = products(W, x) + products(U, h) + b[:, None]
        new = c / (1 + torch.exp(-f - c * cell.peephole[1])) + g.tanh() / (1 + torch.exp(-i - c * cell.peephole[0]))
        h = new.tanh() / (1 + torch.exp(-o - new * cell.peephole[2]))
        return h, (h, new)

    follows(cell, step)


def test_recurrent_dropout_drops_candidates_and_never_what_the_cell_holds() -> None:
    torch.manual_seed(0)
    cell = cells.LSTMCell(3, 100, recurrent_dropout=0.25).double()
    x, state = torch.randn(50, 3).double(), (torch.randn(50, 100).double(), torch.randn(50, 100).double())
    _, (_, dropped) = cell(x, state)
    _, (_, whole) = cell.eval()(x, state)
    gates = cell.weight_ih @ x.T + cell.bias_ih[:, None] + cell.weight_hh @ state[0].T + cell.bias_hh[:, None]
    i, f, g, _ = gates.T.chunk(4, 1)
    torch.testing.assert_close(whole, f.sigmoid() * state[1] + i.sigmoid() * g.tanh())
    share = (dropped - f.sigmoid() * state[1]) / (i.sigmoid() * g.tanh())
    is_kept = share > 0.5
    torch.testing.assert_close(share, is_kept / 0.75, atol=1e-6, rtol=0, check_dtype=False)
    assert 0.7 < is_kept.double().mean() < 0.8


def test_recurrent_dropout_is_drawn_anew_at_every_step() -> None:
    cell = cells.LSTMCell(3, 50, recurrent_dropout=0.5)
    nothing = torch.zeros(1, 50)
    first, second = (cell(torch.ones(1, 3), (nothing, nothing))[1][1] == 0 for _ in range(2))
    assert first.any() and not torch.equal(first, second)
