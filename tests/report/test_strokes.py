"""A legend wraps, and colours run in the order of the names."""

from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from weft.report.axes import Frame, Scale
from weft.report.strokes import LETTER, ROW, SAMPLE, dots, legend, legend_rows, line

FRAME = Frame(Scale(0.0, 1.0, 0.0, 100.0), Scale(0.0, 1.0, 100.0, 0.0))


@given(st.lists(st.text("abc", max_size=30), max_size=12))
def test_rows_keep_the_names_in_order_and_break_only_where_one_more_would_not_fit(names: list[str]) -> None:
    rows = legend_rows(names, 0.0, 300.0)
    assert [name for row in rows for name in row] == names
    for row, following in pairwise(rows):
        assert row and _width([*row, following[0]]) > 300
    assert all(_width(row) <= 300 or len(row) == 1 for row in rows)


def _width(names: list[str]) -> float:
    return sum(SAMPLE + 34 + LETTER * len(name) for name in names)


def test_the_colour_of_a_name_is_that_of_its_place_whatever_its_row() -> None:
    drawn = ElementTree.fromstring(f"<svg>{legend([['a', 'b'], ['c']], 10.0)}</svg>")
    samples = [(each.get("class"), each.get("y1")) for each in drawn.iter("line")]
    assert samples == [("line color-0", "14"), ("line color-1", "14"), ("line color-2", f"{14 + ROW:g}")]
    assert [each.text for each in drawn.iter("text")] == ["a", "b", "c"]


def test_dots_stand_where_the_line_has_its_corners() -> None:
    points = [(0.0, 0.0), (0.5, 1.0)]
    drawn = ElementTree.fromstring(f"<svg>{line(FRAME, points, 7, '<tip>')}{dots(FRAME, points, 7, ['x', 'y'])}</svg>")
    corners = drawn.findall("polyline")[0].get("points")
    assert corners == " ".join(f"{each.get('cx')},{each.get('cy')}" for each in drawn.iter("circle")) == "0,100 50,0"
    assert {each.get("class") for each in drawn} == {"line color-1", "dot color-1"}, "colours begin anew after six"
    assert [each.text for each in drawn.iter("title")] == ["<tip>", "x", "y"]


def test_no_points_draw_nothing() -> None:
    assert line(FRAME, [], 0, "") == dots(FRAME, [], 0, []) == ""
