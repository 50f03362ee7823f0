"""What all curves are drawn with: a line with its name as a tooltip, dots, and a legend that wraps.

━━━ full   ━━━ states   ━━━ sqrt       as many samples in a row as fit
━━━ a name that is longer
"""

from collections.abc import Sequence

from weft.core.markup import Markup, join, number, tag
from weft.report.axes import Frame

Point = tuple[float, float]

SAMPLE = 28.0
"""Length of a line in the legend."""
LETTER = 6.8
"""Width of a character, about."""
ROW = 20.0
"""Height of a row of the legend."""
_COLORS = 6


def line(frame: Frame, points: Sequence[Point], color: int, tip: str, extra: str = "") -> Markup:
    """The points, joined by straight lines."""
    if not points:
        return Markup("")
    path = " ".join(f"{number(frame.x(x))},{number(frame.y(y))}" for x, y in points)
    return tag("polyline", tag("title", tip), points=path, class_=f"line {_color(color)} {extra}".strip())


def dots(frame: Frame, points: Sequence[Point], color: int, tips: Sequence[str]) -> Markup:
    """The points, each with its own tooltip."""
    drawn = [
        tag("circle", tag("title", tip), cx=frame.x(x), cy=frame.y(y), r=4.5, class_=f"dot {_color(color)}")
        for (x, y), tip in zip(points, tips, strict=True)
    ]
    return join(*drawn)


def legend_rows(names: Sequence[str], left: float, right: float) -> list[list[str]]:
    """The names in rows, none wider than from `left` to `right` unless a name alone is."""
    rows: list[list[str]] = [[]]
    at = left
    for name in names:
        if rows[-1] and at + _space(name) > right:
            rows.append([])
            at = left
        rows[-1].append(name)
        at += _space(name)
    return rows


def legend(rows: Sequence[Sequence[str]], left: float) -> Markup:
    """Samples with their names, from left to right, row below row."""
    parts: list[str] = []
    color = 0
    for row, names in enumerate(rows):
        at, y = left, 14 + row * ROW
        for name in names:
            parts.append(tag("line", x1=at, x2=at + SAMPLE, y1=y, y2=y, class_=f"line {_color(color)}"))
            parts.append(tag("text", name, x=at + SAMPLE + 7, y=y + 4, class_="key"))
            at += _space(name)
            color += 1
    return join(*parts)


def _space(name: str) -> float:
    return SAMPLE + 34 + len(name) * LETTER


def _color(color: int) -> str:
    return f"color-{color % _COLORS}"
