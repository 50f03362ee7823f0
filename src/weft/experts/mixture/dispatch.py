"""Sorts the pairs (sample, choice) by expert, so that each expert gets one call with all of its rows.

    chosen   sample 0: B A        pair  0 1 2 3 4 5       by expert   A: pairs 1 4 3     rows of samples 0 2 1
             sample 1: B A    ──>       B A B A A B  ──>              B: pairs 0 2 5     rows of samples 0 1 2
             sample 2: A B        (pair = sample * k + choice)

`take` gathers the rows in that order with one copy, and a call sends a view of it; `put` lays what comes back at
its pairs. First choices stand before second ones, each in the order of the samples: so a capacity, which cuts what
stands behind it, cuts last choices first (as in GShard, Lepikhin et al. 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one call: ``start`` to ``stop`` in the order of the dispatch, for one of the experts."""

    expert: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Dispatch:
    """Which rows go where.

    Args:
        chosen: samples x k, int64 on the CPU: the number of an expert. One sample never has an expert twice.
        capacity: rows that one expert gets at most; pairs beyond it go nowhere. ``None`` for no limit.
        most: rows that one call may have; an expert that gets more is called more than once.
    """

    def __init__(self, chosen: Tensor, *, capacity: int | None = None, most: int | None = None) -> None:
        self.samples, self.k = chosen.shape
        by_choice = chosen.t().reshape(-1)
        order = by_choice.argsort(stable=True)
        counts = by_choice.bincount()
        if capacity is not None:
            starts = counts.cumsum(0) - counts
            rank = torch.arange(len(order), device="cpu") - starts[by_choice[order]]
            order = order[rank < capacity]
            counts = counts.clamp(max=capacity)
        self.rows = order % max(1, self.samples)
        """Sample of each row that is sent, int64."""
        self.pairs = self.rows * self.k + order // max(1, self.samples)
        """Pair of each row that is sent, int64."""
        self.spans = _cut(cast("list[int]", counts.tolist()), most)

    @property
    def sent(self) -> Tensor:
        """samples x k, bool: the pairs that go somewhere."""
        return self.marked(self.pairs)

    def marked(self, pairs: Tensor) -> Tensor:
        """samples x k, bool: True at these pairs."""
        mask = torch.zeros(self.samples * self.k, dtype=torch.bool, device="cpu")
        mask[pairs] = True
        return mask.view(self.samples, self.k)

    def take(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor of samples, in the order of the dispatch."""
        return tensor.index_select(0, self.rows.to(tensor.device))

    def take_pairs(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor of samples x k x ..., in the order of the dispatch."""
        return tensor.flatten(0, 1).index_select(0, self.pairs.to(tensor.device))

    def without(self, alive: Tensor) -> "list[tuple[Span, Tensor | None]]":
        """The spans with what is left of them if only pairs that are True in ``alive`` count.

        A span comes with None if all of it is left, else with the positions (int64, in the order of the dispatch)
        that are; one with nothing left does not come.
        """
        flags = alive.reshape(-1)[self.pairs]
        found: list[tuple[Span, Tensor | None]] = []
        for span in self.spans:
            mine = flags[span.start : span.stop]
            left = int(mine.sum())
            if left:
                found.append((span, None if left == len(span) else mine.nonzero()[:, 0] + span.start))
        return found


def _cut(counts: Sequence[int], most: int | None) -> list[Span]:
    """The spans of experts with so many rows each, none longer than ``most``."""
    spans: list[Span] = []
    start = 0
    for expert, count in enumerate(counts):
        stop = start + count
        step = count if most is None else most
        while start < stop:
            spans.append(Span(expert, start, min(start + step, stop)))
            start += step
        start = stop
    return spans
