"""How much may wait at a pool, in all and for one client.

Both bounds are there for the others: a full queue answers at once with an error that a client can act on, where
an unbounded one would answer too late; and one greedy client fills its own share, not everybody's.
Not thread-safe; the pool holds the lock.
"""

from collections import Counter
from dataclasses import dataclass, field, fields

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault, is_number, seconds_fault
from weft.experts.errors import OverloadError, QuotaError, TooManyRowsError

_LINGER = 1e6  # costs of a batch: whoever asks for so much wants min_batch_size


@dataclass(frozen=True)
class PoolOptions:
    """How a pool batches, and how much may wait in it.

    Args:
        min_batch_size: rows that a batch should have; with fewer, the oldest task waits up to ``timeout`` for more.
        max_batch_size: rows that a batch may have; a task with more is refused.
        timeout: seconds that a task waits for ``min_batch_size`` rows to come together. Then they run as they are.
        linger: how long a batch that could begin waits at most for those who are about to come back, in units of what
            a batch costs by itself, such as an optimizer step; see `weft.experts.linger`. 0: never. With a
            ``min_batch_size`` that decides alone.
        max_tasks, max_rows: what may wait in all; beyond it an `OverloadError`.
        max_client_tasks, max_client_rows: what one client may have waiting or running; beyond it a `QuotaError`. None:
            half of ``max_tasks`` and of ``max_rows``, so that nobody fills a queue alone. Tasks without a client are
            not counted.
    """

    min_batch_size: int = 1
    max_batch_size: int = 4096
    timeout: float = 0.1
    linger: float = 1.0
    max_tasks: int = 4096
    max_rows: int = 1 << 20
    max_client_tasks: int | None = None
    max_client_rows: int | None = None

    def __post_init__(self) -> None:
        names = [one.name for one in fields(self) if one.name not in ("timeout", "linger")]
        faults = [
            fault
            for name in names
            for fault in count_fault(name, getattr(self, name), none=name.startswith("max_client"))
        ]
        faults += seconds_fault("timeout", self.timeout, zero=True)
        if not (is_number(self.linger) and 0 <= self.linger <= _LINGER):
            faults.append(f"linger is {self.linger!r}, wanted a number, 0 to {_LINGER:g}")
        if not faults and self.min_batch_size > self.max_batch_size:
            faults.append(f"min_batch_size is {self.min_batch_size}, but max_batch_size {self.max_batch_size}")
        if not faults and self.max_rows < self.max_batch_size:
            faults.append(f"max_rows is {self.max_rows}, wanted at least max_batch_size, {self.max_batch_size}")
        if faults:
            raise UsageError(listed("a task pool cannot work with these options:", faults))

    @property
    def client_share(self) -> tuple[int, int]:
        """The tasks and the rows that one client may have waiting or running."""
        rows = max(self.max_batch_size, self.max_rows // 2)
        return self.max_client_tasks or max(1, self.max_tasks // 2), self.max_client_rows or rows


@dataclass
class Load:
    """What each client has at a pool now. Clients with nothing are forgotten."""

    options: PoolOptions
    tasks: "Counter[str]" = field(default_factory=Counter["str"])
    rows: "Counter[str]" = field(default_factory=Counter["str"])

    def admit(self, name: str, client: str | None, rows: int, waiting_tasks: int, waiting_rows: int) -> None:
        """Count one more task in, or raise `TooManyRowsError`, `OverloadError` or `QuotaError`."""
        limit = self.options
        if rows > limit.max_batch_size:
            raise TooManyRowsError(
                f"pool {name!r} got a task of {rows} rows, but its largest batch has {limit.max_batch_size}; "
                "split the task, or raise max_batch_size"
            )
        if waiting_tasks >= limit.max_tasks or waiting_rows + rows > limit.max_rows:
            raise OverloadError(
                f"pool {name!r} is full: {waiting_tasks} of {limit.max_tasks} tasks and {waiting_rows} of "
                f"{limit.max_rows} rows wait, and {rows} more were sent; come back later"
            )
        if client is None:
            return
        most_tasks, most_rows = limit.client_share
        if self.tasks[client] >= most_tasks or self.rows[client] + rows > most_rows:
            message = (
                f"client {client!r} has {self.tasks[client]} tasks with {self.rows[client]} rows at pool {name!r} and "
                f"sent {rows} more rows; it may have {most_tasks} tasks and {most_rows} rows there; wait for answers "
                "before sending more"
            )
            self._forget(client)
            raise QuotaError(message)
        self.tasks[client] += 1
        self.rows[client] += rows

    def leave(self, client: str | None, rows: int) -> None:
        """One task less."""
        if client is not None:
            self.tasks[client] -= 1
            self.rows[client] -= rows
            self._forget(client)

    def _forget(self, client: str) -> None:
        if not self.tasks[client]:
            del self.tasks[client], self.rows[client]
