"""A task and its waiters; the queue against a plain list; the delay of batches, simulated and in a pool."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.core.spec import TensorSpec
from weft.experts.errors import ExpiredError, OverloadError, reason_of
from weft.experts.schema import Column, FlatSchema
from weft.experts.task import Answer, BatchQueue, Task, answer_waiters
from weft.experts.task_pool import BatchDelay, CallerGroup, PoolOptions, TaskPool


def ignore(task: Task) -> None:
    """Nobody has to be told."""


def test_a_task_lasts_as_long_as_its_most_patient_waiter() -> None:
    task = Task((), 1, deadline=5.0)
    task.add_waiter(5.0, ignore)
    task.add_waiter(3.0, ignore)
    assert task.deadline == 5.0
    task.add_waiter(9.0, ignore)
    assert task.is_expired(9.0) and not task.is_expired(8.0)
    task.add_waiter(None, ignore)
    assert task.deadline is None and not task.is_expired(1e9)


def test_who_gave_up_is_forgotten_and_the_others_are_answered() -> None:
    told: list[Task] = []
    task = Task((), 1)
    first, second, third = (task.add_waiter(None, told.append) for _ in range(3))
    first.cancel()
    assert told == [task] and task.has_waiters() and len(task.waiters) == 2
    second.cancel()
    assert task.start() and not third.cancel()
    joined = task.add_waiter(None, told.append)
    assert not joined.cancel()
    result = [torch.ones(1)]
    answer_waiters(task.release_waiters(), result)
    assert third.result(0) is result and joined.result(0) is result and not task.waiters


def test_who_waits_for_a_cancelled_future_among_others_is_woken() -> None:
    for taken in (False, True):
        task = Task((), 1)
        future = task.add_waiter(None, ignore)
        future.cancel()
        assert not (task.start() if taken else task.has_waiters())
        assert wait([future], timeout=5.0).not_done == set()


def test_an_answer_reaches_those_who_were_never_taken_and_skips_those_who_left() -> None:
    gone: Future[list[torch.Tensor]] = Future()
    gone.cancel()
    waits: Future[list[torch.Tensor]] = Future()
    answer_waiters([gone, waits], ExpiredError("late"))
    with pytest.raises(TimeoutError, match="late"):
        waits.result(0)
    assert [*map(reason_of, (OverloadError(), ValueError(), ExpiredError()))] == ["overload", "module", "expired"]


MIN, MAX, PATIENCE, GROUPS = 4, 6, 10.0, "abm"
events = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(GROUPS), st.integers(1, MAX), st.none() | st.integers(0, 30)),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.integers(0, 12)),
    st.tuples(st.just("take")),
)


class Model:
    """All waiting tasks in order of arrival; those of "m" are of a mini-batch, which does not wait for more rows."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def group(self, name: str) -> list[Task]:
        return [task for task in self.tasks if task.batch_key == (name,)]

    def ready(self, name: str, now: float) -> bool:
        group = self.group(name)
        if not group:
            return False
        waited = now >= group[0].arrival + PATIENCE
        return waited or name == "m" or sum(task.rows for task in group) >= MIN

    def drop_expired_heads(self, now: float) -> list[Task]:
        dropped: list[Task] = []
        for name in GROUPS:
            while (group := self.group(name)) and group[0].is_expired(now):
                dropped.append(group[0])
                self.forget(group[0])
        return dropped

    def forget(self, task: Task) -> None:
        self.tasks.remove(task)

    def take(self, now: float) -> tuple[list[Task], list[Task]]:
        expired = self.drop_expired_heads(now)
        ready = [self.group(name) for name in GROUPS if self.ready(name, now)]
        batch: list[Task] = []
        for task in min(ready, key=lambda group: group[0].number) if ready else []:
            if task.is_expired(now):
                expired.append(task)
            elif sum(each.rows for each in batch) + task.rows <= MAX:
                batch.append(task)
            else:
                break
            self.forget(task)
        return batch, expired


@given(st.lists(events, max_size=40))
def test_a_queue_does_what_a_plain_list_would(history: list[tuple]) -> None:  # type: ignore[type-arg]
    queue, model, now = BatchQueue(MIN, MAX, PATIENCE), Model(), 0.0
    seen: list[Task] = []
    for event, *details in history:
        if event == "add":
            name, size, ends = details
            whole = "whole" if name == "m" else None
            task = Task((), size, (name,), None if ends is None else now + ends, mini_batch=whole, arrival=now)
            queue.add(task)
            model.tasks.append(task)
            seen.append(task)
        elif event == "remove" and details[0] < len(seen):
            task = seen[details[0]]
            assert queue.remove(task) == (task in model.tasks)
            if task in model.tasks:
                model.forget(task)
        elif event == "wait":
            now += details[0]
        elif event == "take":
            # With an expired head a group is looked at: that is how it gets dropped.
            heads = [group[0] for name in GROUPS if (group := model.group(name))]
            ready = [
                name
                for name in GROUPS
                if model.ready(name, now) or any(h.batch_key == (name,) and h.is_expired(now) for h in heads)
            ]
            number, later = queue.oldest_ready(now)
            assert number == min((model.group(name)[0].number for name in ready), default=None)
            assert (later is None) == (number is not None or not model.tasks) and (later is None or later > now)
            batch, expired = queue.next_batch(now)
            wanted, dropped = model.take(now)
            assert batch == wanted and set(expired) == set(dropped)
        assert queue.count == len(model.tasks) and queue.rows == sum(task.rows for task in model.tasks)
        assert set(queue) == set(model.tasks)
        assert queue.oldest_arrival() == (model.tasks[0].arrival if model.tasks else None)


SCHEMA = FlatSchema([Column("x", TensorSpec((None, 1), torch.float32))])
ROW = torch.zeros(1, 1)


@dataclass
class Outcome:
    """Of the second half of a simulation: seconds of a lap, batches, and the delays."""

    lap: float
    batches: int
    delays: list[BatchDelay]

    @property
    def waited(self) -> float:
        return sum(each.waited for each in self.delays)


def simulated(
    pauses: Sequence[float],
    stages: Sequence[tuple[float, float]],
    most: float,
    starts: Sequence[float] = (),
    laps: int = 100,
) -> Outcome:
    """Callers who go through the pools of an expert in turn, each so long after an answer; and one device.

    ``stages``: what a batch costs by itself, and for each row. Nothing here is measured: the clock is a number.
    """
    callers = CallerGroup()
    delays = [BatchDelay(most, callers) for _ in stages]
    comes = {caller: (pause, 0) for caller, pause in enumerate(starts or pauses)}  # when, and to which pool
    waiting: list[list[tuple[float, int]]] = [[] for _ in stages]
    now = 0.0
    answers, batches, half = 0, 0, (0.0, 0)
    wanted = laps * len(pauses) * len(stages)

    def admit(until: float) -> None:
        for caller in sorted([each for each, (when, _) in comes.items() if when <= until], key=lambda c: comes[c][0]):
            when, pool = comes.pop(caller)
            waiting[pool].append((when, caller))
            delays[pool].task_arrived(len(waiting[pool]))

    while answers < wanted:
        admit(now)
        begins = {i: delays[i].start_time(now, len(some), lambda _: True) for i, some in enumerate(waiting) if some}
        ready = [i for i, begin in begins.items() if begin <= now]
        if not ready:
            now = min([*begins.values(), *[when for when, _ in comes.values()]])
            continue
        pool = min(ready, key=lambda i: waiting[i][0])
        batch, waiting[pool] = waiting[pool], []
        delays[pool].batch_started(now, len(batch), 0)
        seconds = stages[pool][0] + stages[pool][1] * len(batch)
        now += seconds
        admit(now)
        delays[pool].batch_ended(seconds)
        comes |= {caller: (now + pauses[caller], (pool + 1) % len(stages)) for _, caller in batch}
        answers, batches = answers + len(batch), batches + 1
        if answers < wanted / 2:
            half = (now, batches)
    return Outcome((now - half[0]) * 2 / laps, batches - half[1], delays)


@pytest.mark.parametrize(
    ("pauses", "starts", "stages"),
    [
        pytest.param([0.1, 0.2, 0.3, 0.4], [], [(1.0, 0.01)], id="one pool"),
        pytest.param([0.1, 0.2, 0.3, 0.4], [], [(0.3, 0.02), (1.0, 0.01)], id="forward and backward"),
        pytest.param([0.2] * 4, [0.0, 0.0, 0.3, 0.3], [(0.3, 0.1), (0.7, 0.3)], id="two and two by turns"),
        pytest.param([0.1, 0.1], [0.0, 0.3], [(0.7, 0.05), (1.5, 0.1)], id="one and one by turns"),
    ],
)
def test_callers_who_come_one_after_the_other_share_a_step_when_a_step_costs_much(
    pauses: list[float], starts: list[float], stages: list[tuple[float, float]]
) -> None:
    alone, together = (simulated(pauses, stages, most, starts) for most in (0.0, 10.0))
    assert together.batches < 0.8 * alone.batches, "as many batches as without waiting"
    assert together.lap < 0.9 * alone.lap, "waiting has cost more than it saved"
    assert alone.waited == 0.0


@pytest.mark.parametrize("pauses", [[0.3], [0.0]])
@pytest.mark.parametrize("stages", [[(1.0, 0.1)], [(0.1, 0.1), (1.0, 0.2)]])
def test_a_lone_caller_never_waits(pauses: list[float], stages: list[tuple[float, float]]) -> None:
    assert simulated(pauses, stages, most=10.0).waited == 0.0


def test_nobody_waits_for_callers_who_wait_in_another_pool() -> None:
    """They cannot come before they were served there; each would wait for the other, and the device for both."""
    callers = CallerGroup()
    here, there = (BatchDelay(60.0, callers) for _ in range(2))
    here.task_arrived(2)
    here.batch_started(0.0, 2, 0)
    here.batch_ended(6.0)
    here.task_arrived(1)
    assert here.start_time(0.0, 1, lambda _: True) == 3.0, "the other one is out"
    there.task_arrived(1)
    assert here.start_time(0.0, 1, lambda _: True) == 0.0 and there.start_time(0.0, 1, lambda _: True) == 0.0


@given(st.integers(1, 9))
def test_after_each_wait_in_vain_twice_as_many_batches_do_not_wait(waits: int) -> None:
    delay = BatchDelay(1.0)
    delay._group._peaks.extend([2] * 4)
    delay.batch_ended(8.0)
    seen: list[bool] = []
    while sum(seen) < waits:
        delay._group._peaks.append(2)
        delay.task_arrived(1)
        seen.append(delay.start_time(0.0, 1, lambda _: True) > 0.0)
        delay.batch_started(1.0, 1, 0)
        delay.batch_ended(8.0)
    gaps = [len(gap) for gap in "".join("w" if each else "." for each in seen).split("w")[1:-1]]
    assert gaps == [min(1 << place, 64) for place in range(waits - 1)] and delay.waited == waits


@pytest.mark.long
@given(
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.01, 0.05, 0.3])), min_size=1, max_size=2),
)
def test_waiting_costs_little_where_it_does_not_pay(pauses: list[float], stages: list[tuple[float, float]]) -> None:
    without, delayed = (simulated(pauses, stages, most, laps=400) for most in (0.0, 10.0))
    assert delayed.lap <= 1.5 * without.lap  # of 400 at random, 20 took more than 1.08 of it, and none 1.3


def test_a_batch_that_failed_tells_nothing_and_leaves_nobody_under_way() -> None:
    delay = BatchDelay(1.0)
    delay.task_arrived(1)
    delay.batch_started(0.0, 1, 0)
    delay.batch_ended(None)
    assert (list(delay.seconds), delay.running, delay.waiting) == ([], 0, 0)


class Waking:
    name = "r"

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def wake_for(self, pool: TaskPool) -> None:
        self.words.append(pool.name)


def told(**options: float | int) -> tuple[TaskPool, list[str]]:
    """A pool whose batches took 20 s for four callers lately, and the names of woken pools."""
    words: list[str] = []

    def answers(tasks: Sequence[Task]) -> list[Answer]:
        return [[each.tensors[0]] for each in tasks]

    one = TaskPool("p", answers, SCHEMA, PoolOptions(**{"max_batch_delay": 60.0, **options}))  # type: ignore[arg-type]
    one.claim_for(Waking(words))
    one.open_pool()
    one._pending.delay.seconds.append(20.0)
    one._pending.delay._group._peaks.append(4)
    words.clear()
    return one, words


def ready(one: TaskPool, now: float | None = None) -> bool:
    return one.oldest_ready(time.monotonic() if now is None else now)[0] is not None


def test_a_pool_that_waits_is_woken_by_the_last_one_alone() -> None:
    one, words = told()
    start = time.monotonic()
    one.submit_task(ROW)
    assert words == ["p"] and not ready(one)
    later = one.oldest_ready(time.monotonic())[1]
    assert later is not None and start + 8.0 < later < time.monotonic() + 10.1
    for _ in range(2):
        one.submit_task(ROW)
    assert words == ["p"] and not ready(one)
    one.submit_task(ROW)
    assert words == ["p", "p"] and ready(one)
    assert len(one.next_batch()) == 4


def test_a_wait_in_vain_ends_after_half_a_batch_and_the_next_batch_does_not_wait() -> None:
    one, _ = told()
    one.submit_task(ROW)
    now = time.monotonic()
    assert not ready(one) and not ready(one, now + 9.9) and ready(one, now + 10.1)
    one.process_batch(one.next_batch(now + 10.1))
    one.submit_task(ROW)
    assert ready(one)


HURRIES: list[Callable[[TaskPool], object]] = [
    lambda one: one.submit_task(ROW, deadline=time.monotonic() + 60.0),  # less than ten delays away
    lambda one: one.submit_task(torch.zeros(2, 1)),
    lambda one: (one.submit_task(ROW), one.close_pool("the test ends")),
]


@pytest.mark.parametrize("hurry", HURRIES, ids=["soon", "full", "closed"])
def test_nobody_waits_who_has_no_time_or_nothing_to_wait_for(hurry: Callable[[TaskPool], object]) -> None:
    one, _ = told(max_batch_size=2, max_rows=8)
    hurry(one)
    assert ready(one)


def test_after_all_who_waited_gave_up_the_next_one_is_told_of_again() -> None:
    """Or a runtime would sleep on: it had been told of a batch, took none, and sleeps without a time to wake."""
    one, words = told()
    future = one.submit_task(ROW)
    assert not ready(one)
    future.cancel()
    assert one.next_batch() == [] and not ready(one)
    words.clear()
    one.submit_task(ROW)
    assert words == ["p"]


@pytest.mark.parametrize("options", [{"max_batch_delay": 0.0}, {"min_batch_size": 2, "timeout": 0.0}])
def test_a_pool_that_must_not_wait_does_not_and_the_next_task_is_told_of(options: dict[str, float]) -> None:
    one, words = told(**options)
    one.submit_task(ROW)
    assert ready(one) and ready(one) and one.statistics().waited == 0.0
    one.submit_task(ROW)
    assert words == ["p", "p"]
