"""The variants of the GRU by their formulas; that the GRU is PyTorch's stands in test_like_torch.py."""

import torch
from torch import Tensor

from tests.recurrent.cells.references import blocks, follows, products, scattered
from weft.recurrent import cells


def product(weight: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("hd,nd->nh", weight, x)


def test_the_gru_as_it_was_published_follows_its_formula() -> None:
    cell = scattered(cells.ResetBeforeGRUCell(3, 4))
    W, U, b = blocks(cell, 3)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        r = torch.sigmoid(product(W[0], x) + product(U[0], h) + b[0])
        z = torch.sigmoid(product(W[1], x) + product(U[1], h) + b[1])
        n = torch.tanh(product(W[2], x) + product(U[2], r * h) + b[2])
        h = z * h + (1 - z) * n
        return h, h

    follows(cell, step)


def test_the_minimal_gated_cell_follows_its_formula() -> None:
    cell = scattered(cells.MinimalGatedCell(3, 4))
    W, U, b = blocks(cell, 2)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        f = torch.sigmoid(product(W[0], x) + product(U[0], h) + b[0])
        n = torch.tanh(product(W[1], x) + product(U[1], f * h) + b[1])
        h = h + f * (n - h)
        return h, h

    follows(cell, step)


def test_the_light_gru_follows_its_formula() -> None:
    cell = scattered(cells.LightGRUCell(3, 4))
    W, U, b = blocks(cell, 2)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z, n = products(W, x) + products(U, h) + b[:, None]
        h = h * torch.sigmoid(z) + (1 - torch.sigmoid(z)) * n.clamp(min=0)
        return h, h

    follows(cell, step)


def test_the_recurrent_blocks_of_a_light_gru_begin_orthogonal() -> None:
    for block in cells.LightGRUCell(3, 5, dtype=torch.float64).weight_hh.chunk(2):
        torch.testing.assert_close(block @ block.T, torch.eye(5, dtype=torch.float64))


def test_recurrent_dropout_of_a_gru_drops_candidates_only() -> None:
    torch.manual_seed(0)
    cell = cells.GRUCell(3, 100, recurrent_dropout=0.25).double()
    x, h = torch.randn(50, 3).double(), torch.randn(50, 100).double()
    dropped, whole = cell(x, h)[0], cell.eval()(x, h)[0]
    gates = x @ cell.weight_ih.T + cell.bias_ih + h @ cell.weight_hh.T + cell.bias_hh
    held = gates.chunk(3, 1)[1].sigmoid() * h
    share = (dropped - held) / (whole - held)
    is_kept = share > 0.5
    torch.testing.assert_close(share, is_kept / 0.75, atol=1e-6, rtol=0, check_dtype=False)
    assert 0.7 < is_kept.double().mean() < 0.8
