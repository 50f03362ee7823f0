"""What goes into a step and what comes out of it, and where their gradients belong.

Cargo          mini-batch (input, target) -> leaves per micro-batch;      their gradients -> one per tensor
JoinedOutput   one output per micro-batch -> the whole output;            its gradients   -> one per micro-batch
WeightedLoss   one loss per micro-batch   -> the loss of the mini-batch;  its gradient    -> one per micro-batch
"""

from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from weft.core.errors import BatchError, SpecError
from weft.core.leaves import forbid_hidden, leaf_of
from weft.core.microbatch import SplitPlan, plan_split
from weft.core.microbatch_join import JoinPlan, common_structure, plan_join
from weft.core.segment import Gradients
from weft.core.tree import LEAF, flatten, map_leaves, unflatten
from weft.core.validation import is_number


class Cargo:
    """A mini-batch, cut into micro-batches. `tensors` are those that want a gradient, in order.

    `shared` are those that more than one micro-batch gets whole.
    """

    def __init__(self, parts: Sequence[Any], chunks: int, axis: Any = 0) -> None:
        """`parts` are the input, and the target where there is one; `axis` holds the rows: an int, or nested as the
        parts are. Raises BatchError and SpecError as `plan_split` does."""
        self.split, self._leaves = _planned(parts, chunks, axis)
        self._structures = [self.split.structure] if len(parts) == 1 else self.split.structure.children()
        self._wanted = [isinstance(x, Tensor) and x.requires_grad for x in self._leaves]
        self.tensors: list[Tensor] = [x for x, wanted in zip(self._leaves, self._wanted, strict=True) if wanted]
        pairs = zip(self._leaves, self.split.axes, strict=True)
        several = self.micro_batches > 1
        self.shared = [x for x, axis in pairs if several and axis is None and isinstance(x, Tensor)]

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the mini-batch was cut into: at most `chunks`, fewer when rows are few."""
        return len(self.split.sizes)

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows each micro-batch has."""
        return self.split.sizes

    @property
    def given(self) -> list[Tensor]:
        """All tensors of the mini-batch, as the caller gave them."""
        return [x for x in self._leaves if isinstance(x, Tensor)]

    def leaves(self) -> list[list[Any]]:
        """For every micro-batch its parts, as leaves that want a gradient where the caller's tensors do.

        Raises SpecError for what hides a tensor that wants one.
        """
        for leaf in self._leaves:
            if not isinstance(leaf, Tensor):
                forbid_hidden(leaf, "an argument")
        return [
            self._nested(
                [
                    leaf_of(x, wanted) if isinstance(x, Tensor) else x
                    for x, wanted in zip(piece, self._wanted, strict=True)
                ]
            )
            for piece in self.split.split(self._leaves)
        ]

    def pieces(self) -> list[list[Any]]:
        """For every micro-batch its parts, still connected with the caller's tensors."""
        return [self._nested(piece) for piece in self.split.split(self._leaves)]

    def gradients(self, pieces: Sequence[Gradients]) -> list[Tensor | None]:
        """The gradients of `tensors`, out of those of every micro-batch's leaves."""
        columns = zip(*pieces, strict=True)
        found: list[Tensor | None] = []
        for k, column in enumerate(columns):
            if self._wanted[k]:
                whole = self.split.join_gradients(k, column, self._leaves[k])
                found.append(None if whole is None else whole.to(self._leaves[k].device))
        return found

    def _nested(self, leaves: Sequence[Any]) -> list[Any]:
        parts: list[Any] = []
        for structure in self._structures:
            parts.append(unflatten(structure, leaves[: structure.num_leaves]))
            leaves = leaves[structure.num_leaves :]
        return parts


def _planned(values: Sequence[Any], chunks: int, axis: Any) -> tuple[SplitPlan, list[Any]]:
    """One plan for all parts together, since their rows must agree."""
    if len(values) == 1:
        return plan_split(values[0], chunks, axis=axis, where="input")
    return plan_split(tuple(values), chunks, axis=axis, where="(input, target)")


@runtime_checkable
class Outcome(Protocol):
    """What becomes of the results of the last segment."""

    def gather(self, results: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
        """The tensors that leave the step, and which of them have a gradient."""
        ...

    def spread(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        """For every micro-batch the gradients of its result."""
        ...

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The result as the caller sees it, with these tensors."""
        ...

    def visible(self, results: Sequence[Any]) -> Any:
        """The result as the caller sees it, still connected with the graphs of the micro-batches."""
        ...


class JoinedOutput:
    """The outputs of the micro-batches, joined along their batch axis; what is no tensor is passed through."""

    _where = "output"

    def __init__(
        self,
        given: Sequence[Tensor] = (),
        axis: Any = 0,
        rows: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """`given` are the tensors of the mini-batch, with which no output is to share memory; `axis` holds the rows:
        an int, or nested as the output is; `rows` are those of the micro-batches, which outputs must have as well.
        With `weights`, numbers that are one per micro-batch, such as a loss of the model, are added up by them."""
        self._given = given
        self._axis = axis
        self._rows = rows
        self._number_weights = weights or ()
        self._numbers: set[int] = set()
        self._plan: JoinPlan | None = None
        self._structure = LEAF
        self._rest: list[Any] = []
        self._at: list[int] = []
        self._pieces = 0

    def gather(self, results: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
        """See `Outcome.gather`. Raises BatchError when the results cannot be joined."""
        columns, joined = self._join(results)
        self._pieces = len(results)
        self._at = [k for k, leaf in enumerate(joined) if isinstance(leaf, Tensor)]
        self._rest = [None if isinstance(leaf, Tensor) else leaf for leaf in joined]
        tracked = [any(leaves[k].requires_grad for leaves in columns) for k in self._at]
        return [joined[k].detach() for k in self._at], tracked

    def spread(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        """See `Outcome.spread`."""
        pieces: list[Gradients] = [[None] * len(self._rest) for _ in range(self._pieces)]
        for k, gradient in zip(self._at, gradients, strict=True):
            if gradient is not None and self._plan is not None:
                weighted = [gradient * weight for weight in self._number_weights] if k in self._numbers else None
                for piece, part in zip(pieces, weighted or self._plan.split_gradient(k, gradient), strict=True):
                    piece[k] = part
        return pieces

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """See `Outcome.filled`."""
        leaves = list(self._rest)
        for k, tensor in zip(self._at, tensors, strict=True):
            leaves[k] = tensor
        return unflatten(self._structure, leaves)

    def visible(self, results: Sequence[Any]) -> Any:
        """See `Outcome.visible`."""
        joined = self._join(results)[1]
        return unflatten(self._structure, joined)

    def _join(self, results: Sequence[Any]) -> tuple[list[list[Any]], list[Any]]:
        """The flat leaves of every result, and of all of them joined."""
        flat = [flatten(result) for result in results]
        columns = [leaves for leaves, _ in flat]
        self._structure = common_structure([structure for _, structure in flat], where=self._where)
        rest = self._without_numbers(columns)
        self._plan = plan_join(
            rest,
            self._structure,
            axis=self._axis,
            where=self._where,
            rows=self._rows,
            flattened=bool(self._number_weights),
        )
        joined = self._plan.join(rest)
        for k in self._numbers:
            weighted = [leaves[k] * weight for leaves, weight in zip(columns, self._number_weights, strict=True)]
            joined[k] = torch.stack(weighted).sum(0)
        return columns, joined if len(columns) > 1 else self._apart(joined)

    def _without_numbers(self, columns: list[list[Any]]) -> list[list[Any]]:
        """The leaves of every result, but for those that are added up."""
        if self._number_weights:
            first = enumerate(columns[0])
            self._numbers = {k for k, x in first if isinstance(x, Tensor) and not x.dim() and x.is_floating_point()}
        if not self._numbers:
            return columns
        return [[None if k in self._numbers else x for k, x in enumerate(leaves)] for leaves in columns]

    def _apart(self, leaves: list[Any]) -> list[Any]:
        """The leaves of a single result, none of which shares memory with another one or with what was given.

        Behind a cut they are no views of each other for autograd, so what the caller writes into one of them would
        change the others behind its back. A join of several micro-batches is new memory anyway.
        """
        taken = {_memory(x) for x in self._given}
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if (memory := _memory(leaf)) in taken:
                    leaves[k] = leaf.clone()
                taken.add(memory)
        return leaves


def _memory(tensor: Tensor) -> int:
    """A number that tensors have in common if they share memory."""
    return cast(Any, tensor.untyped_storage())._cdata if tensor.layout is torch.strided else id(tensor)


class WeightedLoss:
    """The losses of the micro-batches, added up with one weight each.

    What weighs nothing is left out: the mean over no targets is NaN, and zero times NaN would be as well. Where each
    result is a pair (loss, extras), the caller gets the loss and the joined extras (see `Extras`).
    """

    def __init__(
        self, weights: Sequence[float], given: Sequence[Tensor] = (), axis: int = 0, rows: Sequence[int] | None = None
    ) -> None:
        """`given`, `axis` and `rows` are for the extras, as for a `JoinedOutput`."""
        self._weights = weights
        self._new_extras = partial(Extras, weights, given, axis, rows)
        self._extras: Extras | None = None

    def gather(self, results: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
        """See `Outcome.gather`. Raises BatchError when the extras cannot be joined."""
        losses, extras = _parted(results)
        tracked = [any(loss.requires_grad for loss in losses)]
        tensors = [self._sum([loss.detach() for loss in losses])]
        if extras:
            self._extras = self._new_extras()
            tensors += self._extras.gather(extras)[0]
        return tensors, tracked + [False] * (len(tensors) - 1)

    def spread(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        """See `Outcome.spread`."""
        gradient = gradients[0]  # extras have none
        return [[gradient * weight if weight and gradient is not None else None] for weight in self._weights]

    def seeds(self, gradient: Tensor, device: torch.device | None) -> list[Gradients]:
        """As `spread`, before the loss is known and where it will be."""
        return self.spread([gradient if device is None else gradient.to(device)])

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """See `Outcome.filled`."""
        return tensors[0] if self._extras is None else (tensors[0], self._extras.filled(tensors[1:]))

    def visible(self, results: Sequence[Any]) -> Any:
        """See `Outcome.visible`."""
        losses, extras = _parted(results)
        return (self._sum(losses), self._new_extras().visible(extras)) if extras else self._sum(losses)

    def _sum(self, losses: Sequence[Tensor]) -> Tensor:
        pairs = zip(losses, self._weights, strict=True)
        return torch.stack([loss * weight for loss, weight in pairs if weight]).sum(0)


def _parted(results: Sequence[Any]) -> tuple[Sequence[Tensor], list[Any]]:
    """The losses of the micro-batches, and what they came with. Raises BatchError if only some came with anything."""
    pairs = [isinstance(result, tuple) for result in results]
    if not any(pairs):
        return results, []
    if not all(pairs):
        raise BatchError(
            f"the loss function returned (loss, extras) for micro-batch {pairs.index(True)}, but only a loss "
            f"for micro-batch {pairs.index(False)}; return the same for all"
        )
    return [loss for loss, _ in results], [extras for _, extras in results]


class Extras(JoinedOutput):
    """What the loss of each micro-batch came with, joined as outputs are; but numbers become one number.

    Numbers are Python's (not True and False) and tensors without axes. Whole ones are counts, and added up; the others
    are combined by `weights`, as the losses are.
    """

    _where = "what the loss came with"

    def __init__(
        self, weights: Sequence[float], given: Sequence[Tensor], axis: int, rows: Sequence[int] | None
    ) -> None:
        super().__init__(given, axis, rows)
        self._weights = weights

    def _join(self, results: Sequence[Any]) -> tuple[list[list[Any]], list[Any]]:
        flat = [flatten(result) for result in results]
        structure = common_structure([each for _, each in flat], where=self._where)
        table = list(zip(*(leaves for leaves, _ in flat), strict=True))
        numbers = {k: self._combined(column) for k, column in enumerate(table) if all(map(_is_number, column))}
        rest = [
            unflatten(structure, [None if k in numbers else leaf for k, leaf in enumerate(leaves)])
            for leaves, _ in flat
        ]
        columns, joined = super()._join(rest)
        for leaves in (*columns, joined):
            for k, number in numbers.items():
                leaves[k] = number
        return columns, joined

    def _combined(self, column: Sequence[Any]) -> Any:
        if any(
            x.is_floating_point() or x.is_complex() if isinstance(x, Tensor) else isinstance(x, float) for x in column
        ):
            return reduce(add, [x * weight for x, weight in zip(column, self._weights, strict=True) if weight])
        return reduce(add, [x.sum() if isinstance(x, Tensor) else x for x in column])  # sum: of bools it is a count


def _is_number(leaf: Any) -> bool:
    return leaf.dim() == 0 if isinstance(leaf, Tensor) else is_number(leaf)


def checked_loss(value: Any) -> Any:
    """The loss of one micro-batch, or the pair (loss, extras), which are cut off from the graph.

    Raises SpecError when the loss is not one real number.
    """
    kind = type(value).__name__
    if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 2:
        loss, extras = cast("tuple[Any, Any]", value)
        if not isinstance(loss, tuple):
            return checked_loss(loss), map_leaves(_detached, extras)
    if not isinstance(value, Tensor) or value.dim() != 0 or value.is_complex():
        is_tensor = isinstance(value, Tensor)
        seen = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if is_tensor else kind
        raise SpecError(
            f"the loss function returned {seen}; it must return one real number, a tensor of shape (), or a pair "
            "(number, extras): the mean over the rows that it was given (or their sum, with loss_reduction='sum')"
        )
    return value


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
