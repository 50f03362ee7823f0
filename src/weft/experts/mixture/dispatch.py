"""Dispatch and combine: rows sorted by expert, one call each, and answers written back to their pairs.

    chosen   sample 0: B A        pair  0 1 2 3 4 5       by expert   A: pairs 1 4 3     rows of samples 0 2 1
             sample 1: B A    ──>       B A B A A B  ──>              B: pairs 0 2 5     rows of samples 0 1 2
             sample 2: A B        (pair = sample * k + choice)

`take` gathers the rows in that order with one copy, and a call sends a view of it; `CombineBuffer.put` writes what
comes back to its pairs. First choices stand before second ones, each in the order of the samples: so a capacity, which
cuts what stands behind it, cuts last choices first (as in GShard, Lepikhin et al. 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.errors import SpecError, listed


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The rows of one call: ``start`` to ``stop`` in the order of the dispatch, for one of the experts."""

    expert: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Dispatch:
    """The order in which rows are sent, and to which expert.

    Args:
        chosen: samples x k, int64 on the CPU: the number of an expert. One sample never has an expert twice.
        capacity: rows that one expert gets at most; pairs beyond it are dropped. None: no limit.
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
        """samples x k, bool: the pairs that are sent."""
        return self.mask(self.pairs)

    def mask(self, pairs: Tensor) -> Tensor:
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

    def restricted(self, alive: Tensor) -> "list[tuple[RowSpan, Tensor | None]]":
        """The spans with pairs that are True in ``alive``, and the positions of those pairs; None: all of the span."""
        flags = alive.reshape(-1)[self.pairs]
        found: list[tuple[RowSpan, Tensor | None]] = []
        for span in self.spans:
            mine = flags[span.start : span.stop]
            left = int(mine.sum())
            if left:
                found.append((span, None if left == len(span) else mine.nonzero()[:, 0] + span.start))
        return found


def _cut(counts: Sequence[int], most: int | None) -> list[RowSpan]:
    """The spans of experts with so many rows each, none longer than ``most``."""
    spans: list[RowSpan] = []
    start = 0
    for expert, count in enumerate(counts):
        stop = start + count
        step = count if most is None else most
        while start < stop:
            spans.append(RowSpan(expert, start, min(start + step, stop)))
            start += step
        start = stop
    return spans


class CombineBuffer:
    """Rows of answers by pair: samples x k x ..., zeros where none came, on the device of the first answer.

    With ``finite``, rows with NaN or Inf are left out. ``alive`` says for each pair whether its row came. On the CPU
    rows are copied by numpy, in one thread: while some experts have answered the others still work, maybe on this
    machine, and torch's threads would take their cores from them.
    """

    def __init__(self, samples: int, k: int, *, finite: bool) -> None:
        self._samples, self._k, self._finite = samples, k, finite
        self._flat: list[Tensor] | None = None
        self.alive = torch.zeros(samples * k, dtype=torch.bool, device="cpu")

    def put(self, pairs: Tensor, answer: Sequence[Tensor]) -> Tensor | None:
        """Write an answer to these pairs. Returns which of its rows are good, None for all. Raises ``SpecError``."""
        if self._flat is None:
            self._flat = [x.new_empty(self._samples * self._k, *x.shape[1:]) for x in answer]
        faults = [
            f"tensor {i} has shape {tuple(seen.shape)}, wanted {(len(pairs), *flat.shape[1:])}"
            for i, (flat, seen) in enumerate(zip(self._flat, answer, strict=True))
            if seen.shape != (len(pairs), *flat.shape[1:])
        ]
        if faults:
            raise SpecError(listed("the answer does not fit the call, or the answers before it:", faults))
        good = finite_rows(answer) if self._finite else None
        if good is not None:
            pairs, answer = pairs[good], [x[good.to(x.device)] for x in answer]
        for flat, rows in zip(self._flat, answer, strict=True):
            rows = rows.to(flat)
            if flat.device.type == "cpu":
                _bytes(flat)[pairs.numpy()] = _bytes(rows)
            else:
                flat.index_copy_(0, pairs.to(flat.device), rows)
        self.alive[pairs] = True
        return good

    def rows(self) -> list[Tensor] | None:
        """All rows, each tensor samples x k x ...; None if no answer came."""
        if self._flat is None:
            return None
        if not bool(self.alive.all()):
            for flat in self._flat:
                flat[~self.alive.to(flat.device)] = 0
        return [flat.view(self._samples, self._k, *flat.shape[1:]) for flat in self._flat]

    def clear(self, samples: Tensor) -> None:
        """Drop all rows of the samples that are True here."""
        self.alive.view(self._samples, self._k)[samples] = False


def _bytes(tensor: Tensor) -> Any:
    """The rows as bytes, as numpy does not know all dtypes: a view, if the rows lie one after the other."""
    return tensor.reshape(len(tensor), prod(tensor.shape[1:])).contiguous().view(torch.uint8).numpy()


def finite_rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """Which rows are finite in all tensors (bool, CPU), None if all are; integers always are."""
    good: Tensor | None = None
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            mine = tensor.isfinite().flatten(1).all(1).cpu()
            good = mine if good is None else good & mine
    return None if good is None or bool(good.all()) else good
