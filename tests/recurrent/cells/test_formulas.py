"""Cells follow their formulas, entry by entry, and the LSTM, the GRU and the Elman cell equal PyTorch's."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.recurrent.cells.references import (
    assert_follows,
    gate_blocks,
    gate_products,
    randomized,
    run_formula,
)
from tests.recurrent.recurrent_cases import at_once, close, gradients, grid
from torchweft.recurrent import Recurrent, cells

State = tuple[Tensor, Tensor]


def lstm_end(i: Tensor, f: Tensor, g: Tensor, o: Tensor, c: Tensor) -> tuple[Tensor, State]:
    """The output and new state of an LSTM, from its gates."""
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, (h, c)


def reset_before(cell: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    W, U, b = gate_blocks(cell, 3)
    r, z = torch.sigmoid(gate_products(W[:2], x) + gate_products(U[:2], h) + b[:2, None])
    (n,) = torch.tanh(gate_products(W[2:], x) + gate_products(U[2:], r * h) + b[2])
    return (z * h + (1 - z) * n,) * 2


def minimal(cell: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    W, U, b = gate_blocks(cell, 2)
    (f,) = torch.sigmoid(gate_products(W[:1], x) + gate_products(U[:1], h) + b[0])
    (n,) = torch.tanh(gate_products(W[1:], x) + gate_products(U[1:], f * h) + b[1])
    return (h + f * (n - h),) * 2


def light(cell: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    W, U, b = gate_blocks(cell, 2)
    z, n = gate_products(W, x) + gate_products(U, h) + b[:, None]
    return (h * torch.sigmoid(z) + (1 - torch.sigmoid(z)) * n.clamp(min=0),) * 2


def highway(cell: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    for layer in range(len(cell.weight_hh)):
        mixed = gate_products(cell.weight_hh[layer].view(2, 4, 4), h) + cell.bias[layer].view(2, 1, 4)
        if layer == 0:
            mixed = mixed + gate_products(cell.weight_ih.view(2, 4, 3), x)
        h = h + torch.sigmoid(mixed[0]) * (torch.tanh(mixed[1]) - h)
    return h, h


def peephole(cell: Any, x: Tensor, state: State) -> tuple[Tensor, State]:
    (W, U, b), (h, c) = gate_blocks(cell, 4), state
    i, f, g, o = gate_products(W, x) + gate_products(U, h) + b[:, None]
    new = c / (1 + torch.exp(-f - c * cell.peephole[1])) + g.tanh() / (1 + torch.exp(-i - c * cell.peephole[0]))
    h = new.tanh() / (1 + torch.exp(-o - new * cell.peephole[2]))
    return h, (h, new)


def layer_norm(cell: Any, x: Tensor, state: State) -> tuple[Tensor, State]:
    def normed(x: Tensor) -> Tensor:
        centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
        return centred / ((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt()

    h, c = state
    of_x = normed(torch.einsum("kd,nd->nk", cell.weight_ih, x)) * cell.norm_ih.weight
    of_h = normed(torch.einsum("kd,nd->nk", cell.weight_hh, h)) * cell.norm_hh.weight
    i, f, g, o = (of_x + of_h + cell.bias).split(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(normed(c) * cell.norm_cell.weight + cell.norm_cell.bias)
    return h, (h, c)


def multiplicative(cell: Any, x: Tensor, state: State) -> tuple[Tensor, State]:
    W, U, b = gate_blocks(cell, 4)
    alpha, beta_ih, beta_hh = (scale.view(4, 1, 4) for scale in (cell.alpha, cell.beta_ih, cell.beta_hh))
    of_x, of_h = gate_products(W, x), gate_products(U, state[0])
    return lstm_end(*(alpha * of_x * of_h + beta_hh * of_h + beta_ih * of_x + b[:, None]), state[1])


def convolutional(cell: Any, x: Tensor, state: State) -> tuple[Tensor, State]:
    def convolved(conv: nn.Conv2d, image: Tensor) -> Tensor:
        """The sum over all shifts of the zero-padded image, times their weights."""
        size = conv.kernel_size[0]
        padded = F.pad(image, [size // 2] * 4)
        height, width = image.shape[-2:]
        total: Any = 0 if conv.bias is None else conv.bias.view(1, -1, 1, 1)
        for down, right in product(range(size), repeat=2):
            shifted = padded[..., down : down + height, right : right + width]
            total = total + torch.einsum("oc,nchw->nohw", conv.weight[:, :, down, right], shifted)
        return total

    i, f, g, o = (convolved(cell.conv_ih, x) + convolved(cell.conv_hh, state[0])).split(3, 1)
    return lstm_end(i, f, g, o, state[1])


FORMULAS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[int, ...]]] = {
    "published GRU": (lambda: cells.ResetBeforeGRUCell(3, 4), reset_before, (3,)),
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
def test_cells_follow_their_formulas(
    make: Callable[[], nn.Module], formula: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    cell = randomized(make())
    assert_follows(cell, partial(formula, cell), shape)


@pytest.mark.parametrize("heads", [1, 2])
def test_slstm_follows_its_formula_without_stabiliser(heads: int) -> None:
    cell = randomized(cells.SLSTMCell(3, 4, heads))

    def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        h, c, n = state
        # The old hidden state is along the second axis, the new one along the first.
        whole = torch.stack([torch.block_diag(*cell.weight_hh[gate]).T for gate in range(4)])
        i, f, z, o = gate_products(cell.weight_ih.view(4, 4, 3), x) + gate_products(whole, h) + cell.bias.view(4, 1, 4)
        c = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
        n = torch.sigmoid(f) * n + torch.exp(i)
        h = torch.sigmoid(o) * (c / n)
        return h, (h, c, n)

    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    expected, (_, c, n) = run_formula(step, x, (torch.zeros(2, 4).double(),) * 3)
    result = Recurrent(cell)(x)
    close(result.outputs, expected)
    _, scaled_c, scaled_n, m = result.last
    close([scaled_c * m.exp(), scaled_n * m.exp()], [c, n])
    wrt = [x, *cell.parameters()]
    close(gradients(result.outputs, wrt), gradients(expected, wrt), 1e-10)


@grid(shift=[-1e4, -200.0, 200.0, 1e4], dtype=[torch.float32, torch.float64])
def test_shifted_input_gate_of_slstm_changes_nothing(shift: float, dtype: torch.dtype) -> None:
    """Without the stabiliser, the exponential of the gate would be out of range."""
    torch.manual_seed(0)
    cell = cells.SLSTMCell(3, 4, 2).to(dtype)
    x = torch.randn(20, 2, 3, dtype=dtype)
    expected = Recurrent(cell)(x).outputs
    with torch.no_grad():
        cell.bias[:4] += shift
    outputs = Recurrent(cell)(x).outputs
    tolerance = torch.finfo(dtype).eps * abs(shift) * 20  # the rounding of gate + shift
    close(outputs, expected, tolerance)
    outputs.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in cell.parameters())


def test_initial_parameters_are_as_published() -> None:
    for block in cells.LightGRUCell(3, 5, dtype=torch.float64).weight_hh.chunk(2):
        torch.testing.assert_close(block @ block.T, torch.eye(5, dtype=torch.float64))
    highway = cells.RHNCell(3, 4, depth=2)
    assert (highway.bias[:, :4] == -2).all() and not highway.bias[:, 4:].any(), "it keeps most of its state"


@pytest.mark.parametrize("make", [cells.LSTMCell, cells.GRUCell])
def test_recurrent_dropout_drops_candidates_only(make: Any) -> None:
    """The mask differs in every step, and the share of the old state is never dropped."""
    torch.manual_seed(0)
    cell = make(3, 100, recurrent_dropout=0.25).double()
    x, h, c = torch.randn(50, 3).double(), torch.randn(50, 100).double(), torch.randn(50, 100).double()
    lstm = make is cells.LSTMCell
    state, old = ((h, c), c) if lstm else (h, h)
    gates = x @ cell.weight_ih.T + cell.bias_ih + h @ cell.weight_hh.T + cell.bias_hh
    old = gates.chunk(4 if lstm else 3, 1)[1].sigmoid() * old
    news = [new[1] if lstm else new for new in (cell(x, state)[1], cell(x, state)[1], cell.eval()(x, state)[1])]
    first, second, whole = (new - old for new in news)
    masks = [share / whole > 0.5 for share in (first, second)]
    torch.testing.assert_close(first / whole, masks[0] / 0.75, atol=1e-6, rtol=0, check_dtype=False)
    assert 0.7 < masks[0].double().mean() < 0.8 and not torch.equal(*masks)


PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "LSTM": (cells.LSTMCell, nn.LSTMCell, {}),
    "GRU": (cells.GRUCell, nn.GRUCell, {}),
    "Elman": (cells.ElmanCell, nn.RNNCell, {}),
    "Elman relu": (cells.ElmanCell, nn.RNNCell, {"nonlinearity": "relu"}),
}


@grid(name=list(PAIRS), bias=[True, False])
def test_weights_of_pytorchs_cells_load_both_ways(name: str, bias: bool) -> None:
    *makes, options = PAIRS[name]
    one, other = (randomized(make(3, 4, bias, **options)) for make in makes)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    for target, source in ((one, other), (other, one)):
        randomized(source)
        target.load_state_dict(source.state_dict())
        result, expected = Recurrent(one)(x), Recurrent(other)(x)
        close(result, expected)
        close(gradients(result, [x, *one.parameters()]), gradients(expected, [x, *other.parameters()]), 1e-10)
        with torch.no_grad():
            next(source.parameters()).mul_(2.0)


@at_once("name", PAIRS)
def test_initial_weights_are_drawn_as_by_pytorch(name: str) -> None:
    *makes, options = PAIRS[name]
    drawn = []
    for make in makes:
        torch.manual_seed(3)
        drawn.append(make(3, 4, **options).state_dict())
    assert list(drawn[0]) == list(drawn[1])
    assert all(torch.equal(drawn[0][key], drawn[1][key]) for key in drawn[0])
