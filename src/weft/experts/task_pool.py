"""A task pool: tasks of one kind from many clients, taken as batches by a runtime.

    many threads                          one runtime thread
    submit_task ── check ── admit ──> queue ──take──> process(tasks) ──> one answer per task
        |            |        |         |                                      |
      Future    SpecError  Overload   leave at once when cancelled          Futures

Batching is continuous: a batch is what waits when the device is free. It costs something by itself, an optimizer step
above all. So it waits for callers who had tasks in the pools of this expert lately and have none now: at most
``max_batch_delay``, and half of what a batch takes. After a wait in vain the next batch does not wait; after two in a
row, the next two do not, then four, and so on.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from math import isnan
from typing import Any

from torch import Tensor

from weft.core.errors import UsageError, listed
from weft.core.validation import Validator, is_whole
from weft.experts.errors import (
    ClosedError,
    DeviceLostError,
    ExpertError,
    ExpiredError,
    OverloadError,
    QuotaError,
    TooManyRowsError,
    reason_of,
)
from weft.experts.idempotency import IdempotencyTable, RequestKind
from weft.experts.schema import FlatSchema
from weft.experts.task import Answer, BatchQueue, CallerStream, Results, Task, answer
from weft.experts.telemetry import PoolStatistics, WorkObserver


@dataclass(frozen=True)
class PoolOptions:
    """How a pool batches, and how much may wait in it.

    Args:
        min_batch_size: rows that a batch should have; with fewer, the oldest task waits up to ``timeout`` for more,
            unless it is of a mini-batch.
        max_batch_size: rows that a batch may have; a task with more is refused.
        timeout: seconds that a task waits for ``min_batch_size`` rows to come together. Then they run as they are.
        max_batch_delay: seconds for which a batch that could begin waits at most for callers about to come back; see
            `weft.experts.task_pool`. 0: never. With a ``min_batch_size`` that decides alone. Not of mini-batches.
        max_tasks, max_rows: what may wait in all; beyond it an `OverloadError`.
        max_client_tasks, max_client_rows: what one client may have waiting or running; beyond it a `QuotaError`. None:
            half of ``max_tasks`` and of ``max_rows``. Tasks without a client are not counted.

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
                check.that(least <= largest, f"min_batch_size is {least}, but max_batch_size {largest}")
                check.that(rows >= largest, f"max_rows is {rows}, wanted at least max_batch_size, {largest}")

    @property
    def client_share(self) -> tuple[int, int]:
        """The tasks and the rows that one client may have waiting or running."""
        rows = max(self.max_batch_size, self.max_rows // 2)
        return self.max_client_tasks or max(1, self.max_tasks // 2), self.max_client_rows or rows


_LATELY = 4  # batches
_MOST_SKIPPED = 64  # batches in a row that do not wait, after waits in vain


class CallerGroup:
    """The callers of several pools, such as those of one expert. What is read of another pool may be late, not torn."""

    def __init__(self) -> None:
        self.delays: list[BatchDelay] = []
        self._peaks = deque([0] * _LATELY, maxlen=_LATELY)  # tasks under way at most, from batch to batch
        self._peak = 0

    def missing(self, *, begun: bool = False) -> int:
        """How many tasks fewer are under way than lately: these are about to come back. ``begun``: a batch has."""
        if begun:
            self._peaks.append(self._peak)
            self._peak = 0
        now = sum([each.waiting + each.running for each in self.delays])
        self._peak = max(self._peak, now)
        return max(self._peaks) - now


class BatchDelay:
    """How long batches of one pool wait for callers who are about to come back. Times are seconds of one clock."""

    def __init__(self, max_delay: float, group: CallerGroup | None = None) -> None:
        self._max_delay = max_delay
        self._group = group or CallerGroup()
        self._group.delays.append(self)
        self.seconds = deque[float](maxlen=_LATELY)  # durations of the last batches
        self.waited = 0.0  # seconds for which batches have waited, in all
        self.waiting = self.running = 0  # tasks, as of the last report of the pool
        self._since: float | None = None  # when the wait began that the runtime was told of
        self._skip = self._skipped = 0  # batches that do not wait: still to come, and after the last wait in vain

    def arrived(self, tasks: int) -> bool:
        """A task came, and so many wait now. Whether to wake the runtime: not if it waits for more already."""
        self.waiting = tasks
        return self._group.missing() <= 0 or self._since is None  # asked in this order: it is counted, too

    def begin(self, now: float, tasks: int, patient: Callable[[float], bool]) -> float:
        """When a batch of so many tasks, which could begin now, should begin. ``patient``: whether they can wait."""
        self.waiting = tasks
        longest = 0.0
        if self._group.missing() > 0 and not self._skip:  # asked in this order: it is counted, too
            # Half of what callers lose who are not together: the shortest of the last batches of each pool.
            longest = min(self._max_delay, sum([min(each.seconds, default=0.0) for each in self._group.delays]) / 2)
        if not longest or not patient(longest):
            return now
        self._since = now if self._since is None else self._since
        return max(now, self._since + longest)

    def reset(self, tasks: int) -> None:
        """No batch can begin; so many tasks wait for something else."""
        self.waiting, self._since = tasks, None

    def began(self, now: float, tasks: int, left: int) -> None:
        """A batch of so many tasks has begun, and others are left."""
        if self._since is not None:
            self.waited += max(0.0, now - self._since)
            in_vain = self._group.missing() > 0
            self._skip = self._skipped = min(max(1, 2 * self._skipped), _MOST_SKIPPED) if in_vain else 0
        else:
            self._skip = max(0, self._skip - 1)
        self.reset(left)
        self.running = tasks
        self._group.missing(begun=True)

    def ended(self, seconds: float | None) -> None:
        """The batch took so long; None: it failed, and its time means nothing."""
        self.running = 0
        if seconds is not None:
            self.seconds.append(seconds)


Process = Callable[[Sequence[Task]], Sequence[Answer]]
"""Works on a batch: one answer per task, in order. What it raises, all of them get."""

_HASTE = 10.0  # a task that has less time left than so many waits is not asked to wait


class TaskPool:
    """Collects tasks and hands them out as batches.

    Args:
        name: what errors and statistics call it.
        process: works on a batch, in the runtime's thread; see `Process`.
        columns: the flat tensors of one task.
        options: see `PoolOptions`.
        idempotency: of the requests that were applied, by idempotency key; without one ``key`` is only carried along.
        kind: of these requests.
        splits: whether tasks may name a mini-batch. Tasks of different mini-batches never share a batch.
        callers: of pools that have the same callers, such as those of one expert.
        alone: whether tasks of a mode (evaluation or not) share no batch.

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
        splits: bool = False,
        callers: CallerGroup | None = None,
        alone: Callable[[bool], bool] | None = None,
    ) -> None:
        self.name = name
        self.options = options or PoolOptions()
        self.columns = columns
        self.process = process
        self._observer: WorkObserver | None = None
        self._idempotency = idempotency
        self._kind: RequestKind = kind
        self._splits = splits
        self._alone = alone
        self._where = f"pool {name!r}"
        self.queue = BatchQueue(self.options.min_batch_size, self.options.max_batch_size, self.options.timeout)
        self._held: dict[str, tuple[int, int]] = {}  # tasks and rows of each principal that has any here
        self._delay = BatchDelay(self.options.max_batch_delay if self.options.min_batch_size == 1 else 0.0, callers)
        self._counts, self._failed, self._refused = (Counter[str]() for _ in range(3))
        self._merged = Counter[int]()
        self._running = 0
        self._taken: Sequence[Task] = ()
        self._closed: str | None = None
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._wake: Callable[[TaskPool], None] | None = None
        self.runtime: Any = None  # the one that runs and works on it; guarded by the runtimes' lock

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
            deadline: time of `time.monotonic` after which the task fails with `ExpiredError` instead of running.
            client: the owner of ``key`` and of ``mini_batch``.
            key: idempotency key; a repetition gets the answer of the first, and nothing runs twice.
            mini_batch: adds the gradient to this sum instead of stepping; see `ExpertBackend.commit`.
            evaluation: the module runs as after ``eval()``; forward and backward of one key should agree in it.
            keep: of a forward with a key: what it leaves may be kept for its backward, see `weft.experts.graph_cache`.
            principal: the owner of the quotas and shares that this task counts against; None: ``client``.
            stream: by which it came; when that has ended, its open mini-batch is dropped, see `AccumulationOptions`.

        Raises ``SpecError`` for tensors that do not fit, and a `RefusedError`. A future that is cancelled before its
        turn leaves the queue at once.
        """
        try:
            rows = self.columns.check(tensors, self._where)
            validate_metadata(self.name, client, key, mini_batch, deadline, splits=self._splits)
            owner = None if mini_batch is None else client
            own = object() if self._alone is not None and self._alone(evaluation) else None
            sizes = self.columns.batch_key(tensors) if self.columns.free else ()
            batch_key, payer = (owner, mini_batch, sizes, evaluation, own), client if principal is None else principal
            # Most are as they should be. An operation of torch would release the GIL, and a batch begin without others.
            if not all([tensor.is_cpu and not tensor.requires_grad for tensor in tensors]):
                tensors = tuple([tensor.detach().cpu() for tensor in tensors])
            task = Task(tensors, rows, batch_key, deadline, client, key, mini_batch, evaluation, keep, payer, stream)
            if self._idempotency is not None and key is not None:
                task.fingerprint()  # in its author's thread, since it reads the whole payload
            future, news = self._enter(task)
        except Exception as error:
            with self._lock:
                self._refused[reason_of(error)] += 1
            raise
        if news and self._wake is not None:
            self._wake(self)
        return future

    def _enter(self, task: Task) -> "tuple[Future[Results], bool]":
        """The task's future, and whether to wake the runtime."""
        queue, records = self.queue, None if task.key is None else self._idempotency
        with self._lock:
            if self._closed is not None:
                raise ClosedError(f"pool {self.name!r} takes no more tasks: {self._closed}; ask elsewhere")
            if task.deadline is not None and task.deadline <= task.arrival:
                raise ExpiredError(f"the deadline of a task for pool {self.name!r} had passed when it was submitted")
            known = None if records is None else records.begin(self._kind, task)
            if known is not None:
                self._counts["joined"] += 1
                if isinstance(known, Task):
                    return known.join(task.deadline, self._gave_up), False
                there: Future[Results] = Future()
                there.set_result(known)
                return there, False
            try:
                self._admit(task.principal, task.rows)
            except BaseException:
                if records is not None:
                    records.abandon(self._kind, task)
                raise
            future = task.join(task.deadline, self._gave_up)
            queue.add(task)
            self._counts["submitted"] += 1
            return future, self._delay.arrived(queue.count)

    def _admit(self, client: str | None, rows: int) -> None:
        """Count one more task in, or raise `TooManyRowsError`, `OverloadError` or `QuotaError`."""
        limit, name, queue = self.options, self.name, self.queue
        if rows > limit.max_batch_size:
            raise TooManyRowsError(
                f"pool {name!r} got a task of {rows} rows, but its largest batch has {limit.max_batch_size}; "
                "split the task, or raise max_batch_size"
            )
        if queue.count >= limit.max_tasks or queue.rows + rows > limit.max_rows:
            raise OverloadError(
                f"pool {name!r} is full: {queue.count} of {limit.max_tasks} tasks and {queue.rows} of {limit.max_rows} "
                f"rows wait, and {rows} more were sent; come back later"
            )
        if client is None:
            return
        (most_tasks, most_rows), (tasks, held) = limit.client_share, self._held.get(client, (0, 0))
        if tasks >= most_tasks or held + rows > most_rows:
            raise QuotaError(
                f"client {client!r} has {tasks} tasks with {held} rows at pool {name!r} and sent {rows} more rows; it "
                f"may have {most_tasks} tasks and {most_rows} rows there; wait for answers before sending more"
            )
        self._held[client] = (tasks + 1, held + rows)

    def observe(self, observer: WorkObserver | None) -> None:
        """Report every batch to this observer, or to none."""
        self._observer = observer

    def urgency(self, now: float) -> tuple[int | None, float | None]:
        """The number of the oldest task that may run now, or None and when to look again (None: nothing waits)."""
        with self._lock:
            queue = self.queue
            number, later = queue.urgency(now) if queue.count else (None, None)
            if number is None:
                self._delay.reset(queue.count)
                return None, later
            if self._closed is not None:
                return number, None
            begin = self._delay.begin(now, queue.count, lambda spare: queue.patient(now + _HASTE * spare))
            return (None, begin) if begin > now else (number, None)

    def has_mini_batch(self, client: str | None, mini_batch: str) -> bool:
        """Whether a task of this mini-batch waits or runs."""
        with self._lock:
            known = [*self._taken, *self.queue] if self._running else self.queue
            return any(task.client == client and task.mini_batch == mini_batch for task in known)

    def take(self, now: float | None = None) -> list[Task]:
        """The next batch, now out of the queue and to be given to `work`; empty if nothing is ready."""
        with self._lock:
            begun = time.monotonic() if now is None else now
            batch, expired = self.queue.take(begun)
            self._taken = batch
            wanted = [task for task in batch if task.take()]
            for task in batch:
                if not task.taken:  # it was cancelled just now
                    self._drop(task)
            if not wanted:
                self._delay.reset(self.queue.count)
            else:
                self._running += len(wanted)
                self._delay.began(begun, len(wanted), self.queue.count)
                self._counts["batches"] += 1
                self._counts["rows"] += sum([task.rows for task in wanted])
                self._merged[1 << (len(wanted) - 1).bit_length()] += 1
        if expired:
            text = f"the deadline of a task for pool {self.name!r} passed before its turn"
            self._finish(expired, [ExpiredError(text) for _ in expired])
        return wanted

    def work(self, tasks: Sequence[Task]) -> None:
        """Process a batch from `take` and answer everyone in it. Raises nothing but `DeviceLostError`."""
        start = time.monotonic()
        try:
            with self._observer.batch_span(self.name, tasks) if self._observer else nullcontext():
                answers = self.process(tasks)
            if len(answers) != len(tasks):
                raise ExpertError(f"{self._where}: its process gave {len(answers)} answers for {len(tasks)} tasks")
        except BaseException as error:  # a fault of the process, not of a task; but every waiter needs an answer
            answers = [error] * len(tasks)
        self._finish(tasks, answers, ran=len(tasks), seconds=time.monotonic() - start)
        if isinstance(answers[0], DeviceLostError):
            raise answers[0]

    def run_batch(self) -> bool:
        """Take the next batch and work on it; whether there was one. Holds no task afterwards."""
        tasks = self.take()
        if tasks:
            self.work(tasks)
        return bool(tasks)

    def open(self, wake: "Callable[[TaskPool], None] | None" = None) -> None:
        """Take tasks, and call ``wake`` with this pool whenever one has come."""
        with self._lock:
            self._closed, self._wake, self.queue.timeout = None, wake, self.options.timeout
        if wake is not None:
            wake(self)

    def close(self, why: str) -> None:
        """Refuse new tasks with a `ClosedError` that says why. What waits may still be taken, without delay."""
        with self._lock:
            self._closed, self.queue.timeout = why, 0.0
        if self._wake is not None:
            self._wake(self)

    def abandon(self) -> None:
        """Fail all that waits with a `ClosedError`. What runs is not touched."""
        with self._lock:
            left = list(self.queue)
            for task in left:
                self.queue.remove(task)
            self._idle.notify_all()
        text = f"pool {self.name!r} did not get to this task: {self._closed or 'it was abandoned'}; ask elsewhere"
        self._finish(left, [ClosedError(text) for _ in left])

    def perish(self, why: str) -> None:
        """The runtime died, perhaps amid a batch: fail all tasks, and take no more."""
        with self._lock:
            self._closed = why
            taken, ran = [task for task in self._taken if task.waiters], self._running
        text = f"pool {self.name!r} was at this task when {why}; whether it was applied is unknown"
        self._finish(taken, [ExpertError(text) for _ in taken], ran=ran)
        self.abandon()

    def drained(self, timeout: float | None) -> bool:
        """Wait until nothing waits or runs, for at most so many seconds; whether it came to that."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._running and not self.queue.count, timeout)

    def statistics(self) -> PoolStatistics:
        with self._lock:
            oldest = self.queue.oldest()
            kinds = ("submitted", "answered", "cancelled", "expired", "joined", "batches", "rows")
            return PoolStatistics(
                name=self.name,
                **{kind: self._counts[kind] for kind in kinds},
                failed=dict(self._failed),
                refused=dict(self._refused),
                merged=dict(self._merged),
                waited=self._delay.waited,
                waiting_tasks=self.queue.count,
                waiting_rows=self.queue.rows,
                running_tasks=self._running,
                oldest_age=0.0 if oldest is None else max(0.0, time.monotonic() - oldest),
            )

    def _gave_up(self, task: Task) -> None:
        with self._lock:
            if not task.wanted() and self.queue.remove(task):
                self._drop(task)

    def _drop(self, task: Task) -> None:
        """Forget a task without waiters that is out of the queue. Under the lock."""
        self._counts["cancelled"] += 1
        self._leave(task)
        self._idle.notify_all()

    def _leave(self, task: Task) -> Sequence["Future[Results]"]:
        if task.principal is not None:
            tasks, rows = self._held.pop(task.principal)
            if tasks > 1:
                self._held[task.principal] = (tasks - 1, rows - task.rows)
        if self._idempotency is not None and task.key is not None:
            self._idempotency.abandon(self._kind, task)
        return task.release()

    def _finish(self, tasks: Sequence[Task], answers: Sequence[Answer], ran: int = 0, seconds: float = 0.0) -> None:
        """Answer all tasks, of which ``ran`` ran. They are off the books before their waiters wake."""
        with self._lock:
            waiting = [self._leave(task) for task in tasks]
            self._taken = () if ran else self._taken
            errors = [found for found in answers if isinstance(found, BaseException)]
            self._counts["answered"] += len(answers) - len(errors)
            for error in errors:
                if isinstance(error, ExpiredError):
                    self._counts["expired"] += 1
                else:
                    self._failed[reason_of(error)] += 1
            if ran:
                self._delay.ended(None if errors else seconds)
        for waiters, found in zip(waiting, answers, strict=True):
            answer(waiters, found)
        with self._lock:
            self._running -= ran
            self._idle.notify_all()


def validate_metadata(pool: str, client: Any, key: Any, mini_batch: Any, deadline: Any, *, splits: bool) -> None:
    """Raise ``UsageError`` that lists invalid metadata. ``splits``: allows mini-batches."""
    faults = [
        f"{name} is {word!r}, wanted None or a non-empty str"
        for name, word in (("client", client), ("key", key), ("mini_batch", mini_batch))
        if word is not None and not (isinstance(word, str) and word)
    ]
    timely = not isnan(deadline) if isinstance(deadline, float) else deadline is None or is_whole(deadline)
    if not timely:
        faults.append(f"deadline is {deadline!r}, wanted None or a time of `time.monotonic`")
    if mini_batch is not None and not splits:
        faults.append(f"it does not accumulate gradients; drop mini_batch={mini_batch!r}")
    if faults:
        raise UsageError(listed(f"invalid metadata of a task for pool {pool!r}:", faults))
