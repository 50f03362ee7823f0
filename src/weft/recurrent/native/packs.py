"""Matrices that are the same in all steps, packed once per call into the panels that kernels.cpp multiplies by.

weight   K x N        ->   [N / width][K][width], the last panel filled up with zeros; each thread packs some
"""

from collections.abc import Mapping
from math import prod

import torch

from weft.recurrent.native.c_types import TYPES
from weft.recurrent.native.place import Place

ALIGN = 64
"""Bytes: whatever lies in the workspace begins at a multiple."""


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


def call(name: str, *arguments: int | str) -> str:
    """A statement of C that calls a function; numbers are of type long."""
    return f"{name}({', '.join(f'{each}L' if isinstance(each, int) else each for each in arguments)});"


class Packs:
    """The packed matrices of one function. `width` says how many columns a panel has, by dtype."""

    def __init__(self, width: Mapping[torch.dtype, int]) -> None:
        self.bytes = 0
        self._width = width
        self._known: dict[tuple[Place, tuple[int, ...], torch.dtype], int] = {}

    def panels(self, columns: int, dtype: torch.dtype) -> int:
        """How many panels so many columns make."""
        return -(-columns // self._width[dtype])

    def numbers(self, inner: int, columns: int, dtype: torch.dtype) -> int:
        """What one packed matrix takes."""
        return self.panels(columns, dtype) * self._width[dtype] * inner

    def _all_numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return prod(shape[:-2]) * self.numbers(shape[-2], shape[-1], dtype)

    def pointer(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, bool]:
        """The C variable of a packed matrix, and whether there is one for every batch; packed at most once."""
        several = len(shape) > 2 and place.strides[0] != 0
        if not several:
            place, shape = place.only([-2, -1]), shape[-2:]
        key = (place, shape, dtype)
        if key not in self._known:
            self._known[key] = self.bytes
            self.bytes += aligned(self._all_numbers(shape, dtype) * dtype.itemsize)
        return f"p{self._known[key]}", several

    def lines(self) -> list[str]:
        """The text that packs them all."""
        lines = [each for key, at in self._known.items() for each in self._pack(*key, at)]
        return [*lines, "kernels.meet(gate, threads);"] if lines else []

    def _pack(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> list[str]:
        kind, width = TYPES[dtype], self._width[dtype]
        inner, columns, down, across = shape[-2], shape[-1], place.strides[-2], place.strides[-1]
        count, step = (shape[0], place.strides[0]) if len(shape) > 2 else (1, 0)
        panels = self.panels(columns, dtype)
        return [
            f"{kind} *const p{at} = ({kind} *)(work + {at}L);",
            f"for (long q = thread; q < {count * panels}; q += threads) {{",
            f"const long b = q / {max(panels, 1)}, j = q % {max(panels, 1)} * {width};",
            call(
                "w_pack",
                *(inner, f"{columns} - j < {width} ? {columns} - j : {width}L"),
                *(f"{place.pointer} + b * {step}L + j * {across}L", down, across),
                f"p{at} + b * {self.numbers(inner, columns, dtype)}L + j * {inner}L",
            ),
            "}",
        ]
