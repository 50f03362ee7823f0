"""A task and its waiters, the queue compared with a plain list, and the batch delay, simulated and in a pool."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.concurrency import FakeClock
from torchweft.core.spec import TensorSpec
from torchweft.experts.schema import Column, FlatSchema
from torchweft.experts.task import Answer, BatchDelay, BatchQueue, CallerGroup, PoolOptions, Task, answer_waiters
from torchweft.experts.task_pool import Runtime, TaskPool


def ignore(task: Task) -> None:
    """A callback for cancelled waiters that does nothing."""


def test_task_lasts_as_long_as_its_last_waiter() -> None:
    task = Task((), 1, deadline=5.0)
    for deadline, latest in ((5.0, 5.0), (3.0, 5.0), (9.0, 9.0), (None, None)):
        task.add_waiter(deadline, ignore)
        assert task.deadline == latest
        assert task.is_expired(9.0) == (latest is not None) and not task.is_expired(2.0)


def test_cancelled_waiters_are_dropped_and_others_answered() -> None:
    cancelled: list[Task] = []
    task = Task((), 1)
    first, second, third = (task.add_waiter(None, cancelled.append) for _ in range(3))
    first.cancel()
    assert cancelled == [task] and task.has_waiters() and len(task.waiters) == 2
    second.cancel()
    assert task.start() and not third.cancel()
    joined = task.add_waiter(None, cancelled.append)
    assert not joined.cancel()
    result = [torch.ones(1)]
    answer_waiters(task.release_waiters(), result)
    assert third.result(0) is result and joined.result(0) is result and not task.waiters


@pytest.mark.parametrize("started", [False, True])
def test_cancelled_future_wakes_concurrent_futures_wait(started: bool) -> None:
    task = Task((), 1)
    future = task.add_waiter(None, ignore)
    future.cancel()
    assert not (task.start() if started else task.has_waiters())
    assert wait([future], timeout=5.0).not_done == set()


MIN, MAX, TIMEOUT, GROUPS = 4, 6, 10.0, "abm"
events = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(GROUPS), st.integers(1, MAX), st.none() | st.integers(0, 30)),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.integers(0, 12)),
    st.tuples(st.just("take")),
)


class ListQueue:
    """All waiting tasks in order of arrival. Group "m" belongs to a mini-batch, which does not wait for more rows."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def group(self, name: str) -> list[Task]:
        return [task for task in self.tasks if task.batch_key == (name,)]

    def is_ready(self, name: str, now: float, *, expired: bool = False) -> bool:
        group = self.group(name)
        if not group:
            return False
        waited = now >= group[0].arrival + TIMEOUT or (expired and group[0].is_expired(now))
        return waited or name == "m" or sum(task.rows for task in group) >= MIN

    def next_batch(self, now: float) -> tuple[list[Task], list[Task]]:
        expired: list[Task] = []
        for name in GROUPS:
            while (group := self.group(name)) and group[0].is_expired(now):
                expired.append(group[0])
                self.tasks.remove(group[0])
        ready = [self.group(name) for name in GROUPS if self.is_ready(name, now)]
        batch: list[Task] = []
        for task in min(ready, key=lambda group: group[0].number) if ready else []:
            if task.is_expired(now):
                expired.append(task)
            elif sum(earlier.rows for earlier in batch) + task.rows <= MAX:
                batch.append(task)
            else:
                break
            self.tasks.remove(task)
        return batch, expired


@given(st.lists(events, max_size=40))
def test_queue_agrees_with_a_plain_list(history: list[tuple]) -> None:  # type: ignore[type-arg]
    queue, model, now = BatchQueue(MIN, MAX, TIMEOUT), ListQueue(), 0.0
    added: list[Task] = []
    for event, *details in history:
        if event == "add":
            name, size, lifetime = details
            mini_batch = "whole" if name == "m" else None
            deadline = None if lifetime is None else now + lifetime
            task = Task((), size, (name,), deadline, mini_batch=mini_batch, arrival=now)
            queue.add(task)
            model.tasks.append(task)
            added.append(task)
        elif event == "remove" and details[0] < len(added):
            task = added[details[0]]
            assert queue.remove(task) == (task in model.tasks)
            if task in model.tasks:
                model.tasks.remove(task)
        elif event == "wait":
            now += details[0]
        elif event == "take":
            # A group with an expired head counts as ready, because only a look at it drops the head.
            ready = [model.group(name)[0].number for name in GROUPS if model.is_ready(name, now, expired=True)]
            number, later = queue.oldest_ready(now)
            assert number == min(ready, default=None)
            assert (later is None) == (number is not None or not model.tasks) and (later is None or later > now)
            batch, expired = queue.next_batch(now)
            model_batch, model_expired = model.next_batch(now)
            assert batch == model_batch and set(expired) == set(model_expired)
        assert queue.count == len(model.tasks) and queue.rows == sum(task.rows for task in model.tasks)
        assert set(queue) == set(model.tasks)
        assert queue.oldest_arrival() == (model.tasks[0].arrival if model.tasks else None)


class Outcome(NamedTuple):
    """Seconds per lap and batches in the second half of a simulation, and seconds waited in all of it."""

    lap: float
    batches: int
    waited: float


def simulate(
    pauses: Sequence[float],
    stages: Sequence[tuple[float, float]],
    max_delay: float,
    starts: Sequence[float] = (),
    laps: int = 100,
) -> Outcome:
    """Simulate callers that visit the pools of an expert in turn and pause after each answer, with one device.

    ``stages``: for each pool, the seconds per batch and per row. Time is simulated.
    """
    callers = CallerGroup()
    delays = [BatchDelay(max_delay, callers) for _ in stages]
    arrivals = {caller: (pause, 0) for caller, pause in enumerate(starts or pauses)}  # time, and number of the pool
    waiting: list[list[tuple[float, int]]] = [[] for _ in stages]
    now = 0.0
    answers, batches, half = 0, 0, (0.0, 0)
    total = laps * len(pauses) * len(stages)

    def admit(until: float) -> None:
        due = [caller for caller, (time, _) in arrivals.items() if time <= until]
        for caller in sorted(due, key=lambda caller: arrivals[caller][0]):
            time, pool = arrivals.pop(caller)
            waiting[pool].append((time, caller))
            delays[pool].task_arrived(len(waiting[pool]))

    while answers < total:
        admit(now)
        starting = {
            i: delays[i].start_time(now, len(tasks), lambda _: True) for i, tasks in enumerate(waiting) if tasks
        }
        ready = [i for i, start in starting.items() if start <= now]
        if not ready:
            now = min([*starting.values(), *[time for time, _ in arrivals.values()]])
            continue
        pool = min(ready, key=lambda i: waiting[i][0])
        batch, waiting[pool] = waiting[pool], []
        delays[pool].batch_started(now, len(batch), 0)
        seconds = stages[pool][0] + stages[pool][1] * len(batch)
        now += seconds
        admit(now)
        delays[pool].batch_ended(seconds)
        arrivals |= {caller: (now + pauses[caller], (pool + 1) % len(stages)) for _, caller in batch}
        answers, batches = answers + len(batch), batches + 1
        if answers < total / 2:
            half = (now, batches)
    return Outcome((now - half[0]) * 2 / laps, batches - half[1], sum(delay.waited for delay in delays))


@pytest.mark.parametrize(
    ("pauses", "starts", "stages"),
    [
        pytest.param([0.1, 0.2, 0.3, 0.4], [], [(1.0, 0.01)], id="one pool"),
        pytest.param([0.1, 0.2, 0.3, 0.4], [], [(0.3, 0.02), (1.0, 0.01)], id="forward and backward"),
        pytest.param([0.2] * 4, [0.0, 0.0, 0.3, 0.3], [(0.3, 0.1), (0.7, 0.3)], id="two and two by turns"),
        pytest.param([0.1, 0.1], [0.0, 0.3], [(0.7, 0.05), (1.5, 0.1)], id="one and one by turns"),
    ],
)
def test_separate_callers_come_to_share_expensive_batches(
    pauses: list[float], starts: list[float], stages: list[tuple[float, float]]
) -> None:
    alone, together = (simulate(pauses, stages, max_delay, starts) for max_delay in (0.0, 10.0))
    assert together.batches < 0.8 * alone.batches, "waiting has merged too few batches"
    assert together.lap < 0.9 * alone.lap, "waiting has cost more than it saved"
    assert alone.waited == 0.0


@pytest.mark.parametrize("pauses", [[0.3], [0.0]])
@pytest.mark.parametrize("stages", [[(1.0, 0.1)], [(0.1, 0.1), (1.0, 0.2)]])
def test_lone_caller_never_waits(pauses: list[float], stages: list[tuple[float, float]]) -> None:
    assert simulate(pauses, stages, max_delay=10.0).waited == 0.0


@pytest.mark.long
@given(
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.01, 0.05, 0.3])), min_size=1, max_size=2),
)
def test_useless_waiting_costs_little(pauses: list[float], stages: list[tuple[float, float]]) -> None:
    without, delayed = (simulate(pauses, stages, max_delay, laps=400) for max_delay in (0.0, 10.0))
    assert delayed.lap <= 1.5 * without.lap  # in 400 random cases, 20 exceeded 1.08 and none 1.3


def test_pools_of_an_expert_do_not_wait_for_each_other() -> None:
    """Callers that wait in one pool cannot come to the other, so both pools and the device would stay idle."""
    callers = CallerGroup()
    one, other = (BatchDelay(60.0, callers) for _ in range(2))
    one.task_arrived(2)
    one.batch_started(0.0, 2, 0)
    one.batch_ended(6.0)
    one.task_arrived(1)
    assert one.start_time(0.0, 1, lambda _: True) == 3.0, "the second caller is in neither pool"
    other.task_arrived(1)
    assert one.start_time(0.0, 1, lambda _: True) == 0.0 and other.start_time(0.0, 1, lambda _: True) == 0.0


@given(st.integers(1, 9))
def test_each_wait_in_vain_doubles_the_batches_without(waits: int) -> None:
    callers = CallerGroup()
    delay, others = BatchDelay(1.0, callers), BatchDelay(0.0, callers)
    delay.batch_ended(8.0)
    waited: list[bool] = []
    while sum(waited) < waits:
        others.task_arrived(1)  # a second caller visits another pool, and leaves without a batch
        delay.task_arrived(1)
        others.stop_waiting(0)
        waited.append(delay.start_time(0.0, 1, lambda _: True) > 0.0)
        delay.batch_started(1.0, 1, 0)
        delay.batch_ended(8.0)
    gaps = [len(gap) for gap in "".join("w" if one else "." for one in waited).split("w")[1:-1]]
    assert gaps == [min(1 << place, 64) for place in range(waits - 1)] and delay.waited == waits


def test_failed_batch_counts_neither_time_nor_callers() -> None:
    delay = BatchDelay(1.0)
    delay.task_arrived(1)
    delay.batch_started(0.0, 1, 0)
    delay.batch_ended(None)
    assert (list(delay.seconds), delay.running, delay.waiting) == ([], 0, 0)


SCHEMA = FlatSchema([Column("x", TensorSpec((None, 1), torch.float32))])
ROW = torch.zeros(1, 1)


class WaitingPool(Runtime):
    """Pool whose last batch took 20 s for four callers, and the pool's runtime, which counts wake-ups."""

    name = "runtime"

    def __init__(self, patch: pytest.MonkeyPatch, **options: float | int) -> None:
        self.clock = FakeClock().install(patch, "torchweft.experts.task_pool")
        self.clock.now = time.monotonic()
        options = {"max_batch_delay": 60.0, **options}
        self.pool = TaskPool("p", self.process, SCHEMA, PoolOptions(**options))  # type: ignore[arg-type]
        self.woken = 0
        self.pool.assign_runtime(self)
        for _ in range(4):
            self.pool.submit_task(ROW)
        self.pool.run_batch()
        self.woken = 0

    def process(self, tasks: Sequence[Task]) -> list[Answer]:
        self.clock.now += 20.0
        return [[task.tensors[0]] for task in tasks]

    def wake_for(self, pool: TaskPool) -> None:
        self.woken += 1

    def is_ready(self, later: float = 0.0) -> bool:
        return self.pool.oldest_ready(self.clock.now + later)[0] is not None


def test_waiting_pool_is_woken_by_the_last_caller_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = WaitingPool(monkeypatch)
    waiting.pool.submit_task(ROW)
    assert waiting.woken == 1 and not waiting.is_ready()
    assert waiting.pool.oldest_ready(waiting.clock.now) == (None, waiting.clock.now + 10.0)
    for _ in range(2):
        waiting.pool.submit_task(ROW)
    assert waiting.woken == 1 and not waiting.is_ready()
    waiting.pool.submit_task(ROW)
    assert waiting.woken == 2 and waiting.is_ready()
    assert len(waiting.pool.next_batch()) == 4


def test_wait_in_vain_is_half_a_batch_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = WaitingPool(monkeypatch)
    waiting.pool.submit_task(ROW)
    assert not waiting.is_ready() and not waiting.is_ready(9.9) and waiting.is_ready(10.1)
    waiting.clock.now += 10.1
    waiting.pool.run_batch()
    waiting.pool.submit_task(ROW)
    assert waiting.is_ready()


URGENT: dict[str, Callable[[TaskPool], object]] = {
    "deadline in less than ten delays": lambda pool: pool.submit_task(ROW, deadline=time.monotonic() + 60.0),
    "full batch": lambda pool: pool.submit_task(torch.zeros(4, 1)),
    "closed pool": lambda pool: (pool.submit_task(ROW), pool.set_closed("the test ends")),
}


@pytest.mark.parametrize("case", URGENT)
def test_urgent_batch_does_not_wait(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    waiting = WaitingPool(monkeypatch, max_batch_size=4, max_rows=8)
    URGENT[case](waiting.pool)
    assert waiting.is_ready()


def test_runtime_is_woken_again_after_all_callers_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime was woken for a batch, found none, and sleeps without a wake-up time."""
    waiting = WaitingPool(monkeypatch)
    future = waiting.pool.submit_task(ROW)
    assert not waiting.is_ready()
    future.cancel()
    assert waiting.pool.next_batch() == [] and not waiting.is_ready()
    waiting.woken = 0
    waiting.pool.submit_task(ROW)
    assert waiting.woken == 1


@pytest.mark.parametrize("options", [{"max_batch_delay": 0.0}, {"min_batch_size": 2, "timeout": 0.0}])
def test_pool_without_delay_is_woken_by_every_task(monkeypatch: pytest.MonkeyPatch, options: dict[str, float]) -> None:
    waiting = WaitingPool(monkeypatch, **options)
    waiting.clock.now = time.monotonic()
    for woken in (1, 2):
        waiting.pool.submit_task(ROW)
        assert waiting.woken == woken and waiting.is_ready(1.0) and waiting.pool.statistics().waited == 0.0
