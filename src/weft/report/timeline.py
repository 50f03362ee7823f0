"""A step as stages x time: what ran when, and below it what the forecast had said.

stage 0  ▐F0▌▐F1▌▐F2▌          ▐─B0─▌▐─B1─▌      measured: a bar per event, its micro-batch in it
         [F0][F1][F2]          [ B0 ][ B1 ]      forecast: outlines, on the same axis
stage 1      ▐F0▌▐─B0─▌▐F1▌▐─B1─▌
"""

from collections.abc import Sequence

from weft.core.events import Event
from weft.core.forecast import Forecast
from weft.core.markup import Markup, chart, join, tag
from weft.core.schedule import Action
from weft.report.axes import SECONDS, Frame, Scale, show_time, unit_for

KINDS = {"F": "forward", "B": "backward", "R": "recompute", "I": "input gradient", "W": "weight gradient"}
"""What the letters of events mean. Each has its colour in the page's style, as the class ``kind-F``."""

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960.0, 64.0, 12.0, 34.0, 42.0
_BAR, _OUTLINE, _GAP = 26.0, 18.0, 16.0
_LETTER = 6.8  # width of a character in a bar, in the picture's units


def timeline(events: Sequence[Event], forecast: Forecast | None = None, *, title: str = "Timeline of a step") -> Markup:
    """Draw the events of one run, with the forecast of the same schedule as outlines below each stage.

    Times are counted from the first event; the forecast starts at the same point. A bar shows kind and
    micro-batch where they fit, and a tooltip with its times. No events at all give an empty frame.
    """
    begin = min((event.start for event in events), default=0.0)
    spans = forecast.spans if forecast is not None else ()
    stages = 1 + max([event.action.stage for event in events] + [span.action.stage for span in spans], default=-1)
    lane = _BAR + (_OUTLINE + 3 if spans else 0) + _GAP
    longest = max([event.end - begin for event in events] + [span.end for span in spans], default=0.0)
    height = _TOP + stages * lane + _BOTTOM
    frame = Frame(Scale(0.0, longest, _LEFT, _WIDTH - _RIGHT), Scale(0.0, 1.0, height - _BOTTOM, _TOP - 4))
    unit = unit_for(longest, SECONDS)
    tops = [_TOP + stage * lane for stage in range(stages)]
    names = [
        tag("text", f"stage {stage}", x=_LEFT - 8, y=top + 17, class_="tick end") for stage, top in enumerate(tops)
    ]
    outlines = [
        _outline(frame.x, tops[s.action.stage] + _BAR + 3, s.action.kind, s.action, s.start, s.end) for s in spans
    ]
    bars = [_bar(frame.x, tops[e.action.stage], e.kind, e.action, e.start - begin, e.end - begin) for e in events]
    kinds = sorted({e.kind for e in events} | {s.action.kind for s in spans}, key=[*KINDS].index)
    axis = frame.bottom_axis(unit, f"time in {unit.name}")
    return chart(title, _WIDTH, height, _legend(kinds, bool(spans)), axis, *names, *outlines, *bars)


def _bar(x: Scale, top: float, kind: str, action: Action, start: float, end: float) -> Markup:
    left, width = x(start), max(0.5, x(end) - x(start))
    shape = tag("rect", x=left, y=top, width=width, height=_BAR, rx=2, class_=f"bar kind-{kind}")
    word = _label(kind, action, left + width / 2, width, top + 17, "in-bar")
    return tag("g", _tip("measured", kind, action, start, end), shape, word)


def _outline(x: Scale, top: float, kind: str, action: Action, start: float, end: float) -> Markup:
    left, width = x(start), max(0.5, x(end) - x(start))
    inside = max(0.5, width - 1.5)  # so that neighbours do not share a stroke
    shape = tag("rect", x=left + 0.75, y=top, width=inside, height=_OUTLINE, rx=2, class_=f"outline kind-{kind}")
    word = _label(kind, action, left + width / 2, width, top + 13, "in-outline")
    return tag("g", _tip("forecast", kind, action, start, end), shape, word)


def _label(kind: str, action: Action, middle: float, width: float, y: float, role: str) -> Markup:
    """Kind and micro-batch, or the micro-batch alone, or nothing: what fits."""
    room = width - 4  # to the words of the neighbours
    label = next((s for s in (f"{kind}{action.micro_batch}", f"{action.micro_batch}") if len(s) * _LETTER < room), "")
    return tag("text", label, x=middle, y=y, class_=role) if label else Markup("")


def _tip(word: str, kind: str, action: Action, start: float, end: float) -> Markup:
    where = f"stage {action.stage}, micro-batch {action.micro_batch}"
    times = f"{show_time(start)} to {show_time(end)}, takes {show_time(end - start)}"
    return tag("title", f"{word}: {KINDS[kind]}, {where}; {times}")


def _legend(kinds: Sequence[str], forecast: bool) -> Markup:
    """A row of samples on top."""
    parts: list[str] = []
    left = _LEFT
    for kind in kinds:
        parts.append(tag("rect", x=left, y=4, width=14, height=12, rx=2, class_=f"bar kind-{kind}"))
        parts.append(tag("text", f"{kind}  {KINDS[kind]}", x=left + 20, y=14, class_="key"))
        left += 48 + len(KINDS[kind]) * _LETTER
    if forecast:
        parts.append(tag("rect", x=left, y=4, width=14, height=12, rx=2, class_="outline"))
        parts.append(tag("text", "outline: the forecast", x=left + 20, y=14, class_="key"))
    return join(*parts)
