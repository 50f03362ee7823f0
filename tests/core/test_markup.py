"""Nothing that somebody named breaks out of its place, and all that is made is well-formed."""

import unicodedata
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from weft.core.markup import Markup, chart, join, number, tag, text

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
    assert join(tag("b"), "<b>") == "<b></b>&lt;b&gt;" and isinstance(join(), Markup)


@given(ANY)
def test_no_control_character_and_no_lone_surrogate_gets_through(said: str) -> None:
    text(said).encode()
    assert all(each in "\t\n\r" or unicodedata.category(each) not in ("Cc", "Cs") for each in text(said))


def test_what_is_forbidden_is_seen_to_be_missing() -> None:
    assert text("a\x00b\x1b\x7f\x9fc\ud800\ufffe") == "a\ufffdb\ufffd\ufffd\ufffdc\ufffd\ufffd"
    assert text("line\n\ttab é \u2028 \U0001f9f5") == "line\n\ttab é \u2028 \U0001f9f5"


def test_an_attribute_that_is_none_is_left_out() -> None:
    assert tag("g", x=None, y=1) == '<g y="1"></g>'


def test_numbers_are_short() -> None:
    assert [number(x) for x in (1.0, 1.5, 0.12345, -0.25, 10, 100.0, "1.000")] == [
        "1", "1.5", "0.12", "-0.25", "10", "100", "1.000",
    ]  # fmt: skip


def test_a_chart_says_what_it_is_and_keeps_its_shape() -> None:
    element = ElementTree.fromstring(chart("a <title>", 10, 5.5))
    assert element.attrib == {"viewBox": "0 0 10 5.5", "role": "img", "aria-label": "a <title>"}


def test_a_chart_takes_more_attributes() -> None:
    element = ElementTree.fromstring(chart("bars", 20, 10, tag("rect"), width=20, class_="bars"))
    assert element.get("width") == "20" and element.get("class") == "bars" and [e.tag for e in element] == ["rect"]
