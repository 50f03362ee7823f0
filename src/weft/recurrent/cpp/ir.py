"""Intermediate representation: values of one step, how each is computed, where its elements lie, and what builds it.

    LoopValue      shape and dtype of one step's tensor; made by an operation, or an argument
    Operation      Elementwise, Reduce, AxisOp, Product, Cat, or TimeReduction, a sum over all steps
    View           elements of a value, by strides in its contiguous layout
    MemoryLayout   where a value's elements lie: a C variable, the row of it that step t uses, and strides

A view costs nothing: PyTorch itself works out its strides, on a tensor of the "meta" device that has no memory.
Nodes of the graph that are only views therefore never become values here.

row      row of memory that step t uses                          example
same     the only one                                            weights; a value read only in the step that makes it
step     row t                                                   inputs, outputs, what is saved for backward
next     row t + 1                                               new states: the states' memory has T + 1 rows
in, out  two rows in turn: the one the step before wrote,        carried gradients
         and the other one

A view of a cheap elementwise value is pushed to its operands, so that slices of pre-activations are never stored:
``z = a + b, i = z[:, :4]`` becomes ``i = a[:, :4] + b[:, :4]``, and z is never made.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from weft.core.errors import WeftError

C_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "w_bfloat16",
    torch.float16: "w_float16",
    torch.bool: "boolean",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
"""The dtypes that loops can hold, and their names in C."""

REDUCED_PRECISION = (torch.bfloat16, torch.float16)
"""Held, but computed with in float32, as PyTorch does on a CPU: each operator's result is rounded."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which C computes what is of this one."""
    return torch.float32 if dtype in REDUCED_PRECISION else dtype


class Unsupported(WeftError, RuntimeError):
    """The generated loops do not know an operator or a dtype of this cell; the message names it."""


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise Unsupported for a dtype that loops cannot hold; `what` has it."""
    if dtype not in C_TYPES:
        raise Unsupported(f"{what} is of {dtype}; loops in C hold {', '.join(map(str, C_TYPES))}")


CHEAP = {"({0}+{1})", "({0}-{1})", "({0}*{1})", "(-{0})", "({0}+{1}*{2})", "({0}-{1}*{2})"}
"""Expressions that are computed where they are read, if only slices of them are."""


@dataclass(eq=False)
class LoopValue:
    """A tensor that is made anew in every step, or is the same in all (`varies` is False)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    made: "Operation | None" = None
    varies: bool = True

    def __repr__(self) -> str:
        return self.name

    @property
    def constant(self) -> bool:
        """Given, and the same in all steps."""
        return not self.varies and self.made is None

    @property
    def size(self) -> int:
        """Numbers in one step."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Bytes of one step."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class View:
    """A view of a value; `at` is a meta tensor with the view's shape, strides and offset."""

    value: LoopValue
    at: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The view's shape."""
        return tuple(self.at.shape)

    @property
    def whole(self) -> bool:
        """Whether this is the value itself, in its own layout."""
        return self.at.shape == self.value.shape and self.at.storage_offset() == 0 and self.at.is_contiguous()


Operand = View | bool | int | float


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A C expression of the operands, each converted to `type` first."""

    expression: str
    operands: Sequence[Operand]
    type: torch.dtype


@dataclass(frozen=True, eq=False)
class Reduce:
    """A reduction along axes, which stay with size 1 in the value's shape if `keep`."""

    kind: Literal["sum", "max", "min"]
    source: View
    axes: tuple[int, ...]
    keep: bool


@dataclass(frozen=True, eq=False)
class AxisOp:
    """An operation along one axis, in order; the other axes of all operands are those of the value.

    cumsum       of (source,)                  running sums
    argmax, -min of (source,)                  where the first of the largest or smallest is; the axis stays with size 1
    gather       of (source, index)            source at the index
    scatter      of (start, index, source)     start, with source written at the index
    scatter_add  of (start, index, source)     start, with source added at the index
    """

    kind: Literal["cumsum", "argmax", "argmin", "gather", "scatter", "scatter_add"]
    operands: Sequence[View]
    axis: int


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix product, ... x M x K by ... x K x N, plus what its sums start with.

    With `row_mask`, only rows where it is true are read: rows on the left, or the inner axis of a sum over time.
    """

    left: View
    right: View
    start: View | None = None
    row_mask: View | None = None

    @property
    def fixed(self) -> Literal["left", "right"] | None:
        """Which side is given and the same in all steps, so that it is packed once; the right one if both are."""
        if self.right.value.constant:
            return "right"
        return "left" if self.left.value.constant else None


@dataclass(frozen=True, eq=False)
class Cat:
    """A concatenation of pieces along an axis."""

    pieces: Sequence[View]
    axis: int

    @property
    def starts(self) -> list[int]:
        """Where each piece begins along the axis."""
        return [0, *accumulate(piece.shape[self.axis] for piece in self.pieces)][:-1]


@dataclass(frozen=True, eq=False)
class TimeReduction:
    """The sum of a view over all steps: of its rows' products, its sums along axes, or of itself."""

    of: "Product | Reduce | View"


Operation = Elementwise | Reduce | AxisOp | Product | Cat | TimeReduction


def operand_views(made: Operation | None) -> list[View]:
    """The views that are read to make a value, without a product's mask."""
    match made:
        case None:
            return []
        case Elementwise(operands=several) | AxisOp(operands=several) | Cat(pieces=several):
            return [each for each in several if isinstance(each, View)]
        case Reduce(source=source):
            return [source]
        case Product(left=left, right=right, start=start):
            return [left, right] if start is None else [left, right, start]
        case TimeReduction(of=of):
            return [of] if isinstance(of, View) else operand_views(of)


def sources(made: Operation | None) -> list[LoopValue]:
    """The values that are read to make a value."""
    return [each.value for each in operand_views(made)]


def ancestors(ends: Iterable[LoopValue]) -> set[LoopValue]:
    """The values that the ends depend on, and the ends."""
    found: set[LoopValue] = set()
    stack = list(ends)
    while stack:
        value = stack.pop()
        if value not in found:
            found.add(value)
            stack += sources(value.made)
    return found


def replace_operand(made: Operation, old: LoopValue, new: LoopValue) -> Operation:
    """The same, but reading another value."""

    def instead(given: Any) -> Any:
        if isinstance(given, View):
            return View(new, given.at) if given.value is old else given
        if isinstance(given, Product | Reduce):
            return replace_operand(given, old, new)
        return [instead(each) for each in cast("list[Any]", given)] if isinstance(given, list) else given

    return replace(made, **{name: instead(given) for name, given in vars(made).items()})


def whole_view(value: LoopValue) -> View:
    """The value itself, whole."""
    return View(value, contiguous_meta(value.shape, value.dtype))


def contiguous_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor without memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def shares_storage(view: Any, of: Tensor) -> bool:
    """Whether a meta tensor is a view of another: they are of one storage."""
    if not isinstance(view, Tensor) or view._cdata == of._cdata:
        return False
    return view.untyped_storage()._cdata == of.untyped_storage()._cdata


Row = Literal["same", "step", "next", "in", "out"]
_FACTOR = {"step": "t", "next": "(t + 1)", "in": "((t + 1) & 1)", "out": "(t & 1)"}
_FIRST = {"step": 0, "next": 1}


@dataclass(frozen=True)
class MemoryLayout:
    """Layout of a view in memory. `base` is a C variable; `size`, `offset` and `strides` count numbers, not bytes."""

    base: str
    row: Row
    size: int
    """Numbers in a row."""
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def per_step(self) -> bool:
        """Whether every step has a row of its own, which is still there when the loop is over."""
        return self.row in _FIRST

    @property
    def here(self) -> str:
        """A pointer to the row of this step."""
        return self.base if self.row == "same" else f"({self.base} + {_FACTOR[self.row]} * {self.size}L)"

    @property
    def pointer(self) -> str:
        """The first element's address in this step."""
        return f"{self.here} + {self.offset}L" if self.offset else self.here

    @property
    def first(self) -> str:
        """The first element's address in the first step, of a layout with a row per step, or only one row."""
        return self.first_step().pointer

    def first_step(self) -> "MemoryLayout":
        """The first step's row as the only one."""
        if self.row == "same":
            return self
        return replace(self, base=f"({self.base} + {_FIRST[self.row]} * {self.size}L)", row="same")

    def step_stride(self, rows: int, axis: int = 0) -> int | None:
        """The stride of an axis of so many rows, if those of the next step go on with it."""
        if not self.per_step:
            return None
        if rows == 1:
            return self.size
        return self.strides[axis] if self.size == rows * self.strides[axis] else None

    def all_steps(self, rows: int, axis: int = 0) -> "MemoryLayout | None":
        """The rows of all steps behind those of the first, along this axis; None if they do not lie so."""
        stride = self.step_stride(rows, axis)
        if stride is None:
            return None
        strides = [stride if i == axis else each for i, each in enumerate(self.strides)]
        return self.first_step().with_strides(strides)

    def at(self, batch: int | None, row: str, column: str = "0") -> str:
        """The address of an element of a matrix in this step, in batch `b` if there is one."""
        text = self.pointer
        if batch is not None:
            text += f" + b * {self.strides[0]}L"
        for index, stride in ((row, self.strides[-2]), (column, self.strides[-1])):
            text += "" if index == "0" else f" + {index} * {stride}L"
        return text

    def transposed(self) -> "MemoryLayout":
        """The transposed matrix."""
        return self.with_strides((*self.strides[:-2], self.strides[-1], self.strides[-2]))

    def broadcast(self, shape: Sequence[int], over: Sequence[int]) -> "MemoryLayout":
        """As broadcast from `shape` over a larger shape."""
        missing = len(over) - len(shape)
        strides = [0 if size == 1 else step for size, step in zip(shape, self.strides, strict=True)]
        return self.with_strides((*[0] * missing, *strides))

    def select_axes(self, axes: Sequence[int]) -> "MemoryLayout":
        """Some of the axes, at the first element of the others."""
        return self.with_strides([self.strides[i] for i in axes])

    def with_strides(self, strides: Sequence[int], offset: int | None = None) -> "MemoryLayout":
        """Other elements of the same memory."""
        return replace(self, strides=tuple(strides), offset=self.offset if offset is None else offset)


class LoweringContext:
    """Values and views made so far for one function, by node of the captured graph."""

    def __init__(
        self, given: Mapping[fx.Node, View | list[View]], row_masks: Mapping[fx.Node, View] | None = None
    ) -> None:
        self.made: list[LoopValue] = []
        """Every value that was made, in order."""
        self.row_masks = row_masks or {}
        """By product, a mask of the only rows of its result that are read."""
        self.views: dict[fx.Node, View | list[View]] = dict(given)

    def view(self, node: fx.Node) -> View:
        """The view that a node stands for."""
        found = self.views[node]
        if isinstance(found, list):
            raise Unsupported(f"{node.target} yields several tensors where one is wanted")
        return found

    def add(self, shape: Sequence[int], dtype: torch.dtype, made: Operation) -> View:
        """A new value, as a view of all of it."""
        value = LoopValue(f"z{len(self.made)}", tuple(shape), dtype, made)
        self.made.append(value)
        return whole_view(value)

    def operand(self, given: object) -> Operand:
        """An argument of an elementwise operator: a tensor's view, or a number."""
        if isinstance(given, fx.Node):
            return self.view(given)
        if isinstance(given, bool | int | float):
            return given
        raise Unsupported(f"loops in C compute with plain numbers, not with {given!r}")

    def elementwise(
        self,
        expression: str,
        operands: Sequence[Operand],
        shape: Sequence[int],
        dtype: torch.dtype,
        type: torch.dtype | None = None,
    ) -> View:
        """A new elementwise value, computed in `type`, which is its own dtype if not given."""
        return self.add(shape, dtype, Elementwise(expression, list(operands), compute_dtype(type or dtype)))

    def like(self, node: fx.Node, expression: str, operands: Sequence[Operand]) -> View:
        """A new elementwise value that looks like the node's."""
        value = meta_value(node)
        return self.elementwise(expression, operands, value.shape, value.dtype)

    def copied(self, view: View, dtype: torch.dtype | None = None) -> View:
        """The elements of a view in a layout of their own, and of a dtype."""
        return self.elementwise("{0}", [view], view.shape, dtype or view.value.dtype)

    def as_dtype(self, view: View, dtype: torch.dtype) -> View:
        """The elements in a dtype; the view itself if they are."""
        return view if view.value.dtype == dtype else self.copied(view, dtype)

    def apply_view(self, view: View, apply: Callable[[Tensor], Any], push: bool = False) -> View | list[View] | None:
        """A view of a view; None if there can be none. With `push`, cheap elementwise operators are computed in it."""
        made = view.value.made
        if push and isinstance(made, Elementwise) and made.expression in CHEAP and view.whole:
            return self._pushed(view.value, made, apply)
        seen = apply(view.at)
        if isinstance(seen, list | tuple):
            return [View(view.value, each) for each in cast("list[Tensor]", seen)]
        return View(view.value, seen) if shares_storage(seen, view.at) or seen is view.at else None

    def _pushed(self, value: LoopValue, made: Elementwise, apply: Callable[[Tensor], Any]) -> View | list[View]:
        """Views of the operands instead of a view of the result."""
        seen = [apply(each.at.expand(value.shape)) if isinstance(each, View) else each for each in made.operands]

        def part(select: Callable[[Any], Any]) -> View:
            pairs = zip(made.operands, seen, strict=True)
            operands = [View(each.value, select(at)) if isinstance(each, View) else each for each, at in pairs]
            shape = next(each.shape for each in operands if isinstance(each, View))
            return self.elementwise(made.expression, operands, shape, value.dtype, made.type)

        counts = [len(cast("Sequence[Tensor]", each)) for each in seen if isinstance(each, list | tuple)]
        return [part(itemgetter(i)) for i in range(counts[0])] if counts else part(lambda at: at)


def meta_value(node: fx.Node) -> Tensor:
    """The fake tensor of a node, from the capture: its shape and dtype count."""
    return cast(Tensor, node.meta["val"])


def schema_arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names that the operator's schema gives them, with defaults."""
    arguments = cast(Any, node.target)._schema.arguments
    given = dict(zip((each.name for each in arguments), node.args, strict=False)) | node.kwargs
    return {each.name: given.get(each.name, each.default_value) for each in arguments}


def promoted_dtype(operands: Sequence[Operand]) -> torch.dtype:
    """The dtype that one or two operands promote to."""
    like = [contiguous_meta((1,) * len(o.shape), o.value.dtype) if isinstance(o, View) else o for o in operands]
    return torch.result_type(cast(Any, like[0]), cast(Any, like[-1]))
