"""Which experts a sample goes to: the k with the largest scores among those that live. Exact, and all local.

    router's scores    samples x (4 + 32)       one score for each place along each axis
    expert (3, 17)     score = scores[:, 3] + scores[:, 4 + 17]
    all living ones    samples x experts  ──top k──>  chosen: samples x k

A search by prefixes (a beam) may miss the best experts, and asks a directory for each prefix. With all scores at
hand one pass over samples x experts is faster: 256 samples over 1024 experts take less than 1 ms on one core.

Choosing has no gradient, so it is done on plain numbers; what the router learns by are the scores of the chosen
(`chosen_scores`) or of all (`all_scores`), which autograd sees.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

_AT_ONCE = 1 << 16  # scores


def all_scores(scores: Tensor, places: Tensor, sizes: Sequence[int]) -> Tensor:
    """The score of every expert: samples x experts. ``scores`` is samples x sum(sizes), ``places`` experts x axes."""
    return _added(scores, _columns(places, sizes))


def choose(scores: Tensor, places: Tensor, sizes: Sequence[int], k: int) -> Tensor:
    """The ``k`` best experts of each sample (all, if fewer live), best first: samples x k, int64, as rows of `places`.

    Of equal scores any may be taken. So many samples at once as the processor's caches hold the scores of: that is
    faster, and what a large batch needs beyond its result is always as little.
    """
    columns, count = _columns(places, sizes), min(k, len(places))
    with torch.no_grad():
        parts = cast("Sequence[Tensor]", scores.detach().split(max(1, _AT_ONCE // max(1, len(places)))))
        return torch.cat([_added(part, columns).topk(count, dim=1).indices for part in parts])


def chosen_scores(scores: Tensor, places: Tensor, sizes: Sequence[int], chosen: Tensor) -> Tensor:
    """The scores of the chosen experts: samples x k. Bit-equal to those of `all_scores`."""
    columns = [column[chosen] for column in _columns(places, sizes)]
    total = scores.gather(1, columns[0])
    for column in columns[1:]:
        total = total + scores.gather(1, column)
    return total


def _added(scores: Tensor, columns: Sequence[Tensor]) -> Tensor:
    total = scores.index_select(1, columns[0])
    for column in columns[1:]:
        total += scores.index_select(1, column)
    return total


def _columns(places: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """For each axis, the column of the scores that each expert reads."""
    starts = accumulate(sizes[:-1], initial=0)
    return [places[:, axis] + start for axis, start in enumerate(starts)]
