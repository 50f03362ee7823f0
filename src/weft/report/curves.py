"""Curves over time: live bytes as steps, the loss as a line with its running mean.

MiB |      ┌──┐                 a step holds until the next point: bytes do not change in between
    |  ┌───┘  └──┐
    |──┘         └── 1f1b
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean

from weft.core.markup import Markup, chart
from weft.report.axes import BYTES, COUNT, SECONDS, Frame, Scale, show_bytes, unit_for
from weft.report.strokes import Point, legend, line

_WIDTH, _HEIGHT = 960.0, 330.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 62.0, 42.0
_HALF = 10  # so many values to each side are in a running mean

_DIVERGED = 1e100  # far from the ends of float64, so that no scale overflows


def memory_curve(
    curves: Mapping[str, Sequence[tuple[float, int]]], *, title: str = "Live activation bytes over time"
) -> Markup:
    """Draw named curves of (seconds, bytes from then on), each with its peak in the legend.

    Points are taken in the order in which they were recorded: a time that lies before its forerunner's, as two
    threads may report it, is drawn at the forerunner's.
    """
    drawn = {
        name: list(zip(accumulate((t for t, _ in points), max), (float(b) for _, b in points), strict=True))
        for name, points in curves.items()
    }
    frame = _frame(drawn.values())
    time, size = unit_for(frame.x.high, SECONDS), unit_for(frame.y.high, BYTES)
    keys = {
        name: f"{name}, peak {show_bytes(max((b for _, b in points), default=0))}" for name, points in drawn.items()
    }
    lines = [line(frame, _steps(points), i, keys[name]) for i, (name, points) in enumerate(drawn.items())]
    axes = [frame.bottom_axis(time, f"time in {time.name}"), frame.left_axis(size, size.name)]
    return chart(title, _WIDTH, _HEIGHT, legend([list(keys.values())], _LEFT), *axes, *lines)


def loss_curve(losses: Sequence[float], *, title: str = "Loss over steps", label: str = "loss") -> Markup:
    """Draw the loss of every step, thin, and its running mean, bold; on a logarithmic axis if all are above 0.

    Losses that are no finite numbers are left out, and so are those beyond `_DIVERGED`.
    """
    points = [(float(step), loss) for step, loss in enumerate(losses, start=1) if abs(loss) < _DIVERGED]
    log = all(loss > 0 for _, loss in points)
    mean = list(running_mean(points, log=log))
    frame = _frame([points], log=log)
    axes = [frame.bottom_axis(COUNT, "step"), frame.left_axis(COUNT, label)]
    faint, bold = line(frame, points, 0, "every step", "faint"), line(frame, mean, 0, "running mean")
    key = legend([[f"{label}: every step thin, running mean bold"]], _LEFT)
    return chart(title, _WIDTH, _HEIGHT, key, *axes, faint, bold)


def _frame(curves: Iterable[Sequence[Point]], *, log: bool = False) -> Frame:
    """From 0, or below where the data is, to a little more than the largest value; with `log` around the data."""
    points = [point for curve in curves for point in curve]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    low, high = min(0.0, *ys), max(ys)
    top = high + 0.05 * (high - low) if high > low else low + 1.0
    across = Scale(min(0.0, *xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    if log and points:
        return Frame(across, Scale(min(ys) / 1.1, high * 1.1, _HEIGHT - _BOTTOM, _TOP, log=True))
    return Frame(across, Scale(low, top, _HEIGHT - _BOTTOM, _TOP))


def _steps(points: Sequence[Point]) -> list[Point]:
    """The corners of a curve that holds each value until the next."""
    corners = list(points[:1])
    for (_, before), (time, after) in pairwise(points):
        corners += [(time, before), (time, after)]
    return corners


def running_mean(points: Sequence[Point], *, log: bool = False) -> Iterator[Point]:
    """The mean of the second numbers around each, of as many before it as behind it.

    So it lies on the line that it is the mean of: one over the past alone lags behind, above a loss that falls. Towards
    both ends there are fewer values in it. With `log`, for a logarithmic axis, it is the geometric mean of numbers
    above 0.
    """
    values = [math.log(value) if log else value for _, value in points]
    for i, (x, _) in enumerate(points):
        half = min(_HALF, i, len(values) - 1 - i)
        mean = fmean(values[i - half : i + half + 1])
        yield x, math.exp(mean) if log else mean
