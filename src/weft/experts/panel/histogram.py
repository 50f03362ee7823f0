"""How many tasks the batches of an expert joined, as a small picture.

▁ █ ▃ ▁        bars: batches of 1 task, of 2, of 3 to 4, of 5 to 8, ...   the tallest fills the height
1 2 4 8        Every bar says its number to whoever points at it; all of it is told to those who cannot see it.
"""

from collections.abc import Mapping

from weft.core.markup import Markup, chart, tag, text

_BAR, _GAP, _HIGH, _FOOT = 16, 4, 26, 13
_LEAST = 2  # a batch that was there is seen


def histogram(merged: Mapping[int, int]) -> Markup:
    """``merged``: batches by the tasks that they joined, up to the next power of two. A dash if there are none."""
    if not any(merged.values()):
        return text("–")
    sizes = [1 << power for power in range(max(merged).bit_length())]
    most = max(merged.values())
    told = ", ".join(f"{count} of {_range(size)}" for size in sizes if (count := merged.get(size, 0)))
    bars = [_bar(place, size, merged.get(size, 0), most) for place, size in enumerate(sizes)]
    width = len(sizes) * (_BAR + _GAP) - _GAP
    high = _HIGH + _FOOT
    return chart(f"batches by tasks: {told}", width, high, *bars, width=width, height=high, class_="bars")


def _bar(place: int, size: int, count: int, most: int) -> Markup:
    high = max(_LEAST, round(_HIGH * count / most)) if count else 0
    at = place * (_BAR + _GAP)
    tip = tag("title", f"{count} batches of {_range(size)}")
    bar = tag("rect", tip, x=at, y=_HIGH - high, width=_BAR, height=high, rx=2, class_="bar")
    base = tag("rect", x=at, y=_HIGH, width=_BAR, height=1, class_="base")
    short = str(size) if size < 1024 else f"{size >> 10}k"
    return Markup(bar + base + tag("text", short, x=at + _BAR // 2, y=_HIGH + _FOOT - 1))


def _range(size: int) -> str:
    low = size // 2 + 1
    return "1 task" if size == 1 else f"{size} tasks" if low >= size else f"{low} to {size} tasks"
