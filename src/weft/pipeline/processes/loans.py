"""Loans: parameters that stages of several ranks use.

A parameter lives on the rank of the first stage that uses it, where optimizers, hooks and checkpoints see it. For each
step its owner lends a copy to every other rank that uses it. The gradient of the copy returns before the owner's node
of autograd returns, so that the parameter gets one gradient per step, as in a single process.

    owner        parameter --copy--> borrower          once per step, before the forward
    owner        sum <--gradient-- borrower            once per backward, before its commit
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from weft.core.segment import MicroBatchContext
from weft.pipeline.processes.links import Walk
from weft.pipeline.stage import ModuleScan, Skip, Stage
from weft.pipeline.weights import Slot, replaced_in

_LENT, _RETURNED = -3, -4  # routes of addresses; those of values are numbered from 0


class Loan(NamedTuple):
    """One parameter that one rank lends to another. `slot` is set on the owner."""

    number: int
    owner: int
    borrower: int
    slot: Slot | None
    trainable: bool

    @property
    def parameter(self) -> nn.Parameter | None:
        """On the owner the parameter, as it is now: another object after `Pipe.materialize`."""
        return None if self.slot is None else cast(nn.Parameter, self.slot[0][self.slot[1]])


class Loans:
    """The loans of one rank, in an order that is the same on all ranks."""

    def __init__(self, loans: Sequence[Loan], rank: int) -> None:
        self._loans, self._rank = loans, rank

    @property
    def lent(self) -> list[nn.Parameter]:
        """The parameters that this rank lends."""
        owned = [loan.parameter for loan in self._loans if loan.owner == self._rank and loan.parameter is not None]
        return list({id(parameter): parameter for parameter in owned}.values())

    def lend(self, walk: Walk) -> dict[int, Tensor]:
        """Send what this rank lends, and receive what it borrows: copies by the number of the loan."""
        borrowed: dict[int, Tensor] = {}
        for loan in self._loans:
            if loan.owner == self._rank and loan.parameter is not None:
                walk.send(loan.borrower, (_LENT, 0, loan.number), loan.parameter.detach())
        for loan in self._loans:
            if loan.borrower == self._rank:
                copy: Tensor = walk.receive((_LENT, 0, loan.number), loan.owner)
                borrowed[loan.number] = nn.Parameter(copy, loan.trainable)
        return borrowed

    def return_gradients(
        self, walk: Walk, borrowed: Mapping[int, Tensor], by_worker: dict[int, dict[int, Tensor]]
    ) -> dict[int, dict[int, Tensor]]:
        """Send the gradients of borrowed copies to their owners, and take those of parameters that this rank lent."""
        mine = by_worker.get(self._rank, {})
        for loan in self._loans:
            if loan.borrower == self._rank:
                gradient = mine.pop(id(borrowed[loan.number]), None)
                walk.send(loan.owner, (_RETURNED, loan.borrower, loan.number), gradient)
        for loan in self._loans:
            if loan.owner == self._rank and loan.parameter is not None:
                gradient = walk.receive((_RETURNED, loan.borrower, loan.number), loan.borrower)
                if gradient is not None:
                    by_worker.setdefault(loan.borrower, {})[id(loan.parameter)] = gradient
        return by_worker


class BorrowingStage(Stage):
    """A stage some of whose parameters belong to another rank."""

    _slots: Sequence[tuple[int, Slot]] = ()
    _borrowed: Mapping[int, Tensor] = MappingProxyType({})

    def borrow_into(self, slots: Sequence[tuple[int, Slot]]) -> None:
        """Where copies go, by the number of the loan. Before the first step."""
        self._slots = slots

    def borrow(self, copies: Mapping[int, Tensor]) -> None:
        """The copies of the step that is about to begin, for its `scan`."""
        self._borrowed = copies

    def run(self, context: MicroBatchContext, main: Any, skips: Mapping[Skip, Any]) -> tuple[Any, dict[Skip, Any]]:
        """As of any stage. A recomputation finds the copies of its own step in the context."""
        if not self._slots:
            return super().run(context, main, skips)
        with self._with_copies(context.borrowed):
            return super().run(context, main, skips)

    def scan(self) -> ModuleScan:
        """As of any stage, with the copies of the next step."""
        with self._with_copies(self._borrowed):
            return super().scan()

    def _with_copies(self, borrowed: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        return replaced_in((slot, borrowed[number]) for number, slot in self._slots)
