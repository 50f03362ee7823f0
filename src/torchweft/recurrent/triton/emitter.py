"""Text of kernels: the operations of one step, tile by tile.

    rows = r0 + tl.arange(0, 16)[:, None]               a program's rows of the batch
    cols = first + tl.arange(0, 64)[None, :]               all other axes of a value, as one index
    e1 = tl.load(x0 + t * (N * 5) + rows * 5 + cols, (rows < N) & (cols < 5), 0)

A group of elementwise values is one pass over tiles: operands are loaded once, and values that only the group reads
stay in registers. A product that a single pass reads is computed in that pass, so its result needs no memory either.

Three sweeps share this text. They differ in the place of a program:

    rows        one kernel for all steps. A program has its rows, all columns, and the loop over time.
    segments    one launch per group and step. A program has a tile of rows and columns.
    steps       one launch per group, for steps that do not depend on each other: the step is part of the grid.
"""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.triton.expressions import TYPES, computed, converted, literal
from torchweft.recurrent.triton.memory import StepMemory, mixed_index

Sweep = Literal["rows", "segments", "steps"]
ROWS = 16  # of a tile of a product: the least that tensor cores take
DEPTH = 64  # of the inner axis of a product, at a time
ELEMENTS = 1024  # of a tile: eight for each thread of four warps
_TEMPORARIES = re.compile(
    r"\b(cols|ks|ms|js|mask|a|b|acc|e|r|live|place|within|best|better|found|total|batch|row|first|k0|m0|j0|j)\b"
)


def power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class Rotated:
    """A carried gradient that a step computes from values of the step after it, instead of reading it from memory.

    `end` is the product or the elementwise value that yields it, `products` are those that it reads.
    """

    end: ir.LoopValue
    products: Sequence[ir.LoopValue]


def _nothing() -> dict[ir.LoopValue, Any]:
    return {}


@dataclass(frozen=True)
class Fusion:
    """The products that passes compute in their registers, by product, and the rotated gradients, by carried value."""

    inlined: Mapping[ir.LoopValue, Sequence[ir.LoopValue]] = field(default_factory=_nothing)
    rotated: Mapping[ir.LoopValue, Rotated] = field(default_factory=_nothing)
    # Carried values to which each pass that reads them adds the caller's gradient, by the argument's name.
    added: Mapping[ir.LoopValue, str] = field(default_factory=_nothing)
    # Concatenations into which the pass that computes a value also writes it, with the offset there.
    placed: Mapping[ir.LoopValue, Sequence[tuple[ir.LoopValue, int]]] = field(default_factory=_nothing)

    @property
    def products(self) -> list[ir.LoopValue]:
        return [*self.inlined, *(product for rotated in self.rotated.values() for product in rotated.products)]


class TileEmitter:
    """The text of one kernel under construction, and what its launch needs to know."""

    def __init__(self, memory: StepMemory, sweep: Sweep, block: int, fusion: Fusion) -> None:
        self.memory, self.block, self.fusion = memory, block, fusion
        self.sweep: Sweep = sweep
        self.lines: list[str] = []
        self.column_tiles = 1
        self.row_tiles = 1  # of values without a row axis. Others have as many as the batch needs.
        self.divides_rows = False
        self._depth, self._count, self.time = 1, 0, "t"
        self._width = 1  # columns of the tile at hand
        self._group, self._opened = 0, False

    def add(self, text: str) -> None:
        # Triton takes a name that a loop assigns, and that has a value before the loop, for a variable that the loop
        # carries, of one shape. So every group has temporaries of its own.
        named = _TEMPORARIES.sub(rf"\1_{self._group}", text)
        self.lines.append("    " * self._depth + named)

    def begin_group(self) -> None:
        self._group += 1
        self._opened = False

    @contextmanager
    def indented(self, head: str | None = None) -> Generator[None]:
        if head is not None:
            self.add(head)
        self._depth += head is not None
        yield
        self._depth -= head is not None

    def fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    # -- tiles --------------------------------------------------------------------------------------------------------

    @contextmanager
    def columns(self, count: int, width: int) -> Generator[None]:
        """The loop over tiles of columns. In segments and steps each program has one tile."""
        if self._opened:
            self.begin_group()
        self._opened = True
        tile, self._width = f"tl.arange(0, {width})[None, :]", width
        if self.sweep != "rows":
            self.column_tiles = max(self.column_tiles, -(-count // width))
            self.add(f"cols = pid_c * {width} + {tile}" if count > width else f"cols = {tile}")
            yield
        elif count > width:
            with self.indented(f"for first in range(0, {count}, {width}):"):
                self.add(f"cols = first + {tile}")
                yield
        else:
            self.add(f"cols = {tile}")
            yield

    def address(
        self,
        layout: ir.MemoryLayout,
        shape: Sequence[int],
        axis: int | None,
        *,
        value: ir.LoopValue,
        dense: bool = False,
    ) -> tuple[str, bool, bool]:
        """The address of a tile, and whether it varies with rows and with columns. A `dense` one does with both."""
        text = self.memory.row_start(layout, self.time, private=self.is_private(value))
        others = [i for i in range(len(shape)) if i != axis]
        terms = mixed_index([shape[i] for i in others], [layout.strides[i] for i in others], "cols")
        with_rows = axis is not None and (layout.strides[axis] != 0 or dense)
        if axis is not None and with_rows:
            terms.insert(0, "rows" if layout.strides[axis] == 1 else f"rows * {layout.strides[axis]}")
        with_columns = any("cols" in term for term in terms)
        # An address is never a single one: stores need a tile, and the interpreter has no logic of single booleans.
        if not with_columns and (dense or not with_rows):
            terms, with_columns = [*terms, "cols * 0"], True
        return " + ".join([text, *terms]), with_rows, with_columns

    def is_private(self, value: ir.LoopValue) -> bool:
        return self.sweep == "rows" and value in self.memory.locals and self.memory.axis_of(value) is None

    def mask(self, with_rows: bool, columns: int | None) -> str:
        """The condition for elements that exist; `columns` is None for an address without columns."""
        parts = ["(rows < N)"] if with_rows else []
        # A launch can have more tiles than these columns, if another part of the kernel has more columns.
        if columns is not None and (columns % self._width or (self.sweep != "rows" and columns > self._width)):
            parts.append(f"(cols < {columns})")
        return " & ".join(parts)

    def load(
        self, layout: ir.MemoryLayout, shape: Sequence[int], axis: int | None, value: ir.LoopValue, dense: bool = False
    ) -> str:
        at, with_rows, with_columns = self.address(layout, shape, axis, value=value, dense=dense)
        self.divides_rows |= with_rows
        mask = self.mask(with_rows, columns_of(shape, axis) if with_columns else None)
        return f"tl.load({at}, {mask}, 0)" if mask else f"tl.load({at})"

    def store(
        self,
        layout: ir.MemoryLayout,
        shape: Sequence[int],
        axis: int | None,
        value: ir.LoopValue,
        text: str,
        dense: bool,
    ) -> None:
        at, with_rows, with_columns = self.address(layout, shape, axis, value=value, dense=dense)
        self.divides_rows |= with_rows
        mask = self.mask(with_rows, columns_of(shape, axis) if with_columns else None)
        self.add(f"tl.store({at}, {text}, {mask})" if mask else f"tl.store({at}, {text})")

    # -- elementwise passes -------------------------------------------------------------------------------------------

    def emit_pass(self, group: Sequence[ir.LoopValue]) -> None:
        """One pass: load the operands, compute the products that only this pass reads, then every value."""
        self.begin_group()
        shape, axis, members = group[0].shape, self.memory.axis_of(group[0]), set(group)
        views = dict.fromkeys(v for value in group for v in ir.operand_views(value.operation) if v.value not in members)
        products = [view for view in views if view.value in self.fusion.inlined]
        dense = bool(products) or any(view.value in self.fusion.rotated for view in views)
        others = columns_of(shape, axis)
        width = max(min(power_of_two(others), ELEMENTS // self.block), ROWS if dense else 1)
        with self.columns(others, width):
            names: dict[ir.View, str] = {}
            for view in views:
                if view not in products:
                    names[view] = self._operand(view, shape, axis)
            for value in dict.fromkeys(view.value for view in products):
                self._product_tiles(value, [view for view in products if view.value is value], names, width)
            self._compute(group, names, shape, axis, dense)

    def _operand(self, view: ir.View, shape: Sequence[int], axis: int | None) -> str:
        """Load an operand of a pass; for a rotated gradient, compute it."""
        name, rotated = self.fresh("e"), self.fusion.rotated.get(view.value)
        layout = self.memory.layout_of(view).broadcast_to(view.shape, shape)
        if rotated is None:
            self.add(f"{name} = {self.load(layout, shape, axis, view.value)}")
        else:
            self._rotated_operand(name, rotated, layout, view)
        if view.value in self.fusion.added:
            argument = self.fusion.added[view.value]
            with self.indented(f"if HAS_{argument}:"):
                text = self.load(_replaced(layout, argument), shape, axis, view.value, dense=rotated is not None)
                dtype = view.value.dtype
                if dtype in ir.REDUCED_PRECISION:
                    self.add(f"{name} = ({name}.to(tl.float32) + {text}.to(tl.float32)).to({TYPES[dtype]})")
                else:
                    self.add(f"{name} += {text}")
        return name

    def _rotated_operand(self, name: str, rotated: Rotated, layout: ir.MemoryLayout, view: ir.View) -> None:
        shape, end = view.shape, rotated.end
        with self.indented("if t == T - 1:"):
            self.add(f"{name} = {self.load(layout, shape, 0, view.value, dense=True)}")
        with self.indented("else:"):
            self.time = "(t + 1)"  # the step that ran before this one, as time runs backward
            names: dict[ir.View, str] = {}
            if isinstance(end.operation, ir.Product):
                whole = ir.whole_view(end)
                self._product_tiles(end, [whole], names, self._width, store=False)
                result = names[whole]
            else:
                views = list(dict.fromkeys(ir.operand_views(end.operation)))
                for value in rotated.products:
                    parts = [each for each in views if each.value is value]
                    self._product_tiles(value, parts, names, self._width, store=False)
                for each in views:
                    if each not in names:
                        names[each] = self.fresh("e")
                        to = self.memory.layout_of(each).broadcast_to(each.shape, shape)
                        self.add(f"{names[each]} = {self.load(to, shape, 0, each.value, dense=True)}")
                result = _value_text(end, names)
            self.add(f"{name} = {result}")
            self.time = "t"

    def _compute(
        self,
        group: Sequence[ir.LoopValue],
        names: Mapping[ir.View, str],
        shape: Sequence[int],
        axis: int | None,
        dense: bool,
    ) -> None:
        for value in group:
            self.add(f"{value} = {_value_text(value, names)}")
        for value in group:
            cats = self.fusion.placed.get(value, [])
            for cat, offset in cats:
                into = self.memory.layouts[cat]
                place = into.with_strides(into.strides, into.offset + offset)
                self.store(place, shape, axis, cat, str(value), dense)
            if self.memory.is_stored(value, [*group, *(cat for cat, _ in cats)]):
                layout = self.memory.layout_of(ir.whole_view(value))
                self.store(layout, shape, axis, value, str(value), dense)

    def _product_tiles(
        self, value: ir.LoopValue, parts: Sequence[ir.View], names: dict[ir.View, str], width: int, store: bool = True
    ) -> None:
        """The tiles of a product that this pass reads: accumulators of one loop, which loads the left tile once."""
        op = value.operation
        assert isinstance(op, ir.Product)
        left, right = self.memory.layout_of(op.left), self.memory.layout_of(op.right)
        inner, kind = op.left.shape[-1], TYPES[value.dtype]
        depth = max(ROWS, min(power_of_two(inner), DEPTH))
        self.divides_rows = True
        for part in parts:
            names[part] = self.fresh("acc")
            offset = int(part.at.storage_offset())
            if op.start is None:
                self.add(f"{names[part]} = tl.zeros([{self.block}, {width}], {kind})")
                continue
            start = self.memory.layout_of(op.start).broadcast_to(op.start.shape, value.shape)
            start = start.with_strides(start.strides, start.offset + offset * start.strides[1])
            text = self.load(start, part.shape, 0, op.start.value, dense=True)
            self.add(f"{names[part]} = {text}")
        loop = f"for k0 in range(0, {inner}, {depth}):" if inner > depth else None
        with self.indented(loop):
            self.add(f"ks = {'k0 + ' if loop else ''}tl.arange(0, {depth})")
            a = self.memory.row_start(left, self.time, private=self.is_private(op.left.value))
            self.add(
                f"a = tl.load({a} + rows * {left.strides[0]} + ks[None, :] * {left.strides[1]}, "
                f"(rows < N) & (ks[None, :] < {inner}), 0)"
            )
            b = self.memory.row_start(right, self.time, private=self.is_private(op.right.value))
            for part in parts:
                column = f"(cols + {offset})" if (offset := int(part.at.storage_offset())) else "cols"
                self.add(
                    f"b = tl.load({b} + ks[:, None] * {right.strides[0]} + {column} * {right.strides[1]}, "
                    f"(ks[:, None] < {inner}) & (cols < {part.shape[1]}), 0)"
                )
                self.add(f"{names[part]} += tl.dot(a, b, input_precision=PRECISION)")
        if store and value not in self.memory.locals:
            to = self.memory.layouts[value]
            for part in parts:
                at = to.with_strides(to.strides, to.offset + int(part.at.storage_offset()))
                self.store(at, part.shape, 0, value, names[part], dense=True)

    # -- gradients of the caller, and zeros ---------------------------------------------------------------------------

    def emit_added(self, value: ir.LoopValue, argument: str) -> bool:
        """Add the caller's gradient of a state, if there is one, to the carried gradient in memory."""
        self.begin_group()
        shape, axis, layout = value.shape, self.memory.axis_of(value), self.memory.layouts[value]
        with self.indented(f"if HAS_{argument}:"), self.columns(*self.flat(shape, axis)):
            more = self.load(_replaced(layout, argument), shape, axis, value)
            text = f"{self.load(layout, shape, axis, value)}.to({_wide(value)}) + {more}.to({_wide(value)})"
            self.store(layout, shape, axis, value, f"({text}).to({TYPES[value.dtype]})", dense=False)
        return True

    def emit_zeros(self, value: ir.LoopValue) -> bool:
        """Write zeros as the carried gradient of a state that the step does not read."""
        self.begin_group()
        shape, axis, layout = value.shape, self.memory.axis_of(value), self.memory.layouts[value]
        out = ir.MemoryLayout(layout.base, "out", layout.size, layout.strides, layout.offset)
        with self.columns(*self.flat(shape, axis)):
            self.store(out, shape, axis, value, f"tl.full([1, 1], 0, {TYPES[value.dtype]})", dense=False)
        return True

    def flat(self, shape: Sequence[int], axis: int | None) -> tuple[int, int]:
        """The columns of a value, and those of a tile."""
        others = columns_of(shape, axis)
        return others, min(power_of_two(others), ELEMENTS // self.block)


def _value_text(value: ir.LoopValue, names: Mapping[ir.View, str]) -> str:
    """The expression of an elementwise value. `names` holds the variables of views that are not members of the pass."""
    op = value.operation
    assert isinstance(op, ir.Elementwise)
    typed = not any(isinstance(operand, ir.View) for operand in op.operands)
    operands = [
        converted(names.get(operand, str(operand.value)), op.type, operand.value.dtype)
        if isinstance(operand, ir.View)
        else literal(operand, op.type, typed=typed)
        for operand in op.operands
    ]
    return computed(op, operands, value.dtype)


def _replaced(layout: ir.MemoryLayout, base: str) -> ir.MemoryLayout:
    return ir.MemoryLayout(base, "step", layout.size, layout.strides, layout.offset)


def columns_of(shape: Sequence[int], axis: int | None) -> int:
    return prod(size for i, size in enumerate(shape) if i != axis)


def _wide(value: ir.LoopValue) -> str:
    return TYPES[ir.compute_dtype(value.dtype)]
