"""Tasks: requests of clients with their flat tensors, the futures that wait for their answers, and queues of tasks.

    submit ──> waiting ──> started ──> answered       every waiter gets the results, or the error
                  |
                  +──> cancelled by all its waiters, or expired: it leaves the queue and holds nothing

    batch key (any length 7)    a b d ────┐  oldest head first
    batch key (any length 9)    c e   ────┴──> next_batch(): a b d as one batch, then c e

Batching is continuous: a batch consists of the tasks that wait when the device is free. A fixed time window would delay
every lone caller. But each batch has a cost, above all the optimizer step. So a batch waits for callers that recently
had tasks in the pools of this expert and have none now: at most ``max_batch_delay``, and half the duration of a batch.
If no one returns, the next batch does not wait. After two such waits in a row the next two do not, then four.

One future per task would do, if clients never repeated a request that is still running. Such a repetition joins the
task as one more waiter. Nothing here locks: the pool calls all of it under its own lock.
"""

import ctypes
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from zlib import crc32

import torch
from torch import Tensor

from torchweft.core.validation import Validator
from torchweft.experts import errors

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


@dataclass(frozen=True)
class PoolOptions:
    """Bounds of the batches of a pool, and of the tasks in it.

    Args:
        min_batch_size: rows for which the oldest task waits, up to ``timeout``. Mini-batches do not wait for more.
        max_batch_size: the most rows of a batch. A task with more is rejected.
        timeout: seconds that a task waits for ``min_batch_size`` rows. Then it runs with fewer.
        max_batch_delay: the most seconds that a ready batch waits for callers that are about to return. 0: never.
            Ignored with a ``min_batch_size`` above 1, and for mini-batches.
        max_tasks, max_rows: the most that can wait. One more raises `OverloadError`.
        max_client_tasks, max_client_rows: the most that one client can have waiting or running. One more raises
            `QuotaError`. None: half of ``max_tasks`` and of ``max_rows``. Tasks without a client are not counted.

    Example:
        >>> weft.experts.PoolOptions(max_batch_size=256).max_batch_delay  # seconds
        0.02
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
            sizes = ("min_batch_size", "max_batch_size", "max_tasks", "max_rows")
            valid = [check.count(name, getattr(self, name)) for name in sizes]
            for name in ("max_client_tasks", "max_client_rows"):
                check.count(name, getattr(self, name), optional=True)
            for name in ("timeout", "max_batch_delay"):
                check.seconds(name, getattr(self, name), zero=True)
            if all(valid):
                least, largest, rows = self.min_batch_size, self.max_batch_size, self.max_rows
                check.require(least <= largest, f"min_batch_size is {least}, but max_batch_size {largest}")
                check.require(rows >= largest, f"max_rows is {rows}, wanted at least max_batch_size, {largest}")

    @property
    def client_share(self) -> tuple[int, int]:
        rows = max(self.max_batch_size, self.max_rows // 2)
        return self.max_client_tasks or max(1, self.max_tasks // 2), self.max_client_rows or rows


_RECENT = 4  # batches
_MOST_SKIPPED = 64  # batches in a row that do not wait, after waits in vain


class CallerGroup:
    """The callers of several pools, such as those of one expert."""

    # Each pool reports under its own lock. A common lock would make the pools of an expert wait for each other. Reads
    # of another pool's counters can therefore be stale, but are never torn: each is one int.
    def __init__(self) -> None:
        self._delays: list[BatchDelay] = []
        self._peaks = deque([0] * _RECENT, maxlen=_RECENT)  # most tasks under way, from batch to batch
        self._peak = 0

    def add_delay(self, delay: "BatchDelay") -> None:
        self._delays.append(delay)

    def count_missing(self, *, begun: bool = False) -> int:
        """Number of callers about to return: fewer tasks are under way than recently. ``begun``: a batch has begun."""
        # The peaks of several batches: callers that take turns in two groups would otherwise look complete after every
        # batch of one group.
        if begun:
            self._peaks.append(self._peak)
            self._peak = 0
        now = sum([delay.waiting + delay.running for delay in self._delays])
        self._peak = max(self._peak, now)
        return max(self._peaks) - now

    def longest_delay(self) -> float:
        return sum([min(delay.seconds, default=0.0) for delay in self._delays]) / 2


class BatchDelay:
    """Delay of one pool's batches, for callers that are about to return. Times are seconds of one clock."""

    def __init__(self, max_delay: float, group: CallerGroup | None = None) -> None:
        self._max_delay = max_delay
        self._group = group or CallerGroup()
        self._group.add_delay(self)
        self.seconds = deque[float](maxlen=_RECENT)  # durations of the last batches
        self.waited = 0.0  # seconds for which batches have waited, in total
        self.waiting = self.running = 0  # tasks, as of the last report of the pool
        self._since: float | None = None  # start of the wait that was reported to the runtime
        self._skip = self._skipped = 0  # batches that do not wait: still to come, and after the last wait in vain

    def task_arrived(self, tasks: int) -> bool:
        """Note that ``tasks`` wait now. Returns whether to wake the runtime: not if it waits for more already."""
        self.waiting = tasks
        missing = self._group.count_missing()  # never skipped, because it also notes the peak
        return missing <= 0 or self._since is None

    def start_time(self, now: float, tasks: int, can_wait: Callable[[float], bool]) -> float:
        """The time at which a batch that is ready now starts. ``can_wait``: whether so many seconds are allowed."""
        self.waiting = tasks
        longest = 0.0
        missing = self._group.count_missing()  # called even if `_skip`, because it also notes the peak
        if missing > 0 and not self._skip:
            longest = min(self._max_delay, self._group.longest_delay())
        if not longest or not can_wait(longest):
            return now
        self._since = now if self._since is None else self._since
        return max(now, self._since + longest)

    def stop_waiting(self, tasks: int) -> None:
        # Called when no batch is ready: the tasks that are left wait for something else.
        self.waiting, self._since = tasks, None

    def batch_started(self, now: float, tasks: int, left: int) -> None:
        if self._since is not None:
            self.waited += max(0.0, now - self._since)
            # Exponential back-off: callers that left for good must not delay the others for long.
            in_vain = self._group.count_missing() > 0
            self._skip = self._skipped = min(max(1, 2 * self._skipped), _MOST_SKIPPED) if in_vain else 0
        else:
            self._skip = max(0, self._skip - 1)
        self.stop_waiting(left)
        self.running = tasks
        self._group.count_missing(begun=True)

    def batch_ended(self, seconds: float | None) -> None:
        self.running = 0
        # None: the batch failed. Its duration would make the delays of later batches too short.
        if seconds is not None:
            self.seconds.append(seconds)


_HASTE = 10.0  # a task is not delayed if its deadline is closer than so many delays


class PendingTasks:
    """Tasks of one pool that wait or run, and the share of each principal. Guarded by the pool's lock."""

    # ``closed``: why new tasks are rejected, or None.
    def __init__(self, pool: str, options: PoolOptions, callers: CallerGroup | None) -> None:
        self.closed: str | None = None
        self.queue = BatchQueue(options.min_batch_size, options.max_batch_size, options.timeout)
        self.delay = BatchDelay(options.max_batch_delay if options.min_batch_size == 1 else 0.0, callers)
        self.batch: Sequence[Task] = ()  # the last one that was started, until it is answered
        self.running = 0  # tasks; a batch that hangs in an earlier runtime counts as well
        self._pool, self._options = pool, options
        self._shares: dict[str, tuple[int, int]] = {}  # tasks and rows of each principal that has any here

    def set_closed(self, reason: str | None) -> None:
        self.closed = reason
        # Tasks that wait in a closed pool run at once, because no others will join them.
        self.queue.set_timeout(self._options.timeout if reason is None else 0.0)

    def check_open(self, task: Task) -> None:
        if self.closed is not None:
            raise errors.ClosedError(f"pool {self._pool!r} accepts no more tasks: {self.closed}; use another server")
        if task.deadline is not None and task.deadline <= task.arrival:
            raise errors.ExpiredError(f"the deadline of a task for pool {self._pool!r} had passed on submission")

    def admit(self, client: str | None, rows: int) -> None:
        """Count one more task, or raise `TooManyRowsError`, `OverloadError` or `QuotaError`."""
        # Checked from the task's own fault to the server's: a client must not retry a task that can never fit.
        limit, name, queue = self._options, self._pool, self.queue
        if rows > limit.max_batch_size:
            raise errors.TooManyRowsError(
                f"pool {name!r} got a task of {rows} rows, but its largest batch has {limit.max_batch_size}; "
                "split the task, or raise max_batch_size"
            )
        if queue.count >= limit.max_tasks or queue.rows + rows > limit.max_rows:
            raise errors.OverloadError(
                f"pool {name!r} is full: {queue.count} of {limit.max_tasks} tasks and {queue.rows} of {limit.max_rows} "
                f"rows wait, and {rows} more were sent; retry later"
            )
        if client is None:
            return
        (most_tasks, most_rows), (tasks, held) = limit.client_share, self._shares.get(client, (0, 0))
        if tasks >= most_tasks or held + rows > most_rows:
            raise errors.QuotaError(
                f"client {client!r} has {tasks} tasks with {held} rows at pool {name!r} and sent {rows} more rows; its "
                f"limit is {most_tasks} tasks and {most_rows} rows; wait for answers before sending more"
            )
        self._shares[client] = (tasks + 1, held + rows)

    def add(self, task: Task) -> bool:
        self.queue.add(task)
        return self.delay.task_arrived(self.queue.count)

    def leave(self, task: Task) -> None:
        if task.principal is not None:
            # Popped, and put back unless it is zero: the table must not keep every client that ever called.
            tasks, rows = self._shares.pop(task.principal)
            if tasks > 1:
                self._shares[task.principal] = (tasks - 1, rows - task.rows)

    def oldest_ready(self, now: float) -> tuple[int | None, float | None]:
        """The number of the oldest task that can run now, or None and when to look again."""
        queue, delay = self.queue, self.delay
        number, later = queue.oldest_ready(now) if queue.count else (None, None)
        if number is None:
            delay.stop_waiting(queue.count)
            return None, later
        if self.closed is not None:
            return number, None
        start = delay.start_time(now, queue.count, lambda longest: queue.can_wait(now + _HASTE * longest))
        return (None, start) if start > now else (number, None)

    def next_batch(self, now: float) -> tuple[list[Task], list[Task], list[Task]]:
        """Remove the next batch from the queue: its tasks, which run now, cancelled tasks, and expired ones."""
        batch, expired = self.queue.next_batch(now)
        started = [task for task in batch if task.start()]
        if started:
            # If the runtime dies, `fail_all` has no other reference to the tasks of the running batch.
            self.batch = started
            self.running += len(started)
            self.delay.batch_started(now, len(started), self.queue.count)
        else:
            self.delay.stop_waiting(self.queue.count)
        return started, [task for task in batch if not task.started], expired

    def end_batch(self, seconds: float | None) -> None:
        self.batch = ()
        self.delay.batch_ended(seconds)

    def forget_running(self, tasks: int) -> None:
        self.running -= tasks
