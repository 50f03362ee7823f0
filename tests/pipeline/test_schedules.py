"""The schedules that go by a name, and how a user's own table comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import any_schedules
from weft.core.errors import ScheduleError
from weft.pipeline.schedule import SCHEDULES, Schedule, build, gpipe, one_f_one_b

sizes = given(st.integers(1, 9), st.integers(1, 9))


@sizes
def test_gpipe_is_valid_and_can_be_cut_and_holds_every_micro_batch(stages: int, micro_batches: int) -> None:
    schedule = gpipe(stages, micro_batches)
    schedule.check(stages=stages, micro_batches=micro_batches)
    assert schedule.splits
    assert schedule.worker_of == tuple(range(stages))
    assert schedule.live() == (micro_batches,) * stages


@sizes
def test_1f1b_is_valid_and_holds_at_most_the_stages_still_ahead(stages: int, micro_batches: int) -> None:
    schedule = one_f_one_b(stages, micro_batches)
    schedule.check(stages=stages, micro_batches=micro_batches)
    assert schedule.splits == (micro_batches == 1)
    assert schedule.live() == tuple(min(stages - stage, micro_batches) for stage in range(stages))


def test_gpipe_runs_backward_in_reverse() -> None:
    assert gpipe(2, 3).text() == "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n"


def test_1f1b_alternates_after_its_warm_up() -> None:
    assert one_f_one_b(2, 3).text() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_name_builds_its_schedule_once(name: str) -> None:
    assert build(name, 3, 4) == SCHEDULES[name](3, 4)
    assert build(name, 3, 4) is build(name, 3, 4)


@given(any_schedules(), st.integers(1, 4))
def test_a_table_of_more_micro_batches_serves_fewer(schedule: Schedule, wanted: int) -> None:
    wanted = min(wanted, schedule.micro_batches)
    for given_as in (schedule, schedule.text()):
        assert build(given_as, schedule.stages, wanted) == schedule.restricted(wanted)


@pytest.mark.parametrize("name", ["1F1B", "zero_bubble", "", "0F0 0B0"])
def test_an_unknown_name_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ScheduleError, match="there are gpipe, 1f1b"):
        build(name, 2, 2)


def test_a_table_of_the_wrong_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(ScheduleError) as caught:
        build(gpipe(2, 3).text(), 3, 4)
    assert "the table has 2 stages, but 3 are wanted" in str(caught.value)
    assert "the table has 3 micro-batches, but 4 are wanted" in str(caught.value)


def test_faults_beyond_the_wanted_micro_batches_are_faults_too() -> None:
    with pytest.raises(ScheduleError, match="B, or I and W, is missing for micro-batch 1"):
        build("0F0,0B0,0F1", 1, 1)


def test_one_action_is_a_table() -> None:
    assert build(" 0F0 \n", 1, 1) == Schedule.parse("0F0")


@pytest.mark.parametrize(("stages", "micro_batches"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "0F0,0B0"])
def test_sizes_below_one_are_refused(schedule: str, stages: int, micro_batches: int) -> None:
    with pytest.raises(ScheduleError, match="at least one stage and one micro-batch"):
        build(schedule, stages, micro_batches)
