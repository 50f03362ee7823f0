"""Gradients of mini-batches that are not committed yet.

    backward(mini_batch="m")  ──+
    backward(mini_batch="m")  ──+──> one sum per (client, mini-batch) ── commit("m") ──> one optimizer step
    backward(mini_batch="m")  ──+

A caller who cuts its mini-batch into micro-batches wants one step for all of them. A sum takes as much memory as
the parameters, so there are few of them, and one that nobody adds to or commits is dropped after a while; its caller
may give it up at once. A name whose sum was dropped is not begun anew: a commit would apply a part of a mini-batch.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from weft.core.errors import UsageError, listed
from weft.core.gradient_sum import GradientSum
from weft.experts.checks import count_fault, seconds_fault
from weft.experts.errors import CommitError, OverloadError
from weft.experts.gradients import nbytes

Owner = tuple[str | None, str]
"""Client and name of the mini-batch."""
_LOST = 4096  # names of dropped sums that are remembered


@dataclass(frozen=True)
class SumsOptions:
    """At most ``mini_batches`` open at a time, each dropped ``seconds`` after its last gradient."""

    mini_batches: int = 16
    seconds: float = 600.0

    def __post_init__(self) -> None:
        faults = count_fault("mini_batches", self.mini_batches) + seconds_fault("seconds", self.seconds)
        if faults:
            raise UsageError(listed("open mini-batches cannot be kept like this:", faults))


@dataclass
class OpenSum:
    """The gradients of these parameters so far."""

    parameters: list[nn.Parameter]
    total: GradientSum
    touched: float = field(default=0.0)


class Sums:
    """The open mini-batches of one expert. Belongs to whoever holds the expert's lock."""

    def __init__(self, options: SumsOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options or SumsOptions()
        self._clock = clock
        self._open: dict[Owner, OpenSum] = {}
        self._lost: OrderedDict[Owner, None] = OrderedDict()
        self._given_up: deque[Owner] = deque()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def nbytes(self) -> int:
        """The memory of all sums."""
        return sum(nbytes(t) for one in self._open.values() for t in one.total.totals if t is not None)

    def check(self, owner: Owner, parameters: Sequence[nn.Parameter]) -> None:
        """Raise `OverloadError` if there would be one sum too many, `CommitError` if this one cannot be added to."""
        if owner in self._lost:
            raise CommitError(
                f"mini-batch {owner[1]!r} of client {owner[0]!r} was dropped: it was given up, nothing came for too "
                "long, or the weights were replaced. Start a new one, and run its micro-batches again"
            )
        one = self._open.get(owner)
        if one is None and len(self._open) >= self._options.mini_batches:
            raise OverloadError(
                f"{len(self._open)} mini-batches are open, and no more are allowed; commit one, or come back later"
            )
        if one is not None and [id(p) for p in one.parameters] != [id(p) for p in parameters]:
            raise CommitError(f"layers were frozen or freed while mini-batch {owner[1]!r} was open; start a new one")

    def add(self, owner: Owner, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Add gradients, which must be nobody else's memory, to a sum that was checked."""
        one = self._open.setdefault(owner, OpenSum(list(parameters), GradientSum(len(parameters))))
        one.total.add(gradients)
        one.touched = self._clock()

    def get(self, owner: Owner) -> OpenSum:
        """The sum to commit. Raises `CommitError` if there is none."""
        if owner not in self._open:
            raise CommitError(
                f"there is no open mini-batch {owner[1]!r} of client {owner[0]!r}: nothing was added to it, it was "
                "committed, or it was dropped because nothing came for too long; run its micro-batches again"
            )
        return self._open[owner]

    def take(self, owner: Owner) -> None:
        """This sum is applied, or its author is told that it is not."""
        self._open.pop(owner, None)

    def drop(self, owner: Owner) -> None:
        """This sum is not to be applied, nor begun anew."""
        self._open.pop(owner, None)
        self._lost[owner] = None
        self._lost.move_to_end(owner)
        while len(self._lost) > _LOST:
            self._lost.popitem(last=False)

    def give_up(self, owner: Owner) -> None:
        """Its caller wants this sum no more: it counts as old. May be called without the expert's lock."""
        self._given_up.append(owner)

    def old(self) -> list[Owner]:
        """The sums that nobody touched for too long, or that were given up. They are to be dropped."""
        limit = self._clock() - self._options.seconds
        given_up = [self._given_up.popleft() for _ in range(len(self._given_up))]
        return given_up + [owner for owner, one in self._open.items() if one.touched <= limit]

    def all(self) -> list[Owner]:
        """Whose sums are open."""
        return list(self._open)
