"""Drawings of a step: measured times above forecast times, and values that cross stages. A trace for Perfetto.

stage 0  ▐F0▌▐F1▌▐F2▌          ▐─B0─▌▐─B1─▌      measured: a bar for each event, with its micro-batch
         [F0][F1][F2]          [ B0 ][ B1 ]      forecast: outlines on the same axis
stage 1      ▐F0▌▐─B0─▌▐F1▌▐─B1─▌
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchweft.pipeline.schedule import Action
from torchweft.pipeline.simulate import Forecast
from torchweft.pipeline.split.program import CrossingValue
from torchweft.pipeline.tracing import ActionEvent, Recorder
from torchweft.report.html import Markup, Section, figure, join, page, tag
from torchweft.report.plot import (
    BOTTOM,
    LEFT,
    LETTER,
    SECONDS,
    WIDTH,
    Scale,
    bottom_axis,
    memory_curve,
    show_bytes,
    show_time,
    svg,
    unit_for,
)

KINDS = {"F": "forward", "B": "backward", "R": "recompute", "I": "input gradient", "W": "weight gradient"}
"""The kinds of events. The style of the page has a class with a colour for each: ``kind-F`` and so on."""

_RIGHT, _TOP = 12.0, 34.0
_BAR, _OUTLINE, _GAP = 26.0, 18.0, 16.0
_REST, _CURVE = 240, 420  # pixels of a frame in a notebook, besides the lanes, and of the memory curve
_COLUMN, _LINE = 90.0, 22.0  # distances in the picture of routes: from stage to stage, from value to value


def timeline(
    events: Sequence[ActionEvent], forecast: Forecast | None = None, *, title: str = "Timeline of a step"
) -> Markup:
    """Draw the events of one run, with the forecast of the same schedule as outlines below each stage.

    Times count from the first event, where the forecast starts too. A bar shows kind and micro-batch if they fit.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), chunks=2, devices=["cpu", "cpu"])
        >>> recorder = weft.Recorder()
        >>> with pipe.observed_by(recorder):
        ...     pipe(torch.randn(4, 2)).sum().backward()
        >>> svg = weft.report.timeline(recorder.events)
    """
    begin = min((event.start for event in events), default=0.0)
    spans = forecast.spans if forecast is not None else ()
    stages = 1 + max([event.action.stage for event in events] + [span.action.stage for span in spans], default=-1)
    lane = _BAR + (_OUTLINE + 3 if spans else 0) + _GAP
    longest = max([event.end - begin for event in events] + [span.end for span in spans], default=0.0)
    base = _TOP + stages * lane
    x = Scale(0.0, longest, LEFT, WIDTH - _RIGHT)
    unit = unit_for(longest, SECONDS)
    tops = [_TOP + stage * lane for stage in range(stages)]
    parts = [bottom_axis(x, _TOP - 4, base, unit, f"time in {unit.name}")]
    parts += [tag("text", f"stage {i}", x=LEFT - 8, y=top + 17, class_="tick end") for i, top in enumerate(tops)]
    parts += [_bar(x, tops[s.action.stage], s.action.kind, s.action, s.start, s.end, outline=True) for s in spans]
    parts += [_bar(x, tops[e.action.stage], e.kind, e.action, e.start - begin, e.end - begin) for e in events]
    kinds = sorted({e.kind for e in events} | {s.action.kind for s in spans}, key=[*KINDS].index)
    return svg(title, base + BOTTOM, _legend(kinds, bool(spans)), *parts)


def live_bytes(recorder: Recorder) -> list[tuple[float, int]]:
    """The memory curve of a recorder, in seconds from its first event, at which no bytes are alive.

    Example:
        >>> recorder = weft.Recorder(memory=True)
        >>> svg = weft.report.memory_curve({"all stages": weft.report.live_bytes(recorder)})
    """
    begin = min((event.start for event in recorder.events), default=0.0)
    return [(0.0, 0), *((time - begin, count) for time, count in recorder.bytes)]


def notebook_frame(recorder: Recorder) -> Markup:
    """The timeline of a recorder's events, and its memory curve if bytes were counted."""
    # A page in a frame, so that its style and that of the notebook do not affect each other.
    stages = 1 + max((event.action.stage for event in recorder.events), default=0)
    pictures = [figure(timeline(recorder.events))]
    if recorder.bytes:
        pictures.append(figure(memory_curve({"alive for backward": live_bytes(recorder)})))
    height = _REST + int(_BAR + _GAP + 6) * stages + _CURVE * bool(recorder.bytes)
    content = page(f"{len(recorder.events)} recorded actions", [Section("Timeline", pictures)])
    return tag("iframe", srcdoc=content, style=f"width: 100%; height: {height}px; border: 0")


def routes(values: Sequence[CrossingValue], stages: int, *, title: str) -> Markup:
    """Draw ``pipe.routes`` of a pipe with so many stages: for each value, a line from its source to its readers.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
        >>> pipe = weft.Pipe(model, chunks=2, devices=["cpu", "cpu"], split=["1"])
        >>> pipe(torch.randn(4, 2)).sum().backward()
        >>> svg = weft.report.routes(pipe.routes, 2, title="What crosses")
    """
    columns = [40 + stage * _COLUMN for stage in range(stages)]
    base = 26 + _LINE * len(values)
    parts: list[str] = []
    for stage, x in enumerate(columns):
        parts.append(tag("text", f"stage {stage}", x=x, y=10, class_="tick"))
        parts.append(tag("line", x1=x, y1=16, x2=x, y2=base, class_="grid"))
    for row, (name, size, source, readers) in enumerate(values):
        y = 34 + row * _LINE
        tip = tag("title", f"{name}: stage {source} to {', '.join(map(str, readers))}")
        parts.append(tag("line", tip, x1=columns[source], y1=y, x2=columns[max(readers)], y2=y, class_="axis"))
        parts.append(tag("circle", cx=columns[source], cy=y, r=4, class_="axis"))
        arrows = [columns[reader] for reader in readers]
        parts += [tag("path", d=f"M{x - 7} {y - 4} l7 4 l-7 4 z", class_="axis") for x in arrows]
        words = f"{name}, {show_bytes(size)}"
        parts.append(tag("text", words, x=columns[-1] + 16, y=y + 4, class_="tick start"))
    return svg(title, base, *parts)


def trace(events: Sequence[ActionEvent], *, name: str = "torchweft") -> dict[str, Any]:
    """A recording in Google's "Trace Event Format": one process of this name, with a track per thread.

    Times count from the first event.

    Example:
        >>> weft.report.trace(weft.Recorder().events, name="step")["traceEvents"][0]["args"]
        {'name': 'step'}
    """
    begin = min((event.start for event in events), default=0.0)
    threads = {thread: number for number, thread in enumerate(sorted({event.thread for event in events}))}
    tracks = [("process_name", name, 0), *(("thread_name", thread, number) for thread, number in threads.items())]
    entries: list[dict[str, Any]] = [
        {"name": kind, "ph": "M", "pid": 0, "tid": number, "args": {"name": label}} for kind, label, number in tracks
    ]
    for event in events:
        stage, _, micro_batch = event.action
        entries.append(
            {
                "name": f"{stage}{event.kind}{micro_batch}",
                "cat": KINDS[event.kind],
                "ph": "X",
                "ts": (event.start - begin) * 1e6,  # microseconds
                "dur": (event.end - event.start) * 1e6,
                "pid": 0,
                "tid": threads[event.thread],
                "args": {"stage": stage, "micro-batch": micro_batch},
            }
        )
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_trace(path: Path | str, events: Sequence[ActionEvent], *, name: str = "torchweft") -> Path:
    """Write `trace` to a JSON file for https://ui.perfetto.dev, and return its path.

    Example:
        >>> import pathlib, tempfile
        >>> weft.report.write_trace(pathlib.Path(tempfile.mkdtemp(), "trace.json"), []).name
        'trace.json'
    """
    target = Path(path)
    target.write_text(json.dumps(trace(events, name=name)), encoding="utf-8")
    return target


def _bar(x: Scale, top: float, kind: str, action: Action, start: float, end: float, *, outline: bool = False) -> Markup:
    """The bar of an action, or the outline of its forecast below it."""
    left, width = x(start), max(0.5, x(end) - x(start))
    when = f"{show_time(start)} to {show_time(end)}, takes {show_time(end - start)}"
    where = f"stage {action.stage}, micro-batch {action.micro_batch}"
    tip = tag("title", f"{'forecast' if outline else 'measured'}: {KINDS[kind]}, {where}; {when}")
    # Outlines are slightly narrower, so that neighbours do not share a stroke.
    inset, y, height = (0.75, top + _BAR + 3, _OUTLINE) if outline else (0.0, top, _BAR)
    style = f"{'outline' if outline else 'bar'} kind-{kind}"
    inside = max(0.5, width - 2 * inset)
    shape = tag("rect", x=left + inset, y=y, width=inside, height=height, rx=2, class_=style)
    words = (f"{kind}{action.micro_batch}", f"{action.micro_batch}", "")
    word = next(word for word in words if not word or len(word) * LETTER < width - 4)
    label = tag("text", word, x=left + width / 2, y=y + height / 2 + 4, class_="in-outline" if outline else "in-bar")
    return tag("g", tip, shape, label if word else "")


def _legend(kinds: Sequence[str], forecast: bool) -> Markup:
    """A row of samples at the top."""
    samples = [(f"bar kind-{kind}", f"{kind}  {KINDS[kind]}") for kind in kinds]
    samples += [("outline", "outline: the forecast")] * forecast
    parts: list[str] = []
    left = LEFT
    for style, words in samples:
        parts.append(tag("rect", x=left, y=4, width=14, height=12, rx=2, class_=style))
        parts.append(tag("text", words, x=left + 20, y=14, class_="key"))
        left += 28 + len(words) * LETTER
    return join(*parts)
