"""A task pool: tasks of one kind from many clients, taken as batches by a runtime.

    many threads                          one runtime thread
    submit_task ── check ── admit ──> queue ──take──> process(tasks) ──> one answer per task
        |            |        |         |                                      |
      Future    SpecError  Overload   leave at once when cancelled          Futures

Everything that can be wrong with a task by itself is found in `submit_task`, in its author's thread. Batching is
continuous: a batch is what waits when the device is free. It waits a moment longer for callers who are about to come
back (`weft.experts.batching`), or where that was asked for (``min_batch_size``). The pool whose oldest task waits
longest goes first: an idea of hivemind's task pools.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import isnan
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.errors import UsageError
from weft.core.validation import is_number
from weft.experts.batching import BatchDelay, BatchQueue, CallerGroup, PoolOptions, QuotaCounter
from weft.experts.errors import ClosedError, ExpertError, ExpiredError, reason_of
from weft.experts.idempotency import IdempotentRequests
from weft.experts.schema import FlatSchema
from weft.experts.statistics import PoolStatistics
from weft.experts.task import Answer, CallerStream, Results, Task, answer

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
        requests: those that were applied, by idempotency key; without one ``key`` is only carried along.
        splits: whether tasks may name a mini-batch. Tasks of different mini-batches never share a batch.
        host: where tensors are gathered; a tensor from elsewhere is copied there, in its author's thread.
        callers: of pools that have the same callers, such as those of one expert.
        alone: whether tasks of a mode (evaluation or not) share no batch.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        columns: FlatSchema,
        options: PoolOptions | None = None,
        *,
        requests: IdempotentRequests | None = None,
        splits: bool = False,
        host: torch.device | str = "cpu",
        callers: CallerGroup | None = None,
        alone: Callable[[bool], bool] | None = None,
    ) -> None:
        self.name = name
        self.options = options or PoolOptions()
        self.columns = columns
        self.process = process
        """What runs a batch. Who observes puts something around it."""
        self._requests = requests
        self._splits = splits
        self._host, self._alone = torch.device(host), alone
        self._where = f"pool {name!r}"
        self._queue = BatchQueue(self.options.min_batch_size, self.options.max_batch_size, self.options.timeout)
        self._quotas = QuotaCounter(self.options)
        self._delay = BatchDelay(self.options.max_batch_delay if self.options.min_batch_size == 1 else 0.0, callers)
        self._counters = _Counters()
        self._running = 0
        self._taken: Sequence[Task] = ()
        self._swept = 0.0
        self._closed: str | None = None
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._wake: Callable[[TaskPool], None] | None = None

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
            validate_metadata(self.name, client, key, mini_batch, deadline, splits=self._splits)
            owner = None if mini_batch is None else client
            own = object() if self._alone is not None and self._alone(evaluation) else None
            batch_key = (mini_batch is not None, owner, mini_batch, self.columns.batch_key(tensors), evaluation, own)
            payer = client if principal is None else principal
            held = _payload(tensors, self._host)
            task = Task(held, rows, batch_key, deadline, client, key, mini_batch, evaluation, keep, payer, stream)
            if self._requests is not None and key is not None:
                task.fingerprint()  # here, in its author's thread, since it reads the whole payload
            future, news = self._enter(task)
        except Exception as error:
            with self._lock:
                self._counters.refused[reason_of(error)] += 1
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
            known = None if self._requests is None or task.key is None else self._requests.lookup(task)
            if known is not None:
                self._counters.joined += 1
                future = known.join(task.deadline, self._gave_up) if isinstance(known, Task) else _resolved(known)
                return future, False
            if self._requests is not None and task.key is not None:
                self._requests.start(task)
            try:
                self._quotas.admit(self.name, task.principal, task.rows, len(self._queue), self._queue.rows)
            except BaseException:
                if self._requests is not None and task.key is not None:
                    self._requests.abandon(task)
                raise
            future = task.join(task.deadline, self._gave_up)
            self._queue.add(task)
            self._counters.submitted += 1
            return future, self._delay.arrived(len(self._queue))

    def _swept_for(self, task: Task) -> Sequence[Task]:
        """What had expired in a full queue, and made room; but it is not searched all the time."""
        now, limit = task.arrival, self.options
        # Looked at without the lock: whoever comes too late to see a full queue is refused as if it had been full.
        if len(self._queue) < limit.max_tasks and self._queue.rows + task.rows <= limit.max_rows:
            return ()
        with self._lock:
            if now < self._swept + _SWEEP:
                return ()
            self._swept = now
            return self._queue.sweep(now)

    def urgency(self, now: float) -> tuple[int | None, float | None]:
        """The number of the oldest task that may run now, or None and when to look again (None: nothing waits)."""
        with self._lock:
            number, later = self._queue.urgency(now)
            if number is None:
                self._delay.reset(len(self._queue))
                return None, later
            patient = self._queue.patient(now, _HASTE * self._delay.longest)
            begin = self._delay.begin(now, len(self._queue), patient=patient)
            return (None, begin) if begin > now else (number, None)

    def flush(self, client: str | None, mini_batch: str) -> None:
        """Let what waits for this mini-batch run without waiting for more rows."""
        with self._lock:
            self._queue.flush_where(lambda key: key[:3] == (True, client, mini_batch))

    def has_mini_batch(self, client: str | None, mini_batch: str) -> bool:
        """Whether a task of this mini-batch waits or runs."""
        with self._lock:
            known = [*self._taken, *self._queue] if self._running else self._queue
            return any(task.client == client and task.mini_batch == mini_batch for task in known)

    def take(self, now: float | None = None) -> list[Task]:
        """The next batch, now out of the queue and to be given to `work`; empty if nothing is ready."""
        with self._lock:
            batch, expired = self._queue.take(time.monotonic() if now is None else now)
            self._taken = batch
            wanted = [task for task in batch if task.take()]
            for task in batch:
                if not task.taken:  # it was cancelled just now
                    self._drop(task)
            self._running += len(wanted)
            if wanted:
                begun = time.monotonic() if now is None else now
                self._delay.began(begun, len(wanted), len(self._queue))
                self._counters.took(len(wanted), sum(task.rows for task in wanted))
        if expired:
            self._expire(expired)
        return wanted

    def work(self, tasks: Sequence[Task]) -> None:
        """Process a batch from `take` and answer everyone in it. Raises nothing."""
        start = time.monotonic()
        try:
            answers = _complete(self.process(tasks), len(tasks), self._where)
        except BaseException as error:  # a fault of the process, not of a task; but nobody must wait for ever
            answers = [error] * len(tasks)
        self._finish(tasks, answers, ran=len(tasks), seconds=time.monotonic() - start)

    def open(self, wake: "Callable[[TaskPool], None] | None" = None) -> None:
        """Take tasks, and call ``wake`` with this pool whenever one has come."""
        with self._lock:
            self._closed, self._wake = None, wake
        if wake is not None:
            wake(self)

    def close(self, why: str) -> None:
        """Refuse new tasks with a `ClosedError` that says why. What waits may still be taken, without delay."""
        with self._lock:
            self._closed = why
            self._queue.flush_where(lambda key: True)
        if self._wake is not None:
            self._wake(self)

    def abandon(self) -> None:
        """Fail all that waits with a `ClosedError`. What runs is not touched."""
        with self._lock:
            left = list(self._queue)
            for task in left:
                self._queue.remove(task)
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
            return self._idle.wait_for(lambda: not self._running and not len(self._queue), timeout)

    def statistics(self) -> PoolStatistics:
        """What was done so far, and what waits now."""
        with self._lock:
            oldest = self._queue.oldest()
            return self._counters.statistics(
                self.name,
                waited=self._delay.waited,
                waiting_tasks=len(self._queue),
                waiting_rows=self._queue.rows,
                running_tasks=self._running,
                oldest_age=0.0 if oldest is None else max(0.0, time.monotonic() - oldest),
            )

    def _gave_up(self, task: Task) -> None:
        """One of those who wait for this task was cancelled."""
        with self._lock:
            if not task.wanted() and self._queue.remove(task):
                self._drop(task)

    def _drop(self, task: Task) -> None:
        """Nobody waits for this task any more, and it is out of the queue. Under the lock."""
        self._counters.cancelled += 1
        self._leave(task)
        self._idle.notify_all()

    def _leave(self, task: Task) -> Sequence["Future[Results]"]:
        self._quotas.leave(task.principal, task.rows)
        if self._requests is not None and task.key is not None:
            self._requests.abandon(task)
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
                self._counters.ended(found)
            if ran:
                failed = any([isinstance(found, BaseException) for found in answers])
                self._delay.ended(None if failed else seconds)
        for waiters, found in zip(waiting, answers, strict=True):
            answer(waiters, found)
        with self._lock:
            self._running -= ran
            self._idle.notify_all()


@dataclass
class _Counters:
    """The counters behind a `PoolStatistics`; its pool holds the lock."""

    submitted: int = 0
    answered: int = 0
    cancelled: int = 0
    expired: int = 0
    joined: int = 0
    batches: int = 0
    rows: int = 0
    failed: "Counter[str]" = field(default_factory=Counter["str"])
    refused: "Counter[str]" = field(default_factory=Counter["str"])
    merged: "Counter[int]" = field(default_factory=Counter["int"])

    def ended(self, found: object) -> None:
        """One task is over, with this answer."""
        if isinstance(found, ExpiredError):
            self.expired += 1
        elif isinstance(found, BaseException):
            self.failed[reason_of(found)] += 1
        else:
            self.answered += 1

    def took(self, tasks: int, rows: int) -> None:
        """A batch of so many tasks was taken."""
        self.batches += 1
        self.rows += rows
        self.merged[1 << (tasks - 1).bit_length()] += 1

    def statistics(self, name: str, **now: Any) -> PoolStatistics:
        """What was counted, with what is so ``now``."""
        return PoolStatistics(
            name=name,
            submitted=self.submitted,
            answered=self.answered,
            failed=dict(self.failed),
            refused=dict(self.refused),
            cancelled=self.cancelled,
            expired=self.expired,
            joined=self.joined,
            batches=self.batches,
            rows=self.rows,
            merged=dict(self.merged),
            **now,
        )


def validate_metadata(pool: str, client: Any, key: Any, mini_batch: Any, deadline: Any, *, splits: bool) -> None:
    """Raise ``UsageError`` for metadata that is invalid at the pool of this name; quick, for the many that are valid.

    ``splits``: whether its tasks may name a mini-batch.
    """
    usual = mini_batch is None and (deadline is None or (type(deadline) is float and not isnan(deadline)))
    if usual and all([word is None or (word and type(word) is str) for word in (client, key)]):
        return
    words = {"client": client, "key": key, "mini_batch": mini_batch}
    wrong = [
        f"{name} is {word!r}, wanted None or a non-empty str"
        for name, word in words.items()
        if not isinstance(word, str | None) or word == ""
    ]
    if deadline is not None and (not is_number(deadline) or (isinstance(deadline, float) and isnan(deadline))):
        wrong.append(f"deadline is {deadline!r}, wanted None or a time of `time.monotonic`")
    if wrong:
        raise UsageError(f"pool {pool!r}: {'; '.join(wrong)}")
    if mini_batch is not None and not splits:
        raise UsageError(f"pool {pool!r} does not accumulate gradients; drop mini_batch={mini_batch!r}")


def _payload(tensors: tuple[Tensor, ...], host: torch.device) -> tuple[Tensor, ...]:
    """The tensors on this device, without a graph. Most lie there: then nothing is asked of torch, whose operations let
    go of the interpreter's lock, and the runtime would begin before the next task is here."""
    if all([tensor.device == host and not tensor.requires_grad for tensor in tensors]):
        return tensors
    return tuple([tensor.detach().to(host) for tensor in tensors])


def _complete(answers: object, wanted: int, where: str) -> Sequence[Answer]:
    """What a process gave for so many tasks. Raises ``ExpertError`` if that is not one answer for each."""
    if not isinstance(answers, Sequence):
        found = f"a {type(answers).__name__}"
    elif len(given := cast("Sequence[Answer]", answers)) != wanted:
        found = f"{len(given)} answers"
    else:
        return given
    raise ExpertError(
        f"the process of {where} gave {found} for a batch of {wanted} tasks, wanted one for each, in order"
    )


def _resolved(results: Results) -> "Future[Results]":
    """A future that has them already."""
    future: Future[Results] = Future()
    future.set_result(results)
    return future
