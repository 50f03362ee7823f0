"""Routing selects exactly the best live experts."""

import itertools
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.mixture.mixture_cases import numbers
from torchweft.experts.mixture import routing
from torchweft.experts.mixture.routing import all_scores, choose_experts, chosen_scores


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 6), st.integers(0, 7), st.data())
def test_routing_chooses_the_best_live_experts(sizes: list[int], k: int, samples: int, data: st.DataObject) -> None:
    whole = list(itertools.product(*(range(size) for size in sizes)))
    living = sorted(data.draw(st.sets(st.sampled_from(whole), min_size=1)))
    scores = numbers(samples, sum(sizes), seed=data.draw(st.integers(0, 9)), dtype=torch.float32).requires_grad_()
    places = torch.tensor(living)
    with mock.patch.object(routing, "_BLOCK", data.draw(st.sampled_from([1, 8, 1 << 16]))):
        chosen = choose_experts(scores, places, sizes, k)
    seen = chosen_scores(scores, places, sizes, chosen)
    assert chosen.shape == (samples, min(k, len(living))) and not chosen.requires_grad and seen.requires_grad
    for row, mine, row_scores in zip(scores.tolist(), chosen.tolist(), seen, strict=True):
        best: list[float] = []
        for place in living:
            total, start = torch.tensor(0.0), 0
            for i, size in zip(place, sizes, strict=True):
                total, start = total + torch.tensor(row[start + i]), start + size
            best.append(float(total))
        assert row_scores.tolist() == sorted(best, reverse=True)[: len(mine)] == [best[i] for i in mine]
    assert torch.equal(seen, all_scores(scores, places, sizes).gather(1, chosen))
