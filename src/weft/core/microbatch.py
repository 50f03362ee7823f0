"""Micro-batches: a mini-batch is cut along one axis, and the results are joined, exactly.

    value   {"x": 7 rows, "mask": 7 rows, "scale": 0.5}       chunks = 3
              x      [ 0 1 2 | 3 4 | 5 6 ]     cut: views, larger pieces first, sizes differ by at most one
              mask   [ 0 1 2 | 3 4 | 5 6 ]
              scale    0.5     0.5   0.5       not a tensor: every micro-batch gets it whole
                        |       |     |
                       y0      y1    y2        one result each
              join   [ 0 1 2 3 4 5 6 ]

Planning and doing are apart: a plan is a small value made once per step, which cuts or joins the flat leaves
on the way forward and takes their gradients the other way. ``split`` and ``join`` are inverse to each other;
so are ``pad`` and ``unpad``. Tensors of different length in one mini-batch are an error, never cut silently.

Micro-batches as the unit of pipelining are GPipe's idea (arXiv 1811.06965).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import BatchError, listed
from weft.core.microbatch_join import JoinPlan, common_structure, cut, has_axis, plan_join
from weft.core.tree import Structure, flatten, map_leaves, spread, structure_paths, unflatten

__all__ = [
    "JoinPlan",
    "NoChunk",
    "SplitPlan",
    "common_structure",
    "join",
    "micro_sizes",
    "pad",
    "plan_join",
    "plan_split",
    "split",
    "unpad",
]


class NoChunk:
    """Wraps a value, nested or not, that every micro-batch gets whole, such as one mask for all rows."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"NoChunk({self.value!r})"


def micro_sizes(rows: int, chunks: int) -> tuple[int, ...]:
    """How many rows each micro-batch gets: at most one apart, larger ones first, none empty.

    Fewer rows than chunks give one micro-batch per row. No rows at all give one empty micro-batch.
    Raises ``BatchError`` if ``chunks`` is below one.
    """
    if chunks < 1:
        raise BatchError(f"chunks is {chunks}, but a mini-batch is cut into at least one micro-batch")
    pieces = max(1, min(rows, chunks))
    base, larger = divmod(rows, pieces)
    return (base + 1,) * larger + (base,) * (pieces - larger)


@dataclass(frozen=True)
class SplitPlan:
    """How one mini-batch is cut, and how the gradients of its micro-batches are joined.

    ``structure`` is the nesting of the value without ``NoChunk``; ``sizes`` the rows of each micro-batch;
    ``axes`` the axis along which each leaf is cut, ``None`` for one that goes whole to every micro-batch.
    """

    structure: Structure
    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]

    def split(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """For each micro-batch its flat leaves. Slices are views; a single one is the tensor itself."""
        count = len(self.sizes)
        columns = [
            [leaf] * count if axis is None else cut(leaf, self.sizes, axis)
            for leaf, axis in zip(leaves, self.axes, strict=True)
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    def join_gradients(self, index: int, pieces: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
        """The gradient of leaf ``index`` out of one gradient (or ``None``) per micro-batch.

        A leaf that was cut gets their concatenation, with zeros for a missing piece; one that went whole gets
        their sum, in the order of the micro-batches. ``like`` is the leaf. ``None`` if no piece is there.
        """
        present = [piece for piece in pieces if piece is not None]
        if not present:
            return None
        axis = self.axes[index]
        if axis is None:
            # Neither an in-place sum nor sum(): a piece may be shared, and sum() would add a zero first.
            return list(accumulate(present, torch.add))[-1]
        if len(self.sizes) == 1:
            return present[0]
        filled = [
            _rows_like(like, size, axis, 0) if piece is None else piece
            for piece, size in zip(pieces, self.sizes, strict=True)
        ]
        return torch.cat(filled, axis)


def plan_split(value: Any, chunks: int, *, axis: Any = 0, where: str = "input") -> tuple[SplitPlan, list[Any]]:
    """Plan how to cut ``value`` into at most ``chunks`` micro-batches; also its leaves, without ``NoChunk``.

    Tensors with at least one dimension are cut along ``axis``: an int for all of them, or nested as ``value`` is
    (see :func:`weft.core.tree.spread`). Tensors without dimensions or with ``None`` for an axis, other objects and
    what stands in ``NoChunk`` go whole to every micro-batch. ``where`` is the value's name in messages.

    Raises ``BatchError`` if ``chunks`` is below one, if there is no tensor to cut, if one has no such axis,
    if their lengths along it differ, or if one is sparse or nested; it names all of them. Raises ``SpecError`` if
    ``axis`` is not nested as ``value`` is.
    """
    leaves, structure = flatten(value)
    wanted: list[int | None] = spread(axis, structure, where)
    if any(isinstance(leaf, NoChunk) for leaf in leaves):
        leaves, structure, wanted = _unwrap(leaves, structure, wanted)
    axes = tuple(
        each if isinstance(leaf, Tensor) and leaf.dim() > 0 else None for leaf, each in zip(leaves, wanted, strict=True)
    )
    if chunks > 1:
        _check_dense(leaves, structure, axes, where)
    rows = _common_rows(leaves, structure, axes, where)
    if rows is None:
        raise BatchError(
            f"{where}: there is no tensor to cut into micro-batches along axis {axis} "
            f"(saw {_kinds(leaves)}); give at least one tensor with a batch axis that is not in NoChunk"
        )
    return SplitPlan(structure, micro_sizes(rows, chunks), axes), leaves


def split(value: Any, chunks: int, *, axis: int = 0) -> list[Any]:
    """The micro-batches of ``value``, nested as it is. Raises ``BatchError`` as :func:`plan_split` does."""
    plan, leaves = plan_split(value, chunks, axis=axis)
    return [unflatten(plan.structure, piece) for piece in plan.split(leaves)]


def join(pieces: Sequence[Any], *, axis: int = 0) -> Any:
    """The inverse of :func:`split`. Raises ``BatchError`` that lists all that cannot be joined."""
    if not pieces:
        raise BatchError("there is no micro-batch to join")
    flat = [flatten(piece) for piece in pieces]
    structure = common_structure([piece[1] for piece in flat])
    columns = [piece[0] for piece in flat]
    return unflatten(structure, plan_join(columns, structure, axis=axis).join(columns))


def pad(value: Any, rows: int, *, axis: int = 0, fill: int | float = 0) -> Any:
    """Every tensor of ``value`` lengthened along ``axis`` to ``rows``; new rows at the end hold ``fill``.

    Other leaves, tensors without dimensions and ``NoChunk`` stay as they are. Raises ``BatchError`` if the
    tensors differ in length or are longer than ``rows``.
    """
    present = _rows_of(value, axis)
    if present is not None and present > rows:
        raise BatchError(f"{present} rows along axis {axis} cannot be padded to {rows} rows; use unpad")

    def lengthen(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[axis] == rows:
            return leaf
        return torch.cat([leaf, _rows_like(leaf, rows - leaf.shape[axis], axis, fill)], axis)

    return map_leaves(lengthen, value)


def unpad(value: Any, rows: int, *, axis: int = 0) -> Any:
    """The first ``rows`` rows of every tensor, as views; takes back what :func:`pad` added.

    Raises ``BatchError`` if the tensors differ in length or have fewer than ``rows``.
    """
    present = _rows_of(value, axis)
    if present is not None and present < rows:
        raise BatchError(f"{present} rows along axis {axis} cannot be cut to {rows} rows; use pad")

    def shorten(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[axis] == rows:
            return leaf
        return leaf.narrow(axis, 0, rows)

    return map_leaves(shorten, value)


def _rows_like(like: Tensor, rows: int, axis: int, fill: int | float) -> Tensor:
    """New rows with the dtype, device and other axes of ``like``."""
    shape = list(like.shape)
    shape[axis] = rows
    return like.new_full(shape, fill)


def _open(leaf: Any) -> Any:
    """What stands in a ``NoChunk``, which may be nested, or be another one."""
    return map_leaves(_open, leaf.value) if isinstance(leaf, NoChunk) else leaf


def _unwrap(
    leaves: Sequence[Any], structure: Structure, axes: Sequence[int | None]
) -> tuple[list[Any], Structure, list[int | None]]:
    """Open every ``NoChunk``; also the new structure, and the axis of each new leaf: None for what stood in one."""
    opened = [_open(leaf) for leaf in leaves]
    of_opened: list[int | None] = []
    for leaf, inner, axis in zip(leaves, opened, axes, strict=True):
        of_opened += [None if isinstance(leaf, NoChunk) else axis] * len(flatten(inner)[0])
    return *flatten(unflatten(structure, opened)), of_opened


def _check_dense(leaves: Sequence[Any], structure: Structure, axes: Sequence[int | None], where: str) -> None:
    """Sparse and nested tensors have no views of some of their rows."""
    pairs = zip(leaves, axes, strict=True)
    odd = [axis is not None and (x.is_nested or x.layout is not torch.strided) for x, axis in pairs]
    if not any(odd):
        return
    named = zip(structure_paths(structure, where), leaves, odd, strict=True)
    faults = [f"{name} is {'nested' if leaf.is_nested else leaf.layout}" for name, leaf, found in named if found]
    headline = (
        f"{where}: only dense tensors can be cut into micro-batches; give them dense or padded, use chunks=1, or wrap "
        "what every micro-batch needs whole in NoChunk(...):"
    )
    raise BatchError(listed(headline, faults))


def _common_rows(leaves: Sequence[Any], structure: Structure, axes: Sequence[int | None], where: str) -> int | None:
    """The one length of all tensors that are cut; ``None`` if there is none."""
    taken = [(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
    if not taken:
        return None
    lengths = {leaf.shape[axis] if has_axis(leaf, axis) else None for leaf, axis in taken}
    if len(lengths) == 1 and None not in lengths:
        return lengths.pop()
    several = len({axis for _, axis in taken}) > 1
    faults = [
        f"{name}: {f'{leaf.shape[axis]} rows' if has_axis(leaf, axis) else 'no such axis'}"
        f"{f' (axis {axis})' * several}, shape {tuple(leaf.shape)}"
        for name, leaf, axis in zip(structure_paths(structure, where), leaves, axes, strict=True)
        if axis is not None
    ]
    along = "their batch axes" if several else f"axis {taken[0][1]}"
    headline = (
        f"{where}: all tensors of a mini-batch must have the same length along {along}. Make them equal, wrap what "
        "every micro-batch needs whole in NoChunk(...), or say which axis holds the rows (batch_dim= of a Pipe):"
    )
    raise BatchError(listed(headline, faults))


def _rows_of(value: Any, axis: int) -> int | None:
    leaves, structure = flatten(value)
    axes = [axis if isinstance(leaf, Tensor) and leaf.dim() > 0 else None for leaf in leaves]
    return _common_rows(leaves, structure, axes, "value")


def _kinds(leaves: Sequence[Any]) -> str:
    kinds = sorted({type(leaf).__name__ for leaf in leaves})
    return ", ".join(kinds) or "no leaves at all"
