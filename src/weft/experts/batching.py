"""Batching in a task pool: its options, quotas, the queue of waiting tasks, and how long a batch waits for more.

    batch key (any length 7)    a b d ────┐  oldest head first
    batch key (any length 9)    c e   ────┴──> take(): a b d as one batch, then c e

Tasks with equal batch keys may share a batch, first come, first served. They leave the queue from anywhere at once when
they are cancelled: it is as long as the number of tasks that somebody waits for. Quotas bound it, in all and for each
client, so that a full queue answers at once with an error that a client can act on, and one greedy client fills its own
share alone.

    at once    a ──┤ a, step ├── b c d ──┤ b c d, step ├──      two optimizer steps
    delayed    a b c d ──┤ a b c d, step ├──                    one, a moment later

A batch costs something by itself, whatever its size: an optimizer step above all. So a batch waits for callers who had
tasks in the pools of this expert lately and have none now: at most ``max_batch_delay``, and half of what a batch takes.
A lone caller never waits. After a wait in vain the next batch does not wait; after two in a row, the next two do not,
then four, and so on.

Nothing here is thread-safe: the pool holds the lock.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weft.core.validation import Validator
from weft.experts.errors import OverloadError, QuotaError, TooManyRowsError
from weft.experts.task import BatchKey, Task


@dataclass(frozen=True)
class PoolOptions:
    """How a pool batches, and how much may wait in it.

    Args:
        min_batch_size: rows that a batch should have; with fewer, the oldest task waits up to ``timeout`` for more.
        max_batch_size: rows that a batch may have; a task with more is refused.
        timeout: seconds that a task waits for ``min_batch_size`` rows to come together. Then they run as they are.
        max_batch_delay: seconds for which a batch that could begin waits at most for callers about to come back; see
            `weft.experts.batching`. 0: never. With a ``min_batch_size`` that decides alone.
        max_tasks, max_rows: what may wait in all; beyond it an `OverloadError`.
        max_client_tasks, max_client_rows: what one client may have waiting or running; beyond it a `QuotaError`. None:
            half of ``max_tasks`` and of ``max_rows``, so that nobody fills a queue alone. Tasks without a client are
            not counted.
    """

    min_batch_size: int = 1
    max_batch_size: int = 4096
    timeout: float = 0.1
    max_batch_delay: float = 0.02
    max_tasks: int = 4096
    max_rows: int = 1 << 20
    max_client_tasks: int | None = None
    max_client_rows: int | None = None

    def __post_init__(self) -> None:
        with Validator("invalid pool options") as check:
            valid = [check.count(name, getattr(self, name)) for name in ("min_batch_size", "max_batch_size")]
            valid += [check.count(name, getattr(self, name)) for name in ("max_tasks", "max_rows")]
            check.count("max_client_tasks", self.max_client_tasks, optional=True)
            check.count("max_client_rows", self.max_client_rows, optional=True)
            check.seconds("timeout", self.timeout, zero=True)
            check.seconds("max_batch_delay", self.max_batch_delay, zero=True)
            if all(valid):
                smallest, largest = self.min_batch_size, self.max_batch_size
                check.that(smallest <= largest, f"min_batch_size is {smallest}, but max_batch_size {largest}")
                check.that(
                    self.max_rows >= largest, f"max_rows is {self.max_rows}, wanted at least max_batch_size, {largest}"
                )

    @property
    def client_share(self) -> tuple[int, int]:
        """The tasks and the rows that one client may have waiting or running."""
        rows = max(self.max_batch_size, self.max_rows // 2)
        return self.max_client_tasks or max(1, self.max_tasks // 2), self.max_client_rows or rows


@dataclass
class QuotaCounter:
    """The tasks and rows that each client has at a pool now. Clients with none are forgotten."""

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


@dataclass(slots=True)
class _Group:
    """Tasks of one batch key, oldest first."""

    # Linked, not hashed in a row: a plain dict whose head is removed again and again is searched from the start.
    tasks: "OrderedDict[int, Task]" = field(default_factory=OrderedDict["int", Task])
    rows: int = 0
    flushed: bool = False

    def head(self) -> Task:
        return next(iter(self.tasks.values()))


class BatchQueue:
    """Waiting tasks. A group of them is ready when it has the rows of the smallest batch, its head has waited for
    ``timeout`` seconds, or it was flushed. ``rows`` and ``len`` are what waits now."""

    def __init__(self, min_rows: int, max_rows: int, timeout: float) -> None:
        self._min_rows = min_rows
        self._max_rows = max_rows
        self._timeout = timeout
        self._groups: dict[BatchKey, _Group] = {}
        self._count = 0
        self.rows = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Task]:
        for group in self._groups.values():
            yield from group.tasks.values()

    def add(self, task: Task) -> None:
        """At the end of its group."""
        group = self._groups.setdefault(task.batch_key, _Group())
        group.tasks[task.number] = task
        group.rows += task.rows
        self.rows += task.rows
        self._count += 1

    def remove(self, task: Task) -> bool:
        """Take one out from where it is; whether it was there."""
        group = self._groups.get(task.batch_key)
        if group is None or group.tasks.pop(task.number, None) is None:
            return False
        group.rows -= task.rows
        self.rows -= task.rows
        self._count -= 1
        if not group.tasks:
            del self._groups[task.batch_key]
        return True

    def flush_where(self, chosen: Callable[[BatchKey], bool]) -> None:
        """What waits now under the chosen keys waits for no more rows."""
        for key, group in self._groups.items():
            group.flushed |= chosen(key)

    def oldest(self) -> float | None:
        """When the oldest task arrived, in seconds of `time.monotonic`."""
        return min((group.head().arrival for group in self._groups.values()), default=None)

    def urgency(self, now: float) -> tuple[int | None, float | None]:
        """The number of the oldest ready head, which orders the pools; and when to look again if there is none."""
        ready = [group.head().number for group in self._groups.values() if self._ready(group, now)]
        if ready:
            return min(ready), None
        heads = [group.head() for group in self._groups.values()]
        times = [head.arrival + self._timeout for head in heads]
        times += [head.deadline for head in heads if head.deadline is not None]
        return None, min(times, default=None)

    def patient(self, now: float, spare: float) -> bool:
        """Whether what is ready may wait: no batch is full or flushed, and no head has less time than that."""
        for group in self._groups.values():
            deadline = group.head().deadline
            if group.flushed or group.rows >= self._max_rows or (deadline is not None and deadline < now + spare):
                return False
        return True

    def take(self, now: float) -> tuple[list[Task], list[Task]]:
        """The tasks of the next batch, and those that had expired on the way to it. Both are out of the queue.

        Tasks with keys are ordered by them: the same callers make the same batch in forward and in backward, which
        may use the graph that forward kept, whoever was faster.
        """
        expired = self._expired_heads(now)
        ready = [group for group in self._groups.values() if self._ready(group, now)]
        batch: list[Task] = []
        if ready:
            self._fill(min(ready, key=lambda group: group.head().number), now, batch, expired)
            batch.sort(key=lambda task: task.key or "")
        return batch, expired

    def sweep(self, now: float) -> list[Task]:
        """Remove and return all tasks that have expired."""
        expired = [task for task in self if task.expired(now)]
        for task in expired:
            self.remove(task)
        return expired

    def _fill(self, group: _Group, now: float, batch: list[Task], expired: list[Task]) -> None:
        rows = 0
        while group.tasks:
            task = group.head()
            if task.expired(now):
                expired.append(task)
            elif rows + task.rows <= self._max_rows:
                rows += task.rows
                batch.append(task)
            else:
                return
            self.remove(task)

    def _expired_heads(self, now: float) -> list[Task]:
        expired: list[Task] = []
        for group in list(self._groups.values()):
            while group.tasks and group.head().expired(now):
                expired.append(group.head())
                self.remove(group.head())
        return expired

    def _ready(self, group: _Group, now: float) -> bool:
        head = group.head()
        waited = now >= head.arrival + self._timeout
        return waited or group.flushed or group.rows >= self._min_rows or head.expired(now)


_LATELY = 4  # batches
_MOST_SKIPPED = 64  # batches in a row that do not wait, after waits in vain


class CallerGroup:
    """The callers of several pools, such as those of one expert, worked on by one thread.

    What other pools report may be late, but not torn.
    """

    def __init__(self) -> None:
        self.delays: list[BatchDelay] = []
        self._peaks = deque([0] * _LATELY, maxlen=_LATELY)  # tasks under way at most, from batch to batch
        self._peak = 0

    def missing(self) -> int:
        """How many tasks fewer are under way now than lately. Above 0, somebody is about to come back."""
        return max(self._peaks) - self._count()

    def began(self) -> None:
        """A batch has begun in one of the pools."""
        self._peaks.append(self._peak)
        self._peak = 0
        self._count()

    @property
    def batch_seconds(self) -> float:
        """What a batch of each pool takes, the shortest of the last ones: the cost of callers who are not together."""
        return sum([min(each.seconds, default=0.0) for each in self.delays])

    def _count(self) -> int:
        now = sum([each.waiting + each.running for each in self.delays])
        self._peak = max(self._peak, now)
        return now


class BatchDelay:
    """How long batches of one pool wait for callers who are about to come back. Times are seconds of one clock."""

    def __init__(self, max_delay: float, group: CallerGroup | None = None) -> None:
        self._max_delay = max_delay
        self._group = group or CallerGroup()
        self._group.delays.append(self)
        self.seconds = deque[float](maxlen=_LATELY)
        """Durations of the last batches."""
        self.waited = 0.0
        """Seconds for which batches have waited, in all."""
        self.waiting = self.running = 0
        """Tasks, as of the last report of the pool."""
        self._since: float | None = None  # when the wait began
        self._sleeps = False  # whether the runtime was told to wait the last time it asked
        self._skip = self._skipped = 0  # batches that do not wait: still to come, and after the last wait in vain

    @property
    def longest(self) -> float:
        """Seconds for which a batch may wait."""
        return min(self._max_delay, self._group.batch_seconds / 2)

    def arrived(self, tasks: int) -> bool:
        """A task came, and so many wait now. Whether to wake the runtime: not if it waits for more already."""
        self.waiting = tasks
        return self._group.missing() <= 0 or not self._sleeps  # asked in this order: it is counted, too

    def begin(self, now: float, tasks: int, *, patient: bool) -> float:
        """When a batch of so many tasks, which could begin now, should begin; ``now`` if they are not patient."""
        self.waiting, self._sleeps = tasks, False
        longest = self.longest
        if self._group.missing() <= 0 or not patient or self._skip or not longest:  # counted in any case
            return now
        self._since = now if self._since is None else self._since
        until = self._since + longest
        self._sleeps = now < until
        return until if self._sleeps else now

    def reset(self, tasks: int) -> None:
        """No batch can begin; so many tasks wait for something else."""
        self.waiting, self._since, self._sleeps = tasks, None, False

    def began(self, now: float, tasks: int, left: int) -> None:
        """A batch of so many tasks has begun, and others are left."""
        if self._since is not None:
            self.waited += max(0.0, now - self._since)
            in_vain = self._group.missing() > 0
            self._skip = self._skipped = min(max(1, 2 * self._skipped), _MOST_SKIPPED) if in_vain else 0
        else:
            self._skip = max(0, self._skip - 1)
        self._since, self._sleeps = None, False
        self.waiting, self.running = left, tasks
        self._group.began()

    def ended(self, seconds: float | None) -> None:
        """The batch took so long; None: it failed, which tells nothing."""
        self.running = 0
        if seconds is not None:
            self.seconds.append(seconds)
