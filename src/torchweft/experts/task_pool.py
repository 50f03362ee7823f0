"""Task pool: collects tasks of one kind from many clients, and hands them to a runtime as batches.

    many threads                          one runtime thread
    submit_task ── check ── admit ──> queue ── next_batch ──> process(tasks) ──> one answer per task
        |            |        |         |                                            |
      Future    SpecError  Overload   leave at once when cancelled                Futures

Batching is continuous: a batch consists of the tasks that wait when the device is free. A fixed time window would delay
every lone caller. But each batch has a cost, above all the optimizer step. So a batch waits for callers that recently
had tasks in the pools of this expert and have none now: at most ``max_batch_delay``, and half the duration of a batch.
If no one returns, the next batch does not wait. After two such waits in a row the next two do not, then four.

Lock order: runtime, pool, idempotency table. The pool's lock guards everything that a batch or a client changes.
Futures are answered outside of it, because their callbacks can call the pool.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import isnan
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from torchweft.core.errors import UsageError, join_faults
from torchweft.core.validation import Validator, is_whole
from torchweft.experts import errors
from torchweft.experts.idempotency import IdempotencyTable, RequestKind
from torchweft.experts.schema import FlatSchema
from torchweft.experts.statistics import PoolStatistics
from torchweft.experts.task import Answer, BatchQueue, CallerStream, Results, Task, answer_waiters
from torchweft.experts.telemetry import WorkObserver, process_observed


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


class PoolCounters:
    """Numbers of tasks by their fate since the pool was made. Guarded by the pool's lock."""

    def __init__(self) -> None:
        self._tasks, self._failed, self._refused = (Counter[str]() for _ in range(3))
        self._merged, self._answer_seconds = Counter[int](), 0.0
        self._answer_times = Counter[float]()

    def count_task(self, fate: str) -> None:
        self._tasks[fate] += 1

    def count_refusal(self, error: BaseException) -> None:
        self._refused[errors.reason_of(error)] += 1

    def count_batch(self, tasks: Sequence[Task]) -> None:
        self._tasks["batches"] += 1
        self._tasks["rows"] += sum([task.rows for task in tasks])
        # Rounded up to a power of two, as a histogram with few buckets.
        self._merged[1 << (len(tasks) - 1).bit_length()] += 1

    def count_answers(self, tasks: Sequence[Task], answers: Sequence[Answer]) -> bool:
        now = time.monotonic()
        for task, answer in zip(tasks, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._tasks["answered"] += 1
                self._answer_seconds += now - task.arrival
                # Rounded up to 1 ms times a power of two, as a histogram with few buckets.
                self._answer_times[(1 << int(1000 * (now - task.arrival)).bit_length()) / 1000] += 1
            elif isinstance(answer, errors.ExpiredError):
                self._tasks["expired"] += 1
            else:
                self._failed[errors.reason_of(answer)] += 1
        return not any(isinstance(answer, BaseException) for answer in answers)

    def pool_statistics(self, name: str, pending: PendingTasks) -> PoolStatistics:
        oldest = pending.queue.oldest_arrival()
        kinds = ("submitted", "answered", "cancelled", "expired", "joined", "batches", "rows")
        return PoolStatistics(
            name=name,
            **{kind: self._tasks[kind] for kind in kinds},
            answer_seconds=self._answer_seconds,
            answer_times=dict(self._answer_times),
            failed=dict(self._failed),
            refused=dict(self._refused),
            merged=dict(self._merged),
            waited=pending.delay.waited,
            waiting_tasks=pending.queue.count,
            waiting_rows=pending.queue.rows,
            running_tasks=pending.running,
            oldest_age=0.0 if oldest is None else max(0.0, time.monotonic() - oldest),
        )


# Works on a batch: one answer per task, in order. An exception fails every task of the batch.
Process = Callable[[Sequence[Task]], Sequence[Answer]]


@runtime_checkable
class PoolRuntime(Protocol):
    """The part of a `Runtime` that its pools use."""

    name: str

    def wake_for(self, pool: "TaskPool") -> None: ...


class TaskPool:
    """Collects tasks and hands them out as batches.

    Args:
        process: works on a batch, in the runtime's thread; see `Process`.
        columns: the flat tensors of one task.
        idempotency: applied requests by idempotency key. Without it, ``key`` is only passed on.
        by_mini_batch: whether tasks can name a mini-batch. Tasks of different mini-batches never share a batch.
        callers: shared by pools with the same callers, such as those of one expert.
        runs_alone: whether a task of this mode (evaluation or not) shares its batch with no other.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> pool = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows).get_pools()[0]
        >>> with weft.Runtime([pool]):
        ...     (y,) = pool.submit_task(torch.randn(4, 8)).result(10)
    """

    def __init__(
        self,
        name: str,
        process: Process,
        columns: FlatSchema,
        options: PoolOptions | None = None,
        *,
        idempotency: IdempotencyTable | None = None,
        kind: RequestKind = "backward",
        by_mini_batch: bool = False,
        callers: CallerGroup | None = None,
        runs_alone: Callable[[bool], bool] | None = None,
    ) -> None:
        self.name = name
        self.options = options or PoolOptions()
        self.columns, self.process = columns, process
        self._runtime: PoolRuntime | None = None  # written only under the lock that all runtimes share
        self._observer: WorkObserver | None = None
        self._idempotency = idempotency
        self._kind: RequestKind = kind
        self._by_mini_batch, self._runs_alone = by_mini_batch, runs_alone
        self.pending = PendingTasks(name, self.options, callers)
        self._counters = PoolCounters()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    @property
    def runtime(self) -> PoolRuntime | None:
        return self._runtime

    def submit_task(
        self,
        *tensors: Tensor,
        deadline: float | None = None,
        client: str | None = None,
        key: str | None = None,
        mini_batch: str | None = None,
        evaluation: bool = False,
        keep: bool = True,
        principal: str | None = None,
        stream: CallerStream | None = None,
    ) -> "Future[Results]":
        """Queue one task. The future gets its flat results, which are views of the batch's rows, or its error.

        Args:
            tensors: flat, rows x ..., as the pool's columns say; never written to.
            deadline: time of `time.monotonic` after which the task fails with `ExpiredError` instead of running.
            client: the owner of ``key`` and of ``mini_batch``.
            key: idempotency key. A repetition gets the first answer, and nothing runs twice.
            mini_batch: adds the gradient to this sum instead of stepping; see `ExpertBackend.commit`.
            evaluation: run the module as after ``eval()``. Forward and backward of one key should agree in it.
            keep: for a forward with a key: allow its graph to be kept for the backward, see `weft.experts.graph_cache`.
            principal: the owner of the quotas that this task counts against; None: ``client``.
            stream: the connection. After it has ended, its open mini-batch is dropped, see `AccumulationOptions`.

        Raises ``SpecError`` for tensors that do not fit, and a `RefusedError`. A future that is cancelled before its
        turn leaves the queue at once.
        """
        try:
            rows = self.columns.check(tensors, f"pool {self.name!r}")
            validate_metadata(self.name, client, key, mini_batch, deadline, by_mini_batch=self._by_mini_batch)
            owner = None if mini_batch is None else client
            unique = object() if self._runs_alone is not None and self._runs_alone(evaluation) else None
            sizes = self.columns.batch_key(tensors) if self.columns.free else ()
            batch_key = (owner, mini_batch, sizes, evaluation, unique)
            payer = client if principal is None else principal
            # Most tensors need no change. A torch operation would release the GIL here, and let the runtime start a
            # batch without the tasks that are submitted next.
            if not all([tensor.is_cpu and not tensor.requires_grad for tensor in tensors]):
                tensors = tuple([tensor.detach().cpu() for tensor in tensors])
            task = Task(tensors, rows, batch_key, deadline, client, key, mini_batch, evaluation, keep, payer, stream)
            if self._idempotency is not None and key is not None:
                task.fingerprint()  # reads the whole payload, so it runs in the caller's thread and without the lock
            future, wake = self._enqueue(task)
        except Exception as error:
            with self._lock:
                self._counters.count_refusal(error)
            raise
        if wake:
            self._wake_runtime()
        return future

    def _enqueue(self, task: Task) -> "tuple[Future[Results], bool]":
        pending, idempotency = self.pending, None if task.key is None else self._idempotency
        with self._lock:
            pending.check_open(task)
            # Looking the key up and queueing are one step under the pool's lock. Otherwise two copies of a request
            # could both be new, and step twice.
            known = None if idempotency is None else idempotency.begin(self._kind, task)
            if known is not None:
                self._counters.count_task("joined")
                if isinstance(known, Task):
                    return known.add_waiter(task.deadline, self._on_cancel), False
                answered: Future[Results] = Future()
                answered.set_result(known)
                return answered, False
            # The key is registered by now. Without releasing it, a retry would join a task that never runs.
            try:
                pending.admit(task.principal, task.rows)
            except BaseException:
                if idempotency is not None:
                    idempotency.abandon(self._kind, task)
                raise
            future = task.add_waiter(task.deadline, self._on_cancel)
            self._counters.count_task("submitted")
            return future, pending.add(task)

    def observe(self, observer: WorkObserver | None) -> None:
        self._observer = observer

    def oldest_ready(self, now: float) -> tuple[int | None, float | None]:
        with self._lock:
            return self.pending.oldest_ready(now)

    def has_mini_batch(self, client: str | None, mini_batch: str) -> bool:
        with self._lock:
            pending = self.pending
            tasks = [*pending.batch, *pending.queue] if pending.running else pending.queue
            return any(task.client == client and task.mini_batch == mini_batch for task in tasks)

    def next_batch(self, now: float | None = None) -> list[Task]:
        """Remove the next batch from the queue, for `process_batch`. Empty if none is ready."""
        with self._lock:
            start = time.monotonic() if now is None else now
            batch, cancelled, expired = self.pending.next_batch(start)
            for task in cancelled:
                self._drop_cancelled(task)
            if batch:
                self._counters.count_batch(batch)
        if expired:
            text = f"the deadline of a task for pool {self.name!r} passed before its turn"
            self._finish_tasks(expired, [errors.ExpiredError(text) for _ in expired])
        return batch

    def process_batch(self, tasks: Sequence[Task]) -> None:
        """Work on a batch from `next_batch` and answer every task in it. Raises only `DeviceLostError`."""
        start, watch = time.monotonic(), self._observer
        try:
            answers = self.process(tasks) if watch is None else process_observed(self.process, self.name, tasks, watch)
            if len(answers) != len(tasks):
                raise errors.ExpertError(f"pool {self.name!r} got {len(answers)} answers for {len(tasks)} tasks")
        except BaseException as error:  # a fault of the process, not of a task, but every waiter needs an answer
            answers = [error] * len(tasks)
        self._finish_tasks(tasks, answers, ran=len(tasks), seconds=time.monotonic() - start)
        if isinstance(answers[0], errors.DeviceLostError):
            raise answers[0]

    def run_batch(self) -> bool:
        """Take the next batch and process it. Returns whether there was one, and holds no task afterwards."""
        tasks = self.next_batch()
        if tasks:
            self.process_batch(tasks)
        return bool(tasks)

    def assign_runtime(self, runtime: PoolRuntime | None) -> None:
        self._runtime = runtime

    def open_pool(self) -> None:
        self._set_closed(None)

    def close_pool(self, reason: str) -> None:
        """Reject new tasks with a `ClosedError`. Tasks that wait can still run, without delay."""
        self._set_closed(reason)

    def _set_closed(self, reason: str | None) -> None:
        with self._lock:
            self.pending.set_closed(reason)
        self._wake_runtime()

    def _wake_runtime(self) -> None:
        # Never under the pool's lock: a runtime holds its own lock when it takes that of a pool.
        if (runtime := self._runtime) is not None:
            runtime.wake_for(self)

    def fail_waiting(self) -> None:
        with self._lock:
            waiting = list(self.pending.queue)
            for task in waiting:
                self.pending.queue.remove(task)
            self._idle.notify_all()
        why = self.pending.closed or "it was dropped"
        text = f"pool {self.name!r} did not start this task: {why}; use another server"
        self._finish_tasks(waiting, [errors.ClosedError(text) for _ in waiting])

    def fail_all(self, reason: str) -> None:
        """Fail all tasks and accept no more, because the runtime died, possibly during a batch."""
        with self._lock:
            self.pending.set_closed(reason)
            running, ran = [task for task in self.pending.batch if task.waiters], self.pending.running
        text = f"pool {self.name!r} was processing this task when {reason}; whether it was applied is unknown"
        self._finish_tasks(running, [errors.ExpertError(text) for _ in running], ran=ran)
        self.fail_waiting()

    def wait_until_idle(self, timeout: float | None) -> bool:
        """Wait until no task waits or runs. Returns whether that happened in time."""
        with self._lock:
            return self._idle.wait_for(lambda: not (self.pending.running or self.pending.queue.count), timeout)

    def statistics(self) -> PoolStatistics:
        with self._lock:
            return self._counters.pool_statistics(self.name, self.pending)

    def _on_cancel(self, task: Task) -> None:
        # In the cancelling thread. `remove` returns False if the task has left the queue already, e.g. into a batch.
        with self._lock:
            if not task.has_waiters() and self.pending.queue.remove(task):
                self._drop_cancelled(task)

    def _drop_cancelled(self, task: Task) -> None:
        # Under the lock, for a task that is out of the queue.
        self._counters.count_task("cancelled")
        self._release_task(task)
        self._idle.notify_all()

    def _release_task(self, task: Task) -> Sequence["Future[Results]"]:
        self.pending.leave(task)
        if self._idempotency is not None and task.key is not None:
            self._idempotency.abandon(self._kind, task)
        return task.release_waiters()

    def _finish_tasks(
        self, tasks: Sequence[Task], answers: Sequence[Answer], ran: int = 0, seconds: float | None = None
    ) -> None:
        """Answer tasks that are out of the queue. ``ran`` tasks have run, in a batch of ``seconds``."""
        # Shares and keys are returned before the waiters wake: a client that sends its next request at once must not
        # be rejected because of its last one.
        with self._lock:
            waiting = [self._release_task(task) for task in tasks]
            succeeded = self._counters.count_answers(tasks, answers)
            if ran:
                self.pending.end_batch(seconds if succeeded else None)
        for waiters, answer in zip(waiting, answers, strict=True):
            answer_waiters(waiters, answer)
        # The pool is idle only after all are answered: `Runtime.remove` returns then.
        with self._lock:
            self.pending.forget_running(ran)
            self._idle.notify_all()


def validate_metadata(pool: str, client: Any, key: Any, mini_batch: Any, deadline: Any, *, by_mini_batch: bool) -> None:
    faults = [
        f"{name} is {word!r}, wanted None or a non-empty str"
        for name, word in (("client", client), ("key", key), ("mini_batch", mini_batch))
        if word is not None and not (isinstance(word, str) and word)
    ]
    valid = not isnan(deadline) if isinstance(deadline, float) else deadline is None or is_whole(deadline)
    if not valid:
        faults.append(f"deadline is {deadline!r}, wanted None or a time of `time.monotonic`")
    if mini_batch is not None and not by_mini_batch:
        faults.append(f"it does not accumulate gradients; drop mini_batch={mini_batch!r}")
    if faults:
        raise UsageError(join_faults(f"invalid metadata of a task for pool {pool!r}:", faults))
