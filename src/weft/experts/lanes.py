"""The queue of a pool: tasks that could share a batch wait in one lane, first come, first served.

    lane (any length 7)    a b d ────┐  oldest head first
    lane (any length 9)    c e   ────┴──> take(): a b d as one batch, then c e

A lane is *ready* when it has the rows of the smallest batch, or its head has waited as long as a batch may be
waited for, or it was flushed. Tasks leave from anywhere at once when they are cancelled: the queue is as long as
the number of tasks that somebody waits for. Not thread-safe; its pool holds the lock.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weft.experts.task import Lane, Task


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
