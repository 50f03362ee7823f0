"""The schedules that go by a name, and how a user's own table comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import any_schedules
from weft.core.errors import ScheduleError
from weft.pipeline.schedule import SCHEDULES, Schedule, build, gpipe, one_f_one_b


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 9), st.integers(1, 9))
def test_named_schedules_are_valid_and_hold_what_they_should(name: str, stages: int, micro_batches: int) -> None:
    schedule = SCHEDULES[name](stages, micro_batches)
    assert build(name, stages, micro_batches) is build(name, stages, micro_batches) == schedule
    schedule.check(stages=stages, micro_batches=micro_batches)
    assert schedule.splits == (name == "gpipe" or micro_batches == 1)
    assert schedule.worker_of == tuple(range(stages))
    ahead = [micro_batches if name == "gpipe" else stages - stage for stage in range(stages)]
    assert schedule.live() == tuple(min(each, micro_batches) for each in ahead)


def test_gpipe_runs_backward_in_reverse_and_1f1b_alternates_after_its_warm_up() -> None:
    assert gpipe(2, 3).text() == "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n"
    assert one_f_one_b(2, 3).text() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


@given(any_schedules(), st.integers(1, 4))
def test_a_table_of_more_micro_batches_serves_fewer(schedule: Schedule, wanted: int) -> None:
    wanted = min(wanted, schedule.micro_batches)
    for given_as in (schedule, schedule.text()):
        assert build(given_as, schedule.stages, wanted) == schedule.restricted(wanted)


@pytest.mark.parametrize("name", ["1F1B", "zero_bubble", "", "0F0 0B0"])
def test_an_unknown_name_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ScheduleError, match="there are gpipe, 1f1b"):
        build(name, 2, 2)


def test_faults_beyond_the_wanted_micro_batches_are_faults_too() -> None:
    with pytest.raises(ScheduleError, match="B, or I and W, is missing for micro-batch 1"):
        build("0F0,0B0,0F1", 1, 1)


@pytest.mark.parametrize(("stages", "micro_batches"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "0F0,0B0"])
def test_sizes_below_one_are_refused(schedule: str, stages: int, micro_batches: int) -> None:
    with pytest.raises(ScheduleError, match="at least one stage and one micro-batch"):
        build(schedule, stages, micro_batches)
