"""From numbers to places on a picture: scales, round ticks, units that people read.

domain   0 ........ 37.2 ms          ticks at 0, 10, 20, 30: 1, 2 or 5 times a power of ten
range    70 px .... 880 px
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.markup import Markup, join, tag


@dataclass(frozen=True)
class Scale:
    """From `low`..`high` of the data to `start`..`end` of the picture: a straight line, or with `log` a logarithm of
    data above 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.0
        return self.start + share * (self.end - self.start)

    def ticks(self, unit: float, most: int = 6) -> list[float]:
        """Where numbers stand: round ones, counted in `unit`."""
        if self.log:
            return [value * unit for value in log_ticks(self.low / unit, self.high / unit)]
        return [value * unit for value in ticks(self.low / unit, self.high / unit, most)]


@dataclass(frozen=True)
class Unit:
    """A unit with its factor: `factor` of the data's units make one."""

    name: str
    factor: float

    def show(self, value: int | float) -> str:
        """The value in this unit, with three digits at least and the unit's name."""
        scaled = value / self.factor
        size = abs(scaled)
        digits = 0 if size >= 100 or size == round(size) else 1 if size >= 10 else 2
        return f"{scaled:.{digits}f} {self.name}".rstrip()


COUNT = Unit("", 1.0)
"""What is counted one by one."""
SECONDS = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6))
BYTES = (Unit("GiB", 2.0**30), Unit("MiB", 2.0**20), Unit("KiB", 2.0**10), Unit("bytes", 1.0))


def unit_for(largest: int | float, units: Sequence[Unit]) -> Unit:
    """The largest unit of which there is at least one; `units` from large to small."""
    return next((unit for unit in units if abs(largest) >= unit.factor), units[-1])


def show_time(seconds: int | float) -> str:
    """A time in the unit that fits it."""
    return unit_for(seconds, SECONDS).show(seconds)


def show_bytes(count: int | float) -> str:
    """A number of bytes in the unit that fits it."""
    return unit_for(count, BYTES).show(count)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` of them; of five or more at least two.

    Where the ends do not differ, or are no finite numbers, `low` alone.
    """
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if step > 0 and last - first < most:
            return [i * step for i in range(first, last + 1)]
    return [low]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from `low` to `high`, both above 0; powers of ten alone if those are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) <= 4 else (1,)
    found = [float(f"{digit}e{power}") for power in powers for digit in digits]
    return [value for value in found if low <= value <= high]


@dataclass(frozen=True)
class Frame:
    """The rectangle that data is drawn in, with its two scales."""

    x: Scale
    y: Scale

    def bottom_axis(self, unit: Unit, label: str) -> Markup:
        """Vertical lines with their numbers below, and what they count."""
        at = self.x.ticks(unit.factor, 10)
        base = self.y.start
        lines = [tag("line", x1=self.x(v), x2=self.x(v), y1=self.y.end, y2=base, class_="grid") for v in at]
        names = [tag("text", f"{v / unit.factor:g}", x=self.x(v), y=base + 16, class_="tick") for v in at]
        title = tag("text", label, x=(self.x.start + self.x.end) / 2, y=base + 34, class_="tick")
        return join(*lines, *names, title)

    def left_axis(self, unit: Unit, label: str) -> Markup:
        """Horizontal lines with their numbers on the left, and what they count above."""
        at = self.y.ticks(unit.factor)
        left = self.x.start
        lines = [tag("line", x1=left, x2=self.x.end, y1=self.y(v), y2=self.y(v), class_="grid") for v in at]
        names = [tag("text", f"{v / unit.factor:g}", x=left - 8, y=self.y(v) + 4, class_="tick end") for v in at]
        title = tag("text", label, x=4, y=self.y.end - 10, class_="tick start")
        return join(*lines, *names, title)
