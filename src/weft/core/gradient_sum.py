"""Sums of gradients, over readers and over micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor


def added(one: Tensor, other: Tensor) -> Tensor:
    """A new sum of two gradients. PyTorch adds a sparse one to a dense one, but not the other way round."""
    return other + one if one.is_sparse else one + other


class GradientSum:
    """The gradients of some parameters, added up over the micro-batches in the order of their arrival.

    It never writes into a tensor that autograd returned: that may be shared with another gradient, as in
    ``y = x + p``. So the second gradient makes a new sum, and only that is added to in place.
    """

    def __init__(self, count: int) -> None:
        self.totals: list[Tensor | None] = [None] * count
        self._owned = [False] * count

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        totals, owned = self.totals, self._owned
        into: list[Tensor] = []
        more: list[Tensor] = []
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = totals[i]
            if total is None:
                totals[i] = gradient
            elif owned[i] and not gradient.is_sparse:
                into.append(total)
                more.append(gradient)
            else:
                totals[i] = added(total, gradient)
                owned[i] = not gradient.is_sparse and not total.is_sparse
        if into:
            torch._foreach_add_(into, more)  # pyright: ignore[reportPrivateImportUsage] # no public name
