"""One self-contained HTML page out of sections: no scripts, nothing fetched, so it can be mailed and kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.core.markup import Markup, join, tag, text
from weft.report.style import STYLE


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, and what `paragraph`, `figure`, `table`, `tiles`, `code` and `details` make."""

    title: str
    body: Sequence[Markup]


class Tile(NamedTuple):
    """A number that a reader should see first, with its name and what it is to be held against."""

    label: str
    value: str
    note: str = ""


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole page, as text to be written in UTF-8."""
    parts = [tag("section", tag("h2", section.title), *section.body) for section in sections]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{tag('main', tag('h1', title), *parts)}\n</body>\n</html>\n"
    )


def paragraph(words: str) -> Markup:
    """A paragraph of plain text."""
    return tag("p", words)


def figure(picture: Markup, caption: str = "") -> Markup:
    """A picture with what a reader should see in it."""
    return tag("figure", picture, tag("figcaption", caption) if caption else "")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table; the first column names the rows."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    whole = tag("table", tag("thead", head), tag("tbody", *(_row(row) for row in rows)))
    return tag("div", whole, class_="wide")  # which scrolls where a screen is narrower


def tiles(each: Sequence[Tile]) -> Markup:
    """Some numbers side by side."""
    return tag("div", *map(_tile, each), class_="tiles")


def code(words: str) -> Markup:
    """Text whose lines stay as they are, in letters of one width."""
    return tag("pre", words)


def details(summary: str, *body: Markup) -> Markup:
    """What few readers want to see: a line that opens it."""
    return tag("details", tag("summary", summary), *body)


def _row(cells: Sequence[str]) -> Markup:
    return tag("tr", *(tag("td", cell) for cell in cells))


def _tile(tile: Tile) -> Markup:
    note = tag("dd", tile.note, class_="note") if tile.note else join()
    return tag("dl", tag("dt", tile.label), tag("dd", tile.value), note, class_="tile")
