"""Micro-batches: a mini-batch is split along one axis, and the results are joined, exactly.

    value   {"x": 7 rows, "mask": 7 rows, "scale": 0.5}       chunks = 3
              x      [ 0 1 2 | 3 4 | 5 6 ]     split: views, larger pieces first, sizes differ by at most one
              mask   [ 0 1 2 | 3 4 | 5 6 ]
              scale    0.5     0.5   0.5       not a tensor: every micro-batch gets it whole
                        |       |     |
                       y0      y1    y2        one result each
              join   [ 0 1 2 3 4 5 6 ]         the gradient of y is split again into views, one per micro-batch

Results that cannot be joined exactly are rejected: one number per micro-batch can be meant as a sum or as a mean.

    MiniBatch       mini-batch (input, target) -> leaves per micro-batch;  their gradients -> one per tensor
    JoinedOutput    one output per micro-batch -> the whole output;        its gradients   -> one per micro-batch
"""

import copy
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from torchweft.core.errors import BatchError, join_faults
from torchweft.core.pytree import (
    CONTAINER_ADVICE,
    LEAF,
    Structure,
    broadcast_prefix,
    difference,
    flatten,
    map_leaves,
    structure_paths,
    unflatten,
)
from torchweft.core.segment import Gradients, detached_leaf, hidden_tensors, reject_hidden


def common_structure(structures: Sequence[Structure], *, where: str = "output") -> Structure:
    """The structure that the results of all micro-batches share. Raises ``BatchError`` that lists those that differ."""
    first = structures[0]
    faults = [
        f"micro-batch {index}: {fault}"
        for index, other in enumerate(structures)
        if other is not first and (fault := difference(first, other, where)) is not None
    ]
    if faults:
        headline = f"{where}: every micro-batch must return a value nested as that of micro-batch 0, but:"
        raise BatchError(join_faults(headline, faults))
    return first


def split_by_sizes(tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
    # Not torch.split: autograd forbids in-place writes to its views.
    if len(sizes) == 1:
        return [tensor]
    return [tensor.narrow(axis, end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def has_axis(tensor: Tensor, axis: int) -> bool:
    return -tensor.dim() <= axis < tensor.dim()


def _lengths(
    column: Sequence[Any], axis: int | None, rows: Sequence[int] | None, flattened: bool
) -> tuple[int, ...] | str | None:
    """The rows of each piece of one leaf, ``None`` if it is not a tensor, or the reason why it cannot be joined.
    Objects that are not tensors must be equal in all pieces. With ``flattened``, tensors can also have the same
    multiple of ``rows`` along the axis, such as a row per token. ``axis`` is None for a value without rows."""
    if axis is None:
        return None
    if not any(isinstance(piece, Tensor) for piece in column):
        return _object_fault(column)
    if len(column) == 1:
        return (column[0].shape[axis] if has_axis(column[0], axis) else 1,)
    if fault := _tensor_fault(column, axis):
        return fault
    lengths = tuple([piece.shape[axis] for piece in column])
    if rows is None or lengths == tuple(rows):
        return lengths
    pairs = zip(lengths, rows, strict=True)
    if flattened and all(n * rows[0] == lengths[0] * r and n > r for n, r in pairs):
        return lengths
    return (
        f"has {', '.join(map(str, lengths))} rows along axis {axis} where the micro-batches have "
        f"{', '.join(map(str, rows))}; let the layers return one row for each that came in, and regroup rows outside: "
        "flatten(0, 1) after the pipe, say"
    )


def _tensor_fault(column: Sequence[Any], axis: int) -> str | None:
    if not all(isinstance(piece, Tensor) for piece in column):
        return f"is a tensor only in some micro-batches ({', '.join(type(piece).__name__ for piece in column)})"
    shapes = [tuple(piece.shape) for piece in column]
    if () in shapes:
        return "is a single number per micro-batch; return it with a batch axis, or compute it with loss="
    seen = ", ".join(map(str, shapes))
    if not all(has_axis(piece, axis) for piece in column):
        return f"has no axis {axis} in some micro-batches (shapes {seen})"
    if len({piece.dtype for piece in column}) > 1:
        return f"differs in dtype between micro-batches ({', '.join(str(piece.dtype) for piece in column)})"
    if len({shape[:axis] + shape[axis:][1:] for shape in shapes}) > 1:
        return f"differs between micro-batches in another axis than {axis} (shapes {seen})"
    return None


def _object_fault(column: Sequence[Any]) -> str | None:
    if all(_same(column[0], piece) for piece in column):
        return None
    if any(hidden_tensors(piece) for piece in column):
        return f"is a {type(column[0]).__name__} with tensors inside, which cannot be joined; {CONTAINER_ADVICE}"
    values = ", ".join(map(reprlib.repr, column))
    return f"is not a tensor and differs between micro-batches ({values}); return one value for all, or a tensor"


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:
        return False


class NoChunk:
    """Wraps a value, nested or not, that every micro-batch gets whole. E.g. one mask for all rows.

    Example:
        >>> class Masked(nn.Module):
        ...     def forward(self, x, mask):
        ...         return x * mask
        >>> pipe = weft.Pipe(nn.Sequential(Masked()), chunks=2, devices=["cpu"])
        >>> pipe(torch.ones(4, 3), weft.NoChunk(torch.tensor([1.0, 0.0, 1.0]))).sum()
        tensor(8.)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"NoChunk({self.value!r})"


def micro_sizes(rows: int, chunks: int) -> tuple[int, ...]:
    """The rows of each micro-batch, the larger ones first. Zero rows make one empty micro-batch."""
    if chunks < 1:
        raise BatchError(f"chunks is {chunks}, but a mini-batch is cut into at least one micro-batch")
    pieces = max(1, min(rows, chunks))
    base, larger = divmod(rows, pieces)
    return (base + 1,) * larger + (base,) * (pieces - larger)


@dataclass(frozen=True)
class SplitPlan:
    """A plan for cutting one mini-batch, and for joining the gradients of its micro-batches of ``sizes`` rows. ``axes``
    is the axis along which each leaf is cut, ``None`` for a leaf that every micro-batch gets whole."""

    structure: Structure
    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]

    def split(self, leaves: Sequence[Any]) -> list[list[Any]]:
        count = len(self.sizes)
        columns = [
            [leaf] * count if axis is None else split_by_sizes(leaf, self.sizes, axis)
            for leaf, axis in zip(leaves, self.axes, strict=True)
        ]
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in self.sizes]

    def join_gradients(self, index: int, pieces: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
        """The gradient of leaf ``index``, made of one gradient (or ``None``) per micro-batch. ``like`` is the leaf."""
        present = [piece for piece in pieces if piece is not None]
        if not present:
            return None
        axis = self.axes[index]
        if axis is None:
            # Not an in-place sum, because a piece can be shared. Not sum(), because it would add a zero first.
            return list(accumulate(present, torch.add))[-1]
        if len(self.sizes) == 1:
            return present[0]
        # Concatenated, with zeros for a micro-batch that did not use its piece.
        pairs = zip(pieces, split_by_sizes(like, self.sizes, axis), strict=True)
        return torch.cat([torch.zeros_like(rows) if piece is None else piece for piece, rows in pairs], axis)


def plan_split(value: Any, chunks: int, *, axis: Any = 0, where: str = "input") -> tuple[SplitPlan, list[Any]]:
    """A plan for cutting ``value`` into at most ``chunks`` micro-batches. Also its leaves, without ``NoChunk``. Tensors
    with at least one dimension are cut along ``axis``: an int for all of them, or nested as ``value`` is. ``where`` is
    the value's name in messages. Raises ``BatchError`` that names every tensor that cannot be cut so, and if there are
    none. Raises ``SpecError`` if ``axis`` is not nested as ``value`` is."""
    leaves, structure = flatten(value)
    leaf_axes: list[int | None] = (
        [axis] * len(leaves) if isinstance(axis, int) else broadcast_prefix(axis, structure, where)
    )
    if any(isinstance(leaf, NoChunk) for leaf in leaves):
        leaves, structure, leaf_axes = _unwrap(leaves, structure, leaf_axes)
    axes = tuple(
        leaf_axis if isinstance(leaf, Tensor) and leaf.dim() > 0 else None
        for leaf, leaf_axis in zip(leaves, leaf_axes, strict=True)
    )
    # With one micro-batch nothing is cut, so any layout will do.
    if chunks > 1:
        _check_dense(leaves, structure, axes, where)
    rows = _common_rows(leaves, structure, axes, where)
    if rows is None:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise BatchError(
            f"{where}: there is no tensor to cut into micro-batches along axis {axis} (saw "
            f"{kinds or 'no leaves at all'}); give at least one tensor with a batch axis that is not in NoChunk"
        )
    return SplitPlan(structure, micro_sizes(rows, chunks), axes), leaves


def split(value: Any, chunks: int, *, axis: int = 0) -> list[Any]:
    """The micro-batches of ``value``, nested as it is. Raises ``BatchError`` as :func:`plan_split` does."""
    plan, leaves = plan_split(value, chunks, axis=axis)
    return [unflatten(plan.structure, piece) for piece in plan.split(leaves)]


def _open(leaf: Any) -> Any:
    return map_leaves(_open, leaf.value) if isinstance(leaf, NoChunk) else leaf


def _unwrap(
    leaves: Sequence[Any], structure: Structure, axes: Sequence[int | None]
) -> tuple[list[Any], Structure, list[int | None]]:
    opened = [_open(leaf) for leaf in leaves]
    of_opened: list[int | None] = []
    for leaf, inner, axis in zip(leaves, opened, axes, strict=True):
        of_opened += [None if isinstance(leaf, NoChunk) else axis] * len(flatten(inner)[0])
    return *flatten(unflatten(structure, opened)), of_opened


def _check_dense(leaves: Sequence[Any], structure: Structure, axes: Sequence[int | None], where: str) -> None:
    pairs = zip(leaves, axes, strict=True)
    odd = [axis is not None and (x.is_nested or x.layout is not torch.strided) for x, axis in pairs]
    if not any(odd):
        return
    named = zip(structure_paths(structure, where), leaves, odd, strict=True)
    faults = [f"{name} is {'nested' if leaf.is_nested else leaf.layout}" for name, leaf, is_odd in named if is_odd]
    headline = (
        f"{where}: only dense tensors can be cut into micro-batches; make these dense or padded, use chunks=1, or wrap "
        "a tensor that every micro-batch needs whole in NoChunk(...):"
    )
    raise BatchError(join_faults(headline, faults))


def _common_rows(leaves: Sequence[Any], structure: Structure, axes: Sequence[int | None], where: str) -> int | None:
    pairs = [(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
    if not pairs:
        return None
    lengths = {leaf.shape[axis] if has_axis(leaf, axis) else None for leaf, axis in pairs}
    if len(lengths) == 1 and None not in lengths:
        return lengths.pop()
    several = len({axis for _, axis in pairs}) > 1
    faults = [
        f"{name}: {f'{leaf.shape[axis]} rows' if has_axis(leaf, axis) else 'no such axis'}"
        f"{f' (axis {axis})' * several}, shape {tuple(leaf.shape)}"
        for name, leaf, axis in zip(structure_paths(structure, where), leaves, axes, strict=True)
        if axis is not None
    ]
    along = "their batch axes" if several else f"axis {pairs[0][1]}"
    headline = (
        f"{where}: all tensors of a mini-batch must have the same length along {along}. Make them equal, wrap a tensor "
        "that every micro-batch needs whole in NoChunk(...), or give the axis of the rows (batch_dim= of a Pipe). A "
        "tensor with several rows for one sample, such as patches of images, needs a separate axis for them:"
    )
    raise BatchError(join_faults(headline, faults))


ELSEWHERE = object()  # stands for a part of the mini-batch that another process has


class MiniBatch:
    """A mini-batch, cut into micro-batches of `rows`. `given` are all its tensors, `tensors` those that require a
    gradient, `shared` those that several micro-batches get whole. `present` are the numbers of the parts that this
    process has."""

    def __init__(self, parts: Sequence[Any], chunks: int, axis: Any = 0, rows: Sequence[int] | None = None) -> None:
        """`parts` are the input, and the target if there is one. `axis` is an int, or nested as the parts are. A part
        can be `ELSEWHERE`. Then `rows` come from the process that has the input."""
        self._parts = len(parts)
        self.present = [k for k, part in enumerate(parts) if part is not ELSEWHERE]
        self.split, leaves, self._structures = self._plan(parts, chunks, axis, rows)
        self._tracked = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        self.rows = self.split.sizes
        self.micro_batches = len(self.rows)
        self._take(leaves)

    def _take(self, leaves: list[Any]) -> None:
        self._leaves = leaves
        self.tensors: list[Tensor] = [x for x, tracked in zip(leaves, self._tracked, strict=True) if tracked]
        self.given = [x for x in leaves if isinstance(x, Tensor)]
        pairs = zip(leaves, self.split.axes, strict=True)
        several = self.micro_batches > 1
        self.shared = [x for x, axis in pairs if several and axis is None and isinstance(x, Tensor)]

    def with_tensors(self, given: Sequence[Any]) -> "MiniBatch":
        """The same mini-batch with other tensors in the place of those that are `given`."""
        other, rest = copy.copy(self), iter(given)
        other._take([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves])
        return other

    @property
    def form(self) -> tuple[Any, ...]:
        """Everything but the numbers in the tensors. A leaf of which this is not known is an `object`."""
        return self.split, self._structures, [_form_of(leaf) for leaf in self._leaves]

    def uploaded(self, upload: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        """The tensors that are given, after `upload` of those that are cut, as in `leaves`."""
        return [x for x in self._uploaded(upload) if isinstance(x, Tensor)]

    def _plan(
        self, parts: Sequence[Any], chunks: int, axis: Any, rows: Sequence[int] | None
    ) -> tuple[SplitPlan, list[Any], list[Structure]]:
        if not self.present:
            return SplitPlan(flatten(())[1], tuple(rows or ()), ()), [], []
        axes = [axis if isinstance(axis, int) or len(parts) == 1 else axis[k] for k in self.present]
        # One plan for all parts that are present, because their rows must agree.
        if len(self.present) == 1:
            where = ("input", "target")[self.present[0]]
            plan, leaves = plan_split(parts[self.present[0]], chunks, axis=axes[0], where=where)
            structures = [plan.structure]
        else:
            where = "(input, target)"
            whole = axis if isinstance(axis, int) else tuple(axes)
            plan, leaves = plan_split(tuple(parts[k] for k in self.present), chunks, axis=whole, where=where)
            structures = plan.structure.children()
        if rows is not None and tuple(rows) != plan.sizes:
            raise BatchError(
                f"{where}: it makes micro-batches of {list(plan.sizes)} rows, but the input on the rank of the first "
                f"stage makes {list(rows)}; give every rank the same mini-batch"
            )
        return plan, leaves, structures

    def leaves(self, upload: Callable[[int, Tensor], Tensor] | None = None) -> list[list[Any]]:
        """The parts of every micro-batch, as leaves. Raises SpecError for an object that hides a trainable tensor.
        `upload` gets the number of a part and each whole tensor that is cut, and returns it where it is needed."""
        for leaf in self._leaves:
            if not isinstance(leaf, Tensor):
                reject_hidden(leaf, "an argument")
        tracked = self._tracked
        return [
            self._nested(
                [detached_leaf(x, t) if isinstance(x, Tensor) else x for x, t in zip(piece, tracked, strict=True)]
            )
            for piece in self.split.split(self._leaves if upload is None else self._uploaded(upload))
        ]

    def _uploaded(self, upload: Callable[[int, Tensor], Tensor]) -> list[Any]:
        numbers = [
            k for k, nesting in zip(self.present, self._structures, strict=True) for _ in range(nesting.num_leaves)
        ]
        # A tensor that every micro-batch gets whole is copied for each, because a layer can write to its copy.
        return [
            leaf if axis is None else upload(number, leaf)
            for number, leaf, axis in zip(numbers, self._leaves, self.split.axes, strict=True)
        ]

    def pieces(self) -> list[list[Any]]:
        return [self._nested(piece) for piece in self.split.split(self._leaves)]

    def gradients(self, pieces: Sequence[Gradients]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        for k, column in enumerate(zip(*pieces, strict=True)):
            if self._tracked[k]:
                joined = self.split.join_gradients(k, column, self._leaves[k])
                gradients.append(None if joined is None else joined.to(self._leaves[k].device))
        return gradients

    def _nested(self, leaves: Sequence[Any]) -> list[Any]:
        parts: list[Any] = [ELSEWHERE] * self._parts
        for part, structure in zip(self.present, self._structures, strict=True):
            parts[part] = unflatten(structure, leaves[: structure.num_leaves])
            leaves = leaves[structure.num_leaves :]
        return parts


PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))


def _form_of(leaf: Any) -> Any:
    if type(leaf) is Tensor and leaf.layout is torch.strided:
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    # The type too, because True == 1 == 1.0. An object that can change inside is equal to nothing.
    return (type(leaf), leaf) if type(leaf) in PLAIN else object()


class JoinedOutput:
    """The outputs of the micro-batches, joined along their batch axis. Other objects than tensors pass through."""

    _where = "output"

    def __init__(
        self,
        given: Sequence[Tensor] = (),
        axis: Any = 0,
        rows: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        *,
        several: bool = False,
    ) -> None:
        """Outputs must not share memory with the tensors of `given`, and must have the `rows` of the micro-batches
        along `axis`, or with `several` a multiple of them. `weights` are factors for outputs that are one number per
        micro-batch, which are added up. An axis of None means that the output of the first micro-batch counts."""
        self._given, self._axis, self._rows, self._several = given, axis, rows, several
        self.weights: Sequence[float] = weights or ()
        self._pieces, self._structure = 0, LEAF
        self._axes: Sequence[int | None] = ()
        self._lengths: list[tuple[int, ...] | None] = []  # rows of the pieces of each leaf that is a tensor
        self._numbers: dict[int, Any] = {}
        self._rest: list[Any] = []
        self._at: list[int] = []

    def set_weights(self, weights: Sequence[float]) -> None:
        self.weights = weights

    def gather(self, results: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
        """The tensors that leave the step, and whether each has a gradient. Raises BatchError for other results."""
        pieces, joined = self._join(results)
        self._at = [k for k, leaf in enumerate(joined) if isinstance(leaf, Tensor)]
        self._rest = [None if isinstance(leaf, Tensor) else leaf for leaf in joined]
        tracked = [any(getattr(leaves[k], "requires_grad", False) for leaves in pieces) for k in self._at]
        return [joined[k].detach() for k in self._at], tracked

    def scatter_gradients(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        columns: list[Sequence[Tensor | None]] = [[None] * self._pieces] * len(self._rest)
        for k, gradient in zip(self._at, gradients, strict=True):
            if gradient is not None and k in self._numbers:
                columns[k] = [gradient * weight for weight in self.weights]
            elif gradient is not None and (axis := self._axes[k]) is not None:
                columns[k] = split_by_sizes(gradient, self._lengths[k] or (), axis)
            elif gradient is not None:
                columns[k] = [gradient, *columns[k][1:]]
        return [[column[i] for column in columns] for i in range(self._pieces)]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self._rest)
        for k, tensor in zip(self._at, tensors, strict=True):
            leaves[k] = tensor
        return unflatten(self._structure, leaves)

    def visible(self, results: Sequence[Any]) -> Any:
        joined = self._join(results)[1]
        return unflatten(self._structure, joined)

    def _join(self, results: Sequence[Any]) -> tuple[list[list[Any]], list[Any]]:
        flat = [flatten(result) for result in results]
        pieces, self._pieces = [leaves for leaves, _ in flat], len(flat)
        structure = self._structure = common_structure([nesting for _, nesting in flat], where=self._where)
        one_axis = isinstance(self._axis, int)
        self._axes = [self._axis] * len(pieces[0]) if one_axis else broadcast_prefix(self._axis, structure, self._where)
        columns = list(zip(*pieces, strict=True))
        numbers = {k: self._number(k, column) for k, column in enumerate(columns)}
        self._numbers = {k: number for k, number in numbers.items() if number is not None}
        lengths = [
            None if k in self._numbers else _lengths(column, axis, self._rows, self._several)
            for k, (column, axis) in enumerate(zip(columns, self._axes, strict=True))
        ]
        self._lengths = [length for length in lengths if not isinstance(length, str)]
        if len(self._lengths) < len(lengths):
            named = zip(structure_paths(structure, self._where), lengths, strict=True)
            faults = [f"{name} {fault}" for name, fault in named if isinstance(fault, str)]
            raise BatchError(join_faults(f"{self._where}: the results of the micro-batches cannot be joined:", faults))
        joined = list(pieces[0])
        if len(pieces) > 1:
            parts = zip(columns, self._lengths, self._axes, strict=True)
            joined = [
                column[0] if length is None or axis is None else torch.cat(column, axis)
                for column, length, axis in parts
            ]
        for k, number in self._numbers.items():
            joined[k] = number
        return pieces, joined if len(pieces) > 1 else self._copy_shared(joined)

    def _number(self, leaf: int, column: Sequence[Any]) -> Any:
        first = column[0]
        if not self.weights or not isinstance(first, Tensor) or first.dim() or not first.is_floating_point():
            return None
        return torch.stack([leaf * weight for leaf, weight in zip(column, self.weights, strict=True)]).sum(0)

    def _copy_shared(self, leaves: list[Any]) -> list[Any]:
        # After a cut, autograd does not know that they are views of each other. It would not notice that a write of the
        # caller into one leaf changes another.
        seen = {storage_id(x) for x in self._given}
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if (memory := storage_id(leaf)) in seen:
                    leaves[k] = leaf.clone()
                seen.add(memory)
        return leaves


def storage_id(tensor: Tensor) -> int:
    return cast(Any, tensor.untyped_storage())._cdata if tensor.layout is torch.strided else id(tensor)
