"""Choice of a layout by measurement: candidates take turns, the fastest is kept, and the simplest wins a tie."""

from time import perf_counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchweft.pipeline.autotune import LayoutTuner, TimedCall

TURNS = 6  # one warm-up, five that are measured
NAMES = ("serial", "uncut", "threads")


def make_tuner(candidates: int = 2) -> LayoutTuner:
    """Tuner of the first layouts in `NAMES`."""
    return LayoutTuner("auto", 2 if candidates > 2 else 1, serial=True, uncut=True)


def take_steps(choice: LayoutTuner, *seconds: float, kind: str = "step") -> list[str]:
    """Take steps with these seconds per candidate until one is chosen. Return the layout of every step."""
    picks: list[str] = []
    while kind not in choice.chosen():
        layout, report = choice.pick(kind)
        picks.append(layout)
        assert report is not None and len(picks) <= 2 * TURNS * len(seconds)
        report(seconds[NAMES.index(layout)])
    return picks


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=3))
def test_all_take_turns_and_the_fastest_stays(seconds: list[float]) -> None:
    choice = make_tuner(len(seconds))
    picks = take_steps(choice, *seconds)
    assert picks == list(NAMES[: len(seconds)]) * TURNS
    best = choice.pick("step")[0]
    assert seconds[NAMES.index(best)] <= min(seconds) / 0.9 + 1e-9
    choice.report("step", "serial", 0.0)
    assert choice.pick("step")[0] == best, "later times do not change the choice"
    assert choice.pick("step", watched=True)[0] != "uncut" and choice.pick("step", local=True)[0] == "serial"


def test_the_simplest_is_kept_unless_another_is_clearly_faster() -> None:
    for other, winner in ((1.0, "serial"), (0.95, "serial"), (0.8, "uncut"), (2.0, "serial")):
        choice = make_tuner()
        take_steps(choice, 1.0, other)
        assert choice.pick("step")[0] == winner


def test_the_first_time_and_outliers_do_not_count() -> None:
    choice = make_tuner()
    times = {"serial": iter([1.0] * TURNS), "uncut": iter([100.0, 0.5] * TURNS)}
    for _ in range(2 * TURNS):
        layout = choice.pick("step")[0]
        choice.report("step", layout, next(times[layout]))
    assert choice.chosen() == {"step": "uncut"}


def test_kinds_of_steps_are_judged_apart() -> None:
    choice = make_tuner()
    take_steps(choice, 1.0, 2.0, kind="training")
    take_steps(choice, 2.0, 1.0, kind="evaluation")
    assert choice.chosen() == {"training": "serial", "evaluation": "uncut"}
    assert choice.pick("something new")[0] == "serial"


def test_a_choice_that_becomes_slow_is_measured_again() -> None:
    choice = make_tuner()
    take_steps(choice, 1.0, 0.5)
    timed = [choice.pick("step")[1] is not None for _ in range(16)]
    assert timed == ([False] * 7 + [True]) * 2, "one step of eight is timed"
    for seconds in (*[0.7] * 20, *[2.0] * 4, 0.6, *[2.0] * 4):  # not clearly slower, or not for long
        choice.report("step", "uncut", seconds)
    choice.report("step", "serial", 9.0)  # of another layout
    assert choice.chosen() == {"step": "uncut"}
    choice.report("step", "uncut", 2.0)
    assert choice.chosen() == {} and choice.pick("step")[1] is not None
    assert take_steps(choice, 1.0, 2.0) and choice.chosen() == {"step": "serial"}


def test_recomputation_or_several_devices_are_never_merged() -> None:
    recomputing = LayoutTuner("auto", 3, serial=True, uncut=False)
    recomputing.fixed = "serial"
    assert recomputing.pick("kind", watched=False) == ("serial", None)
    assert LayoutTuner("auto", 3, serial=False, uncut=False).pick("kind", watched=False)[0] == "threads"


def test_a_candidate_that_is_ruled_out_is_not_tried() -> None:
    choice = make_tuner()
    for _ in range(TURNS):
        assert choice.pick("step", must_cut=True)[0] == "serial"
        choice.report("step", "serial", 1.0)
    assert choice.chosen() == {"step": "serial"}


class Call:
    """Function without stages that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
        self.calls.append("forward")
        return [torch.zeros(1)], [True]

    def backward(self, gradients: object, *, retain: bool) -> list[torch.Tensor | None]:
        self.calls.append(f"backward {retain}")
        return [None]


@pytest.mark.parametrize("with_backward", [False, True])
def test_a_timed_call_does_the_same_and_reports_once_it_is_over(with_backward: bool) -> None:
    choice = make_tuner()
    for step in range(2 * TURNS):
        assert choice.chosen() == {}, f"too early, after {step} steps"
        function, report = Call(), choice.pick("step")[1]
        assert report is not None
        timed = TimedCall(function, report, perf_counter, with_backward=with_backward)
        assert timed.forward()[1] == [True]
        if with_backward:
            assert timed.backward([None], retain=False) == [None]
        assert function.calls == ["forward", "backward False"][: 1 + with_backward]
    assert "step" in choice.chosen()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_call_raises_and_is_not_counted(error: type[BaseException]) -> None:
    class Failing(Call):
        def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
            raise error

    choice = make_tuner()
    layout, report = choice.pick("step")
    assert report is not None
    with pytest.raises(error):
        TimedCall(Failing(), report, perf_counter, with_backward=False).forward()
    assert choice.pick("step")[0] == layout == "serial"


def test_forward_and_first_backward_are_timed_by_the_clock() -> None:
    """The clock waits for the devices at both ends. A second backward of a retained graph is not timed."""
    times, seen = iter([10.0, 13.0, 20.0, 24.0, 30.0, 31.0]), list[float]()
    timed = TimedCall(Call(), seen.append, lambda: next(times), with_backward=True)
    timed.forward()
    for _ in range(2):
        timed.backward([None], retain=True)
    assert seen == [7.0]
