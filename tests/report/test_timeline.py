"""Timelines and traces show every event at its place and time. Timelines also show every span of the forecast."""

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tests.report.pictures import described, forms, size, wide
from tests.strategies import any_schedules
from torchweft.pipeline.schedule import Action, one_f_one_b
from torchweft.pipeline.simulate import Forecast, StageCost, forecast
from torchweft.pipeline.split.program import CrossingValue
from torchweft.pipeline.tracing import ActionEvent, Recorder
from torchweft.report.timeline import KINDS, action_table, live_bytes, routes, timeline, trace, write_trace

TIMES = st.floats(0, 1e4)
NAMES = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)


@st.composite
def events(draw: st.DrawFn) -> ActionEvent:
    action = Action(draw(st.integers(0, 5)), draw(st.sampled_from("FBIW")), draw(st.integers(0, 120)))
    start, duration = draw(TIMES), draw(TIMES)
    kind = draw(st.sampled_from([action.kind, "R"]))
    return ActionEvent(kind, action, draw(NAMES), start, start + duration)


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    """The forecast of any small schedule."""
    schedule = draw(any_schedules(3, 3))
    numbers = draw(st.lists(TIMES, min_size=3, max_size=3))
    return forecast(schedule, [StageCost(*numbers)] * schedule.stages)


def rectangles(picture: ElementTree.Element, word: str) -> list[ElementTree.Element]:
    """The rectangles of this class that represent an event, without those of the legend."""
    return [group[1] for group in picture.iter("g") if word in (group[1].get("class") or "").split()]


def at(element: ElementTree.Element, key: str) -> float:
    return float(element.get(key) or "nan")


@given(st.lists(events(), max_size=12), st.none() | forecasts())
def test_any_timeline_is_complete_and_inside_the_picture(ran: list[ActionEvent], expected: Forecast | None) -> None:
    for picture in forms(timeline(ran, expected)):
        bars, outlines = rectangles(picture, "bar"), rectangles(picture, "outline")
        assert len(bars) == len(ran)
        assert len(outlines) == (len(expected.spans) if expected else 0)
        width, height = size(picture)
        for bar in (*bars, *outlines):
            assert at(bar, "x") >= 0 and at(bar, "x") + at(bar, "width") <= width
            assert at(bar, "y") >= 0 and at(bar, "y") + at(bar, "height") <= height


def test_bars_have_numbers_and_tooltips() -> None:
    ran = [
        ActionEvent("F", Action(0, "F", 7), "t", 10.0, 11.0),
        ActionEvent("R", Action(1, "B", 7), "u", 11.0, 12.0),
        ActionEvent("B", Action(1, "B", 7), "u", 12.0, 14.0),
    ]
    picture = wide(timeline(ran))
    words = [element.text for element in picture.iter("text")]
    assert {"F7", "R7", "B7", "stage 0", "stage 1"} <= set(words)
    tips = [group[0].text for group in picture.iter("g")]
    assert tips[0] == "measured: forward, stage 0, micro-batch 7; 0 µs to 1 s, takes 1 s"
    assert tips[1] is not None and tips[1].startswith("measured: recompute, stage 1, micro-batch 7")


def test_outlines_have_labels_and_do_not_touch() -> None:
    expected = forecast(one_f_one_b(2, 2), [StageCost(1.0, 2.0)] * 2)
    picture = wide(timeline([], expected))
    words = [element.text for element in picture.iter("text") if element.get("class") == "in-outline"]
    assert sorted(words) == sorted(["F0", "F1", "B0", "B1"] * 2)
    first = [(at(o, "x"), at(o, "x") + at(o, "width")) for o in rectangles(picture, "outline")]
    same = [(a, b) for a in first for b in first if a != b and abs(a[1] - b[0]) < 2]
    assert same and all(b[0] - a[1] > 1 for a, b in same)
    assert all(at(o, "height") >= 16 for o in rectangles(picture, "outline"))


def test_narrow_bar_has_no_words() -> None:
    ran = [ActionEvent("F", Action(0, "F", 5), "t", 0.0, 0.001), ActionEvent("F", Action(0, "F", 6), "t", 0.001, 1.0)]
    words = [element.text for element in wide(timeline(ran)).iter("text")]
    assert "F6" in words and not {"F5", "5"} & set(words)


def test_each_stage_has_a_lane_with_time_to_the_right() -> None:
    table = one_f_one_b(3, 4)
    expected = forecast(table, [StageCost(1.0, 2.0)] * 3)
    picture = wide(timeline([], expected))
    outlines = rectangles(picture, "outline")
    assert_in_lanes(outlines, 3, "y", "x", "width")


def test_narrow_form_has_a_column_per_stage_with_time_down() -> None:
    """The bars of the narrow form are long enough for the labels of 8 micro-batches."""
    expected = forecast(one_f_one_b(4, 8), [StageCost(1.0, 2.0)] * 4)
    ran = [ActionEvent(s.action.kind, s.action, "t", s.start, s.end) for s in expected.spans]
    for outlined in (None, expected):
        _, narrow = forms(timeline(ran, outlined))
        assert_in_lanes(rectangles(narrow, "bar"), 4, "x", "y", "height")
        words = [element.text for element in narrow.iter("text")]
        assert words.count("B7") == (4 if outlined is None else 8) and {"stage 0", "stage 3"} <= set(words)


def test_bars_that_touch_in_time_have_a_gap() -> None:
    ran = [ActionEvent("F", Action(0, "F", i), "t", float(i), i + 1.0) for i in range(3)]
    for picture, along, length in zip(forms(timeline(ran)), "xy", ("width", "height"), strict=True):
        edges = [(at(bar, along), at(bar, along) + at(bar, length)) for bar in rectangles(picture, "bar")]
        assert all(0.9 < start - end < 3 for (_, end), (start, _) in pairwise(edges))


def test_timelines_with_the_same_end_share_a_time_axis() -> None:
    ran = [ActionEvent("F", Action(0, "F", 0), "t", 5.0, 6.0)]
    for short, long in zip(forms(timeline(ran, until=4.0)), forms(timeline(ran)), strict=True):
        length = "width" if short.get("class") == "wide-form" else "height"
        assert at(rectangles(short, "bar")[0], length) < at(rectangles(long, "bar")[0], length) / 3


def test_description_summarizes_the_step() -> None:
    expected = forecast(one_f_one_b(2, 2), [StageCost(1.0, 2.0), StageCost(2.0, 3.0)])
    ran = [ActionEvent(s.action.kind, s.action, f"t{s.action.stage}", s.start, s.end) for s in expected.spans]
    text = described(timeline(ran, expected, title="A step, 1f1b"))
    assert text.startswith("A step, 1f1b: 2 stages, 2 micro-batches, 2 workers: ")
    assert f"{expected.bubble:.0%} idle; stage 1 is the slowest; forecast 13 s" in text
    assert described(timeline([])) == "Timeline of a step: no actions"


def test_table_of_a_timeline_lists_its_actions() -> None:
    ran = [ActionEvent("B", Action(1, "B", 3), "<t>", 6.0, 6.5), ActionEvent("F", Action(0, "F", 2), "u", 5.0, 6.0)]
    rows = [["".join(cell.itertext()) for cell in row] for row in ElementTree.fromstring(action_table(ran)).iter("tr")]
    assert rows[1:] == [
        ["forward", "0", "2", "0 µs", "1 s", "u"],
        ["backward", "1", "3", "1 s", "500 ms", "<t>"],
    ]
    many = action_table(ran * 300)
    assert "The first 500 of 600 actions" in many and many.count("<tr>") == 501


def test_routes_have_arrows_and_words_in_both_forms() -> None:
    values = [CrossingValue("a.very.long.name.of.a.value.that.crosses.two.cuts", 2048, 0, (1, 7))]
    for picture in forms(routes(values, 8, title="What crosses")):
        width, height = size(picture)
        assert len(list(picture.iter("path"))) == 2
        for text in picture.iter("text"):
            assert 0 <= at(text, "x") <= width and 0 <= at(text, "y") <= height
            assert text.get("class") == "tick" or at(text, "x") + 6.8 * len(text.text or "") <= width


def assert_in_lanes(bars: list[ElementTree.Element], stages: int, across: str, along: str, length: str) -> None:
    """Assert that bars of the same lane do not overlap."""
    lanes = {at(bar, across) for bar in bars}
    assert len(lanes) == stages
    for lane in lanes:
        edges = [(at(o, along), at(o, along) + at(o, length)) for o in bars if at(o, across) == lane]
        assert all(end <= start + 0.02 for (_, end), (start, _) in pairwise(sorted(edges)))


def test_legend_names_only_kinds_that_occur() -> None:
    picture = wide(timeline([ActionEvent("I", Action(0, "I", 0), "t", 0.0, 1.0)]))
    words = " ".join(element.text or "" for element in picture.iter("text"))
    assert KINDS["I"] in words and KINDS["F"] not in words and "forecast" not in words


@given(st.lists(events(), max_size=12))
def test_every_event_is_complete_work_on_a_named_thread(ran: list[ActionEvent]) -> None:
    entries = json.loads(json.dumps(trace(ran)))["traceEvents"]
    work = [entry for entry in entries if entry["ph"] == "X"]
    named = {entry["tid"] for entry in entries if entry["name"] == "thread_name" and entry["ph"] == "M"}
    assert len(work) == len(ran)
    assert len(named) == len({event.thread for event in ran})
    for entry in work:
        assert entry["ts"] >= 0 and entry["dur"] >= 0 and entry["pid"] == 0 and entry["tid"] in named
        assert set(entry["args"]) == {"stage", "micro-batch"}


def test_trace_times_are_microseconds_from_the_first_event(tmp_path: Path) -> None:
    ran = [ActionEvent("R", Action(2, "B", 3), "one", 5.0, 5.5), ActionEvent("B", Action(2, "B", 3), "one", 5.5, 6.0)]
    work = [entry for entry in trace(ran, name="step")["traceEvents"] if entry["ph"] == "X"]
    assert [(entry["name"], entry["cat"], entry["ts"], entry["dur"]) for entry in work] == [
        ("2R3", "recompute", 0.0, 500_000.0),
        ("2B3", "backward", 500_000.0, 500_000.0),
    ]
    assert work[0]["args"] == {"stage": 2, "micro-batch": 3}
    where = write_trace(tmp_path / "trace.json", ran, name="step")
    assert json.loads(where.read_text("utf-8")) == trace(ran, name="step")
    recorder = Recorder()
    recorder.events, recorder.bytes = ran, [(5.25, 100)]
    assert live_bytes(recorder) == [(0.0, 0), (0.25, 100)], "nothing is alive at the first event"
