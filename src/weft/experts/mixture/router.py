"""Router: scores of experts, the exact top k of those that live, weights of their answers, the load-balancing loss.

    router's scores    samples x (4 + 32)       one score for each place along each axis
    expert (3, 17)     score = scores[:, 3] + scores[:, 4 + 17]
    all living ones    samples x experts  ──top k──>  chosen: samples x k

    mixture   softmax over the k that answered                 weights of a sample add up to 1
    switch    softmax over all living experts, of the chosen   a failed expert is missing, no other gets more

A search by prefixes (a beam) may miss the best experts, and queries a directory for each prefix. With all scores at
hand one pass over samples x experts is faster: 256 samples over 1024 experts take less than 1 ms on one core.

Choosing has no gradient, so it is done on plain numbers; what the router learns by are the scores of the chosen
(`chosen_scores`) or of all (`all_scores`), and the weights, in plain autograd.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

_BLOCK = 1 << 16  # scores that the caches of a processor hold


def all_scores(scores: Tensor, places: Tensor, sizes: Sequence[int]) -> Tensor:
    """The score of every expert: samples x experts. ``scores`` is samples x sum(sizes), ``places`` experts x axes."""
    return _sum_columns(scores, _columns(places, sizes))


def choose(scores: Tensor, places: Tensor, sizes: Sequence[int], k: int) -> Tensor:
    """The ``k`` best experts of each sample (all, if fewer live), best first: samples x k, int64, as rows of `places`.

    Of equal scores any may be taken. Blocks of samples whose scores fit into the processor's caches are faster, and
    bound the memory that a large batch needs beyond its result.
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


def jittered(x: Tensor, epsilon: float) -> Tensor:
    """``x`` times independent uniform numbers from 1 - epsilon to 1 + epsilon; a new tensor (ibid., section 2.4)."""
    return x * torch.empty_like(x).uniform_(1 - epsilon, 1 + epsilon)


def gating_input(x: Tensor) -> Tensor:
    """What the router reads of samples x ... x features: the mean over all axes between, samples x features."""
    middle: Sequence[int] = range(1, x.dim() - 1)
    return x.mean(dim=tuple(middle)) if middle else x
