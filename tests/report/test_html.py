"""A page is one file that fetches nothing and runs nothing. All text is escaped."""

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

from torchweft.pipeline.schedule import Action
from torchweft.pipeline.tracing import ActionEvent
from torchweft.report import (
    Axis,
    Section,
    figure,
    line_chart,
    loss_curve,
    memory_curve,
    page,
    paragraph,
    table,
    timeline,
)
from torchweft.report.html import Markup, details, join, number, tag, text

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="test_html: needs Chromium, which is not on the PATH")
ANY = st.text(st.characters(codec=None, exclude_categories=()))
VOID = {"meta", "link", "br", "img", "input"}


class Parser(HTMLParser):
    """Checks that elements close in order, and records them with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def html() -> str:
    body = [
        paragraph("a < b"),
        figure(timeline([ActionEvent("F", Action(0, "F", 0), "t", 0.0, 1.0)]), "when"),
        figure(memory_curve({"m": [(0.0, 1)]})),
        figure(loss_curve([1.0, 0.5])),
        figure(line_chart({"a": [(1.0, 1.0)]}, title="t", x=Axis("x"), y=Axis("y"))),
        table(["", "<peak>"], [["gpipe", "1 MiB"]]),
    ]
    return page("a & b", [Section("one <two>", body)])


def test_elements_close_in_order_and_nothing_is_fetched(html: str) -> None:
    parser = Parser()
    parser.feed(html)
    assert parser.open == []
    assert html.startswith("<!DOCTYPE html>") and '<html lang="en">' in html
    assert not {"script", "link", "iframe", "img", "object"} & {element for element, _ in parser.seen}
    names = {name for _, attributes in parser.seen for name in attributes}
    assert not {"src", "href", "data", "action"} & names and not any(name.startswith("on") for name in names)
    assert not re.search(r"https?:|@import|url\((?!#)", html)


def test_given_text_is_escaped(html: str) -> None:
    escaped = ("<title>a &amp; b</title>", "one &lt;two&gt;", "&lt;peak&gt;", "a &lt; b")
    assert all(piece in html for piece in escaped)


def test_both_colour_schemes_define_every_used_colour(html: str) -> None:
    light, _, rest = html.partition("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r"var\((--[\w-]+)\)", html))
    for scheme in (light, rest.partition("* {")[0]):
        assert used <= set(re.findall(r"(--[\w-]+):", scheme))


@given(ANY, ANY)
def test_any_text_makes_a_well_formed_element(content: str, value: str) -> None:
    element = ElementTree.fromstring(tag("text", content, class_=value))
    assert element.tag == "text" and list(element) == []
    assert list(element.attrib) == ["class"]


def test_details_fold_their_content_behind_a_summary() -> None:
    assert details("3 < 4", tag("p", "x")) == "<details><summary>3 &lt; 4</summary><p>x</p></details>"


def test_markup_is_kept_and_plain_text_is_escaped() -> None:
    assert tag("g", tag("b", "x"), "<b>") == "<g><b>x</b>&lt;b&gt;</g>"
    assert isinstance(tag("g"), Markup) and tag("g", x=None, y=1) == '<g y="1"></g>'
    words = "a < b & \"c\" > 'd' <script>alert(1)</script>"
    element = ElementTree.fromstring(tag("text", words, aria_label=words))
    assert element.text == words and element.get("aria-label") == words
    assert join(tag("b"), "<b>") == "<b></b>&lt;b&gt;" and isinstance(join(), Markup)


@given(ANY)
def test_control_characters_and_surrogates_are_replaced(words: str) -> None:
    text(words).encode()
    assert all(char in "\t\n\r" or unicodedata.category(char) not in ("Cc", "Cs") for char in text(words))


def test_forbidden_characters_become_visible() -> None:
    assert text("a\x00b\x1b\x7f\x9fc\ud800\ufffe") == "a\ufffdb\ufffd\ufffd\ufffdc\ufffd\ufffd"
    assert text("line\n\ttab é \u2028 \U0001f9f5") == "line\n\ttab é \u2028 \U0001f9f5"


def test_numbers_are_short() -> None:
    short = ["1", "1.5", "0.12", "-0.25", "10", "100", "1.000"]
    assert [number(x) for x in (1.0, 1.5, 0.12345, -0.25, 10, 100.0, "1.000")] == short


def measured(html: str, width: int, folder: Path, expression: str) -> str:
    """The title that JavaScript sets after it has inspected the page, as `phone`, in a frame of this width."""
    frame = tag("iframe", id="phone", srcdoc=html, style=f"width: {width}px; border: 0")
    script = f"onload = () => {{ const phone = document.getElementById('phone').contentDocument; {expression} }}"
    file = folder / "phone.html"
    file.write_text(f"<!DOCTYPE html><title></title>{frame}<script>{script}</script>", "utf-8")
    argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    argv += ["--dump-dom", file.as_uri()]
    dump = subprocess.run(argv, capture_output=True, text=True, timeout=80, check=False).stdout
    return dump.partition("<title>")[2].partition("</title>")[0]


@pytest.mark.long
@needs_chromium
def test_page_fits_the_screen_of_a_phone(html: str, tmp_path: Path) -> None:
    """Wide tables scroll by themselves. The page as a whole is not wider than the screen."""
    wide = page("t", [Section("word" * 40, [table(["column"] * 12, [["cell"] * 12]), paragraph("/path" * 40)])])
    overflow = "const { scrollWidth, clientWidth } = phone.documentElement; document.title = scrollWidth - clientWidth"
    for source in (html, wide):
        assert measured(source, 360, tmp_path, overflow) == "0"


@pytest.mark.long
@needs_chromium
@pytest.mark.parametrize("width", [390, 820])
def test_text_of_pictures_is_legible_at_every_width(html: str, tmp_path: Path, width: int) -> None:
    """No text of a visible picture is smaller than 11 pixels, and no picture is cut off."""
    expression = """
    const shown = [...phone.querySelectorAll("figure svg")].filter((svg) => svg.getClientRects().length);
    const sizes = shown.flatMap((svg) => [...svg.querySelectorAll("text")].map(
      (text) => parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a));
    const cut = shown.some((svg) => svg.getBoundingClientRect().right > phone.documentElement.clientWidth);
    document.title = `${shown.length} ${cut} ${Math.min(...sizes)}`;
    """
    count, cut, least = measured(html, width, tmp_path, expression).split()
    assert (count, cut) == ("4", "false") and float(least) >= 11
