"""Routing: which experts of a grid live, the k best for each sample, rows by expert and back, weights, balancing loss.

    prefix "ffn", grid 4 x 32      "ffn.3.17" is the expert in row 3 and column 17
    router's scores                samples x (4 + 32): one score for each place along each axis
    score of expert (3, 17)        scores[:, 3] + scores[:, 4 + 17]
    all living ones                samples x experts  ──top k──>  chosen: samples x k

    chosen   sample 0: B A        pair  0 1 2 3 4 5       by expert   A: pairs 1 4 3     rows of samples 0 2 1
             sample 1: B A    ──>       B A B A A B  ──>              B: pairs 0 2 5     rows of samples 0 1 2
             sample 2: A B        (pair = sample * k + choice)

    mixture   softmax over the k that answered                 weights of a sample add up to 1
    switch    softmax over all living experts, of the chosen   a failed expert is missing, no other gets more

Grids whose scores are sums along the axes are the product keys of Lample et al., "Large Memory Layers with Product
Keys" (2019), in the form of hivemind's mixture; but one pass over samples x experts misses none, as a beam search may.
Choosing has no gradient; what the router learns by are the scores of the chosen (`chosen_scores`) or of all
(`all_scores`), and the weights, in plain autograd.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.errors import SpecError, listed
from weft.core.validation import Validator
from weft.experts.discovery import Snapshot

_BLOCK = 1 << 16  # scores that the caches of a processor hold


@dataclass(frozen=True)
class LiveExperts:
    """The living experts of a grid, sorted by their place: ``places`` is int64, experts x axes, on the CPU."""

    uids: tuple[str, ...]
    places: Tensor

    def __len__(self) -> int:
        return len(self.uids)


def check_grid(check: Validator, prefix: Any, sizes: Any) -> bool:
    """Check the ``uid_prefix`` and the ``grid_size`` of a grid. Returns whether both are valid."""
    named = isinstance(prefix, str) and bool(prefix.strip("."))
    valid = check.that(named, f"uid_prefix is {prefix!r}, wanted a name such as 'ffn'")
    if isinstance(sizes, str | bytes) or not isinstance(sizes, Sequence):
        check.add(f"grid_size is {sizes!r}, wanted a list with one size for each axis, such as [4, 32]")
        return False
    each = list(enumerate(cast("Sequence[Any]", sizes)))
    valid &= check.that(bool(each), "grid_size is empty, wanted one size for each axis")
    return valid & all([check.count(f"grid_size[{i}]", size) for i, size in each])


class Grid:
    """Names of experts as places on a grid. ``sizes``: the number of places along each axis."""

    def __init__(self, prefix: str, sizes: Sequence[int]) -> None:
        self.prefix = prefix.rstrip(".") + "."
        self.sizes = tuple(sizes)

    def __len__(self) -> int:
        """The number of places."""
        return math.prod(self.sizes)

    def uid(self, place: Sequence[int]) -> str:
        """The name of the expert at a place."""
        return self.prefix + ".".join(map(str, place))

    def place(self, uid: str) -> tuple[int, ...] | None:
        """The place of the expert of this name; None if it is not in the grid."""
        words = uid.removeprefix(self.prefix).split(".")
        if len(words) != len(self.sizes):
            return None
        for word, size in zip(words, self.sizes, strict=True):  # the length spares int() thousands of digits
            if not (word.isascii() and word.isdecimal() and len(word) <= len(str(size)) and int(word) < size):
                return None
        place = tuple(map(int, words))
        return place if self.uid(place) == uid else None  # "03" would be a second name of 3

    def live(self, snapshot: Snapshot) -> LiveExperts:
        """The experts of the snapshot that are in the grid; others under its prefix belong to another model."""
        found = sorted((place, uid) for uid in snapshot.search(self.prefix) if (place := self.place(uid)) is not None)
        places = torch.tensor([place for place, _ in found], dtype=torch.int64, device="cpu")
        return LiveExperts(tuple(uid for _, uid in found), places.reshape(-1, len(self.sizes)))


def all_scores(scores: Tensor, places: Tensor, sizes: Sequence[int]) -> Tensor:
    """The score of every expert: samples x experts. ``scores`` is samples x sum(sizes), ``places`` experts x axes."""
    return _sum_columns(scores, _columns(places, sizes))


def choose(scores: Tensor, places: Tensor, sizes: Sequence[int], k: int) -> Tensor:
    """The ``k`` best experts of each sample (all, if fewer live), best first: samples x k, int64, as rows of `places`.

    Blocks of samples whose scores fit into the processor's caches are faster, and bound the memory.
    """
    columns, count = _columns(places, sizes), min(k, len(places))
    with torch.no_grad():
        parts = cast("Sequence[Tensor]", scores.detach().split(max(1, _BLOCK // max(1, len(places)))))
        return torch.cat([_sum_columns(part, columns).topk(count, dim=1).indices for part in parts])


def chosen_scores(scores: Tensor, places: Tensor, sizes: Sequence[int], chosen: Tensor) -> Tensor:
    """The scores of the chosen experts: samples x k. Bit-equal to those of `all_scores`."""
    columns = [column[chosen] for column in _columns(places, sizes)]
    total = scores.gather(1, columns[0])
    for column in columns[1:]:
        total = total + scores.gather(1, column)
    return total


def _sum_columns(scores: Tensor, columns: Sequence[Tensor]) -> Tensor:
    total = scores.index_select(1, columns[0])
    for column in columns[1:]:
        total += scores.index_select(1, column)
    return total


def _columns(places: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """For each axis, the column of the scores that each expert reads."""
    starts = accumulate(sizes[:-1], initial=0)
    return [places[:, axis] + start for axis, start in enumerate(starts)]


def weights_of_answered(scores: Tensor, alive: Tensor) -> Tensor:
    """Softmax over the chosen that answered: samples x k. Zero for all others; all zero if nobody answered."""
    anyone = alive.any(1, keepdim=True)
    masked = scores.masked_fill(~alive & anyone, float("-inf"))  # not where all are out: softmax would be NaN
    return masked.softmax(1) * alive


def weighted_mean(outputs: Tensor, weights: Tensor) -> Tensor:
    """The sum of ``outputs`` (samples x k x ...) by ``weights`` (samples x k): samples x ..., dtype of the outputs."""
    flat = outputs.flatten(2) if outputs.dim() > 2 else outputs.unsqueeze(2)
    with torch.autocast(outputs.device.type, enabled=False):
        return (weights.to(flat.dtype).unsqueeze(1) @ flat).reshape(outputs.shape[0], *outputs.shape[2:])


def load_balancing_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Experts * sum over experts of (share of the samples that chose it * mean probability): 1 if all are equal.

    ``probabilities`` is samples x experts, ``chosen`` samples x k. The share has no gradient, the probability has:
    an expert that is chosen too often becomes less probable. To be added to the loss with a factor of about 0.01.
    From Fedus et al., "Switch Transformers" (2021), equation 4; with k > 1 every choice counts.

    Example:
        >>> from weft.experts.mixture import load_balancing_loss
        >>> probabilities = torch.full((4, 2), 0.5)
        >>> load_balancing_loss(probabilities, torch.tensor([[0], [1], [0], [1]]))
        tensor(1.)
    """
    experts = probabilities.shape[1]
    exact = torch.promote_types(probabilities.dtype, torch.float32)  # a division of integers would be of float32
    share = torch.bincount(chosen.reshape(-1), minlength=experts).to(exact) / max(1, chosen.numel())
    return experts * (share.to(probabilities.dtype) * probabilities.mean(0)).sum()


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

    First choices stand before second ones, each in the order of the samples: so a capacity, which cuts what stands
    behind it, cuts last choices first (as in GShard, Lepikhin et al. 2020).

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
        mask = torch.zeros(self.samples * self.k, dtype=torch.bool, device="cpu")
        mask[self.pairs] = True
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
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:])).contiguous().view(torch.uint8).numpy()


def finite_rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """Which rows are finite in all tensors (bool, CPU), None if all are; integers always are."""
    good: Tensor | None = None
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            mine = tensor.isfinite().flatten(1).all(1).cpu()
            good = mine if good is None else good & mine
    return None if good is None or bool(good.all()) else good
