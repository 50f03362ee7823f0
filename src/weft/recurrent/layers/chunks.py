"""A sequence in chunks of time: cut on the way in, joined on the way out, and gradients the same way back.

T = 10, chunks of 4        0 1 2 3 | 4 5 6 7 | 8 9        the last one may be shorter
lengths 10, 5, 0           4 1 . . | 4 1 0   | 2 0 0      what is left of each row
start                      s       | s + 4   | s + 8      so that steps keep their numbers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core.tree import map_leaves
from weft.recurrent.layers.reverse import Axes
from weft.recurrent.rows import Lengths


@dataclass(frozen=True)
class Tables:
    """What a call says of rows and of the numbers of its steps, checked already."""

    lengths: Lengths | None = None
    mask: Tensor | None = None
    start: int = 0


@dataclass(frozen=True)
class Chunks:
    """How a call is cut: chunks of `length` steps."""

    axes: Axes
    length: int

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """For every chunk its first step, and the one after its last."""
        steps = self.axes.steps
        return [(begin, min(begin + self.length, steps)) for begin in range(0, steps, self.length)]

    def cut(self, inputs: Any) -> list[Any]:
        """Nested inputs of every chunk; what is no tensor goes to all of them."""

        def piece(begin: int, end: int, leaf: Any) -> Any:
            return leaf.narrow(self.axes.time_of_input(leaf), begin, end - begin) if isinstance(leaf, Tensor) else leaf

        return [map_leaves(partial(piece, begin, end), inputs) for begin, end in self.bounds]

    def tables(self, whole: Tables) -> list[Tables]:
        """What holds for every chunk."""
        time = int(self.axes.batch_first)
        lengths = None if whole.lengths is None else torch.as_tensor(whole.lengths, dtype=torch.int64)
        mask = whole.mask
        return [
            Tables(
                None if lengths is None else (lengths - begin).clamp(0, end - begin),
                None if mask is None else mask.narrow(time, begin, end - begin),
                whole.start + begin,
            )
            for begin, end in self.bounds
        ]

    def join(self, column: Sequence[Any]) -> Any:
        """One leaf of the results of all chunks, over all steps; ``None`` stays ``None``."""
        first = column[0]
        if not isinstance(first, Tensor):
            return first
        return torch.cat(list(column), self.axes.time_of_result(first, self.length))

    def split(self, gradient: Tensor) -> list[Tensor]:
        """The inverse of `join` for its gradient."""
        sizes = [end - begin for begin, end in self.bounds]
        return list(torch.split(gradient, sizes, self.axes.time_of_result(gradient)))

    def join_gradients(self, column: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
        """The gradient of one input, out of those of its pieces."""
        if all(piece is None for piece in column):
            return None
        time = self.axes.time_of_input(like)
        pieces = [
            torch.zeros_like(like.narrow(time, begin, end - begin)) if piece is None else piece
            for piece, (begin, end) in zip(column, self.bounds, strict=True)
        ]
        return torch.cat(pieces, time)
