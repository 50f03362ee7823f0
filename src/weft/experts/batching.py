"""How much may wait at a pool, in all and for one client.

Both bounds are there for the others: a full queue answers at once with an error that a client can act on, where
an unbounded one would answer too late; and one greedy client fills its own share, not everybody's.
Not thread-safe; the pool holds the lock.

The queue of a pool: tasks that could share a batch wait in one lane, first come, first served.

    lane (any length 7)    a b d ────┐  oldest head first
    lane (any length 9)    c e   ────┴──> take(): a b d as one batch, then c e

A lane is *ready* when it has the rows of the smallest batch, or its head has waited as long as a batch may be
waited for, or it was flushed. Tasks leave from anywhere at once when they are cancelled: the queue is as long as
the number of tasks that somebody waits for. Not thread-safe; its pool holds the lock.

Whether a batch waits a moment for others: while some are out who will come back, and only where that saves time.

    at once     a ──┤ a, step ├── b c d ──┤ b c d, step ├──      two optimizer steps
    lingering   a b c d ──┤ a b c d, step ├──                    one, a moment later

A batch costs something by itself, whatever its size: an optimizer step above all. Two batches where one would have
done pay that twice. So a pool learns this cost from its own batches, by least squares over their rows, and a batch
waits for no longer than that: what waiting could save (the bargain of who rents skis; Karlin et al., "Competitive
Snoopy Caching", 1988). The pools of one expert are a `Company`: their callers are the same, and who is together in one
pool comes together to the next, so they save the costs of all pools.

Somebody is *out* if more were under way lately, in all pools, than are now. A lone caller waits for nobody; and nobody
waits for those who wait in another pool.

Whether waiting pays depends on who calls, so it is tried: some batches with it, some without it, and then whichever
took less of the device's time for a row, idle time included. From time to time the other way is tried again.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault, is_number, seconds_fault
from weft.experts.errors import OverloadError, QuotaError, TooManyRowsError
from weft.experts.task import Lane, Task

_LINGER = 1e6  # costs of a batch: whoever asks for so much wants min_batch_size


@dataclass(frozen=True)
class PoolOptions:
    """How a pool batches, and how much may wait in it.

    Args:
        min_batch_size: rows that a batch should have; with fewer, the oldest task waits up to ``timeout`` for more.
        max_batch_size: rows that a batch may have; a task with more is refused.
        timeout: seconds that a task waits for ``min_batch_size`` rows to come together. Then they run as they are.
        linger: how long a batch that could begin waits at most for those who are about to come back, in units of what
            a batch costs by itself, such as an optimizer step; see `weft.experts.batching`. 0: never. With a
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


@dataclass(slots=True)
class _Lane:
    # Linked, not hashed in a row: a plain dict whose head is removed again and again is searched from the start.
    tasks: "OrderedDict[int, Task]" = field(default_factory=OrderedDict["int", Task])
    rows: int = 0
    flushed: bool = False

    def head(self) -> Task:
        return next(iter(self.tasks.values()))


class Lanes:
    """Waiting tasks. ``rows`` and ``len`` are what waits now."""

    def __init__(self, min_rows: int, max_rows: int, patience: float) -> None:
        self._min_rows = min_rows
        self._max_rows = max_rows
        self._patience = patience
        self._lanes: dict[Lane, _Lane] = {}
        self._count = 0
        self.rows = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Task]:
        for lane in self._lanes.values():
            yield from lane.tasks.values()

    def add(self, task: Task) -> None:
        """At the end of its lane."""
        lane = self._lanes.setdefault(task.lane, _Lane())
        lane.tasks[task.number] = task
        lane.rows += task.rows
        self.rows += task.rows
        self._count += 1

    def remove(self, task: Task) -> bool:
        """Take one out from where it is; whether it was there."""
        lane = self._lanes.get(task.lane)
        if lane is None or lane.tasks.pop(task.number, None) is None:
            return False
        lane.rows -= task.rows
        self.rows -= task.rows
        self._count -= 1
        if not lane.tasks:
            del self._lanes[task.lane]
        return True

    def flush_where(self, chosen: Callable[[Lane], bool]) -> None:
        """What waits in the chosen lanes now waits for no more rows."""
        for name, lane in self._lanes.items():
            lane.flushed |= chosen(name)

    def oldest(self) -> float | None:
        """When the oldest task arrived, in seconds of `time.monotonic`."""
        return min((lane.head().arrival for lane in self._lanes.values()), default=None)

    def urgency(self, now: float) -> tuple[int | None, float | None]:
        """The number of the oldest ready head, which orders the pools; and when to look again if there is none."""
        ready = [lane.head().number for lane in self._lanes.values() if self._ready(lane, now)]
        if ready:
            return min(ready), None
        heads = [lane.head() for lane in self._lanes.values()]
        times = [head.arrival + self._patience for head in heads]
        times += [head.deadline for head in heads if head.deadline is not None]
        return None, min(times, default=None)

    def patient(self, now: float, spare: float) -> bool:
        """Whether what is ready may wait: no batch is full or wanted at once, and no head has less time than that."""
        heads = [lane.head().deadline for lane in self._lanes.values()]
        if any([deadline is not None and deadline < now + spare for deadline in heads]):
            return False
        return not any([lane.flushed or lane.rows >= self._max_rows for lane in self._lanes.values()])

    def take(self, now: float) -> tuple[list[Task], list[Task]]:
        """The tasks of the next batch, and those that had expired on the way to it. Both are out of the queue.

        Those with keys stand in their order: the same callers make the same batch in forward and in backward, which
        may walk the graph that forward kept, whoever was faster.
        """
        expired = self._expired_heads(now)
        ready = [lane for lane in self._lanes.values() if self._ready(lane, now)]
        batch: list[Task] = []
        if ready:
            self._fill(min(ready, key=lambda lane: lane.head().number), now, batch, expired)
            batch.sort(key=_by_key)
        return batch, expired

    def sweep(self, now: float) -> list[Task]:
        """Remove and return all tasks that have expired."""
        expired = [task for task in self if task.expired(now)]
        for task in expired:
            self.remove(task)
        return expired

    def _fill(self, lane: _Lane, now: float, batch: list[Task], expired: list[Task]) -> None:
        rows = 0
        while lane.tasks:
            task = lane.head()
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
        for lane in list(self._lanes.values()):
            while lane.tasks and lane.head().expired(now):
                expired.append(lane.head())
                self.remove(lane.head())
        return expired

    def _ready(self, lane: _Lane, now: float) -> bool:
        head = lane.head()
        waited = now >= head.arrival + self._patience
        return waited or lane.flushed or lane.rows >= self._min_rows or head.expired(now)


def _by_key(task: Task) -> str:
    return task.key or ""


_KEPT = 0.9  # how much of what was learned of the cost stays when a batch is added
_LATELY = 4  # batches
_SPREAD = 0.05  # of rows, relative to their mean; batches that are all alike tell nothing
_PHASE = 12  # batches of one way
_SETTLE = 4  # of them, that do not count: callers fall in, or apart
_PHASES = 16  # of the better way before the other is tried again
_WORTH = 0.97  # of the seconds for a row that it takes without waiting; else it is not worth the delay
_PAUSE = 0.1  # seconds, or two batches; whoever comes back later has done something else


class Company:
    """Pools with the same callers, worked on by one thread. What other threads tell may be late, but not torn."""

    def __init__(self) -> None:
        self.pools: list[Linger] = []
        self.trial = _Trial()
        self.idle = 0.0
        """Seconds for which the device had nothing to do before the last batch, in all."""
        self._peaks = (0,) * _LATELY  # how many were under way at most, from batch to batch
        self._peak = 0
        self._slowest = 0.0  # of the last batches, in seconds

    @property
    def cost(self) -> float:
        """Seconds that callers cost who are not together: in every pool, those that a batch costs by itself."""
        return sum([each.cost for each in self.pools])

    def out(self) -> int:
        """How many were under way lately who are not now."""
        return max(self._peaks) - self._seen()

    def began(self, idle: float) -> float:
        """A batch has begun: the seconds for which the device had nothing to do before it, since the last one."""
        self._peaks = (*self._peaks[1:], self._peak)
        self._peak = 0
        self._seen()
        idle, self.idle = idle - self.idle, idle
        return max(0.0, idle)

    def ended(self, pool: "Linger", rows: int, idle: float, seconds: float) -> None:
        """A batch of so many rows took so long, and the device had had nothing to do before it."""
        self._slowest = max(seconds, _KEPT * self._slowest)
        self.trial.ended(pool, rows, seconds + min(idle, max(_PAUSE, 2 * self._slowest)))

    def _seen(self) -> int:
        now = sum([each.waiting + each.running for each in self.pools])
        self._peak = max(self._peak, now)
        return now


class Linger:
    """Of one pool, which holds the lock. Times are seconds of one clock. ``most``: waits at most so many costs."""

    def __init__(self, most: float, company: Company | None = None) -> None:
        self._most = most
        self._company = company or Company()
        self._company.pools.append(self)
        self._sums = [0.0] * 5  # 1, rows, seconds, rows * rows, rows * seconds
        self.cost = 0.0
        """Seconds that a batch of this pool costs by itself; all that it costs, as long as all are alike."""
        self._known = False
        self.waited = 0.0
        """Seconds for which batches have waited, in all."""
        self.waiting = self.running = 0
        """Tasks, as of the last word of the pool."""
        self._idle = 0.0  # before the batch that runs
        self._asked: float | None = None  # when who asked was told to wait for the first time
        self._told = False  # whether he was told so the last time

    @property
    def longest(self) -> float:
        """Seconds for which a batch may wait."""
        return self._most * self._company.cost

    def came(self, tasks: int) -> bool:
        """A task came, and so many wait now. Whether who works on batches must be told; not if he waits already."""
        self.waiting = tasks
        out = self._company.out()
        return not self._told or out <= 0

    def begin(self, now: float, tasks: int, *, patient: bool) -> float:
        """When a batch of so many tasks, which could begin now, should begin; ``now`` if they are not patient."""
        self.waiting = tasks
        self._told = False
        if patient and self._company.trial.waits and self._company.out() > 0:
            self._asked = now if self._asked is None else self._asked
            self._told = now < self._asked + self.longest
        return now if not self._told or self._asked is None else self._asked + self.longest

    def nobody(self, tasks: int) -> None:
        """Nothing can begin; so many wait for something else."""
        self.waiting, self._asked, self._told = tasks, None, False

    def began(self, now: float, tasks: int, left: int, idle: float) -> None:
        """A batch of so many tasks has begun, and others are left. ``idle``: of the device so far, in seconds."""
        if self._asked is not None:
            self.waited += max(0.0, now - self._asked)
        self._asked, self._told = None, False
        self.waiting, self.running = left, tasks
        self._idle = self._company.began(idle)

    def ended(self, rows: int, seconds: float) -> None:
        """A batch of so many rows took so long; with 0 rows it failed, which tells nothing."""
        self.running = 0
        if not rows:
            return
        terms = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_KEPT * old + new for old, new in zip(self._sums, terms, strict=True)]
        count, r, s, rr, rs = self._sums
        spread = rr / count - (r / count) ** 2
        if spread > (_SPREAD * r / count) ** 2:
            slope = max(0.0, (rs / count - r * s / count**2) / spread)
            self.cost, self._known = max(0.0, s / count - slope * r / count), True
        elif not self._known:
            self.cost = s / count
        self._company.ended(self, rows, self._idle, seconds)


class _Trial:
    """Which of the two ways is used now, and what each of them took for a row of each pool."""

    def __init__(self) -> None:
        self.waits = False
        self._sums: dict[Linger, tuple[float, int]] = {}  # seconds and rows, of this phase
        self._batches = self._phases = 0
        self._prices: dict[bool, dict[Linger, float]] = {False: {}, True: {}}

    def ended(self, pool: Linger, rows: int, seconds: float) -> None:
        self._batches += 1
        if self._batches > _SETTLE:
            before = self._sums.get(pool, (0.0, 0))
            self._sums[pool] = before[0] + seconds, before[1] + rows
        if self._batches < _PHASE:
            return
        prices = self._prices[self.waits]
        for each, (took, count) in self._sums.items():
            prices[each] = (prices.get(each, took / count) + took / count) / 2
        self._sums, self._batches = {}, 0
        self._phases += 1
        other = self._phases % _PHASES == 0
        self.waits = self._pays() is not other

    def _pays(self) -> bool:
        """Whether waiting is worth it, or was never tried."""
        without, waiting = self._prices[False], self._prices[True]
        known = without.keys() & waiting.keys()
        return not known or sum([waiting[each] for each in known]) < _WORTH * sum([without[each] for each in known])
