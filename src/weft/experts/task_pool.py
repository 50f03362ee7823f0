"""A task pool: tasks of one kind from many clients, taken as batches by whoever works on them.

    many threads                          one runtime thread
    submit_task ── check ── admit ──> lanes ──take──> process(tasks) ──> one answer per task
        |            |        |         |                                      |
      Future    SpecError  Overload   leave at once when cancelled          Futures

Everything that can be wrong with a task by itself is found in `submit_task`, in its author's thread. Batching is
continuous: a batch is what waits when the device is free, and a moment longer only where that has been seen to pay
(`weft.experts.batching`) or was asked for (``min_batch_size``). The pool whose oldest task waits longest goes first: an
idea of hivemind's task pools.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from weft.experts.batching import Company, Lanes, Linger, Load, PoolOptions
from weft.experts.errors import ClosedError, ExpertError, ExpiredError, reason_of
from weft.experts.schema import Columns
from weft.experts.statistics import PoolStatistics, Tally
from weft.experts.task import (
    Answer,
    CallerStream,
    Ledger,
    Results,
    Task,
    answer,
    answered,
    brought,
    check_words,
    complete,
)

Process = Callable[[Sequence[Task]], Sequence[Answer]]
"""Works on a batch: one answer per task, in order. What it raises, all of them get."""

_SWEEP = 0.01  # seconds between two searches for expired tasks in a full queue
_HASTE = 10.0  # a task that has less time left than so many waits is not asked to wait


class TaskPool:
    """Collects tasks and hands them out as batches.

    Args:
        name: what errors and statistics call it.
        process: works on a batch, in the runtime's thread; see `Process`.
        columns: the flat tensors of one task.
        options: see `PoolOptions`.
        ledger: knows the idempotency keys; without one ``key`` is only carried along.
        splits: whether tasks may name a mini-batch. Tasks of different mini-batches never share a batch.
        host: where tensors are gathered; a tensor from elsewhere is copied there, in its author's thread.
        company: of pools with the same callers, such as those of one expert.
        alone: whether tasks of a mode (evaluation or not) share no batch.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        columns: Columns,
        options: PoolOptions | None = None,
        *,
        ledger: Ledger | None = None,
        splits: bool = False,
        host: torch.device | str = "cpu",
        company: Company | None = None,
        alone: Callable[[bool], bool] | None = None,
    ) -> None:
        self.name = name
        self.options = options or PoolOptions()
        self.columns = columns
        self.process = process
        """What runs a batch. Who observes puts something around it."""
        self._ledger = ledger
        self._splits = splits
        self._host, self._alone = torch.device(host), alone
        self._where = f"pool {name!r}"
        self._lanes = Lanes(self.options.min_batch_size, self.options.max_batch_size, self.options.timeout)
        self._load = Load(self.options)
        self._linger = Linger(self.options.linger if self.options.min_batch_size == 1 else 0.0, company)
        self._tally = Tally()
        self._running = 0
        self._taken: Sequence[Task] = ()
        self._swept = 0.0
        self._closed: str | None = None
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._wake: Callable[[TaskPool], None] | None = None
        self._idle_seconds: Callable[[], float] = float

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
        """Queue one task; the future gets its flat results, whose rows are views of the batch's, or its error.

        Args:
            tensors: flat, rows x ..., as the pool's columns say; never written to.
            deadline: time of `time.monotonic` after which nobody wants the answer; it fails with `ExpiredError`.
            client: who asks: the owner of ``key`` and of ``mini_batch``.
            key: idempotency key; a repetition gets the answer of the first, and nothing runs twice.
            mini_batch: adds the gradient to this sum instead of stepping; see `ExpertBackend.commit`.
            evaluation: the module runs as after ``eval()``; forward and backward of one key should agree in it.
            keep: of a forward with a key: what it leaves may be kept for its backward, see `weft.experts.graph_cache`.
            principal: the owner of the quotas and shares that this task counts against; None: ``client``.
            stream: by which it came; when that has ended, its open mini-batch is dropped, see `SumsOptions`.

        Raises ``SpecError`` for tensors that do not fit, and what `weft.experts.errors` draws under RefusedError.
        A future that is cancelled before its turn leaves the queue at once.
        """
        try:
            rows = self.columns.check(tensors, self._where)
            check_words(self.name, client, key, mini_batch, deadline, splits=self._splits)
            owner = None if mini_batch is None else client
            own = object() if self._alone is not None and self._alone(evaluation) else None
            lane = (mini_batch is not None, owner, mini_batch, self.columns.lane(tensors), evaluation, own)
            payer = client if principal is None else principal
            held = brought(tensors, self._host)
            task = Task(held, rows, lane, deadline, client, key, mini_batch, evaluation, keep, payer, stream)
            if self._ledger is not None and key is not None:
                task.fingerprint()  # here, in its author's thread, since it reads the whole payload
            future, news = self._enter(task)
        except Exception as error:
            with self._lock:
                self._tally.refused[reason_of(error)] += 1
            raise
        if news and self._wake is not None:
            self._wake(self)
        return future

    def _enter(self, task: Task) -> "tuple[Future[Results], bool]":
        """The task's future, and whether who works on batches must be told."""
        expired = self._swept_for(task)
        if expired:
            self._expire(expired)
        with self._lock:
            if self._closed is not None:
                raise ClosedError(f"pool {self.name!r} takes no more tasks: {self._closed}; ask elsewhere")
            if task.expired(task.arrival):
                raise ExpiredError(f"the deadline of a task for pool {self.name!r} had passed when it was submitted")
            known = None if self._ledger is None or task.key is None else self._ledger.lookup(task)
            if known is not None:
                self._tally.joined += 1
                future = known.join(task.deadline, self._gave_up) if isinstance(known, Task) else answered(known)
                return future, False
            if self._ledger is not None and task.key is not None:
                self._ledger.start(task)
            try:
                self._load.admit(self.name, task.principal, task.rows, len(self._lanes), self._lanes.rows)
            except BaseException:
                if self._ledger is not None and task.key is not None:
                    self._ledger.abandon(task)
                raise
            future = task.join(task.deadline, self._gave_up)
            self._lanes.add(task)
            self._tally.submitted += 1
            return future, self._linger.came(len(self._lanes))

    def _swept_for(self, task: Task) -> Sequence[Task]:
        """What had expired in a full queue, and made room; but it is not searched all the time."""
        now, limit = task.arrival, self.options
        # Looked at without the lock: whoever comes too late to see a full queue is refused as if it had been full.
        if len(self._lanes) < limit.max_tasks and self._lanes.rows + task.rows <= limit.max_rows:
            return ()
        with self._lock:
            if now < self._swept + _SWEEP:
                return ()
            self._swept = now
            return self._lanes.sweep(now)

    def urgency(self, now: float) -> tuple[int | None, float | None]:
        """The number of the oldest task that may run now, or None and when to look again (None: nothing waits)."""
        with self._lock:
            number, later = self._lanes.urgency(now)
            if number is None:
                self._linger.nobody(len(self._lanes))
                return None, later
            patient = self._lanes.patient(now, _HASTE * self._linger.longest)
            begin = self._linger.begin(now, len(self._lanes), patient=patient)
            return (None, begin) if begin > now else (number, None)

    def flush(self, client: str | None, mini_batch: str) -> None:
        """Let what waits for this mini-batch run without waiting for more rows."""
        with self._lock:
            self._lanes.flush_where(lambda lane: lane[:3] == (True, client, mini_batch))

    def has_mini_batch(self, client: str | None, mini_batch: str) -> bool:
        """Whether a task of this mini-batch waits or runs."""
        with self._lock:
            known = [*self._taken, *self._lanes] if self._running else self._lanes
            return any(task.client == client and task.mini_batch == mini_batch for task in known)

    def take(self, now: float | None = None) -> list[Task]:
        """The next batch, now out of the queue and to be given to `work`; empty if nothing is ready."""
        with self._lock:
            batch, expired = self._lanes.take(time.monotonic() if now is None else now)
            self._taken = batch
            wanted = [task for task in batch if task.take()]
            for task in batch:
                if not task.taken:  # it was cancelled just now
                    self._drop(task)
            self._running += len(wanted)
            if wanted:
                begun = time.monotonic() if now is None else now
                self._linger.began(begun, len(wanted), len(self._lanes), self._idle_seconds())
                self._tally.took(len(wanted), sum(task.rows for task in wanted))
        if expired:
            self._expire(expired)
        return wanted

    def work(self, tasks: Sequence[Task]) -> None:
        """Process a batch from `take` and answer everyone in it. Raises nothing."""
        start = time.monotonic()
        try:
            answers = complete(self.process(tasks), len(tasks), self._where)
        except BaseException as error:  # a fault of the process, not of a task; but nobody must wait for ever
            answers = [error] * len(tasks)
        self._finish(tasks, answers, ran=len(tasks), seconds=time.monotonic() - start)

    def open(self, wake: "Callable[[TaskPool], None] | None" = None, idle: Callable[[], float] = float) -> None:
        """Take tasks, and call ``wake`` with this pool whenever one has come. ``idle``: seconds without work so far."""
        with self._lock:
            self._closed, self._wake, self._idle_seconds = None, wake, idle
        if wake is not None:
            wake(self)

    def close(self, why: str) -> None:
        """Refuse new tasks with a `ClosedError` that says why. What waits may still be taken, without delay."""
        with self._lock:
            self._closed = why
            self._lanes.flush_where(lambda lane: True)
        if self._wake is not None:
            self._wake(self)

    def abandon(self) -> None:
        """Fail all that waits with a `ClosedError`. What runs is not touched."""
        with self._lock:
            left = list(self._lanes)
            for task in left:
                self._lanes.remove(task)
            self._idle.notify_all()
        why = self._closed or "its tasks were abandoned"
        text = f"pool {self.name!r} did not get to this task: {why}; ask elsewhere"
        self._finish(left, [ClosedError(text) for _ in left])

    def perish(self, why: str) -> None:
        """Whoever worked on this pool is gone, perhaps amid a batch: everyone is told, and it takes no more tasks."""
        with self._lock:
            self._closed = why
            taken, ran = [task for task in self._taken if task.waiters], self._running
        text = f"pool {self.name!r} was at this task when {why}; nobody knows whether it was applied"
        self._finish(taken, [ExpertError(text) for _ in taken], ran=ran)
        self.abandon()

    def drained(self, timeout: float | None) -> bool:
        """Wait until nothing waits or runs, for at most so many seconds; whether it came to that."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._running and not len(self._lanes), timeout)

    def statistics(self) -> PoolStatistics:
        """What was done so far, and what waits now."""
        with self._lock:
            oldest = self._lanes.oldest()
            return self._tally.seen(
                self.name,
                waited=self._linger.waited,
                waiting_tasks=len(self._lanes),
                waiting_rows=self._lanes.rows,
                running_tasks=self._running,
                oldest_age=0.0 if oldest is None else max(0.0, time.monotonic() - oldest),
            )

    def _gave_up(self, task: Task) -> None:
        """One of those who wait for this task was cancelled."""
        with self._lock:
            if not task.wanted() and self._lanes.remove(task):
                self._drop(task)

    def _drop(self, task: Task) -> None:
        """Nobody waits for this task any more, and it is out of the queue. Under the lock."""
        self._tally.cancelled += 1
        self._leave(task)
        self._idle.notify_all()

    def _leave(self, task: Task) -> Sequence["Future[Results]"]:
        self._load.leave(task.principal, task.rows)
        if self._ledger is not None and task.key is not None:
            self._ledger.abandon(task)
        return task.release()

    def _expire(self, tasks: Sequence[Task]) -> None:
        text = f"the deadline of a task for pool {self.name!r} passed before its turn"
        self._finish(tasks, [ExpiredError(text) for _ in tasks])

    def _finish(self, tasks: Sequence[Task], answers: Sequence[Answer], ran: int = 0, seconds: float = 0.0) -> None:
        """Answer everyone; so many of them ran. Who is told may see at once that the pool is through with it."""
        with self._lock:
            waiting = [self._leave(task) for task in tasks]
            self._taken = () if ran else self._taken
            for found in answers:
                self._tally.ended(found)
            if ran:
                failed = any([isinstance(found, BaseException) for found in answers])
                self._linger.ended(0 if failed else sum(task.rows for task in tasks), seconds)
        for waiters, found in zip(waiting, answers, strict=True):
            answer(waiters, found)
        with self._lock:
            self._running -= ran
            self._idle.notify_all()
