"""Task: the request of one client with its flat tensors, and the futures that wait for its answer. Queue of tasks.

    submit ──> waiting ──> started ──> answered       every waiter gets the results, or the error
                  |
                  +──> cancelled by all its waiters, or expired: it leaves the queue and holds nothing

    batch key (any length 7)    a b d ────┐  oldest head first
    batch key (any length 9)    c e   ────┴──> next_batch(): a b d as one batch, then c e

One future per task would do, if clients never repeated a request that is still running. Such a repetition joins the
task as one more waiter. Nothing here locks: the pool calls all of it under its own lock.
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
Answer = Results | BaseException  # The flat results of a task, or the error for its sender

BatchKey = tuple[Hashable, ...]  # Tasks share a batch only if this is equal

REPEATED = "+"  # Separates the key of a forward from the suffix that distinguishes its backwards

_next_number = count().__next__


@dataclass(eq=False, slots=True)
class CallerStream:
    """The stream by which a task came. ``ended_at`` is a time of `time.monotonic`, None while it is open."""

    ended_at: float | None = None

    def end(self) -> None:
        self.ended_at = time.monotonic()


@dataclass(eq=False, slots=True)
class Task:
    """``tensors`` have ``rows`` rows each. ``number`` is unique here. For the others see `TaskPool.submit_task`."""

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
    started: bool = False
    checksums: int = 0  # the fingerprint; 0: not computed yet

    @property
    def owner(self) -> tuple[str | None, str]:
        return (self.client, self.mini_batch or "")

    def fingerprint(self) -> int:
        """Checksums of everything that a retry has to repeat: mode, mini-batch and shapes, and payload."""
        # Reads the whole payload, so the first call belongs into the thread that submits the task.
        if not self.checksums:
            shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors]
            form = crc32(repr((self.mini_batch, self.evaluation, shapes)).encode("utf-8", "backslashreplace"))
            payload = 0
            for tensor in self.tensors:
                plain = tensor
                if tensor.is_conj() or tensor.is_neg() or not (tensor.is_cpu and tensor.is_contiguous()):
                    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                # Without numpy, because a process that only has its own experts does not need it.
                payload = crc32((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()), payload)
            self.checksums = form << 32 | payload
        return self.checksums

    def add_waiter(self, deadline: float | None, on_cancel: Callable[["Task"], None]) -> "Future[Results]":
        """One more future. The task expires when the last waiter does. ``on_cancel`` runs in the cancelling thread."""
        future = Waiter(self, on_cancel)
        if self.waiters:
            self.deadline = None if self.deadline is None or deadline is None else max(self.deadline, deadline)
        self.waiters.append(future)
        # A retry of a running request must not be able to cancel it either.
        if self.started:
            future.set_running_or_notify_cancel()
        return future

    def has_waiters(self) -> bool:
        # Cancelled waiters are removed on the way.
        for waiter in [waiter for waiter in self.waiters if waiter.cancelled()]:
            self.waiters.remove(waiter)
            # Without this, `concurrent.futures.wait` continues to wait for a cancelled future.
            waiter.set_running_or_notify_cancel()
            waiter.detach()
        return bool(self.waiters)

    def start(self) -> bool:
        """Return whether a waiter is left. If so, the task cannot be cancelled from now on."""
        self.waiters = [waiter for waiter in self.waiters if _set_running(waiter)]
        self.started = bool(self.waiters)
        return self.started

    def is_expired(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now

    def release_waiters(self) -> Sequence["Future[Results]"]:
        """Remove and return the waiters. A client that keeps its future must not keep the task with its tensors."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.detach()
        return waiters


class Waiter(Future[Results]):
    """Notifies the pool when it is cancelled. A done callback would also run for every answer."""

    def __init__(self, task: Task, on_cancel: Callable[[Task], None]) -> None:
        super().__init__()
        self._waits_for: tuple[Task, Callable[[Task], None]] | None = (task, on_cancel)

    def cancel(self) -> bool:
        done, waits_for = super().cancel(), self._waits_for
        if done and waits_for is not None:
            task, on_cancel = waits_for
            on_cancel(task)
        return done

    def detach(self) -> None:
        self._waits_for = None


def answer_waiters(waiters: Sequence["Future[Results]"], result: Answer) -> None:
    for waiter in waiters:
        if not waiter.running() and not _set_running(waiter):
            continue
        # Raised if the client has set its own future, or by a callback. Neither must end the runtime's thread.
        with suppress(BaseException):
            if isinstance(result, BaseException):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)


def split_rows(batch: Sequence[Tensor], rows: Sequence[int]) -> list[Results]:
    if len(rows) == 1:
        # A copy of the list, because its receiver can change it.
        return [list(batch)]
    parts: list[Sequence[Tensor]] = [torch.split(tensor, list(rows)) for tensor in batch]
    return [[part[place] for part in parts] for place in range(len(rows))]


def _set_running(waiter: "Future[Results]") -> bool:
    """Whether a future still needs an answer. It cannot be cancelled from now on."""
    try:
        return waiter.set_running_or_notify_cancel()
    except RuntimeError:  # the client has set it; the library logs that
        return False


@dataclass(slots=True)
class _Group:
    """Tasks of one batch key, oldest first."""

    # A plain dict is hashed in a row: if its head is removed again and again, each search for the next head starts at
    # the beginning. An OrderedDict is linked.
    tasks: "OrderedDict[int, Task]" = field(default_factory=OrderedDict["int", Task])
    rows: int = 0

    def add(self, task: Task) -> None:
        self.tasks[task.number] = task
        self.rows += task.rows

    def remove(self, task: Task) -> bool:
        if self.tasks.pop(task.number, None) is None:
            return False
        self.rows -= task.rows
        return True

    def first_task(self) -> Task:
        return next(iter(self.tasks.values()))


class BatchQueue:
    """Waiting tasks. A group of them is ready when it has ``min_rows``, its head has waited for ``timeout`` seconds,
    or it belongs to a mini-batch. ``count`` tasks and ``rows`` wait now."""

    def __init__(self, min_rows: int, max_rows: int, timeout: float) -> None:
        self._timeout, self._min_rows, self._max_rows = timeout, min_rows, max_rows
        self._groups: dict[BatchKey, _Group] = {}
        self.count = self.rows = 0

    def __iter__(self) -> Iterator[Task]:
        for group in self._groups.values():
            yield from group.tasks.values()

    def set_timeout(self, timeout: float) -> None:
        self._timeout = timeout

    def add(self, task: Task) -> None:
        self._groups.setdefault(task.batch_key, _Group()).add(task)
        self.rows += task.rows
        self.count += 1

    def remove(self, task: Task) -> bool:
        group = self._groups.get(task.batch_key)
        if group is None or not group.remove(task):
            return False
        self.rows -= task.rows
        self.count -= 1
        if not group.tasks:
            del self._groups[task.batch_key]
        return True

    def oldest_arrival(self) -> float | None:
        return min((group.first_task().arrival for group in self._groups.values()), default=None)

    def oldest_ready(self, now: float) -> tuple[int | None, float | None]:
        """The number of the oldest ready head, which orders the pools, or None and when to look again."""
        ready = [group.first_task().number for group in self._groups.values() if self._is_ready(group, now)]
        if ready:
            return min(ready), None
        heads = [group.first_task() for group in self._groups.values()]
        times = [head.arrival + self._timeout for head in heads]
        times += [head.deadline for head in heads if head.deadline is not None]
        return None, min(times, default=None)

    def can_wait(self, latest: float) -> bool:
        """Whether no batch is full, or of one client's mini-batch, or has a deadline before ``latest``."""
        heads = [group.first_task() for group in self._groups.values() if group.rows < self._max_rows]
        urgent = [head for head in heads if head.mini_batch is not None or head.is_expired(latest)]
        return not urgent and len(heads) == len(self._groups)

    def next_batch(self, now: float) -> tuple[list[Task], list[Task]]:
        """Remove and return the tasks of the next batch, and the expired ones that were found on the way."""
        expired: list[Task] = []
        for group in list(self._groups.values()):
            while group.tasks and group.first_task().is_expired(now):
                expired.append(group.first_task())
                self.remove(group.first_task())
        ready = [group for group in self._groups.values() if self._is_ready(group, now)]
        group = min(ready, key=lambda group: group.first_task().number, default=_Group())
        batch: list[Task] = []
        rows = 0
        while group.tasks and (group.first_task().is_expired(now) or rows + group.first_task().rows <= self._max_rows):
            task = group.first_task()
            self.remove(task)
            if task.is_expired(now):
                expired.append(task)
            else:
                rows += task.rows
                batch.append(task)
        # Sorted by key, so that the same callers form the same batch in forward and backward, which can then use its
        # graph. Rounding depends on the order of the rows.
        batch.sort(key=lambda task: task.key or "")
        return batch, expired

    def _is_ready(self, group: _Group, now: float) -> bool:
        head = group.first_task()
        waited = now >= head.arrival + self._timeout or head.mini_batch is not None
        return waited or group.rows >= self._min_rows or head.is_expired(now)
