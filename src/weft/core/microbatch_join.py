"""Joining the results of micro-batches, and cutting the gradient of the joined result again.

    pieces      y0 [3 x d]   y1 [2 x d]   y2 [2 x d]      lengths (3, 2, 2)
                     \\           |           /
    joined               y [7 x d]                        one gradient comes back for it
                     /           |           \\
    gradients   g0 [3 x d]   g1 [2 x d]   g2 [2 x d]      views of it

What cannot be joined exactly is refused: one number per micro-batch, say, may be meant as a sum or as a mean.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import BatchError, listed
from weft.core.leaves import hidden_tensors
from weft.core.tree import OPEN, Structure, difference, spread, structure_paths


@dataclass(frozen=True)
class JoinPlan:
    """How the results of the micro-batches become one, and how its gradient is cut again.

    ``lengths`` holds, for every leaf, the rows of each piece along its axis of ``axes``; ``None`` for a leaf that is
    no tensor. (A tensor without that axis, which only a single piece may have, counts as one row.)
    """

    structure: Structure
    lengths: tuple[tuple[int, ...] | None, ...]
    axes: tuple[int, ...]

    def join(self, pieces_leaves: Sequence[Sequence[Any]]) -> list[Any]:
        """The flat leaves of the joined result. A single piece is returned as it is, not copied."""
        if len(pieces_leaves) == 1:
            return list(pieces_leaves[0])
        return [
            column[0] if lengths is None else torch.cat(column, axis)
            for column, lengths, axis in zip(zip(*pieces_leaves, strict=True), self.lengths, self.axes, strict=True)
        ]

    def split_gradient(self, index: int, grad: Tensor) -> list[Tensor]:
        """The gradient of joined leaf ``index``, cut into one view per micro-batch.

        Raises ``BatchError`` if that leaf is no tensor.
        """
        lengths = self.lengths[index]
        if lengths is None:
            raise BatchError(f"leaf {index} of the joined value is no tensor and has no gradient")
        return cut(grad, lengths, self.axes[index])


def plan_join(
    pieces_leaves: Sequence[Sequence[Any]],
    structure: Structure,
    *,
    axis: Any = 0,
    where: str = "output",
    rows: Sequence[int] | None = None,
    flattened: bool = False,
) -> JoinPlan:
    """Plan how to join the flat leaves of the micro-batches' results, all nested as ``structure`` says.

    ``axis`` is an int, or nested as the results are. Raises ``BatchError`` that lists every leaf which cannot be
    joined. What is no tensor must be equal in all pieces; tensors must agree in dtype and in every axis but theirs of
    ``axis``, and must have that one: of several pieces, each with the rows that ``rows`` says, where it is given, or
    with as many for each of them along axis 0, where they may be ``flattened`` (a row per token, say).
    :func:`common_structure` checks the nesting. Raises ``SpecError`` if ``axis`` is not nested as the results are.
    """
    if not pieces_leaves:
        raise BatchError(f"{where}: there is no micro-batch to join")
    axes = tuple(spread(axis, structure, where))
    columns = zip(zip(*pieces_leaves, strict=True), axes, strict=True)
    found = [_of_rows(_lengths(column, each), rows, each, flattened) for column, each in columns]
    lengths = tuple(each for each in found if not isinstance(each, str))
    if len(lengths) < len(found):
        named = zip(structure_paths(structure, where), found, strict=True)
        faults = [f"{name} {fault}" for name, fault in named if isinstance(fault, str)]
        raise BatchError(listed(f"{where}: the results of the micro-batches cannot be joined:", faults))
    return JoinPlan(structure, lengths, axes)


def common_structure(structures: Sequence[Structure], *, where: str = "output") -> Structure:
    """The one structure of all micro-batches' results. Raises ``BatchError`` naming each that differs."""
    first = structures[0]
    faults = [
        f"micro-batch {index}: {fault}"
        for index, other in enumerate(structures)
        if other is not first and (fault := difference(first, other, where)) is not None
    ]
    if faults:
        headline = f"{where}: every micro-batch must return a value nested as that of micro-batch 0, but:"
        raise BatchError(listed(headline, faults))
    return first


def cut(tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
    """One view per size; a single piece is the tensor itself.

    ``narrow`` and not ``torch.split``, whose views autograd does not let a layer write into.
    """
    if len(sizes) == 1:
        return [tensor]
    return [tensor.narrow(axis, end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def has_axis(tensor: Tensor, axis: int) -> bool:
    """Whether ``axis``, which may count from the end, is one of the tensor's."""
    return -tensor.dim() <= axis < tensor.dim()


def _lengths(column: Sequence[Any], axis: int) -> tuple[int, ...] | str | None:
    """The rows of each piece of one leaf, ``None`` if it is no tensor; or why it cannot be joined."""
    first = column[0]
    if not any(isinstance(piece, Tensor) for piece in column):
        return _object_fault(column)
    if len(column) == 1:
        return (first.shape[axis] if has_axis(first, axis) else 1,)
    fault = None if _alike(column, axis) else _tensor_fault(column, axis)
    return fault or tuple([piece.shape[axis] for piece in column])


def _of_rows(
    lengths: tuple[int, ...] | str | None, rows: Sequence[int] | None, axis: int, flattened: bool
) -> tuple[int, ...] | str | None:
    """The same lengths if they are those of the micro-batches; else the fault, since rows would be out of order."""
    if rows is None or len(rows) == 1 or not isinstance(lengths, tuple) or lengths == tuple(rows):
        return lengths
    if (
        flattened
        and axis == 0
        and all(n * rows[0] == lengths[0] * r and n > r for n, r in zip(lengths, rows, strict=True))
    ):
        return lengths
    return (
        f"has {_numbers(lengths)} rows along axis {axis} where the micro-batches have {_numbers(rows)}; let the layers "
        "return one row for each that came in, and regroup rows outside: flatten(0, 1) after the pipe, say"
    )


def _numbers(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _alike(column: Sequence[Any], axis: int) -> bool:
    """Whether all are plain tensors of one shape and dtype: nearly always, so it is worth a quick look."""
    first = column[0]
    if type(first) is not Tensor or not has_axis(first, axis):
        return False
    shape, dtype = first.shape, first.dtype
    return all(type(piece) is Tensor and piece.shape == shape and piece.dtype is dtype for piece in column)


def _tensor_fault(column: Sequence[Any], axis: int) -> str | None:
    """Why pieces, of which one at least is a tensor, cannot be joined; ``None`` if they can."""
    if not all(isinstance(piece, Tensor) for piece in column):
        return f"is a tensor only in some micro-batches ({', '.join(type(piece).__name__ for piece in column)})"
    if any(piece.dim() == 0 for piece in column):
        return "is a single number per micro-batch; return it with a batch axis, or compute it with loss="
    shapes = ", ".join(str(tuple(piece.shape)) for piece in column)
    if not all(has_axis(piece, axis) for piece in column):
        return f"has no axis {axis} in some micro-batches (shapes {shapes})"
    if len({piece.dtype for piece in column}) > 1:
        return f"differs in dtype between micro-batches ({', '.join(str(piece.dtype) for piece in column)})"
    if any(_rest(piece, axis) != _rest(column[0], axis) for piece in column):
        return f"differs between micro-batches in another axis than {axis} (shapes {shapes})"
    return None


def _rest(tensor: Tensor, axis: int) -> list[int]:
    """The shape without the axis that is joined."""
    rest = list(tensor.shape)
    rest.pop(axis)
    return rest


def _object_fault(column: Sequence[Any]) -> str | None:
    """Why pieces that are no tensors cannot be joined; ``None`` if they are equal."""
    if all(_same(column[0], piece) for piece in column):
        return None
    if any(hidden_tensors(piece) for piece in column):
        return f"is a {type(column[0]).__name__} with tensors inside, which cannot be joined; {OPEN}"
    values = ", ".join(map(reprlib.repr, column))
    return f"is no tensor and differs between micro-batches ({values}); return one value for all, or a tensor"


def _same(a: Any, b: Any) -> bool:
    """Whether two objects are equal. Comparing may fail, or give no plain truth value (arrays)."""
    try:
        return a is b or bool(a == b)
    except Exception:
        return False
