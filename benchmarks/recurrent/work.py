"""The timed work: a forward over a sequence, and its backward to the inputs, the initial state and the weights.

    x, h0, weights ──forward──> outputs, last states
         ^                             |
         '───── torch.autograd.grad <──'  gradients of the outputs, made before the race and shared by all candidates

`torch.autograd.grad` returns gradients instead of adding them to `.grad`, so that no addition is timed.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Forward = Callable[[], Sequence[Tensor]]
Work = Callable[[], Sequence[Tensor]]
THREADS = (1, 2)
TOLERANCE = 1e-4
"""Allowed relative difference between candidates, which add float32 numbers in different orders."""


def training(forward: Forward, leaves: Sequence[Tensor], seeds: Sequence[Tensor]) -> Work:
    """Forward and backward, to the gradients of `leaves`. `seeds` are the gradients of the first outputs."""
    leaves, seeds = list(leaves), list(seeds)

    def work() -> Sequence[Tensor]:
        ends = list(forward())[: len(seeds)]
        return torch.autograd.grad(ends, leaves, [seed.view_as(end) for seed, end in zip(seeds, ends, strict=True)])

    return work


def distance(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest value of its tensor. Raises RuntimeError if sizes differ."""
    largest = 0.0
    for one, other in zip(expected, actual, strict=True):
        if one.numel() != other.numel():
            raise RuntimeError(f"the candidates do not do the same work: shapes {one.shape} and {other.shape}")
        one, other = one.detach(), other.detach().view_as(one)
        size = max(float(one.abs().max()), 1e-12)
        largest = max(largest, float((one - other).abs().max()) / size)
    return largest


def agree(candidates: Mapping[str, Work], tolerance: float = TOLERANCE) -> None:
    """Run each candidate once, which also makes plans. Raises RuntimeError if their gradients differ."""
    gradients = {name: list(work()) for name, work in candidates.items()}
    first = next(iter(gradients))
    distances = {name: distance(gradients[first], other) for name, other in gradients.items()}
    if any(value > tolerance for value in distances.values()):
        raise RuntimeError(f"the candidates do not do the same work; gradients differ from {first}'s by {distances}")
