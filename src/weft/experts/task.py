"""Task: the request of one client, flat tensors, and the futures that wait for the answer; and the queue of tasks.

    submit ──> waiting ──> taken ──> answered       every waiter gets the results, or the error
                  |
                  +──> cancelled by all its waiters, or expired: it leaves the queue and holds nothing

    batch key (any length 7)    a b d ────┐  oldest head first
    batch key (any length 9)    c e   ────┴──> take(): a b d as one batch, then c e

Usually one future waits; the repetition of a request that is under way joins as one more waiter. The pool holds the
lock.
"""

import ctypes
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from zlib import crc32

import torch
from torch import Tensor

Results = list[Tensor]
Answer = Results | BaseException
"""What became of a task: its flat results, or the error that its author gets."""

BatchKey = tuple[Hashable, ...]
"""What must be equal for two tasks to share a batch."""

REPEATED = "+"
"""Separates the key of a forward from the suffix that distinguishes its backwards."""

_next_number = count().__next__


@dataclass(eq=False, slots=True)
class CallerStream:
    """The stream that a task came by. ``ended_at`` is a time of `time.monotonic`, None while it is open."""

    ended_at: float | None = None

    def end(self) -> None:
        self.ended_at = time.monotonic()


@dataclass(eq=False, slots=True)
class Task:
    """``tensors`` have ``rows`` rows each; ``number`` is unique here; for the others see `TaskPool.submit_task`."""

    tensors: tuple[Tensor, ...]
    rows: int
    batch_key: BatchKey = ()
    deadline: float | None = None
    client: str | None = None
    key: str | None = None
    mini_batch: str | None = None
    evaluation: bool = False
    keep: bool = True
    principal: str | None = None
    stream: CallerStream | None = None
    arrival: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=_next_number)
    waiters: list["Waiter"] = field(default_factory=list["Waiter"])
    taken: bool = False
    _fingerprint: int = 0  # 0: not computed yet

    @property
    def owner(self) -> tuple[str | None, str]:
        """Client and name of its mini-batch."""
        return (self.client, self.mini_batch or "")

    def fingerprint(self) -> int:
        """Checksums of everything that a retry has to repeat: mode, mini-batch and shapes, and payload.

        The first call reads the whole payload, so make it in the thread that submits the task.
        """
        if not self._fingerprint:
            shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors]
            form = crc32(repr((self.mini_batch, self.evaluation, shapes)).encode("utf-8", "backslashreplace"))
            payload = 0
            for tensor in self.tensors:
                plain = tensor
                if tensor.is_conj() or tensor.is_neg() or not (tensor.is_cpu and tensor.is_contiguous()):
                    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                # Without numpy, because a process that only has its own experts does not need it.
                payload = crc32((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()), payload)
            self._fingerprint = form << 32 | payload
        return self._fingerprint

    def join(self, deadline: float | None, gave_up: Callable[["Task"], None]) -> "Future[Results]":
        """One more waiter; the task expires when the last does. ``gave_up`` is called in the thread that cancels it."""
        future = Waiter(self, gave_up)
        if self.waiters:
            self.deadline = None if self.deadline is None or deadline is None else max(self.deadline, deadline)
        self.waiters.append(future)
        if self.taken:
            future.set_running_or_notify_cancel()
        return future

    def wanted(self) -> bool:
        """Whether a waiter is left. Removes cancelled ones."""
        for waiter in [waiter for waiter in self.waiters if waiter.cancelled()]:
            self.waiters.remove(waiter)
            waiter.set_running_or_notify_cancel()  # else `concurrent.futures.wait` would go on waiting for it
            waiter.waits = None
        return bool(self.waiters)

    def take(self) -> bool:
        """Whether a waiter is left; if so, the task cannot be cancelled from here on."""
        self.waiters = [waiter for waiter in self.waiters if _still_waits(waiter)]
        self.taken = bool(self.waiters)
        return self.taken

    def expired(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now

    def release(self) -> Sequence["Future[Results]"]:
        """The waiters, for the last time: a future that is kept must not keep the task."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.waits = None
        return waiters


class Waiter(Future[Results]):
    """Notifies the pool when it is cancelled; a callback would be called for every answer as well."""

    def __init__(self, task: Task, gave_up: Callable[[Task], None]) -> None:
        super().__init__()
        self.waits: tuple[Task, Callable[[Task], None]] | None = (task, gave_up)

    def cancel(self) -> bool:
        done, waits = super().cancel(), self.waits
        if done and waits is not None:
            waits[1](waits[0])
        return done


def answer(waiters: Sequence["Future[Results]"], result: Answer) -> None:
    """Set the result of all futures that were not cancelled."""
    for waiter in waiters:
        if not waiter.running() and not _still_waits(waiter):
            continue
        with suppress(BaseException):  # its owner has set it; or raised by a callback, which must not end this thread
            if isinstance(result, BaseException):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)


def split_rows(batch: Sequence[Tensor], rows: Sequence[int]) -> list[Results]:
    """The results of every task: views of its own rows."""
    if len(rows) == 1:
        return [list(batch)]
    parts: list[Sequence[Tensor]] = [torch.split(tensor, list(rows)) for tensor in batch]
    return [[part[place] for part in parts] for place in range(len(rows))]


def _still_waits(waiter: "Future[Results]") -> bool:
    """Whether a future is to be answered. Nobody can cancel it from here on."""
    try:
        return waiter.set_running_or_notify_cancel()
    except RuntimeError:  # its owner has set it; the library logs that
        return False


@dataclass(slots=True)
class _Group:
    """Tasks of one batch key, oldest first."""

    # Linked, not hashed in a row: a plain dict whose head is removed again and again is searched from the start.
    tasks: "OrderedDict[int, Task]" = field(default_factory=OrderedDict["int", Task])
    rows: int = 0

    def head(self) -> Task:
        return next(iter(self.tasks.values()))


class BatchQueue:
    """Waiting tasks. A group of them is ready when it has the rows of the smallest batch, its head has waited for
    ``timeout`` seconds, or it is of a mini-batch. ``count`` tasks and ``rows`` wait now."""

    def __init__(self, min_rows: int, max_rows: int, timeout: float) -> None:
        self.timeout = timeout
        self._min_rows = min_rows
        self._max_rows = max_rows
        self._groups: dict[BatchKey, _Group] = {}
        self.count = self.rows = 0

    def __iter__(self) -> Iterator[Task]:
        for group in self._groups.values():
            yield from group.tasks.values()

    def add(self, task: Task) -> None:
        group = self._groups.setdefault(task.batch_key, _Group())
        group.tasks[task.number] = task
        group.rows += task.rows
        self.rows += task.rows
        self.count += 1

    def remove(self, task: Task) -> bool:
        """Take one out from where it is; whether it was there."""
        group = self._groups.get(task.batch_key)
        if group is None or group.tasks.pop(task.number, None) is None:
            return False
        group.rows -= task.rows
        self.rows -= task.rows
        self.count -= 1
        if not group.tasks:
            del self._groups[task.batch_key]
        return True

    def oldest(self) -> float | None:
        """When the oldest task arrived, in seconds of `time.monotonic`."""
        return min((group.head().arrival for group in self._groups.values()), default=None)

    def urgency(self, now: float) -> tuple[int | None, float | None]:
        """The number of the oldest ready head, which orders the pools; and when to look again if there is none."""
        ready = [group.head().number for group in self._groups.values() if self._ready(group, now)]
        if ready:
            return min(ready), None
        heads = [group.head() for group in self._groups.values()]
        times = [head.arrival + self.timeout for head in heads]
        times += [head.deadline for head in heads if head.deadline is not None]
        return None, min(times, default=None)

    def patient(self, latest: float) -> bool:
        """Whether what is ready may wait: no batch is full, or of a mini-batch, which one client makes alone; and no
        head has a deadline before ``latest``."""
        heads = [group.head() for group in self._groups.values() if group.rows < self._max_rows]
        urgent = [head for head in heads if head.mini_batch is not None or head.expired(latest)]
        return not urgent and len(heads) == len(self._groups)

    def take(self, now: float) -> tuple[list[Task], list[Task]]:
        """The tasks of the next batch, and those that had expired on the way to it. Both are out of the queue.

        Sorted by their keys: the same callers make the same batch in forward and in backward, which may use its graph.
        """
        expired: list[Task] = []
        for group in list(self._groups.values()):
            while group.tasks and group.head().expired(now):
                expired.append(group.head())
                self.remove(group.head())
        ready = [group for group in self._groups.values() if self._ready(group, now)]
        group = min(ready, key=lambda group: group.head().number, default=_Group())
        batch: list[Task] = []
        rows = 0
        while group.tasks and (group.head().expired(now) or rows + group.head().rows <= self._max_rows):
            task = group.head()
            self.remove(task)
            if task.expired(now):
                expired.append(task)
            else:
                rows += task.rows
                batch.append(task)
        batch.sort(key=lambda task: task.key or "")
        return batch, expired

    def _ready(self, group: _Group, now: float) -> bool:
        head = group.head()
        waited = now >= head.arrival + self.timeout or head.mini_batch is not None
        return waited or group.rows >= self._min_rows or head.expired(now)
