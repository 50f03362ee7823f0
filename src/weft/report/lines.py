"""Any quantity against any other: named lines, and dots where something was measured.

MiB |              ╱ full        a line is what was predicted, or a course;
    |    ○      ╱                a dot of the same colour a measurement of the same name;
    |  ╱    ╱───── states        with `log` an axis counts factors, not differences
    +────────────────  steps      a mark is an upright line with its name: something that happened at one moment
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.core.markup import Markup, chart, join, tag
from weft.report.axes import COUNT, Frame, Scale, Unit
from weft.report.strokes import LETTER, ROW, Point, dots, legend, legend_rows, line

_WIDTH, _PLOT = 960.0, 250.0
_LEFT, _RIGHT, _BOTTOM = 64.0, 20.0, 42.0
_LABEL = 28.0  # room for what the left axis counts
_LARGEST = 1e100  # far from the ends of float64, so that no scale overflows


@dataclass(frozen=True)
class Axis:
    """What an axis counts, in which unit, and whether its scale is logarithmic."""

    label: str
    unit: Unit = COUNT
    log: bool = False


def line_chart(
    lines: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: Axis,
    y: Axis,
    measured: Mapping[str, Sequence[Point]] | None = None,
    marks: Mapping[str, float] | None = None,
) -> Markup:
    """Draw named lines, and measured points as dots in the colour of the line of the same name.

    `marks` are moments on the axis of x with their names, such as the end of a server.

    Points that are no finite numbers, or that a logarithmic axis cannot show, are left out. A linear axis of y begins
    at 0, or below where the data is.
    """
    drawn = {name: _fit(points, x, y) for name, points in lines.items()}
    dotted = {name: _fit(points, x, y) for name, points in (measured or {}).items()}
    names = list(dict.fromkeys([*drawn, *dotted]))
    rows = legend_rows(names, _LEFT, _WIDTH - _RIGHT)
    top = len(rows) * ROW + _LABEL
    moments = {name: float(at) for name, at in (marks or {}).items() if _shown(at, x.log)}
    frame = _frame([*drawn.values(), *dotted.values()], x, y, top, list(moments.values()))
    axes = [frame.bottom_axis(x.unit, x.label), frame.left_axis(y.unit, y.label)]
    parts = [line(frame, points, names.index(name), name) for name, points in drawn.items()]
    parts += [
        dots(frame, points, names.index(name), [_tip(name, point, x, y) for point in points])
        for name, points in dotted.items()
    ]
    parts += [_mark(frame, name, at, row) for row, (name, at) in enumerate(moments.items())]
    return chart(title, _WIDTH, top + _PLOT + _BOTTOM, legend(rows, _LEFT), *axes, join(*parts))


def _mark(frame: Frame, name: str, at: float, row: int) -> Markup:
    """An upright line, and its name beside it where there is more room; each name a row lower than the one before."""
    x, top = frame.x(at), frame.y.end
    left = x + 6 + len(name) * LETTER > frame.x.end
    stroke = tag("line", x1=x, x2=x, y1=top, y2=frame.y.start, class_="mark")
    place = {"x": x - 6 if left else x + 6, "y": top + 12 + row * ROW}
    word = tag("text", name, class_=f"mark-name {'end' if left else 'start'}", **place)
    return tag("g", tag("title", name), stroke, word)


def _tip(name: str, point: Point, x: Axis, y: Axis) -> str:
    return f"{name}: {x.label} {x.unit.show(point[0])}, measured {y.unit.show(point[1])}"


def _fit(points: Iterable[Point], x: Axis, y: Axis) -> list[Point]:
    return [(float(a), float(b)) for a, b in points if _shown(a, x.log) and _shown(b, y.log)]


def _shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and abs(value) < _LARGEST and (not log or value > 1 / _LARGEST)


def _frame(curves: Iterable[Sequence[Point]], x: Axis, y: Axis, top: float, moments: Sequence[float]) -> Frame:
    points = [point for curve in curves for point in curve]
    xs, ys = [*(a for a, _ in points), *moments] or [1.0], [b for _, b in points] or [1.0]
    low, high = min(ys), max(ys)
    if y.log:
        low, high = low / 1.2, high * 1.2
    else:
        low = min(0.0, low)
        high = high + 0.05 * (high - low) if high > low else low + 1.0
    across = Scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, log=x.log)
    return Frame(across, Scale(low, high, top + _PLOT, top, log=y.log))
