"""The layer-norm LSTM and the MI-LSTM by their formulas."""

import torch
from torch import Tensor

from tests.recurrent.cells.references import blocks, follows, products, scattered
from weft.recurrent import cells

State = tuple[Tensor, Tensor]


def normed(x: Tensor) -> Tensor:
    """Mean zero and variance one along the last axis."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return centred / ((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt()


def test_the_layer_norm_lstm_follows_its_formula() -> None:
    cell = scattered(cells.LayerNormLSTMCell(3, 4))

    def step(x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state
        of_x = normed(torch.einsum("kd,nd->nk", cell.weight_ih, x)) * cell.norm_ih.weight
        of_h = normed(torch.einsum("kd,nd->nk", cell.weight_hh, h)) * cell.norm_hh.weight
        i, f, g, o = (of_x + of_h + cell.bias).split(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(normed(c) * cell.norm_cell.weight + cell.norm_cell.bias)
        return h, (h, c)

    follows(cell, step)


def test_the_gates_of_a_layer_norm_lstm_do_not_see_the_scale_of_the_input() -> None:
    cell = cells.LayerNormLSTMCell(3, 4).double()
    x = torch.randn(2, 3).double()
    state = cell.initial_state(x)
    torch.testing.assert_close(cell(x * 1000, state), cell(x, state), rtol=0, atol=1e-3)


def test_the_mi_lstm_follows_its_formula() -> None:
    cell = scattered(cells.MILSTMCell(3, 4))
    W, U, b = blocks(cell, 4)
    alpha, beta_ih, beta_hh = (each.view(4, 1, 4) for each in (cell.alpha, cell.beta_ih, cell.beta_hh))

    def step(x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state
        of_x, of_h = products(W, x), products(U, h)
        i, f, g, o = alpha * of_x * of_h + beta_hh * of_h + beta_ih * of_x + b[:, None]
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)

    follows(cell, step)


def test_an_mi_lstm_without_its_product_is_an_lstm() -> None:
    cell, plain = cells.MILSTMCell(3, 4).double(), cells.LSTMCell(3, 4).double()
    with torch.no_grad():
        cell.alpha.zero_()
        for name in ("weight_ih", "weight_hh"):
            getattr(plain, name).copy_(getattr(cell, name))
        plain.bias_ih.copy_(cell.bias)
        plain.bias_hh.zero_()
    x = torch.randn(2, 3).double()
    state = (torch.randn(2, 4).double(), torch.randn(2, 4).double())
    torch.testing.assert_close(cell(x, state), plain(x, state))
