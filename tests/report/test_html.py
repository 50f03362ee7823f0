"""The page is one file that fetches nothing and runs nothing; whatever text it is given is escaped."""

import re
import shutil
import subprocess
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.pipeline.schedule import Action
from weft.pipeline.tracing import ActionEvent
from weft.report import Axis, Section, figure, line_chart, loss_curve, memory_curve, page, paragraph, table, timeline
from weft.report.html import Markup, join, number, tag, text

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ANY = st.text(st.characters(codec=None, exclude_categories=()))
VOID = {"meta", "link", "br", "img", "input"}


class Balance(HTMLParser):
    """Checks that elements close in order, and remembers them with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def html() -> str:
    ran = [ActionEvent("F", Action(0, "F", 0), "t", 0.0, 1.0)]
    body = [
        paragraph("a < b"),
        figure(timeline(ran), "when"),
        figure(memory_curve({"m": [(0.0, 1)]})),
        figure(loss_curve([1.0, 0.5])),
        figure(line_chart({"a": [(1.0, 1.0)]}, title="t", x=Axis("x"), y=Axis("y"))),
        table(["", "<peak>"], [["gpipe", "1 MiB"]]),
    ]
    return page("a & b", [Section("one <two>", body)])


def test_elements_close_in_order_and_nothing_is_fetched_or_runs(html: str) -> None:
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    assert html.startswith("<!DOCTYPE html>") and '<html lang="en">' in html
    assert not {"script", "link", "iframe", "img", "object"} & {element for element, _ in parser.seen}
    for element, attributes in parser.seen:
        for name, value in attributes.items():
            assert not name.startswith("on"), (element, name)
            assert name not in ("src", "href", "data", "action"), (element, value)
    assert not re.search(r"https?:|@import|url\(", html)


def test_what_it_is_given_is_escaped(html: str) -> None:
    assert "<title>a &amp; b</title>" in html and "one &lt;two&gt;" in html and "&lt;peak&gt;" in html
    assert "a &lt; b" in html


def test_both_colour_schemes_give_every_colour_that_the_classes_use(html: str) -> None:
    light, _, rest = html.partition("@media (prefers-color-scheme: dark)")
    dark = rest.partition("* {")[0]
    used = set(re.findall(r"var\((--[\w-]+)\)", html))
    for scheme in (light, dark):
        assert used <= set(re.findall(r"(--[\w-]+):", scheme))


@given(ANY, ANY)
def test_any_text_and_any_attribute_make_a_well_formed_element(content: str, value: str) -> None:
    element = ElementTree.fromstring(tag("text", content, class_=value))
    assert element.tag == "text" and list(element) == []
    assert list(element.attrib) == ["class"]


def test_markup_is_taken_as_it_is_and_plain_text_is_not() -> None:
    assert tag("g", tag("b", "x"), "<b>") == "<g><b>x</b>&lt;b&gt;</g>"
    assert isinstance(tag("g"), Markup) and tag("g", x=None, y=1) == '<g y="1"></g>'
    said = "a < b & \"c\" > 'd' <script>alert(1)</script>"
    element = ElementTree.fromstring(tag("text", said, aria_label=said))
    assert element.text == said and element.get("aria-label") == said
    assert join(tag("b"), "<b>") == "<b></b>&lt;b&gt;" and isinstance(join(), Markup)


@given(ANY)
def test_no_control_character_and_no_lone_surrogate_gets_through(said: str) -> None:
    text(said).encode()
    assert all(each in "\t\n\r" or unicodedata.category(each) not in ("Cc", "Cs") for each in text(said))


def test_what_is_forbidden_is_seen_to_be_missing() -> None:
    assert text("a\x00b\x1b\x7f\x9fc\ud800\ufffe") == "a\ufffdb\ufffd\ufffd\ufffdc\ufffd\ufffd"
    assert text("line\n\ttab é \u2028 \U0001f9f5") == "line\n\ttab é \u2028 \U0001f9f5"


def test_numbers_are_short() -> None:
    assert [number(x) for x in (1.0, 1.5, 0.12345, -0.25, 10, 100.0, "1.000")] == [
        "1", "1.5", "0.12", "-0.25", "10", "100", "1.000",
    ]  # fmt: skip


@pytest.mark.timeout(100)
@pytest.mark.skipif(CHROMIUM is None, reason="test_page: needs Chromium, and there is no chromium on the PATH")
def test_nothing_is_cut_off_on_a_phone(html: str, tmp_path: Path) -> None:
    # Wide things scroll by themselves; the page as a whole is no wider than the screen.
    wide = page("t", [Section("word" * 40, [table(["column"] * 12, [["cell"] * 12]), paragraph("/path" * 40)])])
    for each in (html, wide):
        frame = tag("iframe", id="phone", srcdoc=each, style="width: 360px; border: 0")
        measure = "const { scrollWidth, clientWidth } = phone.contentDocument.documentElement; "
        measure += "document.title = `overflow ${scrollWidth - clientWidth}`"
        around = tmp_path / "phone.html"
        around.write_text(
            f"<!DOCTYPE html><title></title>{frame}<script>onload = () => {{ {measure} }}</script>", "utf-8"
        )
        argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        argv += ["--dump-dom", around.as_uri()]
        seen = subprocess.run(argv, capture_output=True, text=True, timeout=80, check=False).stdout
        assert "<title>overflow 0</title>" in seen
