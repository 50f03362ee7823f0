"""Where elements lie: a place is memory of the caller's or of the workspace, the row that a step uses, and strides.

row      step t uses                                             who has such
same     the only row                                            weights, what one step alone reads
step     row t                                                   inputs, outputs, what is kept for all steps
next     row t + 1                                               new states: the states' memory has T + 1 rows
in, out  of two rows the one that the step before wrote,         carried gradients
         and the other one
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Row = Literal["same", "step", "next", "in", "out"]
_FACTOR = {"step": "t", "next": "(t + 1)", "in": "((t + 1) & 1)", "out": "(t & 1)"}
_FIRST = {"step": 0, "next": 1}


@dataclass(frozen=True)
class Place:
    """Elements in memory. `base` is a C variable; `size`, `offset` and `strides` count numbers, not bytes."""

    base: str
    row: Row
    size: int
    """Numbers in a row."""
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def lasting(self) -> bool:
        """Whether every step has a row of its own, which is still there when the loop is over."""
        return self.row in _FIRST

    @property
    def here(self) -> str:
        """A pointer to the row of this step."""
        return self.base if self.row == "same" else f"({self.base} + {_FACTOR[self.row]} * {self.size}L)"

    @property
    def pointer(self) -> str:
        """The first element's address in this step."""
        return self._from(self.here)

    @property
    def first(self) -> str:
        """The first element's address in the first step, of a place whose row is lasting or the only one."""
        return self._from(self.base if self.row == "same" else f"({self.base} + {_FIRST[self.row]} * {self.size}L)")

    def at(self, batch: int | None, row: str, column: str = "0") -> str:
        """The address of an element of a matrix in this step, in batch `b` if there is one."""
        text = self.pointer
        if batch is not None:
            text += f" + b * {self.strides[0]}L"
        for index, stride in ((row, self.strides[-2]), (column, self.strides[-1])):
            text += "" if index == "0" else f" + {index} * {stride}L"
        return text

    def turned(self) -> "Place":
        """The transposed matrix."""
        return self.seen((*self.strides[:-2], self.strides[-1], self.strides[-2]), self.offset)

    def spread(self, shape: Sequence[int], over: Sequence[int]) -> "Place":
        """As broadcast from `shape` over a larger shape."""
        missing = len(over) - len(shape)
        strides = [0 if size == 1 else step for size, step in zip(shape, self.strides, strict=True)]
        return self.seen((*[0] * missing, *strides), self.offset)

    def only(self, axes: Sequence[int]) -> "Place":
        """Some of the axes, at the first element of the others."""
        return self.seen(tuple([self.strides[i] for i in axes]), self.offset)

    def seen(self, strides: tuple[int, ...], offset: int) -> "Place":
        """Other elements of the same memory."""
        return replace(self, strides=strides, offset=offset)

    def _from(self, row: str) -> str:
        return f"{row} + {self.offset}L" if self.offset else row
