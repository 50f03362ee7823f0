"""A recording in the Chrome trace-event format, which https://ui.perfetto.dev opens.

"Trace Event Format" (Google) describes it: one object with ``traceEvents``; "X" is work with start and duration in
microseconds, "M" the name of a process or a thread.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.pipeline.tracing import ActionEvent
from weft.report.timeline import KINDS


def trace(events: Sequence[ActionEvent], *, name: str = "weft") -> dict[str, Any]:
    """One process of this name with a track per thread; times count from the first event.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), chunks=2, devices=["cpu", "cpu"])
        >>> recorder = weft.Recorder()
        >>> with pipe.watched_by(recorder):
        ...     loss = pipe(torch.randn(4, 2)).sum()
        >>> sorted({event["ph"] for event in weft.report.trace(recorder.events)["traceEvents"]})
        ['M', 'X']
    """
    begin = min((event.start for event in events), default=0.0)
    threads = {thread: number for number, thread in enumerate(sorted({event.thread for event in events}))}
    work = [
        {
            "name": f"{event.action.stage}{event.kind}{event.action.micro_batch}",
            "cat": KINDS[event.kind],
            "ph": "X",
            "ts": (event.start - begin) * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "pid": 0,
            "tid": threads[event.thread],
            "args": {"stage": event.action.stage, "micro-batch": event.action.micro_batch},
        }
        for event in events
    ]
    tracks = [_metadata("thread_name", thread, number) for thread, number in threads.items()]
    return {"traceEvents": [_metadata("process_name", name, 0), *tracks, *work], "displayTimeUnit": "ms"}


def write_trace(path: Path | str, events: Sequence[ActionEvent], *, name: str = "weft") -> Path:
    """Write `trace` to a JSON file, and return its path.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "trace.json")
        >>> weft.report.write_trace(path, []).name  # open it at https://ui.perfetto.dev
        'trace.json'
    """
    target = Path(path)
    target.write_text(json.dumps(trace(events, name=name)), encoding="utf-8")
    return target


def _metadata(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}
