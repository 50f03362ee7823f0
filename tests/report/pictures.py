"""Parsers for the pictures of a report: the wide and the narrow form, and the colours of the style."""

import re
from xml.etree import ElementTree

from torchweft.report import page


def forms(text: str) -> tuple[ElementTree.Element, ElementTree.Element]:
    """The wide and the narrow form of a picture."""
    wide, narrow = ElementTree.fromstring(text)
    assert wide.get("class") == "wide-form" and narrow.get("class") == "narrow-form"
    assert wide.get("aria-label") == narrow.get("aria-label")
    return wide, narrow


def wide(text: str) -> ElementTree.Element:
    return forms(text)[0]


def described(text: str) -> str:
    """The text that a screen reader gets in place of the picture."""
    return wide(text).get("aria-label") or ""


def size(picture: ElementTree.Element) -> tuple[float, float]:
    _, _, width, height = map(float, (picture.get("viewBox") or "").split())
    return width, height


def palettes(style: str) -> dict[str, dict[str, str]]:
    """The colours of the light and the dark mode, by name."""
    light, _, rest = style.partition("@media (prefers-color-scheme: dark)")
    dark = rest.partition("* {")[0]
    return {mode: dict(re.findall(r"--([\w-]+): (#\w{6})", text)) for mode, text in (("light", light), ("dark", dark))}


def report_palettes() -> dict[str, dict[str, str]]:
    return palettes(page("", []))
