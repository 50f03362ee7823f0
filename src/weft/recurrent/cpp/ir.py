"""Intermediate representation: values of one step, how each is computed, where its elements lie, and what builds it.

    Value   shape and dtype of one step's tensor; made by Point, Reduce, AxisOp, Product or Cat, or an argument
    Ref     a view of a value: where its elements lie in the value's natural, contiguous layout
    Place   where a value's elements lie: a C variable, the row of it that step t uses, and strides

A view costs nothing: PyTorch itself works out its strides, on a tensor of the "meta" device that has no memory.
Nodes of the graph that are only views therefore never become values here.

row      row of memory that step t uses                          example
same     the only one                                            weights; a value read only in the step that makes it
step     row t                                                   inputs, outputs, what is saved for backward
next     row t + 1                                               new states: the states' memory has T + 1 rows
in, out  two rows in turn: the one the step before wrote,        carried gradients
         and the other one

A view of a cheap elementwise value is pushed to its operands, so that the slices of pre-activations that most gated
cells take are never stored:

    z = a + b        i = z[:, :4]        becomes        i = a[:, :4] + b[:, :4]        and z is never made
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from weft.core.errors import WeftError

TYPES = {
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


SMALL = (torch.bfloat16, torch.float16)
"""Held, but computed with in float32, as PyTorch does on a CPU: each operator's result is rounded."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which C computes what is of this one."""
    return torch.float32 if dtype in SMALL else dtype


class Unsupported(WeftError, RuntimeError):
    """The generated loops do not know an operator or a dtype of this cell; the message names it."""


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise Unsupported for a dtype that loops cannot hold; `what` has it."""
    if dtype not in TYPES:
        raise Unsupported(f"{what} is of {dtype}; loops in C hold {', '.join(map(str, TYPES))}")


CHEAP = {"({0}+{1})", "({0}-{1})", "({0}*{1})", "(-{0})", "({0}+{1}*{2})", "({0}-{1}*{2})"}
"""Expressions that are computed where they are read, if only slices of them are."""


@dataclass(eq=False)
class Value:
    """A tensor that is made anew in every step, or is the same in all (`varies` is False)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    made: "Made | None" = None
    varies: bool = True

    def __repr__(self) -> str:
        return self.name

    @property
    def still(self) -> bool:
        """Whether it is given, and the same in all steps."""
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
class Ref:
    """A view of a value; `at` is a meta tensor with the view's shape, strides and offset."""

    value: Value
    at: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The view's shape."""
        return tuple(self.at.shape)

    @property
    def whole(self) -> bool:
        """Whether this is the value itself, in its own layout."""
        return self.at.shape == self.value.shape and self.at.storage_offset() == 0 and self.at.is_contiguous()


Operand = Ref | bool | int | float


@dataclass(frozen=True, eq=False)
class Point:
    """Elementwise: a C expression of the operands, each converted to `type` first."""

    expression: str
    operands: Sequence[Operand]
    type: torch.dtype


@dataclass(frozen=True, eq=False)
class Reduce:
    """Along axes, which stay with size 1 in the value's shape if `keep`."""

    kind: Literal["sum", "max", "min"]
    source: Ref
    axes: tuple[int, ...]
    keep: bool


@dataclass(frozen=True, eq=False)
class AxisOp:
    """Along one axis, in order; the other axes of all operands are those of the value.

    cumsum       of (source,)                  running sums
    argmax, -min of (source,)                  where the first of the largest or smallest is; the axis stays with size 1
    gather       of (source, index)            source at the index
    scatter      of (start, index, source)     start, with source written at the index
    scatter_add  of (start, index, source)     start, with source added at the index
    """

    kind: Literal["cumsum", "argmax", "argmin", "gather", "scatter", "scatter_add"]
    operands: Sequence[Ref]
    axis: int


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix product, ... x M x K by ... x K x N, plus what its sums start with.

    With `live`, a mask of the batch's rows, nobody wants the others: rows on the left, or the inner axis of a total.
    """

    left: Ref
    right: Ref
    start: Ref | None = None
    live: Ref | None = None

    @property
    def fixed(self) -> Literal["left", "right"] | None:
        """Which side is given and the same in all steps, so that it is packed once; the right one if both are."""
        if self.right.value.still:
            return "right"
        return "left" if self.left.value.still else None


@dataclass(frozen=True, eq=False)
class Cat:
    """Pieces one behind the other along an axis."""

    pieces: Sequence[Ref]
    axis: int


@dataclass(frozen=True, eq=False)
class Total:
    """The sum of a view over all steps: of its rows' products, its sums along axes, or of itself."""

    of: "Product | Reduce | Ref"


Made = Point | Reduce | AxisOp | Product | Cat | Total


def refs(made: Made | None) -> list[Ref]:
    """The views that are read to make a value."""
    match made:
        case None:
            return []
        case Point(operands=operands):
            return [each for each in operands if isinstance(each, Ref)]
        case Reduce(source=source):
            return [source]
        case AxisOp(operands=operands):
            return list(operands)
        case Product(left=left, right=right, start=start):
            return [each for each in (left, right, start) if each is not None]
        case Cat(pieces=pieces):
            return list(pieces)
        case Total(of=of):
            return [of] if isinstance(of, Ref) else refs(of)


def sources(made: Made | None) -> list[Value]:
    """The values that are read to make a value."""
    return [each.value for each in refs(made)]


def leading(ends: Iterable[Value]) -> set[Value]:
    """The values that some end is made of, and the ends."""
    found: set[Value] = set()
    stack = list(ends)
    while stack:
        value = stack.pop()
        if value not in found:
            found.add(value)
            stack += sources(value.made)
    return found


def replaced(made: Made, old: Value, new: Value) -> Made:
    """The same, but reading another value."""

    def ref(given: Ref) -> Ref:
        return Ref(new, given.at) if given.value is old else given

    match made:
        case Point(operands=operands):
            return replace(made, operands=[ref(each) if isinstance(each, Ref) else each for each in operands])
        case Reduce(source=source):
            return replace(made, source=ref(source))
        case AxisOp(operands=operands):
            return replace(made, operands=[ref(each) for each in operands])
        case Product(left=left, right=right, start=start):
            return replace(made, left=ref(left), right=ref(right), start=None if start is None else ref(start))
        case Cat(pieces=pieces):
            return replace(made, pieces=[ref(each) for each in pieces])
        case Total(of=of):
            return Total(ref(of) if isinstance(of, Ref) else cast("Product | Reduce", replaced(of, old, new)))


def seen(value: Value) -> Ref:
    """The value itself, whole."""
    return Ref(value, natural(value.shape, value.dtype))


def natural(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor without memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def shares(view: Any, of: Tensor) -> bool:
    """Whether a meta tensor is a view of another: they are of one storage."""
    return isinstance(view, Tensor) and view._cdata != of._cdata and _storage(view) == _storage(of)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(eq=False)
class Store:
    """Every value made for one function, by order of making."""

    made: list[Value] = field(default_factory=list[Value])

    def add(self, shape: Sequence[int], dtype: torch.dtype, made: Made) -> Ref:
        """A new value, seen whole."""
        value = Value(f"z{len(self.made)}", tuple(shape), dtype, made)
        self.made.append(value)
        return seen(value)


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


View = Callable[[Tensor], Any]


class Maker:
    """Holds what was given and what was made, by node."""

    def __init__(self, given: Mapping[fx.Node, Ref | list[Ref]], live: Mapping[fx.Node, Ref] | None = None) -> None:
        self.store = Store()
        self.live = live or {}
        """By product, a mask of the only rows that anybody wants."""
        self.refs: dict[fx.Node, Ref | list[Ref]] = dict(given)

    def ref(self, node: fx.Node) -> Ref:
        """The view that a node stands for."""
        found = self.refs[node]
        if isinstance(found, list):
            raise Unsupported(f"{node.target} yields several tensors where one is wanted")
        return found

    def operand(self, given: object) -> Operand:
        """An argument of an elementwise operator: a tensor's view, or a number."""
        if isinstance(given, fx.Node):
            return self.ref(given)
        if isinstance(given, bool | int | float):
            return given
        raise Unsupported(f"loops in C compute with plain numbers, not with {given!r}")

    def point(
        self,
        expression: str,
        operands: Sequence[Operand],
        shape: Sequence[int],
        dtype: torch.dtype,
        type: torch.dtype | None = None,
    ) -> Ref:
        """A new elementwise value, computed in `type`, which is its own dtype if not given."""
        return self.store.add(shape, dtype, Point(expression, list(operands), computed_in(type or dtype)))

    def like(self, node: fx.Node, expression: str, operands: Sequence[Operand]) -> Ref:
        """A new elementwise value that looks like the node's."""
        value = value_of(node)
        return self.point(expression, operands, value.shape, value.dtype)

    def copied(self, ref: Ref, dtype: torch.dtype | None = None) -> Ref:
        """The elements of a view in a layout of their own, and of a dtype."""
        return self.point("{0}", [ref], ref.shape, dtype or ref.value.dtype)

    def as_dtype(self, ref: Ref, dtype: torch.dtype) -> Ref:
        """The elements in a dtype; the view itself if they are."""
        return ref if ref.value.dtype == dtype else self.copied(ref, dtype)

    def look(self, ref: Ref, view: View, push: bool = False) -> Ref | list[Ref] | None:
        """A view of a view; None if there can be none. With `push`, cheap elementwise operators are computed in it."""
        made = ref.value.made
        if push and isinstance(made, Point) and made.expression in CHEAP and ref.whole:
            return self._pushed(ref.value, made, view)
        seen = view(ref.at)
        if isinstance(seen, list | tuple):
            return [Ref(ref.value, each) for each in cast("list[Tensor]", seen)]
        return Ref(ref.value, seen) if shares(seen, ref.at) or seen is ref.at else None

    def _pushed(self, value: Value, made: Point, view: View) -> Ref | list[Ref]:
        """Looks of the operands instead of a look of what is made of them."""
        several = isinstance(view(natural(value.shape, value.dtype)), list | tuple)

        def looks(operand: Operand) -> list[Operand]:
            if not isinstance(operand, Ref):
                return [operand]
            seen = view(operand.at.expand(value.shape))
            return [Ref(operand.value, each) for each in (cast("list[Tensor]", seen) if several else [seen])]

        columns = [looks(each) for each in made.operands]
        found: list[Ref] = []
        for i in range(max(len(each) for each in columns)):
            operands = [each[i if len(each) > 1 else 0] for each in columns]
            shape = next(each.shape for each in operands if isinstance(each, Ref))
            found.append(self.point(made.expression, operands, shape, value.dtype, made.type))
        return found if several else found[0]


def value_of(node: fx.Node) -> Tensor:
    """What the node yielded when the step was captured: its shape and dtype count."""
    return cast(Tensor, node.meta["val"])


def arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names that the operator's schema gives them, with defaults."""
    schema = cast(Any, node.target)._schema
    found: dict[str, Any] = {}
    for i, each in enumerate(schema.arguments):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(each.name, each.default_value)
        found[each.name] = given
    return found


def promoted(operands: Sequence[Operand]) -> torch.dtype:
    """The dtype that one or two operands promote to."""
    like = [natural((1,) * len(o.shape), o.value.dtype) if isinstance(o, Ref) else o for o in operands]
    if len(like) == 1:
        return like[0].dtype if isinstance(like[0], Tensor) else torch.tensor(like[0]).dtype
    one, other = like
    return torch.result_type(cast(Any, one), cast(Any, other))
