"""Sums of gradients, if a caller commits several backwards as one step.

    backward(mini_batch="m")  ──+
    backward(mini_batch="m")  ──+──> one sum per (client, mini-batch) ── commit("m") ──> one optimizer step
    backward(mini_batch="m")  ──+

A sum takes as much memory as the parameters, so their number is limited, and each principal has a share. A sum is
dropped when nothing adds to it or commits it for a while, soon after the stream of its last gradient has ended, or when
its caller discards it. Its name cannot be reused then, because a commit would apply only a part of the mini-batch.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from torchweft.core.segment import GradientSum
from torchweft.core.validation import Validator
from torchweft.experts.errors import CommitError, OverloadError, QuotaError
from torchweft.experts.graph_cache import strided_parts
from torchweft.experts.task import CallerStream, Task

Owner = tuple[str | None, str]  # Client and name of the mini-batch


@dataclass(frozen=True)
class AccumulationOptions:
    """Bounds of the mini-batches that are open at a time.

    Args:
        mini_batches: number of open mini-batches of all clients.
        max_client_mini_batches: number that one principal can have open; None: three quarters of ``mini_batches``.
        seconds: a mini-batch is dropped after so long without a gradient or a commit.
        orphan_seconds: a mini-batch is dropped so long after the stream of its last gradient has ended. A client that
            reconnects and adds to it in time keeps it.

    Example:
        >>> rows, sums = (weft.TensorSpec((None, 8), torch.float32),), weft.experts.AccumulationOptions(mini_batches=4)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows, mini_batches=sums)
    """

    mini_batches: int = 16
    max_client_mini_batches: int | None = None
    seconds: float = 600.0
    orphan_seconds: float = 30.0

    def __post_init__(self) -> None:
        with Validator("invalid options of open mini-batches") as check:
            check.count("mini_batches", self.mini_batches)
            check.count("max_client_mini_batches", self.max_client_mini_batches, optional=True)
            check.seconds("seconds", self.seconds)
            check.seconds("orphan_seconds", self.orphan_seconds, zero=True)

    @property
    def client_share(self) -> int:
        return self.max_client_mini_batches or max(1, self.mini_batches * 3 // 4)


@dataclass
class GradientAccumulator:
    parameters: list[nn.Parameter]
    total: GradientSum
    principal: str | None
    touched: float = 0.0
    stream: CallerStream | None = None
    is_prepared: bool = False  # by the first phase of a commit

    def add(self, gradients: Sequence[Tensor | None], now: float, stream: CallerStream | None) -> None:
        self.total.add(gradients)
        self.touched, self.stream = now, stream

    def prepare(self, now: float) -> None:
        # Without its stream: the caller can reconnect before it commits, and other experts can have stepped by then.
        self.touched, self.stream, self.is_prepared = now, None, True

    def is_expired(self, now: float, options: AccumulationOptions) -> bool:
        ended_at = None if self.stream is None else self.stream.ended_at
        orphaned = ended_at is not None and ended_at <= now - options.orphan_seconds
        return orphaned or self.touched <= now - options.seconds


class GradientAccumulators(dict[Owner, GradientAccumulator]):
    """Open mini-batches of one expert by owner. Other owners raise `CommitError`. Guarded by the expert's lock."""

    def __init__(self, options: AccumulationOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options or AccumulationOptions()
        self._clock = clock
        self.discarded: dict[Owner, str | None] = {}  # with their principals

    @property
    def nbytes(self) -> int:
        # Copies of the lists, because statistics are read without the lock while a batch runs.
        totals = [total for accumulator in list(self.values()) for total in list(accumulator.total.totals)]
        return sum(part.nbytes for total in totals if total is not None for part in strided_parts(total))

    def check_room(self, owner: Owner, principal: str | None, parameters: Sequence[nn.Parameter]) -> None:
        """Raise `OverloadError`, `QuotaError` or `CommitError` if gradients of these parameters cannot be added."""
        if owner in self:
            if self[owner].is_prepared:
                raise CommitError(f"mini-batch {owner[1]!r} is being committed, and takes no more gradients")
            # By identity: parameters compare element by element.
            if [*map(id, self[owner].parameters)] != [*map(id, parameters)]:
                raise CommitError(f"layers were frozen or unfrozen in mini-batch {owner[1]!r}; start a new one")
            return
        if len(self) >= self._options.mini_batches:
            raise OverloadError(
                f"{len(self)} mini-batches are open, and no more are allowed (mini_batches); commit or discard "
                f"one, or retry later. {self._describe_holders()}"
            )
        held = sum(accumulator.principal == principal for accumulator in self.values())
        if held >= self._options.client_share:
            raise QuotaError(
                f"client {principal!r} has {held} mini-batches open, and the limit for one client is "
                f"{self._options.client_share} (max_client_mini_batches); commit or discard one. "
                f"{self._describe_holders()}"
            )

    def add(self, task: Task, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        new = GradientAccumulator(list(parameters), GradientSum(len(parameters)), task.principal)
        self.setdefault(task.owner, new).add(gradients, self._clock(), task.stream)

    def prepare(self, owner: Owner) -> None:
        self[owner].prepare(self._clock())

    def is_prepared(self, owner: Owner) -> bool:
        one = self.get(owner)
        return one is not None and one.is_prepared

    def __missing__(self, owner: Owner) -> GradientAccumulator:
        raise CommitError(
            f"there is no open mini-batch {owner[1]!r} of client {owner[0]!r}: nothing was added to it, it was "
            "committed, or it was dropped because its connection ended or nothing was added for too long. Run it again"
        )

    def discard(self, owner: Owner, principal: str | None) -> None:
        # For any thread. The sum is dropped before the next batch, because the caller must not wait for a running one.
        self.discarded[owner] = principal

    def expired_owners(self) -> dict[Owner, str | None]:
        now = self._clock()
        # Emptied item by item, because other threads can add some at the same time.
        expired = dict(self.discarded.popitem() for _ in range(len(self.discarded)))
        return expired | {owner: one.principal for owner, one in self.items() if one.is_expired(now, self._options)}

    def _describe_holders(self) -> str:
        most = Counter(client for client, _ in self).most_common(5)
        idle = {client: self._clock() - one.touched for (client, _), one in reversed(self.items())}
        words = [f"client {client!r} has {count} (the oldest idle for {idle[client]:.0f} s)" for client, count in most]
        return ", ".join(words)
