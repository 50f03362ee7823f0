"""What a generated loop is about: values of one step, how each is made, and how each is looked at.

    Value   shape and dtype of one step's tensor; made by Point, Reduce, AxisOp, Product or Cat, or given (Start)
    Ref     a view of a value: where its elements lie in the value's natural, contiguous layout

A view costs nothing: PyTorch itself works out its strides, on a tensor of the "meta" device that has no memory.
Values of the graph that are only views therefore never become values here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor


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
