"""Text of the operations that are not elementwise: products, reductions, operations along an axis, concatenations.

product     accumulators of [16, BN] tiles over the inner axis; a product of each row's own matrices: row by row
reduction   [rows, columns, J] tiles, reduced along J
along axis  one element of the axis after another, for a tile of all others
cat         a copy of each piece that was not computed in its place
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.triton.emitter import DEPTH, ELEMENTS, ROWS, TileEmitter, power_of_two
from torchweft.recurrent.triton.expressions import TYPES, literal
from torchweft.recurrent.triton.memory import StepMemory, mixed_index

COLUMNS = 64  # at most so many columns in a tile of a product


def emit_operation(emitter: TileEmitter, value: ir.LoopValue) -> bool:
    """Emit one value. Returns whether there is anything to do. Raises Unsupported."""
    emitter.begin_group()
    match value.operation:
        case ir.Product():
            _ProductText(emitter, value).emit()
        case ir.Reduce():
            _emit_reduction(emitter, value)
        case ir.AxisOp(kind="gather"):
            _emit_gather(emitter, value)
        case ir.AxisOp(kind="scatter" | "scatter_add"):
            _emit_scatter(emitter, value)
        case ir.AxisOp(kind="cumsum"):
            _emit_running_sum(emitter, value)
        case ir.AxisOp():
            _emit_extreme(emitter, value)
        case ir.Cat(pieces=pieces):
            if all(piece.value in emitter.memory.function.slots for piece in pieces):
                return False
            _emit_cat(emitter, value)
        case _:
            raise ir.Unsupported(f"kernels in Triton do not know {type(value.operation).__name__}")
    return True


# -- products ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """A matrix of a product in each batch: its address at the first element, and its strides."""

    start: str
    strides: tuple[int, ...]

    def at(self, batch: str, row: str, column: str) -> str:
        return f"{self.start}{batch} + {row} * {self.strides[-2]} + {column} * {self.strides[-1]}"


class _ProductText:
    def __init__(self, emitter: TileEmitter, value: ir.LoopValue) -> None:
        operation = value.operation
        assert isinstance(operation, ir.Product)
        memory, self.emitter, self.value = emitter.memory, emitter, value
        axis, dims = memory.axis_of(value), len(value.shape)
        sides: dict[str, ir.MemoryLayout] = {"left": memory.layout_of(operation.left)}
        sides |= {"right": memory.layout_of(operation.right), "to": memory.layouts[value]}
        if operation.start is not None:
            start = memory.layout_of(operation.start)
            sides["start"] = start.broadcast_to(operation.start.shape, value.shape)
        *self.lead, self.height, self.width = value.shape
        self.inner = operation.left.shape[-1]
        values = {"left": operation.left.value, "right": operation.right.value, "to": value}
        values["start"] = operation.start.value if operation.start is not None else value
        # The rows of the batch are columns here: compute the transposed product.
        if axis == dims - 1:
            sides = {name: layout.transposed() for name, layout in sides.items()}
            sides["left"], sides["right"] = sides["right"], sides["left"]
            values["left"], values["right"] = values["right"], values["left"]
            self.height, self.width, axis = self.width, self.height, dims - 2
        self.axis = axis
        self.sides = {
            name: _Side(memory.row_start(layout, "t", private=emitter.is_private(values[name])), layout.strides)
            for name, layout in sides.items()
        }

    def emit(self) -> None:
        emitter, axis = self.emitter, self.axis
        batches = [i for i in range(len(self.lead)) if i != axis]
        count = prod(self.lead[i] for i in batches)
        by_row = axis is not None and axis < len(self.lead)  # each row of the batch has a product of its own
        emitter.divides_rows |= axis is not None
        with emitter.indented(f"for batch in range({count}):" if count > 1 else None):
            if by_row:
                with emitter.indented(f"for row in range(r0, r0 + {emitter.block}):"):
                    emitter.add("live = tl.full([1, 1], row, tl.int32) < N")
                    self._emit_matrix(batches, "live")
            else:
                self._emit_matrix(batches, None)

    def _emit_matrix(self, batches: Sequence[int], condition: str | None) -> None:
        emitter, height = self.emitter, self.height
        tall = max(ROWS, min(power_of_two(height), COLUMNS))
        if condition is None and self.axis is not None:
            emitter.add("ms = rows")
            self._emit_tiles(batches, emitter.block, "(ms < N)")
            return
        inside = " & ".join([*([] if condition is None else [condition]), f"(ms < {height})"])
        tile = f"tl.arange(0, {tall})[:, None]"
        if condition is None and emitter.sweep != "rows":  # each program has a tile of this matrix
            emitter.row_tiles = -(-height // tall)
            emitter.add(f"ms = pid * {tall} + {tile}")
            self._emit_tiles(batches, tall, inside)
        elif height > tall:
            with emitter.indented(f"for m0 in range(0, {height}, {tall}):"):
                emitter.add(f"ms = m0 + {tile}")
                self._emit_tiles(batches, tall, inside)
        else:
            emitter.add(f"ms = {tile}")
            self._emit_tiles(batches, tall, inside)

    def _emit_tiles(self, batches: Sequence[int], tall: int, inside: str) -> None:
        emitter, inner, kind = self.emitter, self.inner, TYPES[self.value.dtype]
        wide = max(ROWS, min(power_of_two(self.width), COLUMNS))
        deep = max(ROWS, min(power_of_two(inner), DEPTH))
        with emitter.columns(self.width, wide):
            emitter.add(f"mask = {inside} & (cols < {self.width})")
            if "start" in self.sides:
                at = self._at("start", batches, "ms", "cols")
                emitter.add(f"acc = tl.load({at}, mask, 0)")
            else:
                emitter.add(f"acc = tl.zeros([{tall}, {wide}], {kind})")
            loop = f"for k0 in range(0, {inner}, {deep}):" if inner > deep else None
            with emitter.indented(loop):
                emitter.add(f"ks = {'k0 + ' if loop else ''}tl.arange(0, {deep})")
                left, right = (
                    self._at("left", batches, "ms", "ks[None, :]"),
                    self._at("right", batches, "ks[:, None]", "cols"),
                )
                emitter.add(f"a = tl.load({left}, {inside} & (ks[None, :] < {inner}), 0)")
                # Rows of the batch beyond the last one have matrices of their own, which do not exist.
                own = "live & " if inside.startswith("live") else ""
                emitter.add(f"b = tl.load({right}, {own}(ks[:, None] < {inner}) & (cols < {self.width}), 0)")
                emitter.add("acc += tl.dot(a, b, input_precision=PRECISION)")
            emitter.add(f"tl.store({self._at('to', batches, 'ms', 'cols')}, acc, mask)")

    def _at(self, name: str, batches: Sequence[int], row: str, column: str) -> str:
        side = self.sides[name]
        terms = mixed_index([self.lead[i] for i in batches], [side.strides[i] for i in batches], "batch")
        if self.axis is not None and self.axis < len(self.lead) and side.strides[self.axis]:
            terms.append(f"row * {side.strides[self.axis]}")
        return side.at("".join(f" + {term}" for term in terms), row, column)


# -- reductions -------------------------------------------------------------------------------------------------------


def _emit_reduction(emitter: TileEmitter, value: ir.LoopValue) -> None:
    operation, memory, axis = value.operation, emitter.memory, emitter.memory.axis_of(value)
    assert isinstance(operation, ir.Reduce)
    shape, along, dtype = operation.source.shape, operation.axes, value.dtype
    kept = [i for i in range(len(shape)) if i not in along]
    own = None if axis is None else axis if operation.keep else kept[axis]  # the row axis of the source
    outer = [i for i in kept if i != own]
    source, target = memory.layout_of(operation.source), _unreduced(operation, memory.layout_of(ir.whole_view(value)))
    columns, count = prod(shape[i] for i in outer), prod(shape[i] for i in along)
    rows = emitter.block if own is not None else 1
    deep = min(power_of_two(count), ELEMENTS // rows)
    width = max(1, min(power_of_two(columns), 2 * ELEMENTS // (rows * deep)))
    row = [] if own is None else [f"rows[:, :, None] * {source.strides[own]}"]
    start = memory.row_start(source, "t", private=emitter.is_private(operation.source.value))
    outside = mixed_index([shape[i] for i in outer], [source.strides[i] for i in outer], "cols[:, :, None]")
    inside = mixed_index([shape[i] for i in along], [source.strides[i] for i in along], "js")
    # With every term, even times 0, the addresses have the shape of the tile.
    at = " + ".join([start, *row, *outside, "cols[:, :, None] * 0", *inside, "js * 0"])
    emitter.divides_rows |= own is not None
    mask = f"(cols[:, :, None] < {columns}) & (js < {count})" + (" & (rows[:, :, None] < N)" if row else "")
    wide = torch.int32 if dtype == torch.bool else dtype
    with emitter.columns(columns, width):
        emitter.add(f"r = tl.full([{rows}, {width}], {_identity(operation.kind, wide)}, {TYPES[wide]})")
        loop = f"for j0 in range(0, {count}, {deep}):" if count > deep else None
        with emitter.indented(loop):
            emitter.add(f"js = {'j0 + ' if loop else ''}tl.arange(0, {deep})[None, None, :]")
            emitter.add(f"e = tl.load({at}, {mask}, 0).to({TYPES[wide]})")
            emitter.add(f"live = {mask}")
            emitter.add(f"e = tl.where(live, e, {_identity(operation.kind, wide)})")
            _combine(emitter, operation.kind, wide)
        result = f"(r != 0).to({TYPES[dtype]})" if dtype == torch.bool else "r"
        terms = [] if own is None else [f"rows * {target.strides[own]}"]
        terms += mixed_index([shape[i] for i in outer], [target.strides[i] for i in outer], "cols")
        to = memory.row_start(target, "t", private=emitter.is_private(value))
        terms += [] if any("cols" in term for term in terms) else ["cols * 0"]
        condition = f"(cols < {columns})" + (" & (rows < N)" if own is not None else "")
        emitter.add(f"tl.store({' + '.join([to, *terms])}, {result}, {condition})")


def _combine(emitter: TileEmitter, kind: str, dtype: torch.dtype) -> None:
    """Combine a tile's elements with those before. A NaN wins, as in PyTorch, which tl.max does not promise."""
    if kind == "sum":
        emitter.add(f"r += tl.sum(e, 2).to({TYPES[dtype]})")
        return
    name = {"max": "maximum", "min": "minimum"}[kind]
    emitter.add(f"r = {name}(r, tl.{kind}(e, 2).to({TYPES[dtype]}))")
    if dtype.is_floating_point:
        emitter.add('r = tl.where(tl.max((e != e).to(tl.int32), 2) != 0, float("nan"), r)')


def _identity(kind: str, dtype: torch.dtype) -> str:
    if kind == "sum":
        return "0"
    if dtype.is_floating_point:
        return 'float("-inf")' if kind == "max" else 'float("inf")'
    limits = torch.iinfo(dtype)
    return str(limits.min if kind == "max" else limits.max)


def _unreduced(operation: ir.Reduce, to: ir.MemoryLayout) -> ir.MemoryLayout:
    """The result's layout over the source's shape."""
    strides = iter(to.strides)
    steps = [
        next(strides) if operation.keep or i not in operation.axes else 0 for i in range(len(operation.source.shape))
    ]
    return to.with_strides([0 if i in operation.axes else step for i, step in enumerate(steps)])


# -- operations along an axis -----------------------------------------------------------------------------------------


class _AlongAxis:
    """Elements of the operands at a place of the axis, for a tile of rows and of all other axes."""

    def __init__(self, emitter: TileEmitter, value: ir.LoopValue) -> None:
        operation = value.operation
        assert isinstance(operation, ir.AxisOp)
        self.emitter, self.axis, self.rows = emitter, operation.axis, emitter.memory.axis_of(value)
        self.shape = value.shape
        self.others = [i for i in range(len(value.shape)) if i not in (operation.axis, self.rows)]
        self.columns = prod(value.shape[i] for i in self.others)
        emitter.divides_rows |= self.rows is not None
        self.block = emitter.block if self.rows is not None else 1
        self.width = max(1, min(power_of_two(self.columns), ELEMENTS // self.block))
        self.mask = f"(cols < {self.columns})" + (" & (rows < N)" if self.rows is not None else "")

    def at(self, layout: ir.MemoryLayout, value: ir.LoopValue, place: str) -> str:
        start = self.emitter.memory.row_start(layout, "t", private=self.emitter.is_private(value))
        sizes, strides = [self.shape[i] for i in self.others], [layout.strides[i] for i in self.others]
        terms = mixed_index(sizes, strides, "cols")
        # Every term of a tile is there, so that all loads and stores have one shape.
        terms.append("cols * 0")
        if self.rows is not None:
            terms.append(f"rows * {layout.strides[self.rows]}")
        if layout.strides[self.axis]:
            terms.append(f"{place} * {layout.strides[self.axis]}")
        return " + ".join([start, *terms])

    def load(self, view: ir.View, place: str, mask: str | None = None) -> str:
        at = self.at(self.emitter.memory.layout_of(view), view.value, place)
        return f"tl.load({at}, {mask or self.mask}, 0)"

    def store(self, value: ir.LoopValue, place: str, text: str, mask: str | None = None) -> None:
        at = self.at(self.emitter.memory.layout_of(ir.whole_view(value)), value, place)
        self.emitter.add(f"tl.store({at}, {text}, {mask or self.mask})")

    @property
    def tile(self) -> str:
        return f"[{self.block}, {self.width}]"


def _emit_running_sum(emitter: TileEmitter, value: ir.LoopValue) -> None:
    operation = value.operation
    assert isinstance(operation, ir.AxisOp)
    tile = _AlongAxis(emitter, value)
    with emitter.columns(tile.columns, tile.width):
        emitter.add(f"total = tl.zeros({tile.tile}, {TYPES[value.dtype]})")
        with emitter.indented(f"for j in range({value.shape[operation.axis]}):"):
            emitter.add(f"total += {tile.load(operation.operands[0], 'j')}")
            tile.store(value, "j", "total")


def _emit_extreme(emitter: TileEmitter, value: ir.LoopValue) -> None:
    operation = value.operation
    assert isinstance(operation, ir.AxisOp)
    tile, (source,) = _AlongAxis(emitter, value), operation.operands
    worse = "<=" if operation.kind == "argmax" else ">="
    with emitter.columns(tile.columns, tile.width):
        emitter.add(f"best = {tile.load(source, '0')}")
        emitter.add(f"found = tl.zeros({tile.tile}, tl.int64)")
        with emitter.indented(f"for j in range(1, {source.shape[operation.axis]}):"):
            emitter.add(f"e = {tile.load(source, 'j')}")
            # As in PyTorch, the first NaN wins.
            emitter.add(f"better = ((e {worse} best) == 0) & (best == best)")
            emitter.add("best = tl.where(better, e, best)")
            emitter.add("found = tl.where(better, j, found)")
        tile.store(value, "0", "found")


def _place(emitter: TileEmitter, tile: _AlongAxis, index: ir.View, size: int) -> None:
    emitter.add(f"place = {tile.load(index, 'j')}.to(tl.int64)")
    emitter.add(f"place = tl.where(place < 0, place + {size}, place)")
    emitter.add(f"within = (place >= 0) & (place < {size})")


def _outside(dtype: torch.dtype) -> str:
    """The result at an index that is out of range: NaN, where the dtype has one."""
    return 'float("nan")' if dtype.is_floating_point else literal(0, dtype)


def _emit_gather(emitter: TileEmitter, value: ir.LoopValue) -> None:
    operation = value.operation
    assert isinstance(operation, ir.AxisOp)
    tile, (source, index) = _AlongAxis(emitter, value), operation.operands
    with (
        emitter.columns(tile.columns, tile.width),
        emitter.indented(f"for j in range({value.shape[operation.axis]}):"),
    ):
        _place(emitter, tile, index, source.shape[operation.axis])
        emitter.add(f"e = {tile.load(source, 'place', f'{tile.mask} & within')}")
        tile.store(value, "j", f"tl.where(within, e, {_outside(value.dtype)})")


def _emit_scatter(emitter: TileEmitter, value: ir.LoopValue) -> None:
    operation = value.operation
    assert isinstance(operation, ir.AxisOp)
    tile, (start, index, source) = _AlongAxis(emitter, value), operation.operands
    size = value.shape[operation.axis]
    with emitter.columns(tile.columns, tile.width):
        with emitter.indented(f"for j in range({size}):"):
            tile.store(value, "j", tile.load(start, "j"))
        emitter.add("tl.debug_barrier()")
        with emitter.indented(f"for j in range({index.shape[operation.axis]}):"):
            _place(emitter, tile, index, size)
            emitter.add(f"e = {tile.load(source, 'j')}")
            emitter.add("place = tl.where(within, place, 0)")
            if operation.kind == "scatter_add":
                emitter.add(f"e += {tile.load(ir.whole_view(value), 'place')}")
            tile.store(value, "place", f"tl.where(within, e, {_outside(value.dtype)})")
            # Two indices can be equal, and a thread need not be the one that wrote the element before.
            emitter.add("tl.debug_barrier()")


# -- concatenations ---------------------------------------------------------------------------------------------------


def _emit_cat(emitter: TileEmitter, value: ir.LoopValue) -> None:
    operation, memory, axis = value.operation, emitter.memory, emitter.memory.axis_of(value)
    assert isinstance(operation, ir.Cat)
    into = memory.layout_of(ir.whole_view(value))
    for start, piece in zip(operation.starts, operation.pieces, strict=True):
        if piece.value in memory.function.slots:
            continue
        to = into.with_strides(into.strides, into.offset + start * into.strides[operation.axis])
        with emitter.columns(*emitter.flat(piece.shape, axis)):
            text = emitter.load(memory.layout_of(piece), piece.shape, axis, piece.value, dense=True)
            emitter.store(to, piece.shape, axis, value, text, dense=True)


def has_products_by_rows(values: Sequence[ir.LoopValue], memory: StepMemory) -> bool:
    """Whether a product has rows of the batch as the rows of its tiles."""
    products = [value for value in values if isinstance(value.operation, ir.Product)]
    return any((axis := memory.axis_of(value)) is not None and axis >= len(value.shape) - 2 for value in products)
