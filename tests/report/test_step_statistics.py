"""Statistics of a step: idle time of workers and work of stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.pipeline.schedule import Action, gpipe, one_f_one_b
from torchweft.pipeline.simulate import StageCost, forecast
from torchweft.pipeline.tracing import ActionEvent
from torchweft.report.step_statistics import step_statistics


def ran(stage: int, start: float, end: float, thread: str, kind: str = "F") -> ActionEvent:
    return ActionEvent(kind, Action(stage, "F", 0), thread, start, end)


def test_idle_time_is_that_of_workers() -> None:
    serial = step_statistics([ran(0, 0.0, 1.0, "main"), ran(1, 1.0, 3.0, "main")])
    assert (serial.workers, serial.idle, serial.work) == (1, 0.0, (1.0, 2.0))
    threads = step_statistics([ran(0, 0.0, 1.0, "a"), ran(1, 1.0, 3.0, "b")])
    assert threads.workers == 2 and threads.idle == pytest.approx(0.5) and threads.seconds == 3.0


def test_threads_with_the_same_stages_are_one_worker() -> None:
    places = [(0, "caller"), (1, "caller"), (1, "autograd"), (0, "autograd")]
    events = [ran(stage, float(start), start + 1.0, thread) for start, (stage, thread) in enumerate(places)]
    assert step_statistics(events).workers == 1 and step_statistics(events).idle == 0.0


def test_time_in_which_two_actions_run_counts_once() -> None:
    """A recomputation can be recorded within its backward."""
    assert step_statistics([ran(0, 0.0, 2.0, "a"), ran(0, 0.5, 1.0, "a"), ran(0, 3.0, 4.0, "a")]).idle == 0.25


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@given(st.integers(1, 4), st.integers(1, 6))
def test_idle_time_of_a_forecast_is_its_bubble(schedule: object, stages: int, micro_batches: int) -> None:
    expected = forecast(schedule(stages, micro_batches), [StageCost(1.0, 2.0)] * stages)  # type: ignore[operator]
    events = [ActionEvent(s.action.kind, s.action, f"{s.action.stage}", s.start, s.end) for s in expected.spans]
    assert step_statistics(events).idle == pytest.approx(expected.bubble)


def test_text_names_the_slowest_stage() -> None:
    two = step_statistics([ran(0, 0.0, 1.0, "a"), ran(1, 1.0, 3.0, "b")])
    assert str(two) == "2 stages, 1 micro-batch, 2 workers: 50% idle; stage 1 is the slowest"
    assert str(step_statistics([ran(0, 0.0, 1.0, "a")])) == "1 stage, 1 micro-batch, 1 worker: 0% idle"
    assert str(step_statistics([])) == "no actions"
