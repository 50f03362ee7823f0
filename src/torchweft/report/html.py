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
    main = tag("main", _TEXTURES, tag("h1", title), *parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{main}\n</body>\n</html>\n"
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
        <figure><div class="picture"><svg...<figcaption>Three steps</figcaption></figure>
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


def details(summary: str, *content: Markup) -> Markup:
    """Content that a reader can unfold below its summary."""
    return tag("details", tag("summary", summary), *content)


def _texture(kind: str, size: int, path: str) -> Markup:
    """The pattern of a kind of events: lines on a ground. The style sets both colours."""
    ground = tag("rect", width=size, height=size, class_="ground")
    box = {"width": size, "height": size, "patternUnits": "userSpaceOnUse"}
    return tag("pattern", ground, tag("path", d=path), id=f"texture-{kind}", class_=f"texture-{kind}", **box)


# Once per page and never with `display: none`, because a pattern inside a hidden picture would not be drawn.
_TEXTURES = tag(
    "svg",
    _texture("R", 6, "M-1 1 l2 -2 M0 6 l6 -6 M5 7 l2 -2"),
    _texture("I", 5, "M0 2.5 h5"),
    _texture("W", 5, "M2.5 1.4 v2.2"),
    _texture("T", 6, "M-1 5 l2 2 M0 0 l6 6 M5 -1 l2 2"),
    class_="textures",
    aria_hidden="true",
)

# Pictures only name classes. All colours are here, for light and dark. Three steps of lightness (card, middle, far)
# have a contrast of 3:1 to each other, also for colour-blind readers. Shapes of one step differ in texture or dashes.
_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f6f5f2; --card: #ffffff; --ink: #1f2328; --soft: #5d6570; --rule: #dddbd5;
  --f: #0c2a5c; --f-ink: #ffffff; --b: #c4761d; --b-ink: #000000; --r: #3d2c6e; --w: #0b3b37;
  --i: #1d9188; --i-line: #0b3b37;
  --c0: #0c2a5c; --c1: #c4761d; --c2: #4a0f42; --c3: #1d9188; --c4: #232b0c; --c5: #be5fed;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0f1216; --card: #181b20; --ink: #e8e6e1; --soft: #a2a8b0; --rule: #343a42;
    --f: #4070a1; --f-ink: #ffffff; --b: #ffd591; --b-ink: #000000; --r: #c9c0ff; --w: #9be8d8;
    --i: #9be8d8; --i-line: #12463c;
    --c0: #4070a1; --c1: #ffd591; --c2: #8f42db; --c3: #9be8d8; --c4: #707070; --c5: #e8e6e1;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 12px; overflow-wrap: anywhere; }
p, figcaption { max-width: 80ch; }
section { background: var(--card); border: 1px solid var(--rule); padding: 14px; margin-bottom: 20px; }
figure { margin: 18px 0; }
figcaption, summary { color: var(--soft); font-size: 14px; }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
.textures { position: absolute; width: 0; height: 0; }
.narrow-form { display: none; max-width: 460px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 6px 22px 6px 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { white-space: normal; }
.facts * { text-align: left; white-space: normal; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
@media (max-width: 760px) {
  main { padding: 16px 8px; }
  h1 { font-size: 24px; }
  section { padding: 10px; }
  th, td { padding-right: 12px; font-size: 15px; }
  .wide-form { display: none; }
  .narrow-form { display: block; }
}
.tick { fill: var(--soft); text-anchor: middle; font-variant-numeric: tabular-nums; }
.tick.end { text-anchor: end; }
.tick.start { text-anchor: start; }
.key { fill: var(--ink); }
.key.end { text-anchor: end; }
.mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.line.faint { stroke-width: 1; }
.axis { stroke: var(--f); fill: var(--f); }
.color-0 { stroke: var(--c0); } .color-1 { stroke: var(--c1); }
.color-2 { stroke: var(--c2); stroke-dasharray: 7 3; } .color-3 { stroke: var(--c3); stroke-dasharray: 7 3; }
.color-4 { stroke: var(--c4); stroke-dasharray: 2 3; } .color-5 { stroke: var(--c5); stroke-dasharray: 2 3; }
.texture-R .ground, .texture-W .ground, .texture-T .ground { fill: var(--card); }
.texture-R path { stroke: var(--r); stroke-width: 1.4; }
.texture-I .ground { fill: var(--i); }
.texture-I path { stroke: var(--i-line); stroke-width: 1.2; }
.texture-W path { stroke: var(--w); stroke-width: 2.2; }
.texture-T path { stroke: var(--ink); stroke-width: 1.4; }
.kind-F { fill: var(--f); stroke: var(--f); } .kind-B { fill: var(--b); stroke: var(--b); }
.kind-R { fill: url(#texture-R); stroke: var(--r); } .kind-I { fill: url(#texture-I); stroke: var(--i); }
.kind-W { fill: url(#texture-W); stroke: var(--w); } .kind-T { fill: url(#texture-T); stroke: var(--ink); }
.bar { stroke-width: 1; }
.outline { fill: none; stroke-width: 1.5; }
.outline:not([class*=kind]) { stroke: var(--ink); }
.outline.kind-R { stroke-dasharray: 3 2; } .outline.kind-W { stroke-dasharray: 1 2; }
.in-bar, .in-outline { text-anchor: middle; pointer-events: none; fill: var(--ink); }
.narrow-form .in-bar, .narrow-form .in-outline { font-size: 12px; }
.in-bar { paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
.kind-F + .in-bar { fill: var(--f-ink); stroke: none; }
.kind-B + .in-bar { fill: var(--b-ink); stroke: none; }
"""
