"""C++ text of matrix products, in one step or of all steps at once, and of sums over time.

    w_pack      a matrix that is the same in all steps, packed once per call: K x N -> [N / width][K][width]
    w_product   a product by a packed matrix; threads share its rows, or its panels
    w_some      the same for the rows of which a mask is true, see partitioner.py
    w_small     a product of two matrices that both vary from step to step

    w_gather    adds a product whose inner axis runs over the rows of all steps     a weight's gradient
    w_columns   adds the rows of all steps                                          a bias's gradient

The kernels are in kernels.cpp, `w_small` in loops.h. A product whose left side is the packed one is written as its
transpose, (A B)' = B' A'.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from weft.recurrent.cpp.ir import C_TYPES, LoopValue, MemoryLayout, Product, TimeReduction, View
from weft.recurrent.cpp.scheduling import LoopFunction

ALIGN = 64
"""Bytes: whatever lies in the workspace begins at a multiple."""
BLOCK, TALL = 256, 12
"""As in kernels.cpp: so many rows are packed at a time, and so many are in a tile."""


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


def call(name: str, *arguments: int | str) -> str:
    """A statement of C that calls a function; numbers are of type long."""
    return f"{name}({', '.join(f'{each}L' if isinstance(each, int) else each for each in arguments)});"


@dataclass(frozen=True)
class _Oriented:
    """C = start + A B, turned so that the fixed side, if there is one, is B. C is rows x columns, A rows x inner."""

    a: MemoryLayout
    b: MemoryLayout
    c: MemoryLayout
    start: MemoryLayout | None
    batch: int | None
    rows: int
    columns: int
    inner: int
    row_axis: int
    """Which axis of the value the rows are."""
    weight: tuple[int, ...] | None
    """The shape of B, where that is fixed."""
    dtype: torch.dtype
    row_mask: MemoryLayout | None
    """A mask of the rows of A."""

    def starting(self, low: str, left: str = "0") -> tuple[str, int, int]:
        """The start's address and strides in a step; a null pointer if there is none."""
        if self.start is None:
            return f"({C_TYPES[self.dtype]} *)0", 0, 0
        return self.start.at(self.batch, low, left), self.start.strides[-2], self.start.strides[-1]

    def all_steps(self) -> "_Oriented | None":
        """One product over the rows of all steps, if those of one step follow those of the step before."""
        if self.weight is None or self.batch is not None:
            return None
        a, c, start = self.a.all_steps(self.rows), self.c.all_steps(self.rows), self.start
        if start is not None and start.row != "same":
            start = start.all_steps(self.rows)
        elif start is not None:  # one row for all steps
            start = start.with_strides((0, start.strides[1])) if self.rows == 1 or start.strides[0] == 0 else None
        if a is None or c is None or (start is None and self.start is not None):
            return None
        row_mask = None if self.row_mask is None else self.row_mask.all_steps(self.rows)
        return replace(self, a=a, c=c, start=start, row_mask=row_mask)


class MatrixProducts:
    """The products and the sums over time of one function, and the matrices that it packs for them.

    `width` says how many columns a packed panel has, by dtype.
    """

    def __init__(self, function: LoopFunction, width: Mapping[torch.dtype, int]) -> None:
        self._function, self._width = function, width
        self._packed: dict[tuple[MemoryLayout, tuple[int, ...], torch.dtype], int] = {}
        self.packed_bytes = 0
        """Of all packed matrices: they are packed at most once."""
        self._into = dict(function.totals)
        self.room = max([0, *(self._room(each) for each in self._into)])
        """Bytes that `w_gather` wants for each thread."""

    def step(self, value: LoopValue, axis: int | None, *, by_panels: bool = False) -> list[str]:
        """One step's product. `axis` is the row axis of the batch, of which a thread has r0 to r1."""
        it = self._oriented(value)
        low, high = ("r0", "r1") if axis == it.row_axis else ("0", str(it.rows))
        if it.weight is None:
            line = self._small(it, low, high, by_columns=axis is not None and axis == len(value.shape) - 1)
        else:
            line = self._by_packed(it, it.weight, low, high, by_panels=by_panels)
        if it.batch is None:
            return [line]
        first, last = ("r0", "r1") if axis == 0 else ("0", str(it.batch))
        return [f"for (long b = {first}; b < {last}; b++) {{", line, "}"]

    def bulk(self, value: LoopValue) -> list[str]:
        """The products of all steps: one, if their rows lie one behind the other, else step by step by all threads."""
        it = self._oriented(value).all_steps()
        if it is None or it.weight is None:
            share = "for (long t = steps * thread / threads; t < steps * (thread + 1) / threads; t++) {"
            return [share, *self.step(value, None), "}"]
        m0, m1 = (f"{it.rows} * steps * {each} / threads" for each in ("thread", "(thread + 1)"))
        return [f"{{ const long m0 = {m0}, m1 = {m1};", self._by_packed(it, it.weight, "m0", "m1"), "}"]

    def total(self, value: LoopValue) -> str | None:
        """Add a sum over time to where it belongs; None if no kernel has it."""
        assert isinstance(value.made, TimeReduction)
        made, to = value.made.of, self._function.layout(self._into[value])
        if isinstance(made, Product):
            return self._gather(made, to)
        return self._columns(made, (), to) if isinstance(made, View) else self._columns(made.source, made.axes, to)

    def pack(self) -> list[str]:
        """The text that packs all matrices, once everything else is written."""
        lines = [each for key, at in self._packed.items() for each in self._pack(*key, at)]
        return [*lines, "kernels.meet(gate, threads);"] if lines else []

    def _oriented(self, value: LoopValue) -> _Oriented:
        made, layout, dims = value.made, self._function.layout, len(value.shape)
        assert isinstance(made, Product) and dims <= 3, "a product has at most one batch axis"
        a, b, c = layout(made.left), layout(made.right), self._function.layouts[value]
        start = None if made.start is None else layout(made.start)
        inner, batch = made.left.shape[-1], value.shape[0] if dims > 2 else None
        rows, columns = value.shape[-2:]
        if made.fixed != "left":
            weight = made.right.shape if made.fixed else None
            row_mask = None if made.row_mask is None else layout(made.row_mask)
            return _Oriented(a, b, c, start, batch, rows, columns, inner, dims - 2, weight, value.dtype, row_mask)
        start = None if start is None else start.transposed()
        turned = (b.transposed(), a.transposed(), c.transposed(), start)
        weight = (*made.left.shape[:-2], inner, rows)
        return _Oriented(*turned, batch, columns, rows, inner, dims - 1, weight, value.dtype, None)

    def _by_packed(
        self, it: _Oriented, weight: tuple[int, ...], low: str, high: str, *, by_panels: bool = False
    ) -> str:
        panels = self._panels(it.columns, it.dtype)
        share = (f"{panels} * thread / threads", f"{panels} * (thread + 1) / threads") if by_panels else (0, panels)
        return call(
            "w_product" if it.row_mask is None else "w_some",
            *(f"{high} - {low}", it.columns, it.inner),
            *(it.a.at(it.batch, low), *it.a.strides[-2:], self._weight(it, weight)),
            *(it.c.at(it.batch, low), *it.c.strides[-2:]),
            *it.starting(low),
            *share,
            *([] if it.row_mask is None else [f"{it.row_mask.pointer} + {low}"]),
        )

    def _small(self, it: _Oriented, low: str, high: str, by_columns: bool) -> str:
        """Whether threads may share columns as well: where the batch's rows are columns here."""
        left, right = ("r0", "r1") if by_columns else ("0", str(it.columns))
        return call(
            "w_small",
            *(f"{high} - {low}", f"{right} - {left}", it.inner),
            *(it.a.at(it.batch, low), *it.a.strides[-2:]),
            *(it.b.at(it.batch, "0", left), *it.b.strides[-2:]),
            *(it.c.at(it.batch, low, left), *it.c.strides[-2:]),
            *it.starting(low, left),
        )

    def _panels(self, columns: int, dtype: torch.dtype) -> int:
        return -(-columns // self._width[dtype])

    def _numbers(self, inner: int, columns: int, dtype: torch.dtype) -> int:
        """Numbers in one packed matrix."""
        return self._panels(columns, dtype) * self._width[dtype] * inner

    def _weight(self, it: _Oriented, shape: tuple[int, ...]) -> str:
        """The address of a packed matrix, of that for batch `b` if there are several."""
        layout, several = it.b, len(shape) > 2 and it.b.strides[0] != 0
        if not several:
            layout, shape = layout.select_axes([-2, -1]), shape[-2:]
        numbers = self._numbers(it.inner, it.columns, it.dtype)
        key = (layout, shape, it.dtype)
        if key not in self._packed:
            self._packed[key] = self.packed_bytes
            self.packed_bytes += aligned(prod(shape[:-2]) * numbers * it.dtype.itemsize)
        return f"p{self._packed[key]}" + (f" + b * {numbers}L" if several else "")

    def _pack(self, layout: MemoryLayout, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> list[str]:
        kind, width = C_TYPES[dtype], self._width[dtype]
        (inner, columns), (down, across) = shape[-2:], layout.strides[-2:]
        count, step = (shape[0], layout.strides[0]) if len(shape) > 2 else (1, 0)
        panels = self._panels(columns, dtype)
        return [
            f"{kind} *const p{at} = ({kind} *)(work + {at}L);",
            f"for (long q = thread; q < {count * panels}; q += threads) {{",
            f"const long b = q / {max(panels, 1)}, j = q % {max(panels, 1)} * {width};",
            call(
                "w_pack",
                *(inner, f"{columns} - j < {width} ? {columns} - j : {width}L"),
                *(f"{layout.pointer} + b * {step}L + j * {across}L", down, across),
                f"p{at} + b * {self._numbers(inner, columns, dtype)}L + j * {inner}L",
            ),
            "}",
        ]

    def _room(self, value: LoopValue) -> int:
        made = value.made.of if isinstance(value.made, TimeReduction) else None
        if not isinstance(made, Product):
            return 0
        columns = max(made.right.shape[-1], made.left.shape[-2])  # either side may be packed
        return aligned((self._numbers(BLOCK, columns, value.dtype) + BLOCK * TALL) * value.dtype.itemsize)

    def _columns(self, source: View, axes: tuple[int, ...], to: MemoryLayout) -> str | None:
        """The sum of rows, if they lie one behind the other in all steps."""
        layout, rows = self._function.layout(source), source.shape[0] if axes else 1
        flat = axes in ((), (0,)) and len(source.shape) == 1 + len(axes)
        row = layout.step_stride(rows)
        near = flat and layout.strides[-1] == 1 and to.strides[-1] == 1
        if not near or row is None or layout.size != rows * row or not source.value.dtype.is_floating_point:
            return None
        where = (layout.first, row, to.first, "thread", "threads")
        return call("w_columns", f"{rows} * steps", source.shape[-1], *where, rows, self._counting(rows))

    def _counting(self, rows: int) -> int | str:
        """The number of rows of a step that count, out of `rows`: see `CppBackend.for_rows`."""
        return "count" if rows == self._function.rows else rows

    def _gather(self, made: Product, to: MemoryLayout) -> str:
        """A weight's gradient; step by step where a side has no row for each step."""
        left, right = self._function.layout(made.left), self._function.layout(made.right)
        mask = None if made.row_mask is None else self._function.layout(made.row_mask)
        (rows, inner), columns = made.left.shape, made.right.shape[1]
        a, b = left.all_steps(inner, 1), right.all_steps(inner)
        merged = a is not None and b is not None
        if a is None or b is None:
            a, b = left, right
        sides = [
            (rows, a.pointer, *a.strides, to.strides[0]),
            (columns, b.pointer, b.strides[1], b.strides[0], to.strides[1]),
        ]
        if to.strides[1] != 1 and to.strides[0] == 1:  # as its transpose, so that columns are neighbours
            sides.reverse()
        (M, a, a_row, a_col, c_row), (N, b, b_col, b_row, c_col) = sides
        line = call(
            "w_gather",
            *(M, N, f"{inner} * steps" if merged else inner),
            *(a, a_row, a_col, b, b_row, b_col),
            *(to.first, c_row, c_col, f"({C_TYPES[made.left.value.dtype]} *)room", "thread", "threads"),
            "(const boolean *)0" if mask is None else mask.first if merged else mask.pointer,
            *(inner, self._counting(inner)),
        )
        return line if merged else f"for (long t = 0; t < steps; t++) {line}"
