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
