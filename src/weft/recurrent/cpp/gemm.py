"""C++ text of matrix products, in one step or of all steps at once, and of sums over time.

    w_pack      a matrix that is the same in all steps, packed once per call: K x N -> [N / width][K][width]
    w_product   a product by a packed matrix; threads share its rows, or its panels
    w_some      the same for the rows of which a mask is true, see partitioner.py
    w_small     a product of two matrices that both vary from step to step

    w_gather    adds a product whose inner axis runs over the rows of all steps     a weight's gradient
    w_columns   adds the rows of all steps                                          a bias's gradient
    otherwise   sums over time are added step by step, by the first thread

The kernels are in kernels.cpp, `w_small` in loops.h. A product whose left side is the packed one is written as its
transpose, (A B)' = B' A'.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from weft.recurrent.cpp.ir import C_TYPES, MemoryLayout, Product, Reduce, TimeReduction, Value, View
from weft.recurrent.cpp.loop_nests import time_reduction_nest
from weft.recurrent.cpp.scheduling import LoopFunction

ALIGN = 64
"""Bytes: whatever lies in the workspace begins at a multiple."""


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


def call(name: str, *arguments: int | str) -> str:
    """A statement of C that calls a function; numbers are of type long."""
    return f"{name}({', '.join(f'{each}L' if isinstance(each, int) else each for each in arguments)});"


class PackedWeights:
    """The packed matrices of one function. `width` says how many columns a panel has, by dtype."""

    def __init__(self, width: Mapping[torch.dtype, int]) -> None:
        self.bytes = 0
        self._width = width
        self._known: dict[tuple[MemoryLayout, tuple[int, ...], torch.dtype], int] = {}

    def panels(self, columns: int, dtype: torch.dtype) -> int:
        """Panels for so many columns."""
        return -(-columns // self._width[dtype])

    def numbers(self, inner: int, columns: int, dtype: torch.dtype) -> int:
        """Bytes of one packed matrix."""
        return self.panels(columns, dtype) * self._width[dtype] * inner

    def _all_numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return prod(shape[:-2]) * self.numbers(shape[-2], shape[-1], dtype)

    def pointer(self, layout: MemoryLayout, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, bool]:
        """The C variable of a packed matrix, and whether there is one for every batch; packed at most once."""
        several = len(shape) > 2 and layout.strides[0] != 0
        if not several:
            layout, shape = layout.select_axes([-2, -1]), shape[-2:]
        key = (layout, shape, dtype)
        if key not in self._known:
            self._known[key] = self.bytes
            self.bytes += aligned(self._all_numbers(shape, dtype) * dtype.itemsize)
        return f"p{self._known[key]}", several

    def lines(self) -> list[str]:
        """The text that packs them all."""
        lines = [each for key, at in self._known.items() for each in self._pack(*key, at)]
        return [*lines, "kernels.meet(gate, threads);"] if lines else []

    def _pack(self, layout: MemoryLayout, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> list[str]:
        kind, width = C_TYPES[dtype], self._width[dtype]
        inner, columns, down, across = shape[-2], shape[-1], layout.strides[-2], layout.strides[-1]
        count, step = (shape[0], layout.strides[0]) if len(shape) > 2 else (1, 0)
        panels = self.panels(columns, dtype)
        return [
            f"{kind} *const p{at} = ({kind} *)(work + {at}L);",
            f"for (long q = thread; q < {count * panels}; q += threads) {{",
            f"const long b = q / {max(panels, 1)}, j = q % {max(panels, 1)} * {width};",
            call(
                "w_pack",
                *(inner, f"{columns} - j < {width} ? {columns} - j : {width}L"),
                *(f"{layout.pointer} + b * {step}L + j * {across}L", down, across),
                f"p{at} + b * {self.numbers(inner, columns, dtype)}L + j * {inner}L",
            ),
            "}",
        ]


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
    kind: str
    """The type in C."""
    row_mask: MemoryLayout | None
    """A mask of the rows of A."""

    def starting(self, low: str, left: str = "0") -> tuple[str, int, int]:
        """The start's address and strides in a step; a null pointer if there is none."""
        if self.start is None:
            return f"({self.kind} *)0", 0, 0
        return self.start.at(self.batch, low, left), self.start.strides[-2], self.start.strides[-1]


class MatrixProducts:
    """Writes the products of one function."""

    def __init__(self, function: LoopFunction, packs: PackedWeights) -> None:
        self._function, self._packed = function, packs

    def step(self, value: Value, axis: int | None, *, by_panels: bool = False) -> list[str]:
        """One step's product. `axis` is the row axis of the batch, of which a thread has r0 to r1."""
        it = self._oriented(value)
        low, high = ("r0", "r1") if axis == it.row_axis else ("0", str(it.rows))
        if it.weight is None:
            line = self._small(it, low, high, by_columns=axis is not None and axis == len(value.shape) - 1)
        else:
            line = self._by_packed(it, it.weight, value.dtype, low, high, by_panels)
        if it.batch is None:
            return [line]
        first, last = ("r0", "r1") if axis == 0 else ("0", str(it.batch))
        return [f"for (long b = {first}; b < {last}; b++) {{", line, "}"]

    def bulk(self, value: Value) -> list[str]:
        """The products of all steps: one, if their rows lie one behind the other, else step by step by all threads."""
        share = "for (long t = steps * thread / threads; t < steps * (thread + 1) / threads; t++) {"
        return self._merged(value) or [share, *self.step(value, None), "}"]

    def _oriented(self, value: Value) -> _Oriented:
        made, layout, dims = value.made, self._function.layout, len(value.shape)
        assert isinstance(made, Product) and dims <= 3, "a product has at most one batch axis"
        a, b, c = layout(made.left), layout(made.right), self._function.layouts[value]
        start = None if made.start is None else layout(made.start)
        inner, batch = made.left.shape[-1], value.shape[0] if dims > 2 else None
        rows, columns = value.shape[-2:]
        kind = C_TYPES[value.dtype]
        if made.fixed != "left":
            weight = made.right.shape if made.fixed else None
            row_mask = None if made.row_mask is None else layout(made.row_mask)
            return _Oriented(a, b, c, start, batch, rows, columns, inner, dims - 2, weight, kind, row_mask)
        start = None if start is None else start.transposed()
        transposed = (b.transposed(), a.transposed(), c.transposed(), start)
        weight = (*made.left.shape[:-2], inner, rows)
        return _Oriented(*transposed, batch, columns, rows, inner, dims - 1, weight, kind, None)

    def _by_packed(
        self, it: _Oriented, weight: tuple[int, ...], dtype: torch.dtype, low: str, high: str, by_panels: bool
    ) -> str:
        packed, several = self._packed.pointer(it.b, weight, dtype)
        if several:
            packed = f"{packed} + b * {self._packed.numbers(it.inner, it.columns, dtype)}L"
        panels = self._packed.panels(it.columns, dtype)
        share = (f"{panels} * thread / threads", f"{panels} * (thread + 1) / threads") if by_panels else (0, panels)
        return call(
            "w_product" if it.row_mask is None else "w_some",
            *(f"{high} - {low}", it.columns, it.inner),
            *(it.a.at(it.batch, low), *it.a.strides[-2:], packed),
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

    def _merged(self, value: Value) -> list[str] | None:
        """One product over the rows of all steps, where the rows of one step follow those of the step before."""
        it = self._oriented(value)
        if it.weight is None or it.batch is not None:
            return None
        a_row, c_row, start_row = _step_row(it.a, it.rows), _step_row(it.c, it.rows), _start_row(it)
        if a_row is None or c_row is None or start_row is None:
            return None
        packed, _ = self._packed.pointer(it.b, it.weight, value.dtype)
        start = it.starting("0")
        if it.start is not None:
            start = (f"{it.start.first} + m0 * {start_row}L", start_row, it.start.strides[1])
        row_mask = it.row_mask if it.row_mask and it.row_mask.per_step and it.row_mask.size == it.rows else None
        line = call(
            "w_product" if row_mask is None else "w_some",
            *("m1 - m0", it.columns, it.inner),
            *(f"{it.a.first} + m0 * {a_row}L", a_row, it.a.strides[1], packed),
            *(f"{it.c.first} + m0 * {c_row}L", c_row, it.c.strides[1]),
            *start,
            *(0, self._packed.panels(it.columns, value.dtype)),
            *([] if row_mask is None else [f"{row_mask.first} + m0"]),
        )
        m0, m1 = (f"{it.rows} * steps * {each} / threads" for each in ("thread", "(thread + 1)"))
        return [f"{{ const long m0 = {m0}, m1 = {m1};", line, "}"]


def _step_row(layout: MemoryLayout, rows: int, axis: int = 0) -> int | None:
    """The stride of an axis of so many rows, if those of the next step go on with it."""
    if not layout.per_step:
        return None
    if rows == 1:
        return layout.size
    return layout.strides[axis] if layout.size == rows * layout.strides[axis] else None


def _start_row(it: _Oriented) -> int | None:
    """The same for what sums start with, which may be one row for all steps."""
    if it.start is None:
        return 0
    if it.start.row == "same":
        return 0 if it.rows == 1 or it.start.strides[0] == 0 else None
    return _step_row(it.start, it.rows)


BLOCK, TALL = 256, 12
"""As in kernels.cpp: so many rows are packed at a time, and so many are in a tile."""


class TimeReductions:
    """Writes the sums of one function."""

    def __init__(self, function: LoopFunction, packs: PackedWeights) -> None:
        self._function, self._packed = function, packs
        self._into = dict(function.totals)
        self.room = max([0, *(self._room(each) for each in self._into)])
        """Bytes that `w_gather` wants for each thread."""

    def write(self, value: Value) -> list[str]:
        """Add one sum to where it belongs."""
        made, to = _reduced(value), self._function.layout(self._into[value])
        if isinstance(made, Product):
            return [self._gather(made, to)]
        source = made if isinstance(made, View) else made.source
        axes = () if isinstance(made, View) else made.axes
        columns = self._columns(source, axes, to)
        if columns is not None:
            return [columns]
        keep = isinstance(made, Reduce) and made.keep
        loops = time_reduction_nest(source.shape, axes, keep, self._function.layout(source), to)
        return ["if (thread == 0) for (long t = 0; t < steps; t++) {", *loops, "}"]

    def target(self, value: Value) -> Value:
        """The argument that a sum is added to."""
        return self._into[value].value

    def _room(self, value: Value) -> int:
        made = _reduced(value)
        if not isinstance(made, Product):
            return 0
        columns = max(made.right.shape[-1], made.left.shape[-2])  # either side may be packed
        return aligned((self._packed.numbers(BLOCK, columns, value.dtype) + BLOCK * TALL) * value.dtype.itemsize)

    def _columns(self, source: View, axes: tuple[int, ...], to: MemoryLayout) -> str | None:
        """The sum of rows, if they lie one behind the other in all steps."""
        layout, rows = self._function.layout(source), source.shape[0] if axes else 1
        flat = axes in ((), (0,)) and len(source.shape) == 1 + len(axes)
        if not flat or not source.value.dtype.is_floating_point or not layout.per_step:
            return None
        row = layout.strides[0] if rows > 1 else layout.size
        near = layout.strides[-1] == 1 and to.strides[-1] == 1
        if not near or layout.size != rows * row:
            return None
        return call("w_columns", f"{rows} * steps", source.shape[-1], layout.first, row, to.first, "thread", "threads")

    def _gather(self, made: Product, to: MemoryLayout) -> str:
        """A weight's gradient; step by step where a side has no row for each step."""
        left, right = self._function.layout(made.left), self._function.layout(made.right)
        (rows, inner), columns = made.left.shape, made.right.shape[1]
        down, across = _step_row(left, inner, 1), _step_row(right, inner)
        merged = down is not None and across is not None
        if down is None or across is None:
            down, across = left.strides[1], right.strides[0]
        sides = [
            (rows, left.first if merged else left.pointer, left.strides[0], down, to.strides[0]),
            (columns, right.first if merged else right.pointer, right.strides[1], across, to.strides[1]),
        ]
        if to.strides[1] != 1 and to.strides[0] == 1:  # as its transpose, so that columns are neighbours
            sides.reverse()
        (M, a, a_row, a_col, c_row), (N, b, b_col, b_row, c_col) = sides
        row_mask = None if made.row_mask is None else self._function.layout(made.row_mask)
        mask = "(const boolean *)0" if row_mask is None else row_mask.first if merged else row_mask.pointer
        line = call(
            "w_gather",
            *(M, N, f"{inner} * steps" if merged else inner),
            *(a, a_row, a_col, b, b_row, b_col),
            *(to.first, c_row, c_col, f"({C_TYPES[made.left.value.dtype]} *)room", "thread", "threads", mask),
        )
        return line if merged else f"for (long t = 0; t < steps; t++) {line}"


def _reduced(value: Value) -> Product | Reduce | View:
    assert isinstance(value.made, TimeReduction)
    return value.made.of
