"""A self-contained HTML page, without scripts and without anything to fetch, so that it can be mailed and archived.

    tag("text", "a < b", x=3, class_="label")   ->   <text x="3" class="label">a &lt; b</text>

Plain strings are escaped. `Markup` is inserted unchanged. The elements are valid in HTML and well-formed as XML.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

AttributeValue = str | int | float

# All characters but those of XML 1.0 (section 2.2), and DEL and U+0080 to U+009F, which it discourages.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Markup(str):
    """Text that is markup and must not be escaped.

    Example:
        >>> weft.report.paragraph(weft.report.Markup("<b>kept</b>"))
        '<p><b>kept</b></p>'
    """

    __slots__ = ()


def text(content: str) -> Markup:
    """Escape plain text. Control characters and lone surrogates become the replacement character."""
    return Markup(escape(_FORBIDDEN.sub("\ufffd", content)))


def join(*parts: str) -> Markup:
    """Concatenate markup and plain text, which is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else text(part) for part in parts))


def number(value: AttributeValue) -> str:
    """A number with at most two decimals. Text is returned unchanged."""
    if isinstance(value, str):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def tag(name: str, *content: str, **attributes: AttributeValue | None) -> Markup:
    """An element. In the names of attributes, an underscore becomes a hyphen, and a trailing one is dropped, so that
    ``class_`` can be written. An attribute of None is omitted."""
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{attribute_text}>{join(*content)}</{name}>")


@dataclass(frozen=True)
class Section:
    """A part of a page: a title above paragraphs, figures and tables.

    Example:
        >>> section = weft.report.Section("Data", [weft.report.paragraph("1,000 rows")])
    """

    title: str
    body: Sequence[Markup]


def page(title: str, sections: Sequence[Section]) -> str:
    """The page, to be written in UTF-8.

    Example:
        >>> section = weft.report.Section("Data", [weft.report.paragraph("1,000 rows")])
        >>> weft.report.page("Run 7", [section]).splitlines()[0]
        '<!DOCTYPE html>'
    """
    parts = [tag("section", tag("h2", section.title), *section.body) for section in sections]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{tag('main', tag('h1', title), *parts)}\n</body>\n</html>\n"
    )


def paragraph(words: str) -> Markup:
    """A paragraph of plain text.

    Example:
        >>> print(weft.report.paragraph("1 < 2"))
        <p>1 &lt; 2</p>
    """
    return tag("p", words)


def figure(picture: Markup, caption: str = "") -> Markup:
    """A picture with its caption.

    Example:
        >>> print(weft.report.figure(weft.report.loss_curve([3.0, 2.0, 1.5]), "Three steps"))
        <figure><svg...<figcaption>Three steps</figcaption></figure>
    """
    return tag("figure", picture, tag("figcaption", caption) if caption else "")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table of plain text. The first column names the rows.

    Example:
        >>> print(weft.report.table(["mode", "bytes"], [["full", "268 MB"]]))
        <div class="wide"><table>...</table></div>
    """
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide")


# Pictures only name classes. All colours are here, for light and dark. The colours of kinds and curves differ in
# lightness too, so that colour-blind readers can tell them apart.
_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1f2328; --soft: #5d6570; --rule: #e3e1dc;
  --f: #2f6fb0; --b: #e39a2d; --r: #a9a4c9; --i: #5aa469; --w: #b75d69; --bar-ink: #ffffff; --b-ink: #1f2328;
  --c0: #2f6fb0; --c1: #d9822b; --c2: #3f8f5b; --c3: #8a5fb5; --c4: #b75d69; --c5: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181c; --card: #1d2126; --ink: #e8e6e1; --soft: #a2a8b0; --rule: #343a42;
    --f: #6aa5de; --b: #f0b45c; --r: #8f89b8; --i: #7cc48b; --w: #d98a95; --bar-ink: #101418; --b-ink: #101418;
    --c0: #6aa5de; --c1: #f0a04c; --c2: #7cc48b; --c3: #b99ae0; --c4: #d98a95; --c5: #a2a8b0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 12px; overflow-wrap: anywhere; }
p, figcaption { max-width: 80ch; }
section { background: var(--card); border: 1px solid var(--rule); padding: 14px; margin-bottom: 20px; }
figure { margin: 18px 0; overflow-x: auto; }
figcaption { color: var(--soft); font-size: 14px; }
svg { display: block; width: 100%; min-width: 640px; height: auto; font: 12px system-ui, sans-serif; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 6px 22px 6px 0; text-align: right; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
.tick { fill: var(--soft); text-anchor: middle; font-variant-numeric: tabular-nums; }
.tick.end { text-anchor: end; }
.tick.start { text-anchor: start; }
.key { fill: var(--ink); }
.key.end { text-anchor: end; }
.mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.line.faint { stroke-width: 1; opacity: 0.35; }
.axis { stroke: var(--f); fill: var(--f); }
.color-0 { stroke: var(--c0); } .color-1 { stroke: var(--c1); } .color-2 { stroke: var(--c2); }
.color-3 { stroke: var(--c3); } .color-4 { stroke: var(--c4); } .color-5 { stroke: var(--c5); }
.kind-F { color: var(--f); } .kind-B { color: var(--b); } .kind-R { color: var(--r); }
.kind-I { color: var(--i); } .kind-W { color: var(--w); }
.bar { fill: currentcolor; stroke: var(--card); stroke-width: 0.6; }
.outline { fill: currentcolor; stroke: currentcolor; stroke-width: 1.5; fill-opacity: 0.14; }
.in-bar, .in-outline { font-size: 11px; text-anchor: middle; pointer-events: none; fill: var(--ink); }
.in-bar { fill: var(--bar-ink); }
.kind-B + .in-bar, .kind-R + .in-bar { fill: var(--b-ink); }
"""
