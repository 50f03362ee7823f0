"""The report of a recorded step, and the recording of a script that does not record itself.

The last step of a script is kept and not the first, because first steps allocate memory, compile and measure layouts.
"""

import json
import os
import platform
import runpy
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torchweft.core.errors import UsageError
from torchweft.core.version import __version__
from torchweft.pipeline.schedule import SCHEDULES
from torchweft.pipeline.tracing import Recorder, observing_new_pipes
from torchweft.report.html import Section, figure, page, paragraph, table, tag
from torchweft.report.plot import memory_curve, show_bytes, show_time
from torchweft.report.step_statistics import step_statistics
from torchweft.report.timeline import action_table, last_time, live_bytes, timeline, trace

_MOST_CURVES = 5  # stages whose memory has a curve of its own
_RECENT = 4  # steps of a pipe that can run at the same time, such as two losses before one backward
_ON_ONE_AXIS = (
    "Bytes alive for backward, in the same step and on the same time axis as the timeline. Counting them takes some "
    "microseconds per tensor, which the timeline includes."
)


def summary(recordings: Mapping[str, Recorder]) -> Section:
    """The top of a report: the figures of each recorded step, by its name, then machine, versions and date.

    Example:
        >>> weft.report.summary({"step": weft.Recorder()}).title
        'Summary'
    """
    devices = [f"CPU cores: {os.cpu_count()}, threads per operator: {torch.get_num_threads()}"]
    if torch.cuda.is_initialized():  # otherwise asking for names would start CUDA
        devices += [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    rows = [
        *([name, f"{step_statistics(recorder.events)}"] for name, recorder in recordings.items()),
        ["date", time.strftime("%Y-%m-%d %H:%M %z")],
        ["machine", f"{platform.system()} {platform.release()}, {platform.machine()}; {'; '.join(devices)}"],
        ["versions", f"torchweft {__version__}, torch {torch.__version__}, Python {platform.python_version()}"],
    ]
    return Section("Summary", [tag("div", table(["step", "found"], rows), class_="facts")])


def _step_section(recorder: Recorder, title: str) -> Section:
    """A step in time and, if bytes were recorded, in memory."""
    step, until = step_statistics(recorder.events), last_time(recorder)
    peaks = {stage: max(count for _, count in curve) for stage, curve in sorted(recorder.stage_bytes.items())}
    rows = [[f"stage {stage}", show_time(work), f"{work / step.seconds:.0%}"] for stage, work in enumerate(step.work)]
    for stage, row in enumerate(rows):
        row += [show_bytes(peaks.get(stage, 0))] * bool(peaks)
    body = [
        paragraph(f"{step}. It took {show_time(step.seconds)} of the host's clock."),
        figure(timeline(recorder.events, title=title, until=until)),
        action_table(recorder.events),
        table(["", "work", "share of the step", *["peak memory"] * bool(peaks)], rows),
    ]
    if recorder.bytes:
        stages = peaks if len(peaks) <= _MOST_CURVES else {}
        curves = {f"stage {stage}": live_bytes(recorder, stage) for stage in stages}
        curves = {"all stages": live_bytes(recorder), **curves}
        body.append(figure(memory_curve(curves, title=f"{title}, memory", until=until), _ON_ONE_AXIS))
    return Section(title, body)


def write_recordings(recordings: Mapping[str, Recorder], path: Path, title: str) -> None:
    """Write recorded steps by their names, as a page or a trace, by the suffix. Raises UsageError for another one."""
    if _suffix(path) == ".json":
        traces = [trace(one.events, name=name, process=i) for i, (name, one) in enumerate(recordings.items())]
        content = json.dumps({"traceEvents": [event for part in traces for event in part["traceEvents"]]})
    else:
        content = page(title, [summary(recordings), *(_step_section(one, name) for name, one in recordings.items())])
    path.write_text(content, encoding="utf-8")


def _suffix(path: Path) -> str:
    if path.suffix not in (".html", ".json"):
        raise UsageError(
            f"{path} has the suffix {path.suffix!r}; a recording is saved as .html (a report) or as .json (a trace for "
            "https://ui.perfetto.dev)"
        )
    return path.suffix


class _LastStep(Recorder):
    """Observer of one pipe that keeps its last complete step, and a few others that can still be running."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        self.name = ""
        self._pipe = weakref.ref(pipe)
        self._steps: list[Recorder] = []

    def one_step(self) -> Recorder:
        best, step = self.last_step(), Recorder(memory=True)
        if (pipe := self._pipe()) is not None:
            step.ignore([*pipe.parameters(), *pipe.buffers()])  # in every step, because `materialize` replaces them
            schedule = pipe.schedule if pipe.schedule in SCHEDULES else "its own schedule"
            self.name = f"{schedule}, {len(pipe.devices)} stages"
        others = [other for other in self._steps if other is not best]
        self._steps = [*([best] if best else []), *others[-_RECENT:], step]
        return step.one_step()

    def last_step(self) -> Recorder | None:
        """The last step with all of its backwards. Without such a step, the last with some, or else with actions."""
        return max((step for step in reversed(self._steps) if step.events), key=_completeness, default=None)


def _completeness(step: Recorder) -> int:
    places = {kind: set[tuple[int, int]]() for kind in "FBRIW"}
    for event in step.events:
        places[event.kind].add((event.action.stage, event.action.micro_batch))
    backwards = places["B"] | places["W"]
    return (backwards >= places["F"]) + bool(backwards)


def record_script(script: str, arguments: list[str], out: str) -> int:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, and write a report of the last step of each `Pipe` in it.

    Args:
        script: the file.
        arguments: its ``sys.argv[1:]``.
        out: the report, ``.html``, or a trace for https://ui.perfetto.dev, ``.json``. A process that ``torchrun``
            started adds its rank to the name.

    Returns the exit code of the script. Its exceptions pass, and the steps that it ran before are still written. Raises
    UsageError for another suffix of `out`, for a script or folder that does not exist, and if no pipe ran a step.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> text = "import torch as t, torchweft; torchweft.Pipe(t.nn.Sequential(t.nn.ReLU()), chunks=1)(t.ones(1))"
        >>> _ = (folder / "train.py").write_text(text)
        >>> weft.report.record_script(f"{folder}/train.py", [], f"{folder}/step.html")
        0
    """
    target, observers = Path(out), list[_LastStep]()
    _suffix(target)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        target = target.with_stem(f"{target.stem}-rank{os.environ.get('RANK', '0')}")
    for file, what in ((Path(script), "script"), (target.parent, "folder for the report")):
        if not file.exists():
            raise UsageError(f"there is no {what} {str(file)!r}")

    def observe(pipe: Any) -> _LastStep:
        observers.append(_LastStep(pipe))
        return observers[-1]

    code, failure = 0, None
    with observing_new_pipes(observe):
        try:
            code = _run_as_main(script, arguments)
        except BaseException as error:
            failure = error
    steps = [(one.name, step) for one in observers if (step := one.last_step()) is not None]
    if steps:
        named = {f"Pipe {number}: {name}": step for number, (name, step) in enumerate(steps, start=1)}
        write_recordings(named, target, f"The last step of {Path(script).name}")
        opened = "load it into https://ui.perfetto.dev" if target.suffix == ".json" else "open it with a browser"
        print(f"torchweft: wrote {target.resolve()}; {opened}", file=sys.stderr)
    if failure is not None:
        raise failure.with_traceback(script_traceback(failure, script) or failure.__traceback__)
    if not steps and code == 0:
        raise UsageError(
            f"no weft.Pipe in {script} ran a step that can be observed, so {target} is not written; executor='graph' "
            "has no stages to observe"
        )
    return code


def script_traceback(error: BaseException, script: str) -> TracebackType | None:
    """The traceback of an error from the first frame of the script on. None if no frame is of the script."""
    rest = error.__traceback__
    while rest is not None and rest.tb_frame.f_code.co_filename != script:
        rest = rest.tb_next
    return rest


def _run_as_main(script: str, arguments: list[str]) -> int:
    argv, path = sys.argv, [*sys.path]
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).resolve().parent)]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0
