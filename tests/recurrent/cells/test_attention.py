"""Attention by its formula, row by row; sources of different length, and what is wrong with a source."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.cells.references import scattered
from tests.recurrent.recurrent_cases import close, equal, gradients, told
from weft.core.errors import SpecError, UsageError
from weft.recurrent import Recurrent, cells

LENGTHS = [5, 2, 0, 1]
SCORES = ["additive", "dot"]


def attention(score: str, inner: nn.Module | None = None) -> Any:
    inner = cells.LSTMCell(3 + 2, 4) if inner is None else inner
    return scattered(cells.AttentionCell(inner, 2, 4, 6, score))


def one_row(cell: Any, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of one row over its own source, S x M, place by place."""
    state = (torch.zeros(1, 4).double(), torch.zeros(1, 4).double())
    context = torch.zeros(2).double()
    found = []
    for x_t in x:
        y, state = cell.cell(torch.cat([x_t, context])[None], state)
        query = cell.weight_query @ y[0]
        scores = []
        for place in source:
            key = cell.weight_key @ place
            if cell.score == "dot":
                scores.append(query @ key / 6**0.5)
            else:
                scores.append(torch.tanh(query + key + cell.bias) @ cell.weight_score)
        weights = torch.stack([s.exp() for s in scores]) if scores else torch.zeros(0).double()
        weights = weights / weights.sum()
        context = sum((w * place for w, place in zip(weights, source, strict=True)), torch.zeros(2).double())
        found.append((y[0], context, weights))
    return tuple(torch.stack(each) for each in zip(*found, strict=True))


def test_a_source_may_come_with_the_batch_first_or_with_a_mask() -> None:
    cell = attention("dot")
    source = torch.randn(5, 4, 2).double()
    wanted = cell.begin(source, LENGTHS)
    assert equal(cell.begin(source.transpose(0, 1), LENGTHS, batch_first=True), wanted)
    mask = torch.arange(5)[:, None] < torch.tensor(LENGTHS)
    assert equal(cell.begin(source, mask=mask), wanted)
    assert equal(cell.begin(source.transpose(0, 1), mask=mask.t(), batch_first=True), wanted)
    assert cell.begin(source).valid.all()


def test_a_reset_begins_anew_over_the_same_source() -> None:
    cell = attention("additive")
    x = torch.randn(4, 2, 3).double()
    state = cell.begin(torch.randn(5, 2, 2).double())
    reset = torch.zeros(4, 2, dtype=torch.bool)
    reset[2, 1] = True
    seen = Recurrent(cell)(x, state, reset=reset)
    close(seen.outputs.output[2:, 1], Recurrent(cell)(x[2:], state).outputs.output[:, 1])
    assert equal(seen.last.memory, state.memory)


def test_an_inner_cell_may_be_pytorchs_or_begin_with_a_given_state() -> None:
    cell = attention("dot", nn.GRUCell(3 + 2, 4))
    source = torch.randn(5, 2, 2).double()
    h = torch.randn(2, 4).double()
    assert equal(cell.begin(source).cell, torch.zeros(2, 4).double())
    assert cell.begin(source, state=h).cell is h
    assert Recurrent(cell)(torch.randn(3, 2, 3).double(), cell.begin(source, state=h)).outputs.output.shape == (3, 2, 4)


class Homeless(nn.Module):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, state


def test_all_that_is_wrong_with_a_source_is_told_at_once() -> None:
    cell = cells.AttentionCell(Homeless(), 2, 4, 6)
    with pytest.raises(SpecError, match="AttentionCell cannot begin") as caught:
        cell.begin(torch.ones(5, 4, 3), [5, 6, 0, 1], mask=torch.ones(4, 5))
    assert told(caught) == [
        "memory has shape (5, 4, 3), wanted S x N x 2",
        "lengths go from 0 to T = 5, but row 1 has 6",
        "mask has dtype torch.float32, wanted torch.bool",
        "mask has shape (4, 5), wanted T x N = (5, 4)",
        "Homeless has no initial state of its own: give state=",
    ]
    with pytest.raises(UsageError, match="no initial state"):
        cell.begin(torch.ones(5, 4, 2))
    with pytest.raises(SpecError, match=r"memory has shape \(5, 2\)"):
        attention("dot").begin(torch.ones(5, 2))


def test_without_a_source_there_is_no_state_to_begin_with() -> None:
    with pytest.raises(UsageError, match="there is no initial state: give state="):
        Recurrent(attention("dot"))(torch.ones(3, 2, 3).double())


def test_a_new_attention_leaves_the_inner_cell_as_it_is() -> None:
    inner = cells.GRUCell(5, 4)
    before = {name: each.clone() for name, each in inner.state_dict().items()}
    cells.AttentionCell(inner, 2, 4, 6).reset_parameters()
    assert all(torch.equal(before[name], each) for name, each in inner.state_dict().items())


@pytest.mark.parametrize("score", SCORES)
def test_attention_follows_its_formula_over_sources_of_any_length_and_never_reads_their_padding(score: str) -> None:
    cell = attention(score)
    x = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    counts = torch.arange(5)[:, None] < torch.tensor(LENGTHS)
    source = torch.randn(5, 4, 2, dtype=torch.float64).masked_fill(~counts[..., None], torch.nan).requires_grad_()
    seen = Recurrent(cell)(x, cell.begin(source, LENGTHS)).outputs
    rows = [one_row(cell, x[:, row], source[:length, row]) for row, length in enumerate(LENGTHS)]
    for row, (length, (output, context, weights)) in enumerate(zip(LENGTHS, rows, strict=True)):
        close([seen.output[:, row], seen.context[:, row], seen.weights[:, row, :length]], [output, context, weights])
        assert not seen.weights[:, row, length:].any()
    wrt = [x, source, *cell.parameters()]
    wanted = [torch.stack([row[part] for row in rows], 1) for part in (0, 1)]
    of_source = gradients(seen[:2], wrt)
    close(of_source, gradients(wanted, wrt), 1e-10)
    assert torch.equal(of_source[1].bool().any(-1), counts)
