"""What goes into a step and what comes out of it, and where their gradients belong.

Cargo          mini-batch (input, target) -> leaves per micro-batch;      their gradients -> one per tensor
JoinedOutput   one output per micro-batch -> the whole output;            its gradients   -> one per micro-batch
WeightedLoss   one loss per micro-batch   -> the loss of the mini-batch;  its gradient    -> one per micro-batch
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.core.leaves import forbid_hidden, leaf_of
from weft.core.microbatch import SplitPlan, plan_split
from weft.core.microbatch_join import JoinPlan, common_structure, plan_join
from weft.core.segment import Gradients
from weft.core.tree import LEAF, flatten, unflatten


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

    def __init__(self, given: Sequence[Tensor] = (), axis: Any = 0, rows: Sequence[int] | None = None) -> None:
        """`given` are the tensors of the mini-batch, with which no output is to share memory; `axis` holds the rows:
        an int, or nested as the output is; `rows` are those of the micro-batches, which outputs must have as well."""
        self._given = given
        self._axis = axis
        self._rows = rows
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
                for piece, part in zip(pieces, self._plan.split_gradient(k, gradient), strict=True):
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
        self._structure = common_structure([structure for _, structure in flat])
        self._plan = plan_join(columns, self._structure, axis=self._axis, rows=self._rows)
        joined = self._plan.join(columns)
        return columns, joined if len(columns) > 1 else self._apart(joined)

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

    What weighs nothing is left out: the mean over no targets is NaN, and zero times NaN would be as well.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights

    def gather(self, results: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
        """See `Outcome.gather`."""
        return [self._sum([loss.detach() for loss in results])], [any(loss.requires_grad for loss in results)]

    def spread(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        """See `Outcome.spread`."""
        (gradient,) = gradients
        return [[gradient * weight if weight and gradient is not None else None] for weight in self._weights]

    def seeds(self, device: torch.device | None) -> list[Gradients]:
        """As `spread` for a gradient of one, before the loss is known."""
        return [
            [torch.tensor(weight, dtype=torch.float64, device=device) if weight else None] for weight in self._weights
        ]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """See `Outcome.filled`."""
        return tensors[0]

    def visible(self, results: Sequence[Any]) -> Any:
        """See `Outcome.visible`."""
        return self._sum(results)

    def _sum(self, losses: Sequence[Tensor]) -> Tensor:
        pairs = zip(losses, self._weights, strict=True)
        return torch.stack([loss * weight for loss, weight in pairs if weight]).sum(0)


def checked_loss(value: Any) -> Tensor:
    """The loss of one micro-batch. Raises SpecError when it is not one real number."""
    if not isinstance(value, Tensor) or value.dim() != 0 or value.is_complex():
        is_tensor = isinstance(value, Tensor)
        seen = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
        raise SpecError(
            f"the loss function returned {seen}; it must return one real number, a tensor of shape (): "
            "the mean over the rows that it was given (or their sum, with loss_reduction='sum')"
        )
    return value
