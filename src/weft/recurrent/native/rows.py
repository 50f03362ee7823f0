"""Whether the rows of a batch never meet within a step, so that threads may take rows of their own through all steps.

A value's *row axis* is the axis along which its elements depend only on the same row of what was computed before:

    h (N, H) axis 0    h W  axis 0    (h W).t()  axis 1    softmax(h, 1)  axis 0    h.mean(0)  rows meet: none

Values that are given, or depend on such only, are there for every thread: they put no constraint.
"""

from collections.abc import Mapping, Sequence
from math import prod

from weft.recurrent.native.values import AxisOp, Cat, Point, Product, Reduce, Ref, Value, refs

Axes = Mapping[Value, int | None]
"""The row axis of each value of a loop; None for one that every thread computes for itself."""


def row_axes(loop: Sequence[Value], carried: Sequence[Value]) -> Axes | None:
    """The row axis of every value in the loop, or None if the rows cannot be parted."""
    if not carried or any(not each.shape or each.shape[0] != carried[0].shape[0] for each in carried):
        return None
    rows = carried[0].shape[0]
    found: dict[Value, int | None] = dict.fromkeys(carried, 0)
    for value in loop:
        bound = [(ref, axis) for ref in refs(value.made) if (axis := found.get(ref.value)) is not None]
        axes = {_through(value, ref, axis_in_view(ref, axis, rows)) for ref, axis in bound}
        if len(axes) > 1 or None in axes:
            return None
        if not axes and isinstance(value.made, AxisOp) and value.made.kind.startswith("scatter"):
            return None  # it is built up in memory, which threads that all compute it would share
        found[value] = axes.pop() if axes else None
    return found


def axis_in_view(ref: Ref, axis: int, rows: int) -> int | None:
    """Where a value's row axis went in a view of it; None if it is split, joined with another, shifted or cut.

    value (A, rows, B)   one element:  a * rows * B + row * B + b        stride B, and what moves b stays below B,
                                                                         what moves a is a multiple of rows * B
    """
    stride = prod(ref.value.shape[axis + 1 :])
    sizes, strides, offset = ref.at.shape, ref.at.stride(), int(ref.at.storage_offset())
    at = [i for i, size in enumerate(sizes) if size == rows and strides[i] == stride]
    if len(at) != 1 or offset // max(stride, 1) % rows:
        return None
    inner = offset % max(stride, 1)
    for i, (size, step) in enumerate(zip(sizes, strides, strict=True)):
        if i == at[0] or size == 1 or step == 0:
            continue
        if step < stride:
            inner += (size - 1) * step
        elif step % (rows * stride):
            return None
    return at[0] if inner < stride else None


def _through(value: Value, ref: Ref, axis: int | None) -> int | None:
    """Where the row axis of an operand is in the result; None if the operator mixes rows."""
    if axis is None:
        return None
    match value.made:
        case Point():
            return axis + len(value.shape) - len(ref.shape)
        case Reduce(axes=axes, keep=keep):
            return None if axis in axes else axis if keep else axis - sum(each < axis for each in axes)
        case AxisOp(axis=along):
            return None if axis == along else axis
        case Cat(axis=joined):
            return None if axis == joined else axis
        case Product() as made:
            return _through_product(made, ref, axis)
        case _:
            return None


def _through_product(made: Product, ref: Ref, axis: int) -> int | None:
    """Batches stay what they are; else rows must be rows on the left, or columns on the right.

    Threads cannot share the columns of a packed weight by rows of the batch.
    """
    dims = len(ref.shape)
    rows, columns = dims - 2, dims - 1
    if axis < rows:
        return axis
    if ref is made.start:
        return None if made.fixed is not None and axis == (columns if made.fixed == "right" else rows) else axis
    return axis if axis == (rows if ref is made.left else columns) else None
