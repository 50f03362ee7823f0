"""A chart shows what its axes can show, and dots in the colour of their line."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.report.axes import BYTES
from weft.report.lines import Axis, line_chart

POINTS = st.lists(st.tuples(st.floats(), st.floats()), max_size=8)
NAMES = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
X, Y = Axis("steps"), Axis("bits")
LOG = Axis("steps", log=True)


def corners(text: str) -> list[list[tuple[float, float]]]:
    """The corners of every line."""
    found: list[list[tuple[float, float]]] = []
    for line in ElementTree.fromstring(text).iter("polyline"):
        pairs = [pair.split(",") for pair in (line.get("points") or "").split()]
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


@given(st.dictionaries(NAMES, POINTS, max_size=4), st.dictionaries(NAMES, POINTS, max_size=2), st.booleans())
def test_any_points_make_a_picture_and_stay_inside_of_it(
    lines: dict[str, list[tuple[float, float]]], measured: dict[str, list[tuple[float, float]]], log: bool
) -> None:
    text = line_chart(lines, title="t", x=Axis("x", log=log), y=Axis("y", log=log), measured=measured)
    image = ElementTree.fromstring(text)
    width, height = (float(each) for each in (image.get("viewBox") or "").split()[2:])
    seen = [point for line in corners(text) for point in line]
    seen += [(float(each.get("cx") or "nan"), float(each.get("cy") or "nan")) for each in image.iter("circle")]
    assert all(-1 <= x <= width + 1 and -1 <= y <= height + 1 for x, y in seen)


def test_a_mark_is_an_upright_line_with_its_name_and_no_curve() -> None:
    marks = {"a < b is killed": 9.0, "it is back": 20.0, "never": float("nan")}
    text = line_chart({"a": [(0.0, 1.0), (10.0, 2.0)]}, title="t", x=X, y=Y, marks=marks)
    image = ElementTree.fromstring(text)
    upright = [each for each in image.iter("line") if each.get("class") == "mark"]
    assert len(corners(text)) == 1 and len(upright) == 2
    assert all(each.get("x1") == each.get("x2") and each.get("y1") != each.get("y2") for each in upright)
    names = {each.text: each for each in image.iter("text") if "mark-name" in (each.get("class") or "")}
    assert [*names] == ["a < b is killed", "it is back"]
    assert len({each.get("y") for each in names.values()}) == 2, "they do not lie over each other"
    assert "end" in (names["it is back"].get("class") or ""), "it stays inside of the picture"


def test_what_an_axis_cannot_show_is_left_out() -> None:
    points = [(1.0, 1.0), (0.0, 1.0), (2.0, -1.0), (3.0, float("nan")), (4.0, 2.0)]
    assert len(corners(line_chart({"a": points}, title="t", x=LOG, y=Axis("y", log=True)))[0]) == 2
    assert len(corners(line_chart({"a": points}, title="t", x=X, y=Y))[0]) == 4


def test_a_power_is_straight_where_both_axes_are_logarithmic() -> None:
    [(a, b, c)] = corners(line_chart({"a": [(t, 3 * t**2) for t in (1.0, 10.0, 100.0)]}, title="t", x=LOG, y=LOG))
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.02) and b[1] - a[1] == pytest.approx(c[1] - b[1], abs=0.02)


def test_a_linear_axis_begins_at_zero() -> None:
    [(a, b)] = corners(line_chart({"a": [(5.0, 0.0), (6.0, 4.0)]}, title="t", x=X, y=Y))
    [(c, _)] = corners(line_chart({"a": [(5.0, 2.0), (6.0, 4.0)]}, title="t", x=X, y=Y))
    assert c[1] == pytest.approx((a[1] + b[1]) / 2, abs=0.02)


def test_a_dot_has_the_colour_of_its_line_and_tells_its_numbers_in_their_units() -> None:
    points = [(1.0, 2.0**20), (10.0, 2.0**21)]
    measured = {"two": points[:1], "dots only": points[1:]}
    mib = Axis("MiB", BYTES[1], log=True)
    text = line_chart({"one": points, "two": points}, title="t", x=LOG, y=mib, measured=measured)
    circles = list(ElementTree.fromstring(text).iter("circle"))
    assert [each.get("class") for each in circles] == ["dot color-1", "dot color-2"]
    assert [each[0].text for each in circles] == [
        "two: steps 1, measured 1 MiB",
        "dots only: steps 10, measured 2 MiB",
    ]


def test_ticks_are_round_in_the_unit_of_the_axis() -> None:
    points = [(3.0, 2.0**20), (3.1, 2.0**30)]
    mib = Axis("MiB", BYTES[1], log=True)
    text = line_chart({"one": points}, title="t", x=LOG, y=mib)
    words = [each.text for each in ElementTree.fromstring(text).iter("text")]
    assert {"1", "10", "100", "1000", "MiB", "steps", "one"} <= set(words)
