"""Rows are grouped by expert, each pair goes to its chosen expert, and a capacity drops last choices first."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.mixture.mixture_cases import numbers
from torchweft.experts.mixture.routing import Dispatch


@st.composite
def choices(draw: st.DrawFn) -> torch.Tensor:
    experts, samples = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    k = draw(st.integers(0, experts))
    rows = [draw(st.permutations(range(experts)))[:k] for _ in range(samples)]
    return torch.tensor(rows, dtype=torch.int64).reshape(samples, k)


@given(choices())
def test_expert_has_one_span_with_all_its_rows(chosen: torch.Tensor) -> None:
    dispatch = Dispatch(chosen)
    assert [span.expert for span in dispatch.spans] == sorted(set(chosen.flatten().tolist()))
    x = numbers(len(chosen), 3)
    gathered, flat = dispatch.gather_rows(x), chosen.flatten()
    for span in dispatch.spans:
        pairs = dispatch.pairs[span.start : span.stop]
        assert sorted(pairs.tolist()) == (flat == span.expert).nonzero()[:, 0].tolist()
        assert torch.equal(gathered[span.start : span.stop], x[pairs // chosen.shape[1]])
    assert bool(dispatch.sent.all()) and sum(map(len, dispatch.spans)) == chosen.numel()
    by_pair = numbers(*chosen.shape, 2)
    assert torch.equal(dispatch.gather_pairs(by_pair), by_pair.flatten(0, 1)[dispatch.pairs])


@given(choices(), st.integers(1, 4))
def test_a_capacity_keeps_first_choices_and_then_first_samples(chosen: torch.Tensor, capacity: int) -> None:
    kept = set[tuple[int, int]]()
    seen = dict[int, int]()
    for choice in range(chosen.shape[1]):
        for sample in range(len(chosen)):
            expert = int(chosen[sample, choice])
            seen[expert] = seen.get(expert, 0) + 1
            if seen[expert] <= capacity:
                kept.add((sample, choice))
    dispatch = Dispatch(chosen, capacity=capacity)
    assert {(int(s), int(c)) for s, c in dispatch.sent.nonzero()} == kept
    for span in dispatch.spans:
        assert 0 < len(span) <= capacity
        assert set(chosen.flatten()[dispatch.pairs[span.start : span.stop]].tolist()) == {span.expert}


@given(choices(), st.integers(1, 3))
def test_calls_do_not_exceed_the_maximal_batch(chosen: torch.Tensor, most: int) -> None:
    whole, cut = Dispatch(chosen), Dispatch(chosen, most=most)
    assert torch.equal(whole.pairs, cut.pairs)
    assert all(0 < len(span) <= most for span in cut.spans)
    assert [i for span in cut.spans for i in range(span.start, span.stop)] == list(range(chosen.numel()))
    assert len(cut.spans) == sum(-(-len(span) // most) for span in whole.spans)


@given(choices(), st.data())
def test_restricted_spans_hold_exactly_the_alive_pairs(chosen: torch.Tensor, data: st.DataObject) -> None:
    dispatch = Dispatch(chosen)
    flags = data.draw(st.lists(st.booleans(), min_size=chosen.numel(), max_size=chosen.numel()))
    alive = torch.tensor(flags, dtype=torch.bool).view(chosen.shape)
    left: list[int] = []
    for span, positions in dispatch.restrict_spans(alive):
        mine = list(range(span.start, span.stop)) if positions is None else positions.tolist()
        assert mine and all(span.start <= i < span.stop for i in mine)
        left += mine
    assert sorted(dispatch.pairs[left].tolist()) == alive.flatten().nonzero()[:, 0].tolist()
