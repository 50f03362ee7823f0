"""A batch waits for others only where that pays: never a lone caller, never longer than a batch costs by itself."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import UsageError
from weft.core.spec import TensorSpec
from weft.experts.batching import Company, Linger, PoolOptions
from weft.experts.schema import Column, Columns
from weft.experts.task import Answer, Task
from weft.experts.task_pool import TaskPool

COLUMNS = Columns([Column("x", TensorSpec((None, 1), torch.float32))])
ROW = torch.zeros(1, 1)


@dataclass
class Outcome:
    """Of the second half of a simulation: seconds of a lap, and batches. What was learned, and waited in all."""

    lap: float
    batches: int
    lingers: list[Linger]

    @property
    def waited(self) -> float:
        return sum(each.waited for each in self.lingers)


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
    company = Company()
    lingers = [Linger(most, company) for _ in stages]
    comes = {caller: (pause, 0) for caller, pause in enumerate(starts or pauses)}  # when, and to which pool
    waiting: list[list[tuple[float, int]]] = [[] for _ in stages]
    now = idle = 0.0
    answers, batches, half = 0, 0, (0.0, 0)
    wanted = laps * len(pauses) * len(stages)

    def admit(until: float) -> None:
        for caller in sorted([each for each, (when, _) in comes.items() if when <= until], key=lambda c: comes[c][0]):
            when, pool = comes.pop(caller)
            waiting[pool].append((when, caller))
            lingers[pool].came(len(waiting[pool]))

    while answers < wanted:
        admit(now)
        begins = {i: lingers[i].begin(now, len(some), patient=True) for i, some in enumerate(waiting) if some}
        ready = [i for i, begin in begins.items() if begin <= now]
        if not ready:
            later = min([*begins.values(), *[when for when, _ in comes.values()]])
            now, idle = later, idle + later - now
            continue
        pool = min(ready, key=lambda i: waiting[i][0])
        batch, waiting[pool] = waiting[pool], []
        lingers[pool].began(now, len(batch), 0, idle)
        seconds = stages[pool][0] + stages[pool][1] * len(batch)
        now += seconds
        admit(now)
        lingers[pool].ended(len(batch), seconds)
        comes |= {caller: (now + pauses[caller], (pool + 1) % len(stages)) for _, caller in batch}
        answers, batches = answers + len(batch), batches + 1
        if answers < wanted / 2:
            half = (now, batches)
    return Outcome((now - half[0]) * 2 / laps, batches - half[1], lingers)


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
    alone, together = (simulated(pauses, stages, most, starts) for most in (0.0, 1.0))
    assert together.batches < 0.8 * alone.batches, "as many batches as without waiting"
    assert together.lap < 0.9 * alone.lap, "waiting has cost more than it saved"
    assert alone.waited == 0.0


@pytest.mark.parametrize("pauses", [[0.3], [0.0]])
@pytest.mark.parametrize("stages", [[(1.0, 0.1)], [(0.1, 0.1), (1.0, 0.2)]])
def test_a_lone_caller_never_waits(pauses: list[float], stages: list[tuple[float, float]]) -> None:
    assert simulated(pauses, stages, most=1.0).waited == 0.0


def test_where_all_the_cost_is_in_the_rows_nobody_waits() -> None:
    assert simulated([0.1, 0.2, 0.3, 0.4], [(0.0, 1.0)], most=1.0).waited < 1e-9


def test_nobody_waits_for_those_who_wait_in_another_pool() -> None:
    """They cannot come before they were served there; each would wait for the other, and the device for both."""
    company = Company()
    here, there = (Linger(1.0, company) for _ in range(2))
    for _ in range(4):
        here.came(2)
        here.began(0.0, 2, 0, 0.0)
        here.ended(2, 6.0)
    here.cost, there.cost, company.trial.waits = 5.0, 5.0, True
    here.came(1)
    assert here.begin(0.0, 1, patient=True) == 10.0, "the other one is out, and the costs of both pools are at stake"
    there.came(1)
    assert here.begin(0.0, 1, patient=True) == 0.0 and there.begin(0.0, 1, patient=True) == 0.0


@given(
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.01, 0.05, 0.3])), min_size=1, max_size=2),
)
def test_whoever_calls_waiting_costs_little_where_it_does_not_pay(
    pauses: list[float], stages: list[tuple[float, float]]
) -> None:
    without, lingering = (simulated(pauses, stages, most, laps=400) for most in (0.0, 1.0))
    assert lingering.lap <= 1.25 * without.lap  # of 1500 at random, 5 took more than 1.08 of it, and none 1.18


@given(st.lists(st.integers(1, 64), min_size=3, max_size=30).filter(lambda rows: max(rows) > 2 * min(rows)))
def test_what_a_batch_costs_by_itself_is_learned(rows: list[int]) -> None:
    linger = Linger(1.0)
    for each in rows:
        linger.ended(each, 2.0 + 0.5 * each)
    assert linger.cost == pytest.approx(2.0, rel=1e-6)


def test_as_long_as_batches_are_all_alike_all_that_they_cost_may_be_saved() -> None:
    """Or two callers who come in turn would never find out."""
    linger = Linger(1.0)
    for _ in range(20):
        linger.ended(8, 3.0)
    assert linger.cost == pytest.approx(3.0)
    for rows in (8, 16, 8, 16, 8, 16):
        linger.ended(rows, 1.0 + rows / 4)
    assert linger.cost == pytest.approx(1.0, rel=0.05)
    for _ in range(20):
        linger.ended(8, 3.0)
    assert linger.cost == pytest.approx(1.0, rel=0.05), "what was learned was forgotten"


@pytest.mark.parametrize(
    ("rows", "idle", "pays"),
    [
        pytest.param(2, 0.5, True, id="a little"),
        pytest.param(2, 1.5, False, id="more than was saved"),
        pytest.param(4, 100.0, True, id="a pause counts as two batches, whoever made it"),
    ],
)
def test_what_the_device_had_to_wait_is_a_price_of_waiting(rows: int, idle: float, pays: bool) -> None:
    company = Company()
    linger, total = Linger(1.0, company), 0.0
    seen: list[bool] = []
    for each, before in [(1, 0.0)] * 12 + [(rows, idle)] * 12:
        seen.append(company.trial.waits)
        total += before
        linger.began(0.0, 1, 0, total)
        linger.ended(each, 1.0)
    assert seen == [False] * 12 + [True] * 12 and company.trial.waits is pays


def test_a_batch_that_failed_tells_nothing_and_leaves_nobody_under_way() -> None:
    linger = Linger(1.0)
    linger.came(1)
    linger.began(0.0, 1, 0, 0.0)
    linger.ended(0, 99.0)
    assert (linger.cost, linger.running, linger.waiting) == (0.0, 0, 0)


# In a pool.


def told(**options: float | int) -> tuple[TaskPool, list[str]]:
    """A pool that has learned to wait ten seconds for four, and who was told that it has something."""
    words: list[str] = []

    def answers(tasks: Sequence[Task]) -> list[Answer]:
        return [[each.tensors[0]] for each in tasks]

    one = TaskPool("p", answers, COLUMNS, PoolOptions(**options))  # type: ignore[arg-type]
    one.open(lambda pool: words.append(pool.name))
    company = one._linger._company
    one._linger.cost, company.trial.waits, company._peaks = 10.0, True, (4, 4, 4, 4)
    words.clear()
    return one, words


def ready(one: TaskPool, now: float | None = None) -> bool:
    return one.urgency(time.monotonic() if now is None else now)[0] is not None


def test_a_pool_that_waits_is_woken_by_the_last_one_alone() -> None:
    one, words = told()
    start = time.monotonic()
    one.submit_task(ROW)
    assert words == ["p"] and not ready(one)
    later = one.urgency(time.monotonic())[1]
    assert later is not None and start + 8.0 < later < time.monotonic() + 10.1
    for _ in range(2):
        one.submit_task(ROW)
    assert words == ["p"] and not ready(one)
    one.submit_task(ROW)
    assert words == ["p", "p"] and ready(one)
    assert len(one.take()) == 4


def test_who_waits_in_vain_begins_after_what_could_have_been_saved() -> None:
    one, _ = told()
    one.submit_task(ROW)
    now = time.monotonic()
    assert not ready(one) and not ready(one, now + 9.9) and ready(one, now + 10.1)


def soon(one: TaskPool) -> None:
    one.submit_task(ROW, deadline=time.monotonic() + 60.0)  # less than ten costs away


def full(one: TaskPool) -> None:
    one.submit_task(torch.zeros(2, 1))


def closed(one: TaskPool) -> None:
    one.submit_task(ROW)
    one.close("the test ends")


@pytest.mark.parametrize("hurry", [soon, full, closed])
def test_nobody_waits_who_has_no_time_or_nothing_to_wait_for(hurry: Callable[[TaskPool], None]) -> None:
    one, _ = told(max_batch_size=2, max_rows=8)
    hurry(one)
    assert ready(one)


def test_after_all_who_waited_gave_up_the_next_one_is_told_of_again() -> None:
    """Or a runtime would sleep on: it had been told of a batch, took none, and sleeps without a time to wake."""
    one, words = told()
    future = one.submit_task(ROW)
    assert not ready(one)
    future.cancel()
    assert one.take() == [] and not ready(one)
    words.clear()
    one.submit_task(ROW)
    assert words == ["p"]


def test_who_looks_without_being_told_to_wait_does_not_keep_the_next_from_being_told_of() -> None:
    one, words = told(linger=0.0)
    one.submit_task(ROW)
    assert ready(one) and ready(one)
    one.submit_task(ROW)
    assert words == ["p", "p"]


@pytest.mark.parametrize("options", [{"linger": 0.0}, {"min_batch_size": 2, "timeout": 0.0}])
def test_a_pool_that_must_not_wait_does_not(options: dict[str, float]) -> None:
    one, _ = told(**options)
    one.submit_task(ROW)
    assert ready(one) and one.statistics().waited == 0.0


@pytest.mark.parametrize("linger", [-1.0, float("nan")])
def test_a_wait_that_makes_no_sense_is_refused(linger: float) -> None:
    with pytest.raises(UsageError, match="linger is"):
        PoolOptions(linger=linger)
