"""Attention follows its formula row by row, over sources of different length. Faults of a source are listed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.cells.references import randomized
from tests.recurrent.recurrent_cases import close, equal, fault_lines, gradients
from torchweft.core.errors import SpecError, UsageError
from torchweft.recurrent import Recurrent, cells

LENGTHS = [5, 2, 0, 1]


def attention(score: str, inner: nn.Module | None = None) -> Any:
    inner = cells.LSTMCell(3 + 2, 4) if inner is None else inner
    return randomized(cells.AttentionCell(inner, 2, 4, 6, score))


def one_row(cell: Any, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, context and weights of one row over its own source, S x M, position by position."""
    state = (torch.zeros(1, 4).double(), torch.zeros(1, 4).double())
    context = torch.zeros(2).double()
    steps = []
    for x_t in x:
        y, state = cell.cell(torch.cat([x_t, context])[None], state)
        query = cell.weight_query @ y[0]
        scores = []
        for position in source:
            key = cell.weight_key @ position
            if cell.score == "dot":
                scores.append(query @ key / 6**0.5)
            else:
                scores.append(torch.tanh(query + key + cell.bias) @ cell.weight_score)
        weights = torch.stack([score.exp() for score in scores]) if scores else torch.zeros(0).double()
        weights = weights / weights.sum()
        context = sum((w * position for w, position in zip(weights, source, strict=True)), torch.zeros(2).double())
        steps.append((y[0], context, weights))
    return tuple(torch.stack(parts) for parts in zip(*steps, strict=True))


@pytest.mark.parametrize("score", ["additive", "dot"])
def test_attention_follows_its_formula(score: str) -> None:
    """Padding of a source is never read."""
    cell = attention(score)
    x = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    valid = torch.arange(5)[:, None] < torch.tensor(LENGTHS)
    source = torch.randn(5, 4, 2, dtype=torch.float64).masked_fill(~valid[..., None], torch.nan).requires_grad_()
    outputs = Recurrent(cell)(x, cell.begin(source, LENGTHS)).outputs
    rows = [one_row(cell, x[:, row], source[:length, row]) for row, length in enumerate(LENGTHS)]
    for row, (length, expected) in enumerate(zip(LENGTHS, rows, strict=True)):
        weights = outputs.weights[:, row, :length]
        close([outputs.output[:, row], outputs.context[:, row], weights], [*expected])
        assert not outputs.weights[:, row, length:].any()
    wrt = [x, source, *cell.parameters()]
    expected = [torch.stack([row[part] for row in rows], 1) for part in (0, 1)]
    derived = gradients(outputs[:2], wrt)
    close(derived, gradients(expected, wrt), 1e-10)
    assert torch.equal(derived[1].bool().any(-1), valid)


def test_begin_takes_batch_first_masks_and_inner_states() -> None:
    cell = attention("dot", nn.GRUCell(3 + 2, 4))
    source = torch.randn(5, 4, 2).double()
    state = cell.begin(source, LENGTHS)
    assert equal(state.cell, torch.zeros(4, 4).double())
    assert equal(cell.begin(source.transpose(0, 1), LENGTHS, batch_first=True), state)
    mask = torch.arange(5)[:, None] < torch.tensor(LENGTHS)
    assert equal(cell.begin(source, mask=mask), state)
    assert equal(cell.begin(source.transpose(0, 1), mask=mask.t(), batch_first=True), state)
    assert cell.begin(source).valid.all()
    h = torch.randn(4, 4).double()
    assert cell.begin(source, state=h).cell is h
    assert Recurrent(cell)(torch.randn(3, 4, 3).double(), cell.begin(source, state=h)).outputs.output.shape == (3, 4, 4)


@pytest.mark.long
def test_reset_restarts_over_the_same_source() -> None:
    cell = attention("additive")
    x = torch.randn(4, 2, 3).double()
    state = cell.begin(torch.randn(5, 2, 2).double())
    reset = torch.zeros(4, 2, dtype=torch.bool)
    reset[2, 1] = True
    result = Recurrent(cell)(x, state, reset=reset)
    close(result.outputs.output[2:, 1], Recurrent(cell)(x[2:], state).outputs.output[:, 1])
    assert equal(result.last.memory, state.memory)


class Stateless(nn.Module):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, state


def test_all_faults_of_a_source_are_listed() -> None:
    cell = cells.AttentionCell(Stateless(), 2, 4, 6)
    with pytest.raises(SpecError, match="AttentionCell cannot begin") as caught:
        cell.begin(torch.ones(5, 4, 3), [5, 6, 0, 1], mask=torch.ones(4, 5))
    assert fault_lines(caught) == [
        "memory has shape (5, 4, 3), wanted S x N x 2",
        "lengths go from 0 to T = 5, but row 1 has 6",
        "mask has dtype torch.float32, wanted torch.bool",
        "mask has shape (4, 5), wanted T x N = (5, 4)",
        "Stateless has no initial state of its own: give state=",
    ]
    with pytest.raises(UsageError, match="no initial state"):
        cell.begin(torch.ones(5, 4, 2))
    with pytest.raises(SpecError, match=r"memory has shape \(5, 2\)"):
        attention("dot").begin(torch.ones(5, 2))
    with pytest.raises(UsageError, match="there is no initial state: give state="):
        Recurrent(attention("dot"))(torch.ones(3, 2, 3).double())


def test_attention_leaves_the_inner_parameters_alone() -> None:
    inner = cells.GRUCell(5, 4)
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    cells.AttentionCell(inner, 2, 4, 6).reset_parameters()
    assert all(torch.equal(before[name], tensor) for name, tensor in inner.state_dict().items())
