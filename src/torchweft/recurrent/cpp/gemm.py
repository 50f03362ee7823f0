"""C++ text of matrix products, in one step or of all steps at once, and of sums over time.

The matrices are too small for a BLAS: its calls cost more than the product of a step. It also does not fix the order of
summation, and the kernels here must.

    w_pack      a matrix that is the same in all steps, packed once per call: K x N -> [N / width][K][width]
    w_product   a product by a packed matrix; threads share its rows, or its panels
    w_some      the same for the rows of which a mask is true, see partitioner.py
    w_small     a product of two matrices that both vary from step to step

    w_gather    adds a product whose inner axis runs over the rows of all steps     a weight's gradient
    w_columns   adds the rows of all steps                                          a bias's gradient

The kernels are in kernels.cpp, `w_small` in loops.h. If the left side is the packed one, the product is written as its
transpose, (A B)' = B' A'.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from torchweft.recurrent.cpp.ir import C_TYPES, LoopValue, MemoryLayout, Product, TimeReduction, View
from torchweft.recurrent.cpp.scheduling import LoopFunction

ALIGN = 64  # alignment of everything in the workspace, in bytes
BLOCK, TALL = 256, 12  # as in kernels.cpp: rows that are packed at a time, and rows of a tile


def aligned(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN


def call_text(name: str, *arguments: int | str) -> str:
    """A statement of C that calls a function. Numbers are of type long."""
    texts = (f"{argument}L" if isinstance(argument, int) else argument for argument in arguments)
    return f"{name}({', '.join(texts)});"


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
    row_axis: int  # the axis of the value that holds these rows
    weight: tuple[int, ...] | None  # the shape of B, if that is fixed
    dtype: torch.dtype
    row_mask: MemoryLayout | None  # A mask of the rows of A

    def start_arguments(self, low: str, left: str = "0") -> tuple[str, int, int]:
        if self.start is None:
            return f"({C_TYPES[self.dtype]} *)0", 0, 0
        return self.start.address_of(self.batch, low, left), self.start.strides[-2], self.start.strides[-1]

    def all_steps(self) -> "_Oriented | None":
        """One product over the rows of all steps, if the rows of each step follow those of the step before."""
        if self.weight is None or self.batch is not None:
            return None
        a, c, start = self.a.all_steps(self.rows), self.c.all_steps(self.rows), self.start
        if start is not None and start.row != "same":
            start = start.all_steps(self.rows)
        elif start is not None:  # a start that all rows of all steps share, such as a bias, is a row of stride 0
            start = start.with_strides((0, start.strides[1])) if self.rows == 1 or start.strides[0] == 0 else None
        if a is None or c is None or (start is None and self.start is not None):
            return None
        row_mask = None if self.row_mask is None else self.row_mask.all_steps(self.rows)
        return replace(self, a=a, c=c, start=start, row_mask=row_mask)


class MatrixProducts:
    """The products and the sums over time of one function, and the matrices that it packs for them."""

    def __init__(self, function: LoopFunction, width: Mapping[torch.dtype, int]) -> None:
        self._function, self._width = function, width
        self._destinations = dict(function.signature.totals)
        # Offsets of the packed matrices. Products that read one weight in the same layout share it.
        self._packed: dict[tuple[MemoryLayout, tuple[int, ...], torch.dtype], int] = {}
        self.packed_bytes = 0
        # The bytes that `w_gather` needs for each thread.
        self.room = max([0, *map(self._gather_room, self._destinations)])

    def step_lines(self, value: LoopValue, axis: int | None, *, by_panels: bool = False) -> list[str]:
        """One step's product. `axis` is the row axis of the batch, of which a thread has r0 to r1."""
        product = self._oriented(value)
        low, high = ("r0", "r1") if axis == product.row_axis else ("0", str(product.rows))
        if product.weight is None:
            line = self._small(product, low, high, by_columns=axis is not None and axis == len(value.shape) - 1)
        else:
            line = self._by_packed(product, product.weight, low, high, by_panels=by_panels)
        if product.batch is None:
            return [line]
        first, last = ("r0", "r1") if axis == 0 else ("0", str(product.batch))
        return [f"for (long b = {first}; b < {last}; b++) {{", line, "}"]

    def bulk_lines(self, value: LoopValue) -> list[str]:
        """The products of all steps: one product if all rows are evenly spaced, else step by step."""
        product = self._oriented(value).all_steps()
        # By steps, each product is smaller, but its sums have the same order, and so the same bits.
        if product is None or product.weight is None:
            share = "for (long t = steps * thread / threads; t < steps * (thread + 1) / threads; t++) {"
            return [share, *self.step_lines(value, None), "}"]
        m0, m1 = (f"{product.rows} * steps * {bound} / threads" for bound in ("thread", "(thread + 1)"))
        return [f"{{ const long m0 = {m0}, m1 = {m1};", self._by_packed(product, product.weight, "m0", "m1"), "}"]

    def total_line(self, value: LoopValue) -> str | None:
        """The statement that adds a sum over time to its destination, or None if no kernel computes it."""
        assert isinstance(value.operation, TimeReduction)
        of, to = value.operation.of, self._function.layout_of(self._destinations[value])
        if isinstance(of, Product):
            return self._gather(of, to)
        return self._columns(of, (), to) if isinstance(of, View) else self._columns(of.source, of.axes, to)

    def pack_lines(self) -> list[str]:
        """The text that packs all matrices. Call it last: the other text determines which ones are."""
        lines = [line for key, at in self._packed.items() for line in self._pack(*key, at)]
        return [*lines, "kernels.meet(gate, threads);"] if lines else []

    def _oriented(self, value: LoopValue) -> _Oriented:
        product, layout_of, dims = value.operation, self._function.layout_of, len(value.shape)
        assert isinstance(product, Product) and dims <= 3, "a product has at most one batch axis"
        a, b, c = layout_of(product.left), layout_of(product.right), self._function.layouts[value]
        start = None if product.start is None else layout_of(product.start)
        inner, batch = product.left.shape[-1], value.shape[0] if dims > 2 else None
        rows, columns = value.shape[-2:]
        if product.fixed != "left":
            weight = product.right.shape if product.fixed else None
            row_mask = None if product.row_mask is None else layout_of(product.row_mask)
            return _Oriented(a, b, c, start, batch, rows, columns, inner, dims - 2, weight, value.dtype, row_mask)
        # The kernels pack only the right side. So the product is transposed, and its columns become rows.
        start = None if start is None else start.transposed()
        turned = (b.transposed(), a.transposed(), c.transposed(), start)
        weight = (*product.left.shape[:-2], inner, rows)
        return _Oriented(*turned, batch, columns, rows, inner, dims - 1, weight, value.dtype, None)

    def _by_packed(
        self, product: _Oriented, weight: tuple[int, ...], low: str, high: str, *, by_panels: bool = False
    ) -> str:
        panels = self._panel_count(product.columns, product.dtype)
        share = (f"{panels} * thread / threads", f"{panels} * (thread + 1) / threads") if by_panels else (0, panels)
        return call_text(
            "w_product" if product.row_mask is None else "w_some",
            *(f"{high} - {low}", product.columns, product.inner),
            *(product.a.address_of(product.batch, low), *product.a.strides[-2:], self._packed_weight(product, weight)),
            *(product.c.address_of(product.batch, low), *product.c.strides[-2:]),
            *product.start_arguments(low),
            *share,
            *([] if product.row_mask is None else [f"{product.row_mask.pointer} + {low}"]),
        )

    def _small(self, product: _Oriented, low: str, high: str, by_columns: bool) -> str:
        """A product of two varying matrices. With `by_columns`, threads also divide its columns, the batch's rows."""
        # Not packed: both sides change in every step, so packing would cost as much as the product.
        left, right = ("r0", "r1") if by_columns else ("0", str(product.columns))
        return call_text(
            "w_small",
            *(f"{high} - {low}", f"{right} - {left}", product.inner),
            *(product.a.address_of(product.batch, low), *product.a.strides[-2:]),
            *(product.b.address_of(product.batch, "0", left), *product.b.strides[-2:]),
            *(product.c.address_of(product.batch, low, left), *product.c.strides[-2:]),
            *product.start_arguments(low, left),
        )

    def _panel_count(self, columns: int, dtype: torch.dtype) -> int:
        return -(-columns // self._width[dtype])

    def _packed_size(self, inner: int, columns: int, dtype: torch.dtype) -> int:
        return self._panel_count(columns, dtype) * self._width[dtype] * inner

    def _packed_weight(self, product: _Oriented, shape: tuple[int, ...]) -> str:
        """The address of a packed matrix, of that for batch `b` if there are several."""
        # Products that share a weight also share its packed form, so the key is the layout, not the value.
        layout, batched = product.b, len(shape) > 2 and product.b.strides[0] != 0
        if not batched:
            layout, shape = layout.select_axes([-2, -1]), shape[-2:]
        numbers = self._packed_size(product.inner, product.columns, product.dtype)
        key = (layout, shape, product.dtype)
        if key not in self._packed:
            self._packed[key] = self.packed_bytes
            self.packed_bytes += aligned(prod(shape[:-2]) * numbers * product.dtype.itemsize)
        return f"p{self._packed[key]}" + (f" + b * {numbers}L" if batched else "")

    def _pack(self, layout: MemoryLayout, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> list[str]:
        """The text that packs one matrix at an offset of the workspace: each thread takes every n-th panel."""
        kind, width = C_TYPES[dtype], self._width[dtype]
        (inner, columns), (down, across) = shape[-2:], layout.strides[-2:]
        count, step = (shape[0], layout.strides[0]) if len(shape) > 2 else (1, 0)
        panels = self._panel_count(columns, dtype)
        return [
            f"{kind} *const p{at} = ({kind} *)(work + {at}L);",
            f"for (long q = thread; q < {count * panels}; q += threads) {{",
            f"const long b = q / {max(panels, 1)}, j = q % {max(panels, 1)} * {width};",
            call_text(
                "w_pack",
                *(inner, f"{columns} - j < {width} ? {columns} - j : {width}L"),
                *(f"{layout.pointer} + b * {step}L + j * {across}L", down, across),
                f"p{at} + b * {self._packed_size(inner, columns, dtype)}L + j * {inner}L",
            ),
            "}",
        ]

    def _gather_room(self, value: LoopValue) -> int:
        of = value.operation.of if isinstance(value.operation, TimeReduction) else None
        if not isinstance(of, Product):
            return 0
        columns = max(of.right.shape[-1], of.left.shape[-2])  # `_gather` can exchange the sides
        return aligned((self._packed_size(BLOCK, columns, value.dtype) + BLOCK * TALL) * value.dtype.itemsize)

    def _columns(self, source: View, axes: tuple[int, ...], to: MemoryLayout) -> str | None:
        layout, rows = self._function.layout_of(source), source.shape[0] if axes else 1
        flat = axes in ((), (0,)) and len(source.shape) == 1 + len(axes)
        row = layout.step_stride(rows)
        adjacent = flat and layout.strides[-1] == 1 and to.strides[-1] == 1
        if not adjacent or row is None or layout.size != rows * row or not source.value.dtype.is_floating_point:
            return None
        where = (layout.first_pointer, row, to.first_pointer, "thread", "threads")
        return call_text("w_columns", f"{rows} * steps", source.shape[-1], *where, rows, self._row_count(rows))

    def _row_count(self, rows: int) -> int | str:
        """The rows of a step that count, out of `rows`: fewer if a batch is filled up, see `CppBackend.for_rows`."""
        return "count" if rows == self._function.rows else rows

    def _gather(self, product: Product, to: MemoryLayout) -> str:
        """A weight's gradient, step by step if a side has no row for each step."""
        left, right = self._function.layout_of(product.left), self._function.layout_of(product.right)
        mask = None if product.row_mask is None else self._function.layout_of(product.row_mask)
        (rows, inner), columns = product.left.shape, product.right.shape[1]
        a, b = left.all_steps(inner, 1), right.all_steps(inner)
        merged = a is not None and b is not None
        # A side without a row per step, such as a constant, has no long inner axis. Then each step adds a product.
        if a is None or b is None:
            a, b = left, right
        sides = [
            (rows, a.pointer, *a.strides, to.strides[0]),
            (columns, b.pointer, b.strides[1], b.strides[0], to.strides[1]),
        ]
        # The kernel's tiles store whole vectors only if columns of C are adjacent, else C' = B' A' is computed.
        if to.strides[1] != 1 and to.strides[0] == 1:
            sides.reverse()
        (M, a, a_row, a_col, c_row), (N, b, b_col, b_row, c_col) = sides
        line = call_text(
            "w_gather",
            *(M, N, f"{inner} * steps" if merged else inner),
            *(a, a_row, a_col, b, b_row, b_col),
            *(to.first_pointer, c_row, c_col, f"({C_TYPES[product.left.value.dtype]} *)room", "thread", "threads"),
            "(const boolean *)0" if mask is None else mask.first_pointer if merged else mask.pointer,
            *(inner, self._row_count(inner)),
        )
        return line if merged else f"for (long t = 0; t < steps; t++) {line}"
