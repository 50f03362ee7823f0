"""Elements of HTML and SVG as text, in which no name can break out of its place.

    tag("td", "a < b", class_="name")   ->   <td class="name">a &lt; b</td>

Experts and clients may be called anything, so everything is escaped but `Markup`, which only functions here make.
The report has the like; it stands above this package and cannot be imported here.
"""

import re
from html import escape

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def text(words: str) -> Markup:
    """Plain text as markup; control characters and lone surrogates become the replacement character."""
    return Markup(escape(_FORBIDDEN.sub("\ufffd", words)))


def join(*parts: str) -> Markup:
    """One after the other; plain text is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else text(part) for part in parts))


def tag(name: str, *content: str, **attributes: str | int | None) -> Markup:
    """An element. In names of attributes ``_`` stands for a hyphen, a trailing one for nothing; None: left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{said}>{join(*content)}</{name}>")


def named(words: str) -> Markup:
    """A name that somebody chose: letters that run from right to left do not turn what stands beside them."""
    return tag("bdi", words or "(empty)")
