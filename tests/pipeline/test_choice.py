"""Choosing by measurement: every candidate gets its turns, the fastest stays, the simplest wins a tie."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.pipeline.autotune import Autotuner, TimedCall

TURNS = 6  # one to warm up, five that count


def measured(choice: Autotuner, seconds: list[float], kind: str = "step") -> list[int]:
    """Take steps of these times per candidate until the choice is made; return who was picked."""
    picks: list[int] = []
    while kind not in choice.decisions():
        picks.append(choice.pick(kind))
        choice.report(kind, picks[-1], seconds[picks[-1]])
        assert len(picks) <= 2 * TURNS * len(seconds)
    return picks


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=4))
def test_all_take_turns_and_the_fastest_stays(seconds: list[float]) -> None:
    choice = Autotuner(len(seconds))
    picks = measured(choice, seconds)
    assert picks == list(range(len(seconds))) * TURNS
    best = choice.pick("step")
    assert seconds[best] <= min(seconds) / 0.9 + 1e-9
    choice.report("step", 0, 0.0)
    assert choice.pick("step") == best, "what is decided stays"


def test_the_simplest_is_kept_unless_another_is_clearly_faster() -> None:
    for other, winner in ((1.0, 0), (0.95, 0), (0.8, 1), (2.0, 0)):
        choice = Autotuner(2)
        measured(choice, [1.0, other])
        assert choice.pick("step") == winner


def test_the_first_time_and_outliers_do_not_count() -> None:
    choice = Autotuner(2)
    times = {0: iter([1.0] * TURNS), 1: iter([100.0, 0.5] * TURNS)}
    for _ in range(2 * TURNS):
        candidate = choice.pick("step")
        choice.report("step", candidate, next(times[candidate]))
    assert choice.decisions() == {"step": 1}


def test_kinds_of_steps_are_judged_apart() -> None:
    choice = Autotuner(2)
    measured(choice, [1.0, 2.0], "training")
    measured(choice, [2.0, 1.0], "evaluation")
    assert choice.decisions() == {"training": 0, "evaluation": 1}
    assert choice.pick("something new") == 0


def test_a_choice_that_becomes_slow_is_measured_again() -> None:
    choice = Autotuner(2)
    measured(choice, [1.0, 0.5])
    timed = [choice.times("step") for _ in range(16)]
    assert timed == ([False] * 7 + [True]) * 2, "one step of eight"
    for seconds in (*[0.7] * 20, *[2.0] * 4, 0.6, *[2.0] * 4):  # not clearly, or not for long
        choice.report("step", 1, seconds)
    choice.report("step", 0, 9.0)  # another one's
    assert choice.decisions() == {"step": 1}
    choice.report("step", 1, 2.0)
    assert choice.decisions() == {} and choice.times("step")
    assert measured(choice, [1.0, 2.0]) and choice.decisions() == {"step": 0}


def test_a_candidate_that_is_ruled_out_is_not_tried() -> None:
    choice = Autotuner(2)
    choice.rule_out("step", 0)
    for _ in range(TURNS):
        assert choice.pick("step") == 1
        choice.report("step", 1, 1.0)
    assert choice.decisions() == {"step": 1}


class Journey:
    """A function without stages."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
        self.did.append("forward")
        return [torch.zeros(1)], [True]

    def backward(self, gradients: object, *, retain: bool) -> list[torch.Tensor | None]:
        self.did.append(f"backward {retain}")
        return [None]


@pytest.mark.parametrize("with_backward", [False, True])
def test_a_timed_journey_does_the_same_and_reports_once_it_is_over(with_backward: bool) -> None:
    choice = Autotuner(2)
    for step in range(2 * TURNS):
        assert choice.decisions() == {}, f"too early, after {step} steps"
        function = Journey()
        timed = TimedCall(function, partial(choice.report, "step", choice.pick("step")), with_backward=with_backward)
        assert timed.forward()[1] == [True]
        if with_backward:
            assert timed.backward([None], retain=False) == [None]
        assert function.did == ["forward", "backward False"][: 1 + with_backward]
    assert "step" in choice.decisions()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_journey_that_fails_passes_its_error_on_and_is_not_counted(error: type[BaseException]) -> None:
    class Failing(Journey):
        def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
            raise error

    choice = Autotuner(2)
    with pytest.raises(error):
        TimedCall(Failing(), partial(choice.report, "step", 0), with_backward=False).forward()
    assert choice.pick("step") == 0
