"""A batch waits for others only where that pays: never a lone caller, never longer than a batch costs by itself."""

import time
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import UsageError
from weft.core.spec import TensorSpec
from weft.experts.limits import PoolOptions
from weft.experts.linger import Linger
from weft.experts.pool import TaskPool
from weft.experts.schema import Column, Columns
from weft.experts.task import Answer, Task

COLUMNS = Columns([Column("x", TensorSpec((None, 1), torch.float32))])
ROW = torch.zeros(1, 1)


def simulated(
    pauses: Sequence[float], fixed: float, per_row: float, most: float, laps: int = 60
) -> tuple[float, int, Linger]:
    """Callers that call again so long after their answer, and a device: seconds of an answer, batches; the last half.

    Nothing here is measured: the clock is a number.
    """
    linger, now = Linger(most), 0.0
    comes = {caller: pause for caller, pause in enumerate(pauses)}
    waiting: list[int] = []
    answers, batches, half = 0, 0, (0.0, 0, 0)
    while answers < laps * len(pauses):
        for caller in sorted([each for each, when in comes.items() if when <= now], key=lambda each: comes[each]):
            waiting.append(caller)
            linger.came(comes.pop(caller), len(waiting))
        begin = linger.begin(now, len(waiting), patient=True) if waiting else min(comes.values())
        if begin > now or not waiting:
            now = min([begin, *comes.values()])
            continue
        batch, waiting = waiting, []
        linger.began(now, len(batch))
        end = now + fixed + per_row * len(batch)
        for caller in sorted([each for each, when in comes.items() if when < end], key=lambda each: comes[each]):
            waiting.append(caller)
            linger.came(comes.pop(caller), len(waiting))
        now = end
        linger.ended(len(batch), fixed + per_row * len(batch))
        comes |= {caller: now + pauses[caller] for caller in batch}
        answers, batches = answers + len(batch), batches + 1
        if answers < laps * len(pauses) / 2:
            half = (now, batches, answers)
    return (now - half[0]) / (answers - half[2]), batches - half[1], linger


def test_callers_that_come_one_after_the_other_share_a_step_when_a_step_costs_much() -> None:
    pauses = [0.1, 0.2, 0.3, 0.4]
    alone, together = (simulated(pauses, fixed=1.0, per_row=0.01, most=most) for most in (0.0, 1.0))
    assert together[1] < 0.7 * alone[1], "as many batches as without waiting"
    assert together[0] < 0.8 * alone[0], "waiting has cost more than it saved"
    assert alone[2].waited == 0.0


@pytest.mark.parametrize("pauses", [[0.3], [0.0]])
def test_a_lone_caller_never_waits(pauses: list[float]) -> None:
    assert simulated(pauses, fixed=1.0, per_row=0.1, most=1.0)[2].waited == 0.0


def test_where_all_the_cost_is_in_the_rows_nobody_waits() -> None:
    assert simulated([0.1, 0.2, 0.3, 0.4], fixed=0.0, per_row=1.0, most=1.0)[2].waited < 1e-9


@given(
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([0.01, 0.05, 0.3]),
)
def test_whoever_calls_waiting_costs_no_more_than_its_trials(pauses: list[float], fixed: float, per_row: float) -> None:
    without, lingering = (simulated(pauses, fixed, per_row, most, laps=200) for most in (0.0, 1.0))
    assert lingering[0] <= 1.1 * without[0]
    assert lingering[2].cost <= (fixed + per_row * len(pauses)) * (1 + 1e-6)


@given(st.lists(st.integers(1, 64), min_size=3, max_size=30).filter(lambda rows: max(rows) > 2 * min(rows)))
def test_what_a_batch_costs_by_itself_is_learned(rows: list[int]) -> None:
    linger = Linger(1.0)
    for each in rows:
        linger.ended(each, 2.0 + 0.5 * each)
    assert linger.cost == pytest.approx(2.0, rel=1e-6)


def test_batches_that_are_all_alike_tell_nothing_of_what_a_batch_costs_by_itself() -> None:
    linger = Linger(1.0)
    for _ in range(20):
        linger.ended(8, 3.0)
    assert linger.cost == 0.0


# In a pool.


def told(**options: float | int) -> tuple[TaskPool, list[str]]:
    """A pool that has learned to wait ten seconds for four, and who was told that it has something."""
    words: list[str] = []

    def answers(tasks: Sequence[Task]) -> list[Answer]:
        return [[each.tensors[0]] for each in tasks]

    one = TaskPool("p", answers, COLUMNS, PoolOptions(**options))  # type: ignore[arg-type]
    one.open(lambda pool: words.append(pool.name))
    one._linger.cost, one._linger._trial.waits = 10.0, True
    one._linger._sizes.extend([4, 4])
    words.clear()
    return one, words


def ready(one: TaskPool, now: float | None = None) -> bool:
    return one.urgency(time.monotonic() if now is None else now)[0] is not None


def test_a_pool_that_waits_is_woken_by_the_last_one_alone() -> None:
    one, words = told()
    one.submit_task(ROW)
    assert words == ["p"] and not ready(one)
    later = one.urgency(time.monotonic())[1]
    assert later is not None and 3.0 < later - time.monotonic() < 5.1
    for _ in range(2):
        one.submit_task(ROW)
    assert words == ["p"] and not ready(one)
    one.submit_task(ROW)
    assert words == ["p", "p"] and ready(one)
    assert len(one.take()) == 4


def test_who_waits_in_vain_begins_when_nobody_came_for_half_of_the_cost() -> None:
    one, _ = told()
    one.submit_task(ROW)
    now = time.monotonic()
    assert not ready(one) and not ready(one, now + 4.9) and ready(one, now + 5.1)


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
