"""The raced work: a forward over a sequence, and its backward to the inputs, the initial state and the weights.

    x, h0, weights ──forward──> outputs, last states
         ^                             |
         '───── torch.autograd.grad <──'  gradients of the ends, made beforehand and the same for all candidates

Gradients are asked for and not added to `.grad`: so nobody is timed for additions that are none of its business.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Forward = Callable[[], Sequence[Tensor]]
Work = Callable[[], Sequence[Tensor]]
THREADS = (1, 2)
TOLERANCE = 1e-4
"""How far candidates may be apart, of the largest value: all compute in float32, each in its own order."""


def training(forward: Forward, wants: Sequence[Tensor], seeds: Sequence[Tensor]) -> Work:
    """Forward and backward. `wants` are the tensors that get gradients, `seeds` the gradients of the first ends."""
    wants, seeds = list(wants), list(seeds)

    def work() -> Sequence[Tensor]:
        ends = list(forward())[: len(seeds)]
        return torch.autograd.grad(ends, wants, [seed.view_as(end) for seed, end in zip(seeds, ends, strict=True)])

    return work


def distance(wanted: Sequence[Tensor], seen: Sequence[Tensor]) -> float:
    """The largest difference, of the largest value of its tensor. Raises RuntimeError where shapes differ in size."""
    found = 0.0
    for one, other in zip(wanted, seen, strict=True):
        if one.numel() != other.numel():
            raise RuntimeError(f"the candidates do not do the same work: shapes {one.shape} and {other.shape}")
        one, other = one.detach(), other.detach().view_as(one)
        size = max(float(one.abs().max()), 1e-12)
        found = max(found, float((one - other).abs().max()) / size)
    return found


def agree(candidates: Mapping[str, Work], tolerance: float = TOLERANCE) -> None:
    """Run each once: plans are made. Raises RuntimeError unless all find the same gradients, in the same order."""
    found = {name: list(work()) for name, work in candidates.items()}
    first = next(iter(found))
    far = {name: distance(found[first], each) for name, each in found.items()}
    if any(each > tolerance for each in far.values()):
        raise RuntimeError(f"the candidates do not do the same work; their gradients are apart from {first}'s by {far}")
