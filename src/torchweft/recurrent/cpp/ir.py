"""Intermediate representation: values of one step, the operations that compute them, and their layout in memory.

The nodes of PyTorch's graph do not suffice: loops need each operand's strides in the C text, and the row of memory that
a step reads or writes.

    LoopValue      shape and dtype of one step's tensor, which an operation computes, or which is an argument
    Operation      Elementwise, Reduce, AxisOp, Product, Cat, or TimeReduction, a sum over all steps
    View           elements of a value, by strides in its contiguous layout
    MemoryLayout   place of a value's elements: a C variable, the row of it that step t uses, and strides
    Argument       memory of the caller, by kind and index

A view costs nothing: PyTorch computes its strides on a tensor of the "meta" device, which has no memory. Nodes of the
graph that are only views therefore never become values here.

row      row of memory that step t uses                          example
same     the only one                                            weights; a value read only in the step that computes it
step     row t                                                   inputs, outputs, values saved for backward
next     row t + 1                                               new states: the states' memory has T + 1 rows
in, out  two rows in turn: the one that the previous step wrote, carried gradients
         and the other one

A view of a cheap elementwise value is pushed to its operands, so that slices of pre-activations are never stored:
``z = a + b, i = z[:, :4]`` becomes ``i = a[:, :4] + b[:, :4]``, and z is never computed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from torchweft.core.errors import WeftError

# The dtypes that loops can hold, and their names in C.
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

# Stored as such, but computed in float32, as PyTorch does on a CPU: each operator's result is rounded.
REDUCED_PRECISION = (torch.bfloat16, torch.float16)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in REDUCED_PRECISION else dtype


class Unsupported(WeftError, RuntimeError):
    """The generated loops do not know an operator or a dtype of this cell. The message names it."""


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise Unsupported for a dtype that loops cannot hold. The message calls its tensor `what`."""
    if dtype not in C_TYPES:
        raise Unsupported(f"{what} is of {dtype}; loops in C hold {', '.join(map(str, C_TYPES))}")


# Expressions that are computed at their readers if these read only slices of them.
CHEAP = {"({0}+{1})", "({0}-{1})", "({0}*{1})", "(-{0})", "({0}+{1}*{2})", "({0}-{1}*{2})"}


# Compared by identity, here and below: two values with equal fields are still two values, and they are keys of tables.
@dataclass(eq=False)
class LoopValue:
    """A tensor that every step computes, or that is the same in all steps (`varies` is False)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: "Operation | None" = None
    varies: bool = True

    def __repr__(self) -> str:
        return self.name

    @property
    def is_constant(self) -> bool:
        """Whether this is an argument that is the same in all steps."""
        return not self.varies and self.operation is None

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class View:
    """A view of a value. `at` is a meta tensor with the view's shape, strides and offset."""

    value: LoopValue
    at: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.at.shape)

    @property
    def is_whole(self) -> bool:
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
    """An operation along one axis, in order. The other axes of all operands are those of the value.

    cumsum       of (source,)                  running sums
    argmax, -min of (source,)                  index of the first largest or smallest; the axis stays with size 1
    gather       of (source, index)            source at the index
    scatter      of (start, index, source)     start, with source written at the index
    scatter_add  of (start, index, source)     start, with source added at the index
    """

    kind: Literal["cumsum", "argmax", "argmin", "gather", "scatter", "scatter_add"]
    operands: Sequence[View]
    axis: int


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix product, ... x M x K by ... x K x N, plus the start of its sums."""

    # With `row_mask`, only rows where it is true are read: rows of the left side, or the inner axis of a sum over time.

    left: View
    right: View
    start: View | None = None
    row_mask: View | None = None

    @property
    def fixed(self) -> Literal["left", "right"] | None:
        """The side that is the same in all steps, which is packed once. The right one if both are."""
        if self.right.value.is_constant:
            return "right"
        return "left" if self.left.value.is_constant else None


@dataclass(frozen=True, eq=False)
class Cat:
    """A concatenation of pieces along an axis."""

    pieces: Sequence[View]
    axis: int

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(piece.shape[self.axis] for piece in self.pieces)][:-1]


@dataclass(frozen=True, eq=False)
class TimeReduction:
    """The sum of a view over all steps: of its rows' products, its sums along axes, or of itself."""

    of: "Product | Reduce | View"


Operation = Elementwise | Reduce | AxisOp | Product | Cat | TimeReduction


def operand_views(operation: Operation | None) -> list[View]:
    """The views that an operation reads, without a product's mask."""
    match operation:
        case None:
            return []
        case Elementwise(operands=operands) | AxisOp(operands=operands) | Cat(pieces=operands):
            return [operand for operand in operands if isinstance(operand, View)]
        case Reduce(source=source):
            return [source]
        case Product(left=left, right=right, start=start):
            return [left, right] if start is None else [left, right, start]
        case TimeReduction(of=of):
            return [of] if isinstance(of, View) else operand_views(of)


def operand_values(operation: Operation | None) -> list[LoopValue]:
    return [view.value for view in operand_views(operation)]


def with_ancestors(ends: Iterable[LoopValue]) -> set[LoopValue]:
    reached: set[LoopValue] = set()
    stack = list(ends)
    while stack:
        value = stack.pop()
        if value not in reached:
            reached.add(value)
            stack += operand_values(value.operation)
    return reached


def with_operand(operation: Operation, old: LoopValue, new: LoopValue) -> Operation:

    def replaced(field: Any) -> Any:
        if isinstance(field, View):
            return View(new, field.at) if field.value is old else field
        if isinstance(field, Product | Reduce):
            return with_operand(field, old, new)
        return [replaced(item) for item in cast("list[Any]", field)] if isinstance(field, list) else field

    return replace(operation, **{name: replaced(field) for name, field in vars(operation).items()})


def whole_view(value: LoopValue) -> View:
    return View(value, contiguous_meta(value.shape, value.dtype))


def contiguous_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def shares_storage(view: Any, of: Tensor) -> bool:
    """Whether a meta tensor is a view of another one: another tensor on the same storage."""
    # Meta tensors have no data pointer to compare, so the identity of the C++ objects decides.
    if not isinstance(view, Tensor) or view._cdata == of._cdata:
        return False
    return view.untyped_storage()._cdata == of.untyped_storage()._cdata


Row = Literal["same", "step", "next", "in", "out"]
# In the C text, t is the step. A carried gradient has two rows: backward step t reads ("in") the one that step t + 1
# wrote ("out"). It writes the other row, because it still needs the old gradient.
_ROW_INDEX = {"step": "t", "next": "(t + 1)", "in": "((t + 1) & 1)", "out": "(t & 1)"}
_FIRST_ROW = {"step": 0, "next": 1}

ArgumentKind = Literal[
    "input", "state", "output", "saved", "constant", "output gradient", "carried gradient", "added gradient",
    "input gradient", "parameter gradient", "from torch", "for torch",
]  # fmt: skip
# The beginning of an argument's name in the C text.
_PREFIXES: dict[ArgumentKind, str] = {
    "input": "x", "state": "h", "output": "y", "saved": "v", "constant": "c", "output gradient": "dy",
    "carried gradient": "dh", "added gradient": "a", "input gradient": "dx", "parameter gradient": "dp",
    "from torch": "u", "for torch": "g",
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """Memory of the caller: the one of this index among those of its kind. `size` counts the numbers of a row."""

    kind: ArgumentKind
    index: int
    dtype: torch.dtype
    size: int
    row: Row

    @property
    def name(self) -> str:
        return f"{_PREFIXES[self.kind]}{self.index}"


@dataclass(frozen=True)
class MemoryLayout:
    """Layout of a view in memory. `base` is a C variable. `size`, `offset` and `strides` count numbers, not bytes."""

    base: str
    row: Row
    size: int  # numbers in a row
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def contiguous(cls, value: LoopValue, base: str, row: Row) -> "MemoryLayout":
        return cls(base, row, value.size, contiguous_meta(value.shape, value.dtype).stride())

    @property
    def is_per_step(self) -> bool:
        """Whether every step has a row of its own, which is still valid after the loop."""
        return self.row in _FIRST_ROW

    @property
    def row_pointer(self) -> str:
        return self.base if self.row == "same" else f"({self.base} + {_ROW_INDEX[self.row]} * {self.size}L)"

    @property
    def pointer(self) -> str:
        return f"{self.row_pointer} + {self.offset}L" if self.offset else self.row_pointer

    @property
    def first_pointer(self) -> str:
        """The first element's address in the first step, of a layout with a row per step or only one row."""
        return self.first_step().pointer

    def first_step(self) -> "MemoryLayout":
        if self.row == "same":
            return self
        return replace(self, base=f"({self.base} + {_FIRST_ROW[self.row]} * {self.size}L)", row="same")

    def step_stride(self, rows: int, axis: int = 0) -> int | None:
        """The stride along an axis of so many rows, if the next step's rows continue it, else None."""
        if not self.is_per_step:
            return None
        # The next step begins `size` numbers later. Its rows continue the axis only if this step's fill that space.
        if rows == 1:
            return self.size
        return self.strides[axis] if self.size == rows * self.strides[axis] else None

    def all_steps(self, rows: int, axis: int = 0) -> "MemoryLayout | None":
        """The rows of all steps as one long axis, or None if they are not evenly spaced."""
        stride = self.step_stride(rows, axis)
        if stride is None:
            return None
        strides = [stride if i == axis else old for i, old in enumerate(self.strides)]
        return self.first_step().with_strides(strides)

    def address_of(self, batch: int | None, row: str, column: str = "0") -> str:
        """The address of an element of a matrix in this step, in batch `b` if there is one."""
        text = self.pointer
        if batch is not None:
            text += f" + b * {self.strides[0]}L"
        for index, stride in ((row, self.strides[-2]), (column, self.strides[-1])):
            text += "" if index == "0" else f" + {index} * {stride}L"
        return text

    def transposed(self) -> "MemoryLayout":
        return self.with_strides((*self.strides[:-2], self.strides[-1], self.strides[-2]))

    def broadcast_to(self, shape: Sequence[int], larger: Sequence[int]) -> "MemoryLayout":
        missing = len(larger) - len(shape)
        strides = [0 if size == 1 else stride for size, stride in zip(shape, self.strides, strict=True)]
        return self.with_strides((*[0] * missing, *strides))

    def select_axes(self, axes: Sequence[int]) -> "MemoryLayout":
        """Some of the axes, at the first element of the others."""
        return self.with_strides([self.strides[i] for i in axes])

    def with_strides(self, strides: Sequence[int], offset: int | None = None) -> "MemoryLayout":
        return replace(self, strides=tuple(strides), offset=self.offset if offset is None else offset)


class LoweringContext:
    """The values and views of one function so far, by node of the captured graph."""

    def __init__(
        self, views: Mapping[fx.Node, View | list[View]], row_masks: Mapping[fx.Node, View] | None = None
    ) -> None:
        self.values: list[LoopValue] = []  # every computed value, in order
        self.views: dict[fx.Node, View | list[View]] = dict(views)  # several for an operator with several results
        self.row_masks = row_masks or {}  # for some products, a mask of the only rows of the result that are read

    def view_of(self, node: fx.Node) -> View:
        view = self.views[node]
        if isinstance(view, list):
            raise Unsupported(f"{node.target} yields several tensors where one is wanted")
        return view

    def as_operand(self, argument: object) -> Operand:
        """An argument of an elementwise operator: a tensor's view, or a number."""
        if isinstance(argument, fx.Node):
            return self.view_of(argument)
        if isinstance(argument, bool | int | float):
            return argument
        raise Unsupported(f"loops in C compute with plain numbers, not with {argument!r}")

    def add_value(self, shape: Sequence[int], dtype: torch.dtype, operation: Operation) -> View:
        value = LoopValue(f"z{len(self.values)}", tuple(shape), dtype, operation)
        self.values.append(value)
        return whole_view(value)

    def add_elementwise(
        self,
        expression: str,
        operands: Sequence[Operand],
        shape: Sequence[int],
        dtype: torch.dtype,
        type: torch.dtype | None = None,
    ) -> View:
        """A new elementwise value, computed in `type`, by default its own dtype."""
        return self.add_value(shape, dtype, Elementwise(expression, list(operands), compute_dtype(type or dtype)))

    def add_result(self, node: fx.Node, expression: str, operands: Sequence[Operand]) -> View:
        value = meta_value(node)
        return self.add_elementwise(expression, operands, value.shape, value.dtype)

    def add_copy(self, view: View, dtype: torch.dtype | None = None) -> View:
        """The elements of a view in a layout of their own, optionally in another dtype."""
        return self.add_elementwise("{0}", [view], view.shape, dtype or view.value.dtype)

    def as_dtype(self, view: View, dtype: torch.dtype) -> View:
        return view if view.value.dtype == dtype else self.add_copy(view, dtype)

    def apply_view(self, view: View, apply: Callable[[Tensor], Any], push: bool = False) -> View | list[View] | None:
        """A view of a view, or None if PyTorch would copy. With `push`, cheap expressions are computed in that view."""
        operation = view.value.operation
        if push and isinstance(operation, Elementwise) and operation.expression in CHEAP and view.is_whole:
            return self._push_to_operands(view.value, operation, apply)
        # PyTorch computes the strides, on a tensor without memory. So every view of PyTorch is known here.
        viewed = apply(view.at)
        if isinstance(viewed, list | tuple):
            return [View(view.value, at) for at in cast("list[Tensor]", viewed)]
        return View(view.value, viewed) if shares_storage(viewed, view.at) or viewed is view.at else None

    def _push_to_operands(
        self, value: LoopValue, operation: Elementwise, apply: Callable[[Tensor], Any]
    ) -> View | list[View]:
        """Apply a view to the operands, and compute the expression of those, instead of viewing the result."""
        # Operands are expanded first: the view is meant for the result's shape, and expanding costs nothing.
        viewed = [apply(x.at.expand(value.shape)) if isinstance(x, View) else x for x in operation.operands]

        def part(select: Callable[[Any], Any]) -> View:
            pairs = zip(operation.operands, viewed, strict=True)
            operands = [View(x.value, select(at)) if isinstance(x, View) else x for x, at in pairs]
            shape = next(x.shape for x in operands if isinstance(x, View))
            return self.add_elementwise(operation.expression, operands, shape, value.dtype, operation.type)

        counts = [len(cast("Sequence[Tensor]", parts)) for parts in viewed if isinstance(parts, list | tuple)]
        return [part(itemgetter(i)) for i in range(counts[0])] if counts else part(lambda at: at)


def meta_value(node: fx.Node) -> Tensor:
    return cast(Tensor, node.meta["val"])


def operator_schema(node: fx.Node) -> Any:
    """The schema of a node's operator: arguments, defaults, aliases. None for functions of Python such as getitem."""
    return getattr(node.target, "_schema", None)


def schema_arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names that the operator's schema gives them, with defaults."""
    arguments = operator_schema(node).arguments
    named = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    return {argument.name: named.get(argument.name, argument.default_value) for argument in arguments}


def promoted_dtype(operands: Sequence[Operand]) -> torch.dtype:
    # Only the number of axes counts for promotion, so tensors of size 1 will do.
    like = [contiguous_meta((1,) * len(o.shape), o.value.dtype) if isinstance(o, View) else o for o in operands]
    return torch.result_type(cast(Any, like[0]), cast(Any, like[-1]))
