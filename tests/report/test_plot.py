"""Scales, ticks and units, and charts of lines, memory and loss."""

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.pictures import described, forms, size, wide
from torchweft.report.plot import BYTES, Axis, Scale, line_chart, loss_curve, memory_curve, show_bytes, show_time, ticks

POINTS = st.lists(st.tuples(st.floats(), st.floats()), max_size=8)
NAMES = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
SAMPLES = st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 2**40)), max_size=20)
X, Y = Axis("steps"), Axis("bits")
FINITE = st.floats(-1e9, 1e9, allow_nan=False)
POSITIVE = st.floats(1e-9, 1e9)


Corners = list[list[tuple[float, float]]]


def corners_of(picture: ElementTree.Element) -> Corners:
    """The corners of every line."""
    pairs = [[pair.split(",") for pair in (line.get("points") or "").split()] for line in picture.iter("polyline")]
    return [[(float(x), float(y)) for x, y in line] for line in pairs]


def corners(text: str) -> Corners:
    return corners_of(wide(text))


def words(text: str) -> str:
    return " | ".join(element.text or "" for element in wide(text).iter("text"))


@given(FINITE, st.floats(1e-6, 1e9), st.integers(5, 12))
def test_ticks_are_few_and_within_the_range(low: float, span: float, most: int) -> None:
    high = low + span
    if not high - low > 1e-9 * abs(low):
        return  # floating point cannot distinguish ticks there
    values = ticks(low, high, most)
    assert 2 <= len(values) <= most
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in values)


@given(st.floats(1e-6, 1e9), st.integers(5, 12))
def test_ticks_are_round_numbers(high: float, most: int) -> None:
    values = ticks(0.0, high, most)
    step = values[1] - values[0] if len(values) > 1 else 1.0
    assert round(step / 10 ** math.floor(math.log10(step * (1 + 1e-9))), 6) in (1, 2, 5)


@pytest.mark.parametrize("low, high", [(3.0, 3.0), (5.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_empty_range_has_one_tick(low: float, high: float) -> None:
    assert len(ticks(low, high)) == 1


@given(POSITIVE, st.floats(1.1, 1e6))
def test_scale_meets_both_ends_and_keeps_the_order(low: float, factor: float) -> None:
    scale = Scale(low, low * factor, 10.0, 110.0)
    assert scale(scale.low) == pytest.approx(10) and scale(scale.high) == pytest.approx(110)
    assert 10 < scale(low * (1 + factor) / 2) < 110
    assert Scale(low, low, 10.0, 20.0)(low) == 10, "an empty range maps to the start"


def test_times_and_bytes_have_a_suitable_unit() -> None:
    assert [show_time(t) for t in (2.0, 0.0123, 1.5e-6, 0.0)] == ["2 s", "12.3 ms", "1.50 µs", "0 µs"]
    assert [show_bytes(b) for b in (0, 512, 2048, 3.5 * 2**20, 2**31)] == [
        "0 bytes", "512 bytes", "2 KiB", "3.50 MiB", "2 GiB",
    ]  # fmt: skip


@given(st.dictionaries(NAMES, POINTS, max_size=4))
def test_any_points_stay_inside_both_forms(lines: dict[str, list[tuple[float, float]]]) -> None:
    for picture in forms(line_chart(lines, title="t", x=X, y=Y)):
        width, height = size(picture)
        points = [point for line in corners_of(picture) for point in line]
        assert all(-1 <= x <= width + 1 and -1 <= y <= height + 1 for x, y in points)


def test_description_summarizes_every_line() -> None:
    lines = {"loss": [(0.0, 3.0), (1.0, 4.0), (2.0, 0.125)], "nothing": []}
    text = described(line_chart(lines, title="Training", x=X, y=Y))
    assert text == "Training: bits over steps; nothing is empty; loss from 3 to 0.125, at most 4"
    assert described(memory_curve({})) == "Live activation bytes over time: no lines"


def test_charts_with_the_same_end_share_a_time_axis() -> None:
    """Curves that end at different times draw equal times at equal places."""
    early, late = memory_curve({"a": [(0.0, 1), (0.5, 2)]}, until=2.0), memory_curve({"a": [(0.0, 1), (2.0, 2)]})
    ticks_of = [
        [(e.text, e.get("x")) for e in wide(chart).iter("text") if e.get("class") == "tick"] for chart in (early, late)
    ]
    assert ticks_of[0] == ticks_of[1]
    for picture in forms(early):
        assert corners_of(picture)[0][-1][0] < size(picture)[0] / 2


def test_marks_stand_at_their_place_even_beyond_the_lines() -> None:
    marks = [(2.0, "killed"), (9.0, "back"), (math.nan, "never")]
    chart = line_chart({"loss": [(0.0, 3.0), (4.0, 1.0)]}, title="t", x=X, y=Y, marks=marks)
    lines = [line for line in wide(chart).iter("line") if line.get("class") == "mark"]
    places = [float(line.get("x1") or "") for line in lines]
    first, last = corners(chart)[0]
    assert first[0] < places[0] < last[0] < places[1] and len(lines) == 2
    assert places[0] - first[0] == pytest.approx((last[0] - first[0]) / 2, abs=0.1)
    assert "killed" in words(chart) and "back" in words(chart) and "never" not in words(chart)


def test_values_that_are_not_finite_are_omitted() -> None:
    points = [(1.0, 1.0), (0.0, 1.0), (2.0, -1.0), (3.0, float("nan")), (4.0, 2.0)]
    assert len(corners(line_chart({"a": points}, title="t", x=X, y=Y))[0]) == 4
    assert len(corners(loss_curve([1.0, float("nan"), 2.0, float("inf")]))[0]) == 2


def test_linear_axis_begins_at_zero() -> None:
    [(a, b)] = corners(line_chart({"a": [(5.0, 0.0), (6.0, 4.0)]}, title="t", x=X, y=Y))
    [(c, _)] = corners(line_chart({"a": [(5.0, 2.0), (6.0, 4.0)]}, title="t", x=X, y=Y))
    assert c[1] == pytest.approx((a[1] + b[1]) / 2, abs=0.02)


@given(st.lists(st.text("abc", max_size=60), max_size=12, unique=True))
def test_legend_wraps_and_colours_follow_the_names(names: list[str]) -> None:
    image, narrow = forms(line_chart({name: [(1.0, 1.0)] for name in names}, title="t", x=X, y=Y))
    samples = [line for line in image.iter("line") if "color" in (line.get("class") or "")]
    assert [sample.get("class") for sample in samples] == [f"line color-{i % 6}" for i in range(len(names))]
    keys = [key for key in image.iter("text") if key.get("class") == "key"]
    assert [key.text or "" for key in keys] == names
    places = [(float(key.get("y") or "nan"), float(key.get("x") or "nan")) for key in keys]
    assert places == sorted(places) and len({*places}) == len(places)
    ends = [x + 6.8 * len(name) for name, (_, x) in zip(names, places, strict=True)]
    assert all(end <= size(image)[0] for end in ends), "no name leaves the picture"
    for key in narrow.iter("text"):
        if key.get("class") == "key":
            assert float(key.get("x") or "nan") + 6.8 * len(key.text or "") <= size(narrow)[0]


def test_ticks_are_round_in_the_unit_of_the_axis() -> None:
    points = [(3.0, 2.0**20), (3.1, 2.0**30)]
    chart = line_chart({"one": points}, title="t", x=X, y=Axis("MiB", BYTES[1]))
    assert {"200", "400", "1000", "MiB", "steps", "one"} <= set(words(chart).split(" | "))


@given(st.dictionaries(NAMES, SAMPLES, max_size=4))
def test_time_of_any_memory_curve_never_decreases(
    curves: dict[str, list[tuple[float, int]]],
) -> None:
    drawn = corners(memory_curve(curves))
    assert len(drawn) == sum(1 for points in curves.values() if points)
    for line in drawn:
        assert all(a[0] <= b[0] for a, b in pairwise(line))


def test_bytes_hold_until_they_change() -> None:
    [line] = corners(memory_curve({"a": [(0.0, 0), (1.0, 1024), (2.0, 0)]}))
    assert len(line) == 5
    assert line[0][1] == line[1][1] and line[2][1] == line[3][1] < line[1][1]
    assert line[1][0] == line[2][0]


def test_legend_names_the_peak_of_every_curve() -> None:
    seen = words(memory_curve({"gpipe": [(0.0, 0), (0.01, 3 * 2**20)], "<1f1b>": [(0.0, 512)]}))
    assert "gpipe, peak 3 MiB" in seen and "<1f1b>, peak 512 bytes" in seen
    assert "time in ms" in seen and "MiB" in seen


def test_running_mean_lies_on_its_line() -> None:
    every, mean = corners(loss_curve([-2.0] * 9))
    assert every == mean
    every, mean = corners(loss_curve([5.0 - 0.1 * step for step in range(60)]))
    assert all(one == pytest.approx(other, abs=0.02) for one, other in zip(every, mean, strict=True))
    every, mean = corners(loss_curve([1.0 + (-1) ** step for step in range(60)]))
    middle = (every[0][1] + every[1][1]) / 2
    assert all(y == pytest.approx(middle, abs=10) for _, y in mean[10:-10])
