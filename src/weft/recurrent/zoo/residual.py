"""A shortcut around a cell: its output is what it adds to its input."""

from typing import Any

from torch import Tensor

from weft.core.errors import SpecError
from weft.core.tree import map_leaves
from weft.recurrent.zoo.wrapper import Wrapper


class Residual(Wrapper):
    """``y' = y + x``; the state is the wrapped cell's, without the sum.

    Inputs and outputs have one shape, and if they are nested, one nesting. Wu et al., "Google's neural machine
    translation system" (arXiv 1609.08144), section 3.1; the idea is He et al.'s (arXiv 1512.03385).

    Raises ``SpecError`` if output and input differ in shape or nesting.
    """

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        """One step: ``(y + x, new_state)``."""
        y, state = self.inner(x, state)
        return map_leaves(_sum, y, x), state


def _sum(y: Any, x: Any) -> Tensor:
    seen = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in (y, x)]
    if not isinstance(y, Tensor) or not isinstance(x, Tensor) or y.shape != x.shape:
        raise SpecError(f"Residual adds input and output of a cell, but the output is {seen[0]}, the input {seen[1]}")
    return y + x
