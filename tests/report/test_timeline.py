"""Timelines and traces show every event, at its place and time; timelines every span of the forecast too."""

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import any_schedules
from weft.pipeline.schedule import Action, one_f_one_b
from weft.pipeline.simulate import Forecast, StageCost, forecast
from weft.pipeline.tracing import ActionEvent, Recorder
from weft.report.timeline import KINDS, live_bytes, timeline, trace, write_trace

TIMES = st.floats(0, 1e4)
NAMES = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)


@st.composite
def events(draw: st.DrawFn) -> ActionEvent:
    """Any event."""
    action = Action(draw(st.integers(0, 5)), draw(st.sampled_from("FBIW")), draw(st.integers(0, 120)))
    start, duration = draw(TIMES), draw(TIMES)
    kind = draw(st.sampled_from([action.kind, "R"]))
    return ActionEvent(kind, action, draw(NAMES), start, start + duration)


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    """A forecast of any small schedule."""
    schedule = draw(any_schedules(3, 3))
    numbers = draw(st.lists(TIMES, min_size=3, max_size=3))
    return forecast(schedule, [StageCost(*numbers)] * schedule.stages)


def rectangles(picture: ElementTree.Element, word: str) -> list[ElementTree.Element]:
    """The rectangles of this class that stand for an event, without the legend."""
    return [group[1] for group in picture.iter("g") if word in (group[1].get("class") or "").split()]


def at(element: ElementTree.Element, key: str) -> float:
    return float(element.get(key) or "nan")


@given(st.lists(events(), max_size=12), st.none() | forecasts())
def test_whatever_ran_the_picture_is_well_formed_and_complete_and_nothing_leaves_it(
    ran: list[ActionEvent], foretold: Forecast | None
) -> None:
    picture = ElementTree.fromstring(timeline(ran, foretold))
    assert len(rectangles(picture, "bar")) == len(ran)
    assert len(rectangles(picture, "outline")) == (len(foretold.spans) if foretold else 0)
    _, _, width, height = map(float, (picture.get("viewBox") or "").split())
    for bar in rectangles(picture, "bar"):
        assert at(bar, "x") >= 0 and at(bar, "x") + at(bar, "width") <= width
        assert at(bar, "y") >= 0 and at(bar, "y") + at(bar, "height") <= height


def test_micro_batches_are_numbered_and_tooltips_tell_stage_and_times() -> None:
    ran = [
        ActionEvent("F", Action(0, "F", 7), "t", 10.0, 11.0),
        ActionEvent("R", Action(1, "B", 7), "u", 11.0, 12.0),
        ActionEvent("B", Action(1, "B", 7), "u", 12.0, 14.0),
    ]
    picture = ElementTree.fromstring(timeline(ran))
    words = [element.text for element in picture.iter("text")]
    assert {"F7", "R7", "B7", "stage 0", "stage 1"} <= set(words)
    tips = [group[0].text for group in picture.iter("g")]
    assert tips[0] == "measured: forward, stage 0, micro-batch 7; 0 µs to 1 s, takes 1 s"
    assert tips[1] is not None and tips[1].startswith("measured: recompute, stage 1, micro-batch 7")


def test_an_outline_says_what_it_foretells_and_is_apart_from_its_neighbours() -> None:
    foretold = forecast(one_f_one_b(2, 2), [StageCost(1.0, 2.0)] * 2)
    picture = ElementTree.fromstring(timeline([], foretold))
    words = [element.text for element in picture.iter("text") if element.get("class") == "in-outline"]
    assert sorted(words) == sorted(["F0", "F1", "B0", "B1"] * 2)
    first = [(at(o, "x"), at(o, "x") + at(o, "width")) for o in rectangles(picture, "outline")]
    same = [(a, b) for a in first for b in first if a != b and abs(a[1] - b[0]) < 2]
    assert same and all(b[0] - a[1] > 1 for a, b in same)
    assert all(at(o, "height") >= 16 for o in rectangles(picture, "outline"))


def test_a_bar_too_narrow_for_words_has_none() -> None:
    ran = [ActionEvent("F", Action(0, "F", 5), "t", 0.0, 0.001), ActionEvent("F", Action(0, "F", 6), "t", 0.001, 1.0)]
    words = [element.text for element in ElementTree.fromstring(timeline(ran)).iter("text")]
    assert "F6" in words and not {"F5", "5"} & set(words)


def test_stages_stand_one_below_the_other_and_time_runs_to_the_right() -> None:
    table = one_f_one_b(3, 4)
    foretold = forecast(table, [StageCost(1.0, 2.0)] * 3)
    picture = ElementTree.fromstring(timeline([], foretold))
    outlines = rectangles(picture, "outline")
    lanes = {at(outline, "y") for outline in outlines}
    assert len(lanes) == 3
    for lane in lanes:
        edges = [(at(o, "x"), at(o, "x") + at(o, "width")) for o in outlines if at(o, "y") == lane]
        assert all(end <= start + 0.02 for (_, end), (start, _) in pairwise(edges))


def test_the_legend_names_what_occurs_and_nothing_else() -> None:
    picture = ElementTree.fromstring(timeline([ActionEvent("I", Action(0, "I", 0), "t", 0.0, 1.0)]))
    words = " ".join(element.text or "" for element in picture.iter("text"))
    assert KINDS["I"] in words and KINDS["F"] not in words and "forecast" not in words


@given(st.lists(events(), max_size=12))
def test_every_event_is_complete_work_on_a_named_thread(ran: list[ActionEvent]) -> None:
    made = json.loads(json.dumps(trace(ran)))["traceEvents"]
    work = [each for each in made if each["ph"] == "X"]
    named = {each["tid"] for each in made if each["name"] == "thread_name" and each["ph"] == "M"}
    assert len(work) == len(ran)
    assert len(named) == len({event.thread for event in ran})
    for each in work:
        assert each["ts"] >= 0 and each["dur"] >= 0 and each["pid"] == 0 and each["tid"] in named
        assert set(each["args"]) == {"stage", "micro-batch"}


def test_times_are_microseconds_from_the_first_event_also_in_a_file(tmp_path: Path) -> None:
    ran = [ActionEvent("R", Action(2, "B", 3), "one", 5.0, 5.5), ActionEvent("B", Action(2, "B", 3), "one", 5.5, 6.0)]
    work = [each for each in trace(ran, name="step")["traceEvents"] if each["ph"] == "X"]
    assert [(each["name"], each["cat"], each["ts"], each["dur"]) for each in work] == [
        ("2R3", "recompute", 0.0, 500_000.0),
        ("2B3", "backward", 500_000.0, 500_000.0),
    ]
    assert work[0]["args"] == {"stage": 2, "micro-batch": 3}
    where = write_trace(tmp_path / "trace.json", ran, name="step")
    assert json.loads(where.read_text("utf-8")) == trace(ran, name="step")
    recorder = Recorder()
    recorder.events, recorder.bytes = ran, [(5.25, 100)]
    assert live_bytes(recorder) == [(0.0, 0), (0.25, 100)], "nothing is alive at the first event"
