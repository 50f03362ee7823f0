"""Cells by their formulas, entry by entry; that the LSTM, the GRU and the Elman cell are PyTorch's stands in
test_like_torch.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.recurrent.cells.references import Step, blocks, by_hand, follows, products, scattered
from tests.recurrent.recurrent_cases import close, gradients, grid
from weft.recurrent import Recurrent, cells

State = tuple[Tensor, Tensor]


def gated(i: Tensor, f: Tensor, g: Tensor, o: Tensor, c: Tensor) -> tuple[Tensor, State]:
    """The end of an LSTM's step."""
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, (h, c)


def reset_before(cell: Any) -> Step:
    W, U, b = blocks(cell, 3)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        r, z = torch.sigmoid(products(W[:2], x) + products(U[:2], h) + b[:2, None])
        (n,) = torch.tanh(products(W[2:], x) + products(U[2:], r * h) + b[2])
        h = z * h + (1 - z) * n
        return h, h

    return step


def minimal(cell: Any) -> Step:
    W, U, b = blocks(cell, 2)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        (f,) = torch.sigmoid(products(W[:1], x) + products(U[:1], h) + b[0])
        (n,) = torch.tanh(products(W[1:], x) + products(U[1:], f * h) + b[1])
        h = h + f * (n - h)
        return h, h

    return step


def light(cell: Any) -> Step:
    W, U, b = blocks(cell, 2)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z, n = products(W, x) + products(U, h) + b[:, None]
        h = h * torch.sigmoid(z) + (1 - torch.sigmoid(z)) * n.clamp(min=0)
        return h, h

    return step


def highway(cell: Any) -> Step:
    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        for layer in range(len(cell.weight_hh)):
            mixed = products(cell.weight_hh[layer].view(2, 4, 4), h) + cell.bias[layer].view(2, 1, 4)
            if layer == 0:
                mixed = mixed + products(cell.weight_ih.view(2, 4, 3), x)
            h = h + torch.sigmoid(mixed[0]) * (torch.tanh(mixed[1]) - h)
        return h, h

    return step


def peephole(cell: Any) -> Step:
    W, U, b = blocks(cell, 4)

    def step(x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state
        i, f, g, o = products(W, x) + products(U, h) + b[:, None]
        new = c / (1 + torch.exp(-f - c * cell.peephole[1])) + g.tanh() / (1 + torch.exp(-i - c * cell.peephole[0]))
        h = new.tanh() / (1 + torch.exp(-o - new * cell.peephole[2]))
        return h, (h, new)

    return step


def layer_norm(cell: Any) -> Step:
    def normed(x: Tensor) -> Tensor:
        centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
        return centred / ((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt()

    def step(x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state
        of_x = normed(torch.einsum("kd,nd->nk", cell.weight_ih, x)) * cell.norm_ih.weight
        of_h = normed(torch.einsum("kd,nd->nk", cell.weight_hh, h)) * cell.norm_hh.weight
        i, f, g, o = (of_x + of_h + cell.bias).split(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(normed(c) * cell.norm_cell.weight + cell.norm_cell.bias)
        return h, (h, c)

    return step


def multiplicative(cell: Any) -> Step:
    W, U, b = blocks(cell, 4)
    alpha, beta_ih, beta_hh = (each.view(4, 1, 4) for each in (cell.alpha, cell.beta_ih, cell.beta_hh))

    def step(x: Tensor, state: State) -> tuple[Tensor, State]:
        of_x, of_h = products(W, x), products(U, state[0])
        return gated(*(alpha * of_x * of_h + beta_hh * of_h + beta_ih * of_x + b[:, None]), state[1])

    return step


def convolutional(cell: Any) -> Step:
    def convolved(conv: nn.Conv2d, image: Tensor) -> Tensor:
        """Every shift of the zero-padded image, times its weights."""
        size = conv.kernel_size[0]
        padded = F.pad(image, [size // 2] * 4)
        height, width = image.shape[-2:]
        total: Any = 0 if conv.bias is None else conv.bias.view(1, -1, 1, 1)
        for down in range(size):
            for right in range(size):
                shifted = padded[..., down : down + height, right : right + width]
                total = total + torch.einsum("oc,nchw->nohw", conv.weight[:, :, down, right], shifted)
        return total

    def step(x: Tensor, state: State) -> tuple[Tensor, State]:
        i, f, g, o = (convolved(cell.conv_ih, x) + convolved(cell.conv_hh, state[0])).split(3, 1)
        return gated(i, f, g, o, state[1])

    return step


FORMULAS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Step], tuple[int, ...]]] = {
    "GRU as it was published": (lambda: cells.ResetBeforeGRUCell(3, 4), reset_before, (3,)),
    "minimal gated": (lambda: cells.MinimalGatedCell(3, 4), minimal, (3,)),
    "light GRU": (lambda: cells.LightGRUCell(3, 4), light, (3,)),
    "highway, one layer": (lambda: cells.RHNCell(3, 4, 1), highway, (3,)),
    "highway, three layers": (lambda: cells.RHNCell(3, 4, 3), highway, (3,)),
    "peephole LSTM": (lambda: cells.PeepholeLSTMCell(3, 4), peephole, (3,)),
    "layer norm LSTM": (lambda: cells.LayerNormLSTMCell(3, 4), layer_norm, (3,)),
    "MI-LSTM": (lambda: cells.MILSTMCell(3, 4), multiplicative, (3,)),
    "ConvLSTM, place by place": (lambda: cells.ConvLSTMCell(2, 3, 1), convolutional, (2, 4, 3)),
    "ConvLSTM": (lambda: cells.ConvLSTMCell(2, 3, 3), convolutional, (2, 4, 3)),
}


@pytest.mark.parametrize(("make", "formula", "shape"), FORMULAS.values(), ids=FORMULAS)
def test_a_cell_follows_its_formula(
    make: Callable[[], nn.Module], formula: Callable[[Any], Step], shape: tuple[int, ...]
) -> None:
    cell = scattered(make())
    follows(cell, formula(cell), shape)


@pytest.mark.parametrize("heads", [1, 2])
def test_the_slstm_follows_its_formula_without_stabiliser(heads: int) -> None:
    cell = scattered(cells.SLSTMCell(3, 4, heads))

    def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        h, c, n = state
        # From old along the second axis to new along the first.
        whole = torch.stack([torch.block_diag(*cell.weight_hh[gate]).T for gate in range(4)])
        i, f, z, o = products(cell.weight_ih.view(4, 4, 3), x) + products(whole, h) + cell.bias.view(4, 1, 4)
        c = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
        n = torch.sigmoid(f) * n + torch.exp(i)
        h = torch.sigmoid(o) * (c / n)
        return h, (h, c, n)

    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    wanted, (_, c, n) = by_hand(step, x, (torch.zeros(2, 4).double(),) * 3)
    seen = Recurrent(cell)(x)
    close(seen.outputs, wanted)
    _, c_kept, n_kept, m = seen.last
    close([c_kept * m.exp(), n_kept * m.exp()], [c, n])
    everything = [x, *cell.parameters()]
    close(gradients(seen.outputs, everything), gradients(wanted, everything), 1e-10)


@grid(shift=[-1e4, -200.0, 200.0, 1e4], dtype=[torch.float32, torch.float64])
def test_an_input_gate_of_an_slstm_that_is_out_of_range_changes_nothing(shift: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cell = cells.SLSTMCell(3, 4, 2).to(dtype)
    x = torch.randn(20, 2, 3, dtype=dtype)
    wanted = Recurrent(cell)(x).outputs
    with torch.no_grad():
        cell.bias[:4] += shift
    seen = Recurrent(cell)(x)
    tolerance = torch.finfo(dtype).eps * abs(shift) * 20  # what the sum of gate and shift rounds away
    close(seen.outputs, wanted, tolerance)
    seen.outputs.sum().backward()
    assert all(each.grad.isfinite().all() for each in cell.parameters())


def test_new_cells_begin_as_published() -> None:
    for block in cells.LightGRUCell(3, 5, dtype=torch.float64).weight_hh.chunk(2):
        torch.testing.assert_close(block @ block.T, torch.eye(5, dtype=torch.float64))
    highway = cells.RHNCell(3, 4, depth=2)
    assert (highway.bias[:, :4] == -2).all() and not highway.bias[:, 4:].any(), "it keeps most of its state"


@pytest.mark.parametrize("make", [cells.LSTMCell, cells.GRUCell])
def test_recurrent_dropout_drops_candidates_anew_in_every_step_and_never_what_the_cell_holds(make: Any) -> None:
    torch.manual_seed(0)
    cell = make(3, 100, recurrent_dropout=0.25).double()
    x, h, c = torch.randn(50, 3).double(), torch.randn(50, 100).double(), torch.randn(50, 100).double()
    lstm = make is cells.LSTMCell
    state, held = ((h, c), c) if lstm else (h, h)
    gates = x @ cell.weight_ih.T + cell.bias_ih + h @ cell.weight_hh.T + cell.bias_hh
    held = gates.chunk(4 if lstm else 3, 1)[1].sigmoid() * held
    dropped, again = (cell(x, state)[1] for _ in range(2))
    whole = cell.eval()(x, state)[1]
    shares = [
        ((each[1] if lstm else each) - held) / ((whole[1] if lstm else whole) - held) for each in (dropped, again)
    ]
    kept = [each > 0.5 for each in shares]
    torch.testing.assert_close(shares[0], kept[0] / 0.75, atol=1e-6, rtol=0, check_dtype=False)
    assert 0.7 < kept[0].double().mean() < 0.8 and not torch.equal(*kept)
