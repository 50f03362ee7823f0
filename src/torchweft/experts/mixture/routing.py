"""Routing: living experts of a grid, the k best for each sample, rows by expert and back, weights, balancing loss.

    prefix "ffn", grid 4 x 32      "ffn.3.17" is the expert in row 3 and column 17
    router's scores                samples x (4 + 32): one score for each place along each axis
    score of expert (3, 17)        scores[:, 3] + scores[:, 4 + 17]
    all living ones                samples x experts  ──top k──>  chosen: samples x k

    chosen   sample 0: B A        pair  0 1 2 3 4 5       by expert   A: pairs 1 4 3     rows of samples 0 2 1
             sample 1: B A    ──>       B A B A A B  ──>              B: pairs 0 2 5     rows of samples 0 1 2
             sample 2: A B        (pair = sample * k + choice)

    mixture   softmax over the k that answered                 weights of a sample add up to 1
    switch    softmax over all living experts, of the chosen   a failed expert is missing, no other gets more

Scores that are sums along the axes of a grid are the product keys of Lample et al., "Large Memory Layers with Product
Keys" (2019), in the form of hivemind's mixture. hivemind selects by a beam search, which can miss the best experts. One
pass over samples x experts finds them, and is fast enough. The choice has no gradient: the router learns through the
scores of the chosen (`chosen_scores`) or of all (`all_scores`), and the weights, in plain autograd.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from torchweft.core.errors import SpecError, join_faults
from torchweft.core.validation import Validator
from torchweft.experts.discovery import Snapshot

_BLOCK = 1 << 16  # scores that fit into a processor's caches


@dataclass(frozen=True)
class LiveExperts:
    """The living experts of a grid, sorted by their place: ``places`` is int64, experts x axes, on the CPU."""

    uids: tuple[str, ...]
    places: Tensor

    def __len__(self) -> int:
        return len(self.uids)


def check_grid(check: Validator, prefix: Any, sizes: Any) -> bool:
    """Check the ``uid_prefix`` and the ``grid_size`` of a grid. Returns whether both are valid."""
    is_name = isinstance(prefix, str) and bool(prefix.strip("."))
    valid = check.require(is_name, f"uid_prefix is {prefix!r}, wanted a name such as 'ffn'")
    if isinstance(sizes, str | bytes) or not isinstance(sizes, Sequence):
        check.add(f"grid_size is {sizes!r}, wanted a list with one size for each axis, such as [4, 32]")
        return False
    numbered = list(enumerate(cast("Sequence[Any]", sizes)))
    valid &= check.require(bool(numbered), "grid_size is empty, wanted one size for each axis")
    return valid & all([check.count(f"grid_size[{i}]", size) for i, size in numbered])


class Grid:
    """Names of experts as places on a grid. ``sizes``: the number of places along each axis."""

    def __init__(self, prefix: str, sizes: Sequence[int]) -> None:
        self.prefix = prefix.rstrip(".") + "."
        self.sizes = tuple(sizes)

    def __len__(self) -> int:
        return math.prod(self.sizes)

    def uid(self, place: Sequence[int]) -> str:
        return self.prefix + ".".join(map(str, place))

    def place(self, uid: str) -> tuple[int, ...] | None:
        """Return None if it is not in the grid."""
        words = uid.removeprefix(self.prefix).split(".")
        if len(words) != len(self.sizes):
            return None
        for word, size in zip(words, self.sizes, strict=True):
            # Names come from other machines. The length is compared first, because int() of many digits is slow.
            if not (word.isascii() and word.isdecimal() and len(word) <= len(str(size)) and int(word) < size):
                return None
        place = tuple(map(int, words))
        return place if self.uid(place) == uid else None  # "03" would be a second name of 3

    def live_experts(self, snapshot: Snapshot) -> LiveExperts:
        # Other experts with the prefix belong to another model.
        listed = sorted((place, uid) for uid in snapshot.search(self.prefix) if (place := self.place(uid)) is not None)
        places = torch.tensor([place for place, _ in listed], dtype=torch.int64, device="cpu")
        return LiveExperts(tuple(uid for _, uid in listed), places.reshape(-1, len(self.sizes)))


def all_scores(scores: Tensor, places: Tensor, sizes: Sequence[int]) -> Tensor:
    """The score of every expert: samples x experts. ``scores`` is samples x sum(sizes), ``places`` experts x axes."""
    return _sum_columns(scores, _score_columns(places, sizes))


def choose_experts(scores: Tensor, places: Tensor, sizes: Sequence[int], k: int) -> Tensor:
    """The ``k`` best experts of each sample (or all), best first: samples x k, int64, as rows of `places`."""
    columns, count = _score_columns(places, sizes), min(k, len(places))
    with torch.no_grad():
        # Blocks of samples bound the memory, and are faster because their scores fit into the processor's caches.
        parts = cast("Sequence[Tensor]", scores.detach().split(max(1, _BLOCK // max(1, len(places)))))
        return torch.cat([_sum_columns(part, columns).topk(count, dim=1).indices for part in parts])


def chosen_scores(scores: Tensor, places: Tensor, sizes: Sequence[int], chosen: Tensor) -> Tensor:
    """The scores of the chosen experts: samples x k. Bit-equal to those of `all_scores`."""
    # The sum has the order of `_sum_columns`: another order would round differently.
    columns = [column[chosen] for column in _score_columns(places, sizes)]
    total = scores.gather(1, columns[0])
    for column in columns[1:]:
        total = total + scores.gather(1, column)
    return total


def _sum_columns(scores: Tensor, columns: Sequence[Tensor]) -> Tensor:
    total = scores.index_select(1, columns[0])
    for column in columns[1:]:
        total += scores.index_select(1, column)
    return total


def _score_columns(places: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [places[:, axis] + start for axis, start in enumerate(accumulate(sizes[:-1], initial=0))]


def weights_of_answered(scores: Tensor, alive: Tensor) -> Tensor:
    """Softmax over the chosen experts that answered: samples x k. Zero for all others."""
    # A sample without any answer is not masked: softmax of -inf alone would be NaN, and NaN * 0 remains NaN.
    has_answer = alive.any(1, keepdim=True)
    return scores.masked_fill(~alive & has_answer, float("-inf")).softmax(1) * alive


def weighted_mean(outputs: Tensor, weights: Tensor) -> Tensor:
    """The sum of ``outputs`` (samples x k x ...) with ``weights`` (samples x k), in the dtype of the outputs."""
    flat = outputs.flatten(2) if outputs.dim() > 2 else outputs.unsqueeze(2)
    # Not under autocast, which would round outputs of full precision.
    with torch.autocast(outputs.device.type, enabled=False):
        return (weights.to(flat.dtype).unsqueeze(1) @ flat).reshape(outputs.shape[0], *outputs.shape[2:])


def load_balancing_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Experts * sum over experts of (share of the samples that chose it * mean probability): 1 if all are equal.

    ``probabilities`` is samples x experts, ``chosen`` samples x k. Only the probability has a gradient, which makes an
    expert that is chosen too often less probable. Add it to the loss with a factor of about 0.01. From Fedus et al.,
    "Switch Transformers" (2021), equation 4; with k > 1 every choice counts.

    Example:
        >>> from torchweft.experts.mixture import load_balancing_loss
        >>> probabilities = torch.full((4, 2), 0.5)
        >>> load_balancing_loss(probabilities, torch.tensor([[0], [1], [0], [1]]))
        tensor(1.)
    """
    experts = probabilities.shape[1]
    exact = torch.promote_types(probabilities.dtype, torch.float32)  # float64 keeps its precision, half gains some
    share = torch.bincount(chosen.reshape(-1), minlength=experts).to(exact) / max(1, chosen.numel())
    return experts * (share.to(probabilities.dtype) * probabilities.mean(0)).sum()


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The rows of one call: ``start`` to ``stop`` in the order of the dispatch, for one expert."""

    expert: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Dispatch:
    """The order in which rows are sent to the experts. ``chosen``: experts by number, samples x k, on the CPU."""

    # ``capacity``: most rows for one expert. Further pairs are dropped. ``most``: most rows of one call.
    def __init__(self, chosen: Tensor, *, capacity: int | None = None, most: int | None = None) -> None:
        self.samples, self.k = chosen.shape
        # First choices precede second ones, each in the order of the samples. The sort is stable, so that a capacity
        # drops the last choices first (as in GShard, Lepikhin et al. 2020).
        by_choice = chosen.t().reshape(-1)
        order = by_choice.argsort(stable=True)
        counts = by_choice.bincount()
        if capacity is not None:
            starts = counts.cumsum(0) - counts
            rank = torch.arange(len(order), device="cpu") - starts[by_choice[order]]
            order = order[rank < capacity]
            counts = counts.clamp(max=capacity)
        self.rows = order % max(1, self.samples)  # Sample of each sent row, int64
        self.pairs = self.rows * self.k + order // max(1, self.samples)  # Pair of each sent row, int64
        self.spans = _make_spans(cast("list[int]", counts.tolist()), most)

    @property
    def sent(self) -> Tensor:
        mask = torch.zeros(self.samples * self.k, dtype=torch.bool, device="cpu")
        mask[self.pairs] = True
        return mask.view(self.samples, self.k)

    def gather_rows(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(0, self.rows.to(tensor.device))

    def gather_pairs(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, self.pairs.to(tensor.device))

    def restrict_spans(self, alive: Tensor) -> "list[tuple[RowSpan, Tensor | None]]":
        """The spans with pairs that are True in ``alive``, and the positions of those pairs. None: all of the span."""
        flags = alive.reshape(-1)[self.pairs]
        restricted: list[tuple[RowSpan, Tensor | None]] = []
        for span in self.spans:
            span_flags = flags[span.start : span.stop]
            count = int(span_flags.sum())
            if count:
                restricted.append((span, None if count == len(span) else span_flags.nonzero()[:, 0] + span.start))
        return restricted


def _make_spans(counts: Sequence[int], most: int | None) -> list[RowSpan]:
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
    """Rows of answers by pair: samples x k x ..., zeros without an answer, on the device of the first answer."""

    # With ``finite``, rows with NaN or Inf are left out. ``alive`` is the mask of pairs with a row.
    def __init__(self, samples: int, k: int, *, finite: bool) -> None:
        self._samples, self._k, self._finite = samples, k, finite
        self._flat: list[Tensor] | None = None
        self.alive = torch.zeros(samples * k, dtype=torch.bool, device="cpu")

    def write(self, pairs: Tensor, answer: Sequence[Tensor]) -> Tensor | None:
        """Write an answer to these pairs. Returns the mask of valid rows, None for all. Raises ``SpecError``."""
        if self._flat is None:
            self._flat = [x.new_empty(self._samples * self._k, *x.shape[1:]) for x in answer]
        faults = [
            f"tensor {i} has shape {tuple(tensor.shape)}, wanted {(len(pairs), *flat.shape[1:])}"
            for i, (flat, tensor) in enumerate(zip(self._flat, answer, strict=True))
            if tensor.shape != (len(pairs), *flat.shape[1:])
        ]
        if faults:
            raise SpecError(join_faults("the answer does not fit the call, or the answers before it:", faults))
        valid = finite_rows(answer) if self._finite else None
        if valid is not None:
            pairs, answer = pairs[valid], [x[valid.to(x.device)] for x in answer]
        for flat, rows in zip(self._flat, answer, strict=True):
            rows = rows.to(flat)
            # By numpy, in one thread: torch's threads would take cores from experts on this machine that still work.
            if flat.device.type == "cpu":
                _as_bytes(flat)[pairs.numpy()] = _as_bytes(rows)
            else:
                flat.index_copy_(0, pairs.to(flat.device), rows)
        self.alive[pairs] = True
        return valid

    def rows(self) -> list[Tensor] | None:
        """All rows, each tensor samples x k x .... None without any answer."""
        if self._flat is None:
            return None
        # Zeroed here rather than at allocation, because usually all rows have come.
        if not bool(self.alive.all()):
            for flat in self._flat:
                flat[~self.alive.to(flat.device)] = 0
        return [flat.view(self._samples, self._k, *flat.shape[1:]) for flat in self._flat]

    def drop_samples(self, mask: Tensor) -> None:
        self.alive.view(self._samples, self._k)[mask] = False


def _as_bytes(tensor: Tensor) -> Any:
    """The rows as bytes, because numpy does not know all dtypes. A view if the tensor is contiguous."""
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:])).contiguous().view(torch.uint8).numpy()


def finite_rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """The mask of rows that are finite in all tensors (bool, CPU), None if all rows are."""
    mask: Tensor | None = None
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            is_finite = tensor.isfinite().flatten(1).all(1).cpu()
            mask = is_finite if mask is None else mask & is_finite
    return None if mask is None or bool(mask.all()) else mask
