"""Nothing that a user named breaks out of its place, and all that is made is well-formed."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from weft.report.markup import Markup, chart, number, tag

ANY = st.text(st.characters(codec=None, exclude_categories=()))


@given(ANY, ANY)
def test_any_text_and_any_attribute_make_a_well_formed_element(content: str, value: str) -> None:
    element = ElementTree.fromstring(tag("text", content, class_=value))
    assert element.tag == "text" and list(element) == []
    assert list(element.attrib) == ["class"]


def test_text_comes_back_as_it_was() -> None:
    said = "a < b & \"c\" > 'd' <script>alert(1)</script>"
    element = ElementTree.fromstring(tag("text", said, aria_label=said))
    assert element.text == said and element.get("aria-label") == said


def test_markup_is_taken_as_it_is_and_plain_text_is_not() -> None:
    assert tag("g", tag("b", "x"), "<b>") == "<g><b>x</b>&lt;b&gt;</g>"
    assert isinstance(tag("g"), Markup)


def test_an_attribute_that_is_none_is_left_out() -> None:
    assert tag("g", x=None, y=1) == '<g y="1"></g>'


def test_numbers_are_short() -> None:
    assert [number(x) for x in (1.0, 1.5, 0.12345, -0.25, 10, 100.0, "1.000")] == [
        "1", "1.5", "0.12", "-0.25", "10", "100", "1.000",
    ]  # fmt: skip


def test_a_chart_says_what_it_is_and_keeps_its_shape() -> None:
    element = ElementTree.fromstring(chart("a <title>", 10, 5.5))
    assert element.attrib == {"viewBox": "0 0 10 5.5", "role": "img", "aria-label": "a <title>"}
