"""Micro-batches: a mini-batch is split along one axis, and the results are joined, exactly.

    value   {"x": 7 rows, "mask": 7 rows, "scale": 0.5}       chunks = 3
              x      [ 0 1 2 | 3 4 | 5 6 ]     split: views, larger pieces first, sizes differ by at most one
              mask   [ 0 1 2 | 3 4 | 5 6 ]
              scale    0.5     0.5   0.5       not a tensor: every micro-batch gets it whole
                        |       |     |
                       y0      y1    y2        one result each
              join   [ 0 1 2 3 4 5 6 ]         the gradient of y is split again into views, one per micro-batch

What cannot be joined exactly is refused: one number per micro-batch may be meant as a sum or as a mean.

    MiniBatch       mini-batch (input, target) -> leaves per micro-batch;  their gradients -> one per tensor
    JoinedOutput    one output per micro-batch -> the whole output;        its gradients   -> one per micro-batch

Micro-batches as the unit of pipelining are GPipe's idea (arXiv 1811.06965).
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.errors import BatchError, listed
from weft.core.pytree import LEAF, OPEN, Structure, difference, flatten, map_leaves, spread, structure_paths, unflatten
from weft.core.segment import Gradients, forbid_hidden, hidden_tensors, leaf_of


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
    """One view per size, which autograd lets a layer write into, unlike those of ``torch.split``; a single piece is the
    tensor itself."""
    if len(sizes) == 1:
        return [tensor]
    return [tensor.narrow(axis, end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def has_axis(tensor: Tensor, axis: int) -> bool:
    """Whether ``axis``, which may count from the end, is one of the tensor's."""
    return -tensor.dim() <= axis < tensor.dim()


def _lengths(
    column: Sequence[Any], axis: int, rows: Sequence[int] | None, flattened: bool
) -> tuple[int, ...] | str | None:
    """The rows of each piece of one leaf, ``None`` if it is no tensor; or why it cannot be joined.

    What is no tensor must be equal in all pieces; tensors must agree in dtype and in every axis but ``axis``, and must
    have that one: of several pieces, each with the rows that ``rows`` says, where it is given, or with as many for each
    of them along axis 0, where they may be ``flattened`` (a row per token, say).
    """
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
    if flattened and axis == 0 and all(n * rows[0] == lengths[0] * r and n > r for n, r in pairs):
        return lengths
    return (
        f"has {', '.join(map(str, lengths))} rows along axis {axis} where the micro-batches have "
        f"{', '.join(map(str, rows))}; let the layers return one row for each that came in, and regroup rows outside: "
        "flatten(0, 1) after the pipe, say"
    )


def _tensor_fault(column: Sequence[Any], axis: int) -> str | None:
    """Why pieces, of which one at least is a tensor, cannot be joined; ``None`` if they can."""
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


class NoChunk:
    """Wraps a value, nested or not, that every micro-batch gets whole, such as one mask for all rows.

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
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in self.sizes]

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
        pairs = zip(pieces, cut(like, self.sizes, axis), strict=True)
        return torch.cat([torch.zeros_like(rows) if piece is None else piece for piece, rows in pairs], axis)


def plan_split(value: Any, chunks: int, *, axis: Any = 0, where: str = "input") -> tuple[SplitPlan, list[Any]]:
    """Plan how to cut ``value`` into at most ``chunks`` micro-batches; also its leaves, without ``NoChunk``.

    Tensors with at least one dimension are cut along ``axis``: an int for all of them, or nested as ``value`` is
    (see :func:`weft.core.pytree.spread`). All else, and what stands in ``NoChunk``, goes whole to every micro-batch.
    ``where`` is the value's name in messages.

    Raises ``BatchError`` that names all tensors that have no such axis, another length along it, or are sparse or
    nested, or if there is none to cut; ``SpecError`` if ``axis`` is not nested as ``value`` is.
    """
    leaves, structure = flatten(value)
    wanted: list[int | None] = [axis] * len(leaves) if isinstance(axis, int) else spread(axis, structure, where)
    if any(isinstance(leaf, NoChunk) for leaf in leaves):
        leaves, structure, wanted = _unwrap(leaves, structure, wanted)
    axes = tuple(
        each if isinstance(leaf, Tensor) and leaf.dim() > 0 else None for leaf, each in zip(leaves, wanted, strict=True)
    )
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
        "every micro-batch needs whole in NoChunk(...), or say which axis holds the rows (batch_dim= of a Pipe). A "
        "tensor with several rows for one sample, such as patches of images, needs them in an axis of their own:"
    )
    raise BatchError(listed(headline, faults))


ELSEWHERE = object()
"""Stands for a part of the mini-batch that another process has."""


class MiniBatch:
    """A mini-batch, cut into micro-batches. `tensors` are those that want a gradient, in order.

    `shared` are those that more than one micro-batch gets whole. `present` numbers the parts that this process has.
    """

    def __init__(self, parts: Sequence[Any], chunks: int, axis: Any = 0, rows: Sequence[int] | None = None) -> None:
        """`parts` are the input, and the target where there is one; `axis` holds the rows: an int, or nested as the
        parts are. A part can be `ELSEWHERE`. Then `rows`, the sizes of the micro-batches, come from the process that
        has the input. Raises BatchError and SpecError as `plan_split` does, and BatchError for other `rows`."""
        self._parts = len(parts)
        self.present = [k for k, part in enumerate(parts) if part is not ELSEWHERE]
        self.split, self._leaves, self._structures = self._plan(parts, chunks, axis, rows)
        self._wanted = [isinstance(x, Tensor) and x.requires_grad for x in self._leaves]
        self.tensors: list[Tensor] = [x for x, wanted in zip(self._leaves, self._wanted, strict=True) if wanted]
        self.rows = self.split.sizes
        """How many rows each micro-batch has."""
        self.micro_batches = len(self.rows)
        """How many micro-batches the mini-batch was cut into: at most `chunks`, fewer when rows are few."""
        self.given = [x for x in self._leaves if isinstance(x, Tensor)]
        """All tensors of the mini-batch, as the caller gave them."""
        pairs = zip(self._leaves, self.split.axes, strict=True)
        several = self.micro_batches > 1
        self.shared = [x for x, axis in pairs if several and axis is None and isinstance(x, Tensor)]

    def _plan(
        self, parts: Sequence[Any], chunks: int, axis: Any, rows: Sequence[int] | None
    ) -> tuple[SplitPlan, list[Any], list[Structure]]:
        """One plan for all parts that are present, since their rows must agree; their leaves, and their structures."""
        if not self.present:
            return SplitPlan(flatten(())[1], tuple(rows or ()), ()), [], []
        axes = [axis if isinstance(axis, int) or len(parts) == 1 else axis[k] for k in self.present]
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
                f"{where}: it makes micro-batches of {list(plan.sizes)} rows, but the input, which the rank of the "
                f"first stage has, makes {list(rows)}; give every rank the same mini-batch"
            )
        return plan, leaves, structures

    def leaves(self) -> list[list[Any]]:
        """For every micro-batch its parts, as leaves that want a gradient where the caller's tensors do.

        Raises SpecError for what hides a tensor that wants one.
        """
        for leaf in self._leaves:
            if not isinstance(leaf, Tensor):
                forbid_hidden(leaf, "an argument")
        wanted = self._wanted
        return [
            self._nested([leaf_of(x, w) if isinstance(x, Tensor) else x for x, w in zip(piece, wanted, strict=True)])
            for piece in self.split.split(self._leaves)
        ]

    def pieces(self) -> list[list[Any]]:
        """For every micro-batch its parts, still connected with the caller's tensors."""
        return [self._nested(piece) for piece in self.split.split(self._leaves)]

    def gradients(self, pieces: Sequence[Gradients]) -> list[Tensor | None]:
        """The gradients of `tensors`, out of those of the leaves that are present, for every micro-batch."""
        found: list[Tensor | None] = []
        for k, column in enumerate(zip(*pieces, strict=True)):
            if self._wanted[k]:
                whole = self.split.join_gradients(k, column, self._leaves[k])
                found.append(None if whole is None else whole.to(self._leaves[k].device))
        return found

    def _nested(self, leaves: Sequence[Any]) -> list[Any]:
        parts: list[Any] = [ELSEWHERE] * self._parts
        for part, structure in zip(self.present, self._structures, strict=True):
            parts[part] = unflatten(structure, leaves[: structure.num_leaves])
            leaves = leaves[structure.num_leaves :]
        return parts


class JoinedOutput:
    """The outputs of the micro-batches, joined along their batch axis; what is no tensor is passed through."""

    _where = "output"
    _flattens = True

    def __init__(
        self,
        given: Sequence[Tensor] = (),
        axis: Any = 0,
        rows: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """No output is to share memory with the tensors of `given`. `axis` holds the rows: an int, or nested as the
        output is; `rows` are those of the micro-batches, which outputs must have as well. With `weights`, numbers that
        are one per micro-batch, such as a loss of the model, are added up by them."""
        self._given = given
        self._axis = axis
        self._rows = rows
        self.weights: Sequence[float] = weights or ()
        self._pieces = 0
        self._structure = LEAF
        self._axes: Sequence[int] = ()
        self._lengths: list[tuple[int, ...] | None] = []  # of the pieces of each leaf that is a tensor
        self._numbers: dict[int, Any] = {}
        self._rest: list[Any] = []
        self._at: list[int] = []

    def set_weights(self, weights: Sequence[float]) -> None:
        """The weights, where another process knows them. Before `gather`."""
        self.weights = weights

    def gather(self, results: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
        """The tensors that leave the step, and which of them have a gradient. Raises BatchError when the results of the
        last segment cannot be joined."""
        pieces, joined = self._join(results)
        self._at = [k for k, leaf in enumerate(joined) if isinstance(leaf, Tensor)]
        self._rest = [None if isinstance(leaf, Tensor) else leaf for leaf in joined]
        tracked = [any(getattr(leaves[k], "requires_grad", False) for leaves in pieces) for k in self._at]
        return [joined[k].detach() for k in self._at], tracked

    def spread(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        """For every micro-batch the gradients of its result."""
        columns: list[Sequence[Tensor | None]] = [[None] * self._pieces] * len(self._rest)
        for k, gradient in zip(self._at, gradients, strict=True):
            if gradient is not None and k in self._numbers:
                columns[k] = [gradient * weight for weight in self.weights]
            elif gradient is not None:
                columns[k] = cut(gradient, self._lengths[k] or (), self._axes[k])
        return [[column[i] for column in columns] for i in range(self._pieces)]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The result as the caller sees it, with these tensors."""
        leaves = list(self._rest)
        for k, tensor in zip(self._at, tensors, strict=True):
            leaves[k] = tensor
        return unflatten(self._structure, leaves)

    def visible(self, results: Sequence[Any]) -> Any:
        """The result as the caller sees it, still connected with the graphs of the micro-batches."""
        joined = self._join(results)[1]
        return unflatten(self._structure, joined)

    def _join(self, results: Sequence[Any]) -> tuple[list[list[Any]], list[Any]]:
        """The flat leaves of every result, and of all of them joined. A single result is not copied."""
        flat = [flatten(result) for result in results]
        pieces, self._pieces = [leaves for leaves, _ in flat], len(flat)
        structure = self._structure = common_structure([each for _, each in flat], where=self._where)
        one_axis = isinstance(self._axis, int)
        self._axes = [self._axis] * len(pieces[0]) if one_axis else spread(self._axis, structure, self._where)
        columns = list(zip(*pieces, strict=True))
        found = {k: self._number(k, column) for k, column in enumerate(columns)}
        self._numbers = {k: number for k, number in found.items() if number is not None}
        flattened = self._flattens and bool(self.weights)
        lengths = [
            None if k in self._numbers else _lengths(column, axis, self._rows, flattened)
            for k, (column, axis) in enumerate(zip(columns, self._axes, strict=True))
        ]
        self._lengths = [each for each in lengths if not isinstance(each, str)]
        if len(self._lengths) < len(lengths):
            named = zip(structure_paths(structure, self._where), lengths, strict=True)
            faults = [f"{name} {fault}" for name, fault in named if isinstance(fault, str)]
            raise BatchError(listed(f"{self._where}: the results of the micro-batches cannot be joined:", faults))
        joined = list(pieces[0])
        if len(pieces) > 1:
            parts = zip(columns, self._lengths, self._axes, strict=True)
            joined = [column[0] if each is None else torch.cat(column, axis) for column, each, axis in parts]
        for k, number in self._numbers.items():
            joined[k] = number
        return pieces, joined if len(pieces) > 1 else self._apart(joined)

    def _number(self, leaf: int, column: Sequence[Any]) -> Any:
        """One number made of numbers that are one per micro-batch; None for leaves that are joined otherwise."""
        first = column[0]
        if not self.weights or not isinstance(first, Tensor) or first.dim() or not first.is_floating_point():
            return None
        return torch.stack([leaf * weight for leaf, weight in zip(column, self.weights, strict=True)]).sum(0)

    def _apart(self, leaves: list[Any]) -> list[Any]:
        """The leaves of a single result, none of which shares memory with another one or with what was given: behind a
        cut they are no views of each other for autograd, which would not see what the caller writes into one."""
        taken = {storage_id(x) for x in self._given}
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if (memory := storage_id(leaf)) in taken:
                    leaves[k] = leaf.clone()
                taken.add(memory)
        return leaves


def storage_id(tensor: Tensor) -> int:
    """A number that tensors have in common if they share memory."""
    return cast(Any, tensor.untyped_storage())._cdata if tensor.layout is torch.strided else id(tensor)
