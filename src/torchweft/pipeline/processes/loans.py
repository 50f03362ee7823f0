"""Loans: parameters that stages of several ranks use.

A parameter lives on the rank of the first stage that uses it, where optimizers, hooks and checkpoints see it. For each
step its owner sends a copy to every other rank that uses it. The gradient of the copy returns before the owner's node
of autograd returns, so that the parameter gets one gradient per step, as in a single process.

    owner        parameter --copy--> borrower          once per step, before the forward
    owner        sum <--gradient-- borrower            once per backward, before its commit
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from torchweft.core.errors import SplitError
from torchweft.core.segment import MicroBatchContext
from torchweft.pipeline.processes.links import Walk
from torchweft.pipeline.stage import ModuleScan, Skip, Stage
from torchweft.pipeline.weights import Slot, replaced_in

_LENT, _RETURNED = -3, -4  # routes of addresses; those of values are numbered from 0


class Place(NamedTuple):
    """A slot of a parameter, and the names of that parameter in the model: on the owner all of them."""

    slot: Slot
    names: Sequence[str]


class Loan(NamedTuple):
    """One parameter that one rank lends to another, by its name at its first user. `place` is set on the owner."""

    number: int
    owner: int
    borrower: int
    place: Place | None
    trainable: bool
    name: str

    @property
    def parameter(self) -> nn.Parameter | None:
        """On the owner the parameter, as it is now: another object after `Pipe.materialize`."""
        return None if self.place is None else cast(nn.Parameter, self.place.slot[0][self.place.slot[1]])


class Loans:
    """The loans of all ranks, as one of them sees them. `loans` have the same order on all ranks, which makes sends and
    receives match. `places` are those for copies on this rank by stage, each with the number of its loan."""

    def __init__(self, loans: Sequence[Loan], places: Mapping[int, Sequence[tuple[int, Place]]], rank: int) -> None:
        self._loans, self.places, self._rank = loans, places, rank
        # Compared at every step. A copy is found by its number, so other numbers would give a stage another parameter.
        facts = [(loan.number, loan.owner, loan.borrower, loan.trainable, loan.name) for loan in loans]
        self.digest = f"{len(facts)} ({hashlib.sha256(repr(facts).encode()).hexdigest()[:12]})"

    @property
    def lent_parameters(self) -> list[nn.Parameter]:
        return list({id(x): x for loan in self._loans if (x := loan.parameter) is not None}.values())

    def exchange_copies(self, walk: Walk) -> dict[int, Tensor]:
        """Send copies of the parameters that this rank lends. Returns those that it borrows, by number of the loan.
        Raises SplitError if a stage would read another parameter than its owner lent."""
        # All sends come before the first receive. Two ranks that borrow from each other would otherwise both wait.
        for loan in self._loans:
            if loan.place is not None and loan.parameter is not None:
                # With its names, because a number shows the plan, and not the lent parameter.
                walk.send(loan.borrower, (_LENT, 0, loan.number), [*loan.place.names, loan.parameter.detach()])
        copies: dict[int, Tensor] = {}
        for loan in self._loans:
            if loan.borrower == self._rank:
                *names, copy = walk.receive((_LENT, 0, loan.number), loan.owner)
                self._reject_other_names(loan, names)
                copies[loan.number] = nn.Parameter(copy, loan.trainable)
        return copies

    def _reject_other_names(self, loan: Loan, names: Sequence[str]) -> None:
        for number, place in chain.from_iterable(self.places.values()):
            if number == loan.number and place.names[0] not in names:
                raise SplitError(
                    f"a stage of rank {loan.borrower} of the group reads {place.names[0]}, but rank {loan.owner} lent "
                    f"{' or '.join(names)} for it. This is a fault of torchweft: please report it, and let the stages "
                    "that use these parameters be on one rank until then"
                )

    def return_gradients(
        self, walk: Walk, borrowed: Mapping[int, Tensor], by_worker: dict[int, dict[int, Tensor]]
    ) -> dict[int, dict[int, Tensor]]:
        """Send the gradients of borrowed copies to their owners, and add those of parameters that this rank lent."""
        local = by_worker.get(self._rank, {})
        for loan in self._loans:
            if loan.borrower == self._rank:
                # Removed, because the copy is not an input of this rank's node of autograd.
                gradient = local.pop(id(borrowed[loan.number]), None)
                walk.send(loan.owner, (_RETURNED, loan.borrower, loan.number), gradient)
        for loan in self._loans:
            if loan.parameter is not None:
                gradient = walk.receive((_RETURNED, loan.borrower, loan.number), loan.borrower)
                # Filed under the borrower: gradients are summed by worker in a fixed order, not by arrival.
                if gradient is not None:
                    by_worker.setdefault(loan.borrower, {})[id(loan.parameter)] = gradient
        return by_worker


class BorrowingStage(Stage):
    _places: Sequence[tuple[int, Place]] = ()
    # Of the step that is about to begin. A scan needs them before the first context of the step exists.
    _next_copies: Mapping[int, Tensor] = MappingProxyType({})

    def set_places(self, places: Sequence[tuple[int, Place]]) -> None:
        self._places = places

    def set_copies(self, copies: Mapping[int, Tensor]) -> None:
        self._next_copies = copies

    def run(self, context: MicroBatchContext, main: Any, skips: Mapping[Skip, Any]) -> tuple[Any, dict[Skip, Any]]:
        if not self._places:
            return super().run(context, main, skips)
        # From the context, because a recomputation needs the copies of its own step, not of the latest one.
        with self._with_copies(context.borrowed):
            return super().run(context, main, skips)

    def scan(self) -> ModuleScan:
        with self._with_copies(self._next_copies):
            return super().scan()

    def _with_copies(self, copies: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        return replaced_in((place.slot, copies[number]) for number, place in self._places)
