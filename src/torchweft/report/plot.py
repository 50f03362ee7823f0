"""Line charts as SVG: scales, round ticks, units, and a legend with line breaks.

Every picture is drawn twice, in a wide and in a narrow form. One form that is scaled to a phone would have text of half
the size, and CSS cannot move ticks or wrap a legend. The style of the page shows the form that fits the screen.

Plotting libraries are not used, because a report must not add a dependency to torchweft.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from torchweft.report.html import Markup, join, number, tag

Point = tuple[float, float]

BOTTOM = 42.0  # height of an axis with its labels
LETTER = 7.2  # approximate width of a character
_PLOT, _LABEL, _SAMPLE, _COLORS = 250.0, 28.0, 28.0, 6
_LARGEST = 1e100  # far from the limits of float64, so that no scale overflows
_MEAN_RADIUS = 10  # values on each side that a running mean averages


@dataclass(frozen=True)
class Form:
    """A form of a picture: its width and margins in units of the picture, and the largest number of ticks."""

    name: str
    width: float
    left: float
    right: float
    ticks: int

    @property
    def end(self) -> float:
        """The right end of the axes."""
        return self.width - self.right


WIDE, NARROW = Form("wide", 880.0, 64.0, 16.0, 10), Form("narrow", 340.0, 50.0, 10.0, 5)


def in_both_forms(draw: Callable[[Form], Markup]) -> Markup:
    """One element with the picture in both forms."""
    return tag("div", draw(WIDE), draw(NARROW), class_="picture")


@dataclass(frozen=True)
class Scale:
    """A linear map from `low`..`high` of the data to `start`..`end` of the picture."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return self.start + share * (self.end - self.start)

    def ticks(self, unit: float, most: int = 6) -> list[float]:
        """Values that are round in multiples of `unit`."""
        return [value * unit for value in ticks(self.low / unit, self.high / unit, most)]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`.

    At most `most`, and at least 2 if `most` is 5 or more. Only `low` if the ends are equal or not finite.
    """
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        # The margin keeps a tick at an end that rounding has moved just outside.
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if step > 0 and last - first < most:
            return [i * step for i in range(first, last + 1)]
    return [low]


@dataclass(frozen=True)
class Unit:
    """A unit for display, which is `factor` units of the data."""

    name: str
    factor: float

    def show(self, value: int | float) -> str:
        """The value with at least three digits, and the name of the unit."""
        scaled = value / self.factor
        size = abs(scaled)
        digits = 0 if size >= 100 or size == round(size) else 1 if size >= 10 else 2
        return f"{scaled:.{digits}f} {self.name}".rstrip()


COUNT = Unit("", 1.0)
SECONDS = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6))
BYTES = (Unit("GiB", 2.0**30), Unit("MiB", 2.0**20), Unit("KiB", 2.0**10), Unit("bytes", 1.0))


def unit_for(largest: int | float, units: Sequence[Unit]) -> Unit:
    """The largest unit that is not larger than the value `largest`. `units` are in descending order."""
    return next((unit for unit in units if abs(largest) >= unit.factor), units[-1])


def show_time(seconds: int | float) -> str:
    """Format a duration in a suitable unit.

    Example:
        >>> weft.report.show_time(0.0123)
        '12.3 ms'
    """
    return unit_for(seconds, SECONDS).show(seconds)


def show_bytes(count: int | float) -> str:
    """Format a number of bytes in a suitable unit.

    Example:
        >>> weft.report.show_bytes(3_000_000)
        '2.86 MiB'
    """
    return unit_for(count, BYTES).show(count)


def svg(form: Form, description: str, height: float, *content: str) -> Markup:
    """A picture in one form. Screen readers get the description in its place."""
    box = f"0 0 {number(form.width)} {number(height)}"
    return tag("svg", *content, viewBox=box, role="img", aria_label=description, class_=f"{form.name}-form")


def bottom_axis(form: Form, x: Scale, top: float, base: float, unit: Unit, label: str) -> Markup:
    """Vertical grid lines from `base` to `top`, with their values and the label below."""
    at = x.ticks(unit.factor, form.ticks)
    lines = [tag("line", x1=x(v), x2=x(v), y1=top, y2=base, class_="grid") for v in at]
    values = [tag("text", f"{v / unit.factor:g}", x=x(v), y=base + 16, class_="tick") for v in at]
    return join(*lines, *values, tag("text", label, x=(x.start + x.end) / 2, y=base + 34, class_="tick"))


def draw_legend(form: Form, samples: Sequence[tuple[str, str]]) -> tuple[Markup, float]:
    """A sample of every style with its words, in as many rows as necessary, and the height of all rows."""
    parts: list[str] = []
    left, top = form.left, 4.0
    for style, name in samples:
        words = shorten(name, form.end - form.left - _SAMPLE - 7)
        space = _SAMPLE + 30 + len(words) * LETTER
        if left > form.left and left + space > form.width:
            left, top = form.left, top + 20.0
        if style.startswith("line"):
            parts.append(tag("line", x1=left, x2=left + _SAMPLE, y1=top + 6, y2=top + 6, class_=style))
        else:
            parts.append(tag("rect", x=left, y=top, width=_SAMPLE - 4, height=13, rx=2, class_=style))
        parts.append(tag("text", words, x=left + _SAMPLE + 7, y=top + 11, class_="key"))
        left += space
    return join(*parts), top + 16


def shorten(words: str, width: float) -> str:
    """The beginning of a text, as far as it fits into this width."""
    letters = int(width / LETTER)
    return words if len(words) <= letters else f"{words[: letters - 1]}…"


@dataclass(frozen=True)
class Axis:
    """The label and unit of an axis.

    Example:
        >>> x, y = weft.report.Axis("step"), weft.report.Axis("loss")
        >>> chart = weft.report.line_chart({"run": [(0.0, 1.0), (1.0, 0.1)]}, title="Loss", x=x, y=y)
    """

    label: str
    unit: Unit = COUNT


def line_chart(
    lines: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: Axis,
    y: Axis,
    thin: Collection[str] = (),
    marks: Sequence[tuple[float, str]] = (),
    until: float | None = None,
) -> Markup:
    """Draw named lines, those in `thin` faintly. Points that are not finite are omitted.

    The y axis begins at 0, or at the smallest value if that is negative. `marks`: labelled positions on the x axis.
    `until`: the least end of the x axis, which makes charts comparable.

    Example:
        >>> x, y = weft.report.Axis("steps"), weft.report.Axis("MB")
        >>> line, killed = [(100.0, 2.0), (200.0, 4.0)], [(150.0, "server killed")]
        >>> chart = weft.report.line_chart({"forecast": line}, title="Memory", x=x, y=y, marks=killed)
        >>> chart.count("<svg")  # for wide and for narrow screens
        2
    """
    drawn = {
        name: [(float(a), float(b)) for a, b in points if abs(a) < _LARGEST and abs(b) < _LARGEST]
        for name, points in lines.items()
    }
    # With a point at 0, because the y axis includes 0, and because zip needs at least one point.
    xs, ys = zip(*(point for curve in drawn.values() for point in curve), (0.0, 0.0), strict=True)
    seen = [(float(at), words) for at, words in marks if abs(at) < _LARGEST]
    ends = [] if until is None else [until]
    inside = [*xs[:-1], *(at for at, _ in seen), *ends] or xs
    low, high = min(ys), max(ys)
    description = f"{title}: {_describe(drawn, x, y)}"

    def draw(form: Form) -> Markup:
        legend, height = draw_legend(form, [(f"line color-{i % _COLORS}", name) for i, name in enumerate(drawn)])
        top = height + _LABEL
        base = top + _PLOT
        across = Scale(min(inside), max(inside), form.left, form.end)
        up = Scale(low, high + 0.05 * (high - low) if high > low else low + 1.0, base, top)
        parts = [legend, bottom_axis(form, across, top, base, x.unit, x.label)]
        for value in up.ticks(y.unit.factor):
            at = up(value)
            parts.append(tag("line", x1=across.start, x2=across.end, y1=at, y2=at, class_="grid"))
            parts.append(tag("text", f"{value / y.unit.factor:g}", x=across.start - 8, y=at + 4, class_="tick end"))
        parts.append(tag("text", y.label, x=4, y=top - 10, class_="tick start"))
        for i, (name, curve) in enumerate(drawn.items()):
            path = " ".join(f"{number(across(a))},{number(up(b))}" for a, b in curve)
            style = f"line color-{i % _COLORS}{' faint' * (name in thin)}"
            parts += [tag("polyline", tag("title", name), points=path, class_=style)] * bool(curve)
        return svg(form, description, base + BOTTOM, *parts, *_draw_marks(seen, across, top, base))

    return in_both_forms(draw)


def _describe(lines: Mapping[str, Sequence[Point]], x: Axis, y: Axis) -> str:
    """The first and last value of every line, and its largest, in words."""
    parts = [f"{name} is empty" for name, curve in lines.items() if not curve]
    for name, curve in lines.items():
        if curve:
            values = (curve[0][1], curve[-1][1], max(value for _, value in curve))
            first, last, most = (f"{value / y.unit.factor:.3g}" for value in values)
            parts.append(f"{name} from {first} to {last}, at most {most}")
    return f"{y.label} over {x.label}; {'; '.join(parts)}" if parts else "no lines"


def _draw_marks(marks: Iterable[tuple[float, str]], across: Scale, top: float, base: float) -> Iterator[Markup]:
    """Vertical lines, each with its words in a separate row, on the side with more room."""
    for row, (value, words) in enumerate(marks):
        at = across(value)
        to_the_left = at > (across.start + across.end) / 2
        yield tag("line", x1=at, x2=at, y1=top, y2=base, class_="mark")
        place, x = ("end", at - 6) if to_the_left else ("start", at + 6)
        yield tag("text", words, x=x, y=top + 12 + 14 * row, class_=f"key {place}")


def memory_curve(
    curves: Mapping[str, Sequence[tuple[float, int]]],
    *,
    title: str = "Live activation bytes over time",
    until: float | None = None,
) -> Markup:
    """Draw named curves of (seconds, bytes from then on), each with its peak in the legend.

    Two threads can report out of order. A time before that of its predecessor is drawn at the predecessor's time.
    `until`: the least end of the time axis, in seconds.

    Example:
        >>> svg = weft.report.memory_curve({"stage 0": [(0.0, 0), (0.1, 4096), (0.3, 0)]})
    """
    lines: dict[str, list[Point]] = {}
    for name, points in curves.items():
        ordered = list(zip(accumulate((t for t, _ in points), max), (float(b) for _, b in points), strict=True))
        corners = ordered[:1]
        for (_, before), (t, after) in pairwise(ordered):  # each value is valid until the next
            corners += [(t, before), (t, after)]
        lines[f"{name}, peak {show_bytes(max((b for _, b in points), default=0))}"] = corners
    drawn = [point for corners in lines.values() for point in corners]
    time = unit_for(max([until or 0.0, *(t for t, _ in drawn)]), SECONDS)
    size = unit_for(max((b for _, b in drawn), default=0.0), BYTES)
    return line_chart(lines, title=title, x=Axis(f"time in {time.name}", time), y=Axis(size.name, size), until=until)


def loss_curve(losses: Sequence[float], *, title: str = "Loss over steps", label: str = "loss") -> Markup:
    """Draw the loss of every step, faintly, and its running mean. Losses that are not finite are omitted.

    Example:
        >>> svg = weft.report.loss_curve([3.0, 2.0, 1.5], title="Loss of three steps")
    """
    points = [(float(step), loss) for step, loss in enumerate(losses, start=1) if abs(loss) < _LARGEST]
    means: list[Point] = []
    for i, (step, _) in enumerate(points):
        # The mean is centred, because a mean over earlier values alone would lie above a falling loss.
        radius = min(_MEAN_RADIUS, i, len(points) - 1 - i)
        means.append((step, fmean(loss for _, loss in points[i - radius : i + radius + 1])))
    lines = {"every step": points, "running mean": means}
    return line_chart(lines, title=title, x=Axis("step"), y=Axis(label), thin=["every step"])
