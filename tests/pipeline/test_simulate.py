"""The forecast: time by list scheduling, bytes by lifetimes."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import any_schedules
from torchweft.core.errors import ScheduleError
from torchweft.pipeline.schedule import Action, Schedule, gpipe, one_f_one_b
from torchweft.pipeline.simulate import Forecast, StageCost, TailCost, ValueCost, forecast

whole = st.integers(0, 5).map(float)  # whole numbers add up without rounding
few = st.integers(0, 9)
stage_costs = st.builds(
    dict, forward=whole, backward=whole, recompute=whole, saved_bytes=few, recomputed_bytes=st.none() | few
)
sizes = given(st.integers(1, 6), st.integers(1, 6))


def spans_by_action(result: Forecast) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in result.spans}


def area_under(curve) -> float:
    """Integral of a curve of bytes over time."""
    return sum(level * (end - start) for (start, level), (end, _) in pairwise(curve))


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@sizes
def test_uniform_stages_take_the_ideal_time(make, stages: int, micro_batches: int) -> None:
    result = forecast(make(stages, micro_batches), [StageCost(1.0, 2.0)] * stages)
    assert result.total == (micro_batches + stages - 1) * 3.0
    assert result.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@given(any_schedules(), st.data())
def test_any_schedule_runs_as_its_lists_and_the_chain_allow(schedule: Schedule, data: st.DataObject) -> None:
    costs = [StageCost(**data.draw(stage_costs)) for _ in range(schedule.stages)]
    result = forecast(schedule, costs)
    assert [span.start for span in result.spans] == sorted(span.start for span in result.spans)
    ran = {span.action: span for span in result.spans}
    assert len(ran) == len(result.spans)
    for worker, row in enumerate(schedule.workers):
        mine = [span for span in result.spans if span.worker == worker]
        assert [span.action for span in mine if span.action.kind != "R"] == list(row)
        assert all(a.end <= b.start for a, b in pairwise(mine))
    for stage, kind, i in [action for row in schedule.workers for action in row]:
        span, cost = ran[Action(stage, kind, i)], costs[stage]
        assert span.end - span.start == (cost.forward if kind == "F" else cost.backward / (1 if kind == "B" else 2))
        if kind == "F" and stage:
            assert ran[Action(stage - 1, "F", i)].end <= span.start
        if kind in "BI" and stage + 1 < schedule.stages:
            after = ran.get(Action(stage + 1, "B", i)) or ran[Action(stage + 1, "I", i)]
            assert after.end <= span.start
        if kind in "BI":
            again = ran.get(Action(stage, "R", i))
            assert (again is not None) == (cost.recompute > 0 and (stage, i) not in schedule.backward_at_once)
            assert again is None or (again.end - again.start == cost.recompute and again.end <= span.start)


@given(any_schedules(), st.data())
def test_nothing_idles_without_a_reason(schedule: Schedule, data: st.DataObject) -> None:
    """Every span starts at the end of another: the previous one of its worker, or one that it needs."""
    costs = [StageCost(**data.draw(stage_costs)) for _ in range(schedule.stages)]
    result = forecast(schedule, costs)
    ends = {0.0} | {span.end for span in result.spans}
    assert {span.start for span in result.spans} <= ends


@given(any_schedules(), st.data())
def test_bytes_are_the_sum_of_their_lifetimes(schedule: Schedule, data: st.DataObject) -> None:
    costs = [StageCost(**data.draw(stage_costs)) for _ in range(schedule.stages)]
    last = schedule.stages - 1
    values = [ValueCost(stage, (stage + 1,), 3, stage % 2 == 0) for stage in range(last)]
    values += [ValueCost(0, tuple(range(1, last + 1)), 5), ValueCost(-1, (0, last), 1000)]
    result = forecast(schedule, costs, values)
    ran = {span.action: span for span in result.spans}

    def backward_end(stage: int, i: int) -> float:
        return (ran.get(Action(stage, "B", i)) or ran[Action(stage, "W", i)]).end

    expected = 0.0
    for i in range(schedule.micro_batches):
        for stage, cost in enumerate(costs):
            again = ran.get(Action(stage, "R", i))
            own = 3 if stage < last and stage % 2 == 0 else 0  # the value that the graph holds
            twice = cost.saved_bytes + own if cost.recomputed_bytes is None else cost.recomputed_bytes
            start = (again or ran[Action(stage, "F", i)]).start
            expected += (twice if again else cost.saved_bytes) * (backward_end(stage, i) - start)
        for value in (v for v in values if v.source >= 0 and v.readers):
            kept = value.kept_by_source and Action(value.source, "R", i) not in ran
            holders = [*value.readers, value.source] if kept else value.readers
            start = ran[Action(value.source, "F", i)].end
            expected += value.bytes * (max(backward_end(stage, i) for stage in holders) - start)
    assert area_under(result.live_bytes) == expected
    assert sum(map(area_under, result.stage_bytes)) == expected
    assert all(not curve or curve[-1][1] == 0 for curve in (*result.stage_bytes, result.live_bytes))
    assert max(result.stage_peaks) <= result.peak_bytes <= sum(result.stage_peaks)


def test_recomputation_starts_before_the_gradient_arrives() -> None:
    result = forecast(gpipe(2, 2), [StageCost(1.0, 2.0, recompute=1.0), StageCost(1.0, 2.0)])
    assert spans_by_action(result) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1, 2),
        "0R1": (2, 3),
        "1F1": (2, 3),
        "1B1": (3, 5),
        "1B0": (5, 7),
        "0B1": (5, 7),
        "0R0": (7, 8),
        "0B0": (8, 10),
    }
    assert result.total == 10
    assert result.bubble == 1 - (10 - 2 + 6) / 20


def test_recomputed_micro_batches_can_be_selected() -> None:
    costs = [StageCost(1.0, 2.0, recompute=1.0)] * 2
    result = forecast(gpipe(2, 3), costs, checkpointed=lambda stage, i: stage == 1 and i < 2)
    assert sorted(str(span.action) for span in result.spans if span.action.kind == "R") == ["1R0", "1R1"]


def test_value_in_the_graph_is_made_twice_if_recomputed() -> None:
    costs = [StageCost(1.0, 1.0, recompute=1.0, saved_bytes=5), StageCost(1.0, 1.0)]
    value = ValueCost(0, (1,), 10, kept_by_source=True)
    kept = forecast(gpipe(2, 1), costs, [value], checkpointed=lambda *_: False)
    again = forecast(gpipe(2, 1), costs, [value])
    assert kept.live_bytes == ((0.0, 5), (1.0, 15), (4.0, 0))  # to the end of 0B0
    assert again.live_bytes == ((1.0, 25), (3.0, 15), (4.0, 0))  # the sent copy is freed with 1B0


def test_without_backward_values_end_with_their_last_reader() -> None:
    costs = [StageCost(1.0, 1.0, recompute=1.0, saved_bytes=100)] * 3
    result = forecast(gpipe(3, 2).forward_only, costs, [ValueCost(0, (1, 2), 10)])
    assert {span.action.kind for span in result.spans} == {"F"}
    assert result.live_bytes == ((1.0, 10), (2.0, 20), (3.0, 10), (4.0, 0))


def test_stages_that_cost_nothing_have_no_bubble() -> None:
    result = forecast(gpipe(2, 2), [StageCost(0.0, 0.0)] * 2)
    assert (result.total, result.bubble) == (0, 0)


def test_wrong_costs_and_impossible_tables_are_refused() -> None:
    with pytest.raises(ScheduleError, match="the table has 2 stages, but 3 are needed"):
        forecast(gpipe(2, 2), [StageCost(1.0, 1.0)] * 3)
    with pytest.raises(ScheduleError, match="0B0 stands before 0F0"):
        forecast(Schedule.parse("0B0,0F0"), [StageCost(1.0, 1.0)])


def test_all_impossible_costs_are_listed() -> None:
    costs = [StageCost(-1.0, 1.0), StageCost(1.0, math.nan)]
    values = [ValueCost(2, (), 1), ValueCost(0, (0,), 1), ValueCost(0, (1,), -1)]
    with pytest.raises(ScheduleError) as caught:
        forecast(gpipe(2, 1), costs, values)
    assert len(str(caught.value).splitlines()) == 6


def test_a_tail_runs_once_between_forwards_and_backwards() -> None:
    expected = forecast(gpipe(2, 3), [StageCost(1.0, 2.0, saved_bytes=10)] * 2, tail=TailCost(4.0, 100))
    (tail,) = [span for span in expected.spans if span.action.kind == "T"]
    assert (tail.worker, tail.start, tail.end) == (1, 4.0, 8.0)
    assert expected.total == forecast(gpipe(2, 3), [StageCost(1.0, 2.0)] * 2).total + 4.0
    assert (expected.stage_peaks, expected.peak_bytes) == ((30, 130), 160)
    with pytest.raises(ScheduleError, match="needs all forwards before it"):
        forecast(one_f_one_b(2, 3), [StageCost(1.0, 2.0)] * 2, tail=TailCost(4.0, 100))
