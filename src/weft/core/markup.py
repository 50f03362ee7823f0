"""Elements of SVG and HTML as text, in which nothing that somebody named can break out of its place.

    tag("text", "a < b", x=3, class_="label")   ->   <text x="3" class="label">a &lt; b</text>

Plain strings are escaped; `Markup` is taken as it is, and only the functions here make it. What they make is valid in
HTML and well-formed as XML, so tests can parse what a reader sees.
"""

import re
from html import escape

Value = str | int | float

# What XML 1.0 allows (section 2.2), without DEL and the control characters of U+0080 to U+009F, which it discourages.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class FoldedText(str):
    """Text with lines indented below headings; a notebook shows the headings, and what is below where one is opened."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """The text with its parts folded, for notebooks."""
        parts: list[tuple[str, list[str]]] = []
        for line in self.splitlines():
            if line[:1].isspace() and parts:
                parts[-1][1].append(line)
            elif line.strip():
                parts.append((line, []))
        return tag("div", *(_folded(heading, below) for heading, below in parts))


def _folded(heading: str, below: list[str]) -> "Markup":
    if not below:
        return tag("p", tag("b", heading))
    return tag("details", tag("summary", heading), tag("pre", "\n".join(below)))


class Markup(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def text(content: str) -> Markup:
    """Plain text as markup; control characters and lone surrogates become the replacement character."""
    return Markup(escape(_FORBIDDEN.sub("\ufffd", content)))


def join(*parts: str) -> Markup:
    """One after the other, with plain text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else text(part) for part in parts))


def number(value: Value) -> str:
    """A number as short as a picture needs it: at most two decimals. Text stays as it is."""
    if isinstance(value, str):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def tag(name: str, *content: str, **attributes: Value | None) -> Markup:
    """An element with this content. In names of attributes an underscore stands for a hyphen, a trailing one for
    nothing; None leaves the attribute out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{said}>{join(*content)}</{name}>")


def chart(title: str, wide: int | float, high: int | float, *content: str, **attributes: Value | None) -> Markup:
    """An SVG picture of this size in its own units, with a title for those who cannot see it."""
    box = f"0 0 {number(wide)} {number(high)}"
    return tag("svg", *content, viewBox=box, role="img", aria_label=title, **attributes)
