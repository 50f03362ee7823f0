"""Drawings of a step: measured times above forecast times, and values that cross stages. A trace for Perfetto.

stage 0  ▐F0▌▐F1▌▐F2▌          ▐─B0─▌▐─B1─▌      measured: a bar for each event, with its micro-batch
         [F0][F1][F2]          [ B0 ][ B1 ]      forecast: outlines on the same axis
stage 1      ▐F0▌▐─B0─▌▐F1▌▐─B1─▌

On a narrow screen time runs downwards and each stage is a column, so that bars stay long enough for their labels.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchweft.pipeline.schedule import Action
from torchweft.pipeline.simulate import Forecast
from torchweft.pipeline.split.program import CrossingValue
from torchweft.pipeline.tracing import ActionEvent, Recorder
from torchweft.report.html import Markup, Section, details, figure, join, number, page, paragraph, table, tag
from torchweft.report.plot import (
    BOTTOM,
    LETTER,
    SECONDS,
    WIDE,
    Form,
    Scale,
    Unit,
    bottom_axis,
    draw_legend,
    in_both_forms,
    memory_curve,
    shorten,
    show_bytes,
    show_time,
    svg,
    unit_for,
)
from torchweft.report.step_statistics import step_statistics

KINDS = {
    "F": "forward",
    "B": "backward",
    "R": "recompute",
    "I": "input gradient",
    "W": "weight gradient",
    "T": "end of forward()",
}
"""The kinds of events. The style of the page has a class with a colour for each: ``kind-F`` and so on."""

_BAR, _OUTLINE, _GAP = 26.0, 18.0, 16.0
_ACTION, _LEAST, _MOST = 18.0, 240.0, 1400.0  # height of the narrow form: for each action of a stage, and its limits
_REST, _CURVE = 260, 420  # pixels of a frame in a notebook, besides the lanes, and of the memory curve
_COLUMN, _LINE = 150.0, 40.0  # distances in the picture of routes: from stage to stage, from value to value
_MOST_ROWS = 500  # of the table of actions


def timeline(
    events: Sequence[ActionEvent],
    forecast: Forecast | None = None,
    *,
    title: str = "Timeline of a step",
    until: float | None = None,
) -> Markup:
    """Draw the events of one run, with the forecast of the same schedule as outlines below each stage.

    Times count from the first event, where the forecast starts too. A bar shows kind and micro-batch if they fit.
    `until`: the least end of the time axis, in seconds, which makes timelines comparable.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), chunks=2, devices=["cpu", "cpu"])
        >>> recorder = weft.Recorder()
        >>> with pipe.observed_by(recorder):
        ...     pipe(torch.randn(4, 2)).sum().backward()
        >>> svg = weft.report.timeline(recorder.events)
    """
    begin = min((event.start for event in events), default=0.0)
    spans = () if forecast is None else forecast.spans
    bars = [_Bar(e.kind, e.action, e.start - begin, e.end - begin, outline=False) for e in events]
    # Outlines are drawn first, so that a bar of no length stays visible.
    bars = [_Bar(s.action.kind, s.action, s.start, s.end, outline=True) for s in spans] + bars
    longest = max([until or 0.0, *(bar.end for bar in bars)])
    description = f"{title}: {step_statistics(events)}"
    if forecast is not None:
        description += f"; forecast {show_time(forecast.total)}, {forecast.bubble:.0%} idle"
    return in_both_forms(lambda form: _draw_timeline(form, bars, longest, description))


def action_table(events: Sequence[ActionEvent]) -> Markup:
    """The events as a table, folded below its number of rows.

    Example:
        >>> weft.report.action_table(weft.Recorder().events)[:9]
        '<details>'
    """
    begin = min((event.start for event in events), default=0.0)
    rows: list[list[str]] = []
    for event in sorted(events, key=lambda event: event.start)[:_MOST_ROWS]:
        times = map(show_time, (event.start - begin, event.end - event.start))
        micro_batch = "all" if event.kind == "T" else f"{event.action.micro_batch}"
        rows.append([KINDS[event.kind], f"{event.action.stage}", micro_batch, *times, event.thread])
    words = f"All {len(events)} actions as a table"
    if len(events) > _MOST_ROWS:
        words = f"The first {_MOST_ROWS} of {len(events)} actions as a table; a .json file has all"
    return details(words, table(["action", "stage", "micro-batch", "start", "duration", "thread"], rows))


def live_bytes(recorder: Recorder, stage: int | None = None) -> list[tuple[float, int]]:
    """The memory curve of a recorder, or of one stage, in seconds from its first event, at which no bytes are alive.

    Example:
        >>> recorder = weft.Recorder(memory=True)
        >>> svg = weft.report.memory_curve({"all stages": weft.report.live_bytes(recorder)})
    """
    begin = min((event.start for event in recorder.events), default=0.0)
    samples = recorder.bytes if stage is None else recorder.stage_bytes.get(stage, [])
    return [(0.0, 0), *((time - begin, count) for time, count in samples)]


def last_time(recorder: Recorder) -> float:
    """Seconds from the first event to the last sample. As the end of both time axes, it aligns their pictures."""
    begin = min((event.start for event in recorder.events), default=0.0)
    return max([0.0, *(event.end - begin for event in recorder.events), *(time - begin for time, _ in recorder.bytes)])


def notebook_frame(recorder: Recorder) -> Markup:
    """The timeline of a recorder's events, and its memory curve if bytes were counted."""
    # A page in a frame, so that its style and that of the notebook do not affect each other.
    stages = 1 + max((event.action.stage for event in recorder.events), default=0)
    until = last_time(recorder)
    pictures = [paragraph(f"{step_statistics(recorder.events)}."), figure(timeline(recorder.events, until=until))]
    if recorder.bytes:
        pictures.append(figure(memory_curve({"alive for backward": live_bytes(recorder)}, until=until)))
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
    description = f"{title}: {len(values)} values cross between {stages} stages"
    return in_both_forms(lambda form: _draw_routes(form, values, stages, description))


def _draw_routes(form: Form, values: Sequence[CrossingValue], stages: int, description: str) -> Markup:
    # The words are above each line, because a narrow screen has no room for them to the right of the stages.
    step = min(_COLUMN, (form.width - 80) / max(1, stages - 1))
    columns = [40 + stage * step for stage in range(stages)]
    base = 26 + _LINE * len(values)
    parts: list[str] = []
    for stage, x in enumerate(columns):
        parts.append(tag("text", f"stage {stage}" if step >= 56 else f"{stage}", x=x, y=11, class_="tick"))
        parts.append(tag("line", x1=x, y1=16, x2=x, y2=base, class_="grid"))
    for row, (name, size, source, readers) in enumerate(values):
        y = 12 + (row + 1) * _LINE
        tip = tag("title", f"{name}: stage {source} to {', '.join(map(str, readers))}")
        parts.append(tag("line", tip, x1=columns[source], y1=y, x2=columns[max(readers)], y2=y, class_="axis"))
        parts.append(tag("circle", cx=columns[source], cy=y, r=4, class_="axis"))
        arrows = [columns[reader] for reader in readers]
        parts += [tag("path", d=f"M{number(x - 7)} {number(y - 4)} l7 4 l-7 4 z", class_="axis") for x in arrows]
        words = shorten(f"{name}, {show_bytes(size)}", form.width - 8)
        parts.append(tag("text", words, x=4, y=y - 10, class_="tick start"))
    return svg(form, description, base, *parts)


def trace(events: Sequence[ActionEvent], *, name: str = "torchweft", process: int = 0) -> dict[str, Any]:
    """A recording in Google's "Trace Event Format": one process of this name and number, with a track per thread.

    Times count from the first event.

    Example:
        >>> weft.report.trace(weft.Recorder().events, name="step")["traceEvents"][0]["args"]
        {'name': 'step'}
    """
    begin = min((event.start for event in events), default=0.0)
    threads = {thread: track for track, thread in enumerate(sorted({event.thread for event in events}))}
    tracks = [("process_name", name, 0), *(("thread_name", thread, track) for thread, track in threads.items())]
    entries: list[dict[str, Any]] = [
        {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": label}}
        for kind, label, track in tracks
    ]
    for event in events:
        stage, _, micro_batch = event.action
        entries.append(
            {
                "name": f"{stage}T" if event.kind == "T" else f"{stage}{event.kind}{micro_batch}",
                "cat": KINDS[event.kind],
                "ph": "X",
                "ts": (event.start - begin) * 1e6,  # microseconds
                "dur": (event.end - event.start) * 1e6,
                "pid": process,
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


class _Bar(NamedTuple):
    """The bar of an action, or the outline of its forecast."""

    kind: str
    action: Action
    start: float
    end: float
    outline: bool

    def draw(self, x: float, y: float, width: float, height: float) -> Markup:
        """The shape, its label if there is room for one, and a tooltip."""
        when = f"{show_time(self.start)} to {show_time(self.end)}, takes {show_time(self.end - self.start)}"
        number = "" if self.kind == "T" else f"{self.action.micro_batch}"
        where = f"stage {self.action.stage}, " + (f"micro-batch {number}" if number else "all micro-batches")
        tip = tag("title", f"{'forecast' if self.outline else 'measured'}: {KINDS[self.kind]}, {where}; {when}")
        style = f"{'outline' if self.outline else 'bar'} kind-{self.kind}"
        shape = tag("rect", x=x, y=y, width=width, height=height, rx=2, class_=style)
        words = (f"{self.kind}{number}", number, "")
        fits = height >= 12
        word = next(word for word in words if not word or (fits and len(word) * LETTER < width - 4))
        middle = {"x": x + width / 2, "y": y + height / 2 + 4}
        label = tag("text", word, class_="in-outline" if self.outline else "in-bar", **middle)
        return tag("g", tip, shape, label if word else "")


def _draw_timeline(form: Form, bars: Sequence[_Bar], longest: float, description: str) -> Markup:
    """All bars: a lane for each stage, which is a row of the wide form and a column of the narrow one."""
    stages = 1 + max((bar.action.stage for bar in bars), default=-1)
    outlined = any(bar.outline for bar in bars)
    kinds = sorted({bar.kind for bar in bars}, key=[*KINDS].index)
    samples = [(f"bar kind-{kind}", f"{kind}  {KINDS[kind]}") for kind in kinds]
    legend, top = draw_legend(form, [*samples, *[("outline", "forecast")] * outlined])
    top += 10.0
    unit = unit_for(longest, SECONDS)
    label = f"time in {unit.name}"
    if form is WIDE:
        thickness, outline, lane = _BAR, _OUTLINE, _BAR + (_OUTLINE + 3) * outlined + _GAP
        base = top + 4 + stages * lane
        scale = Scale(0.0, longest, form.left, form.end)
        parts = [bottom_axis(form, scale, top, base, unit, label)]
        names = [(form.left - 8, top + 21 + stage * lane, f"stage {stage}", "tick end") for stage in range(stages)]
    else:
        lane = (form.end - form.left) / max(1, stages)
        gap = min(8.0, lane / 8)
        thickness = (lane - gap) * (0.58 if outlined else 1.0)
        outline = max(0.5, lane - gap - thickness - 2)
        busiest = max(Counter(bar.action.stage for bar in bars if bar.outline == outlined).values(), default=0)
        top += 24.0
        base = top + min(_MOST, max(_LEAST, _ACTION * busiest))
        scale = Scale(0.0, longest, top, base)
        parts = [_side_axis(form, scale, unit)]
        names = [
            (form.left + (stage + 0.5) * lane, top - 8, f"stage {stage}" if lane >= 54 else f"{stage}", "tick")
            for stage in range(stages)
        ]
        names.append((form.left - 8, top - 8, unit.name, "tick end"))
    parts += [tag("text", words, x=x, y=y, class_=style) for x, y, words, style in names]
    for bar in bars:
        # Slightly shorter than its time, so that the ground shows between neighbours.
        start, length = scale(bar.start) + 0.75, max(0.5, scale(bar.end) - scale(bar.start) - 1.5)
        across = bar.action.stage * lane + (thickness + 3) * bar.outline
        size = outline if bar.outline else thickness
        if form is WIDE:
            parts.append(bar.draw(start, top + 4 + across, length, size))
        else:
            parts.append(bar.draw(form.left + across, start, size, length))
    return svg(form, description, base + (BOTTOM if form is WIDE else 10), legend, *parts)


def _side_axis(form: Form, scale: Scale, unit: Unit) -> Markup:
    """Horizontal grid lines, with their times to the left."""
    at = scale.ticks(unit.factor, 10)
    lines = [tag("line", x1=form.left, x2=form.end, y1=scale(v), y2=scale(v), class_="grid") for v in at]
    values = [tag("text", f"{v / unit.factor:g}", x=form.left - 8, y=scale(v) + 4, class_="tick end") for v in at]
    return join(*lines, *values)
