"""Task pools and their runtimes. A pool collects tasks of one kind, and a runtime works on the batches of all pools.

    many threads                          one runtime thread per device
    submit_task ── check ── admit ──> queue ── next_batch ──> process(tasks) ──> one answer per task
        |            |        |         |                                            |
      Future    SpecError  Overload   leave at once when cancelled                Futures

    pool of expert 1, forward   ── oldest task 17 ──┐
    pool of expert 1, backward  ── oldest task 12 ──┼──> 12 is the oldest: that pool's batch is next
    pool of expert 2, forward   ── empty            ┘

A thread per pool would be simpler, but a device runs one batch at a time anyway, and threads would only compete for it
and for the GIL. Other threads check and queue tasks while a batch runs.

Lock order: runtime, pool, idempotency table. The pool's lock guards everything that a batch or a client changes.
Futures are answered outside of it, because their callbacks can call the pool. Pools wake a runtime without their lock.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from math import isnan
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from torchweft.core.errors import UsageError, join_faults
from torchweft.core.validation import MAX_SECONDS, is_whole
from torchweft.experts import errors
from torchweft.experts.idempotency import IdempotencyTable, RequestKind
from torchweft.experts.schema import FlatSchema
from torchweft.experts.statistics import PoolStatistics, RuntimeStatistics
from torchweft.experts.task import (
    Answer,
    CallerGroup,
    CallerStream,
    PendingTasks,
    PoolOptions,
    Results,
    Task,
    answer_waiters,
)
from torchweft.experts.telemetry import WorkObserver


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
        self._runtime: Runtime | None = None  # written only under the lock that all runtimes share
        self._observer: WorkObserver | None = None
        self._idempotency = idempotency
        self._kind: RequestKind = kind
        self._by_mini_batch, self._runs_alone = by_mini_batch, runs_alone
        self.pending = PendingTasks(name, self.options, callers)
        self._counters = PoolCounters()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    @property
    def runtime(self) -> "Runtime | None":
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
            answers = self.process(tasks) if watch is None else watch.process(self.process, self.name, tasks)
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

    def assign_runtime(self, runtime: "Runtime | None") -> None:
        self._runtime = runtime

    def set_closed(self, reason: str | None) -> None:
        """Reject new tasks with a `ClosedError`, or accept them again. Tasks that wait can run, without delay."""
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


@runtime_checkable
class PoolOwner(Protocol):
    """Such as an `ExpertBackend`."""

    @property
    def pools(self) -> Sequence[TaskPool]: ...


# One lock for all runtimes: a runtime claims all its pools or none, even if two of them start at the same time.
_claiming = threading.Lock()
_GRACE = 30.0  # seconds that the end of a ``with`` block leaves for accepted tasks


class Runtime:
    """Works on the batches of pools, or of all pools of experts. ``name``: usually the device.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)
        >>> with weft.Runtime([expert]):
        ...     (y,) = expert.get_pools()[0].submit_task(torch.randn(4, 8)).result(10)
    """

    def __init__(self, served: Iterable[PoolOwner | TaskPool] = (), *, name: str = "cpu") -> None:
        self.name = name
        self.lost: str | None = None  # the error that ended its thread
        self._state = threading.Condition()
        self._pools: dict[TaskPool, bool] = {}  # and whether each is being removed
        self._active: dict[TaskPool, None] = {}  # those with tasks, in the order in which they were woken
        self._thread: threading.Thread | None = None
        self._ending = False
        self._working_on: TaskPool | None = None
        self._batches, self._busy, self._started_at = 0, 0.0, 0.0
        self.add(*served)

    def add(self, *served: PoolOwner | TaskPool) -> None:
        """Work on these too. Raises ``UsageError``, and adds none, if one is here or another runtime works on it."""
        pools = _pools_of(served)
        with self._state:
            if self.lost is not None:
                raise UsageError(f"runtime {self.name!r} ended with {self.lost}; shut it down and start it again")
            twice = [pool.name for place, pool in enumerate(pools) if pool in self._pools or pool in pools[:place]]
            if twice:
                raise UsageError(f"pool {', '.join(map(repr, twice))} is in runtime {self.name!r} already")
            # A stopped runtime claims its pools when it starts, so several can be prepared for the same pools.
            runs = self._thread is not None
            if runs:
                self._claim_pools(pools)
            self._pools.update(dict.fromkeys(pools, False))
        for pool in pools if runs else ():
            pool.set_closed(None)

    def remove(self, *served: PoolOwner | TaskPool, drain: bool = True, timeout: float = _GRACE) -> bool:
        """Close these pools, wait until their accepted tasks are done (with ``drain``), and forget them.

        Tasks that are not done in time fail with `ClosedError`. Returns whether all their batches have ended.
        """
        pools = list(dict.fromkeys(_pools_of(served)))
        with self._state:
            unknown = [pool.name for pool in pools if self._pools.get(pool, True)]
            if unknown:
                raise UsageError(f"runtime {self.name!r} has no pools {unknown}, or they are being removed")
            self._pools.update(dict.fromkeys(pools, True))
        end, claimed = time.monotonic() + min(timeout, MAX_SECONDS), [pool for pool in pools if pool.runtime is self]
        try:
            self._close_pools(claimed, "it was removed from its runtime", end if drain else 0.0)
        finally:
            with self._state:
                for pool in pools:
                    del self._pools[pool]
                    self._active.pop(pool, None)
        # Released last: as long as they were in `_pools`, this thread could have taken one more batch.
        for pool in claimed:
            pool.assign_runtime(None)
        # A list, so that each pool is waited for, even after one that is not idle in time.
        return all([pool.wait_until_idle(max(0.0, end - time.monotonic())) for pool in claimed])

    def start(self) -> None:
        """Start the thread. Raises ``UsageError`` if it runs, or another running runtime has one of the pools."""
        with self._state:
            if self._thread is not None:
                raise UsageError(f"runtime {self.name!r} was started already; shut it down first")
            pools = list(self._pools)
            self._claim_pools(pools)
            self._ending, self._started_at = False, time.monotonic()
            self._thread = threading.Thread(
                target=self._run_batches, name=f"torchweft-runtime-{self.name}", daemon=True
            )
            self._thread.start()
        for pool in pools:
            pool.set_closed(None)

    def shutdown(self, drain: bool = True, timeout: float = _GRACE) -> bool:
        """Reject new tasks, finish accepted ones (with ``drain``), and end the thread. Can be called again.

        Tasks that are not done in time fail with `ClosedError`. Returns False if a batch still runs then.
        """
        if threading.current_thread() is self._thread:
            raise UsageError(f"runtime {self.name!r} cannot be shut down from its own thread, which it would wait for")
        end = time.monotonic() + min(timeout, MAX_SECONDS)
        with self._state:
            pools, thread = [pool for pool in self._pools if pool.runtime is self], self._thread
        self._close_pools(pools, f"runtime {self.name!r} shuts down", end if drain else 0.0)
        with self._state:
            self._ending = True
            self._state.notify_all()
        for pool in pools:
            pool.assign_runtime(None)
        if thread is not None:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                return False
            with self._state:
                self._thread = self.lost = None
        return True

    def wake_for(self, pool: TaskPool) -> None:
        with self._state:
            # Another runtime's pool can call this while it moves, so it must be one of ours.
            if pool in self._pools:
                self._active[pool] = None
                self._state.notify()

    def statistics(self) -> RuntimeStatistics:
        with self._state:
            alive = self._thread is not None and self._thread.is_alive()
            seconds = time.monotonic() - self._started_at if alive else 0.0
            work = None if self._working_on is None else self._working_on.name
            return RuntimeStatistics(self.name, alive, len(self._pools), self._batches, self._busy, seconds, work)

    def __enter__(self) -> "Runtime":
        self.start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if not self.shutdown(drain=kind is None) and kind is None:
            raise errors.ExpertError(
                f"runtime {self.name!r} did not end within {_GRACE:g} s: a batch of pool "
                f"{self.statistics().working_on!r} still runs"
            )

    def _close_pools(self, pools: Sequence[TaskPool], reason: str, end: float) -> None:
        """Reject new tasks, wait until ``end`` for accepted ones if a thread works on them, and fail the rest."""
        # All are closed before the first wait, so that the wait for one does not let tasks into the others.
        for pool in pools:
            pool.set_closed(reason)
        for pool in pools:
            if self._thread is not None:
                pool.wait_until_idle(max(0.0, end - time.monotonic()))
            pool.fail_waiting()

    def _claim_pools(self, pools: Sequence[TaskPool]) -> None:
        with _claiming:
            owners = [(pool.name, pool.runtime) for pool in pools]
            others = [(pool, owner.name) for pool, owner in owners if owner is not None and owner is not self]
            if others:
                listed = ", ".join(f"{pool!r} is in runtime {runtime!r}" for pool, runtime in others)
                raise UsageError(f"runtime {self.name!r} cannot take pools of others: {listed}; remove them there")
            for pool in pools:
                pool.assign_runtime(self)

    def _run_batches(self) -> None:
        try:
            while (pool := self._next_pool()) is not None:
                start = time.monotonic()
                worked = pool.run_batch()
                with self._state:
                    # Read without the pool's lock: a task that arrives later wakes the runtime itself.
                    if pool.pending.queue.count and pool in self._pools:
                        self._active[pool] = None
                    self._working_on = None
                    self._batches += worked
                    self._busy += time.monotonic() - start
        except BaseException as error:
            # A lost GPU, or a bug. Every waiter still needs an answer.
            with self._state:
                self.lost, self._working_on = f"{type(error).__name__}: {error}", None
                pools = list(self._pools)
            for pool in pools:
                pool.fail_all(f"the thread of runtime {self.name!r} ended with {self.lost}")
            if not isinstance(error, errors.DeviceLostError):
                raise

    def _next_pool(self) -> TaskPool | None:
        """Wait for a pool with a ready batch, and choose the one with the oldest task. None at the end."""
        with self._state:
            while not self._ending:
                now = time.monotonic()
                best: tuple[int, TaskPool] | None = None
                wake: float | None = None
                for pool in list(self._active):
                    number, later = pool.oldest_ready(now)
                    if number is not None and (best is None or number < best[0]):
                        best = (number, pool)
                    elif number is None and later is None:
                        del self._active[pool]
                    elif later is not None:
                        wake = later if wake is None else min(wake, later)
                if best is not None:
                    # Removed before its batch is taken. Otherwise a task that arrives after the batch could activate
                    # the pool first, and this removal would lose it.
                    del self._active[best[1]]
                    self._working_on = best[1]
                    return best[1]
                self._state.wait(None if wake is None else max(0.0, wake - now))
            return None


def _pools_of(served: Iterable[PoolOwner | TaskPool]) -> list[TaskPool]:
    return [pool for item in served for pool in ([item] if isinstance(item, TaskPool) else item.pools)]
