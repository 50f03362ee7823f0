"""``torchweft plan``: a schedule as a table, the micro-batches that it keeps alive, and its forecast.

The forecast runs no model. With ``--pipe`` only the numbers of stages and micro-batches, and the values that cross
stages, come from a pipe, which a function of the user makes.
"""

import json
import os
import sys
import traceback
from argparse import Namespace
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torchweft
from torchweft.core.errors import UsageError, WeftError
from torchweft.core.validation import suggest
from torchweft.pipeline import SCHEDULES, Pipe
from torchweft.pipeline.schedule import build
from torchweft.pipeline.simulate import StageCost, forecast

_PACKAGE = Path(torchweft.__file__).parent


def print_plan(chosen: Namespace) -> None:
    """Print the plan of the parsed options. Raises ``UsageError`` and ``ScheduleError``."""
    routes: list[Any] = []
    joined: list[Any] = []
    joined_parts = 0  # micro-batches of the step in which they were seen
    stages, chunks = chosen.stages, chosen.chunks
    if chosen.pipe is not None:
        pipe: Any = _load_pipe(chosen.pipe)
        stages, chunks = stages or len(pipe.devices), chunks or pipe.chunks
        # Only a pipe made with split= has routes, and without sample= it knows them after its first step.
        with suppress(AttributeError, UsageError):
            routes = pipe.routes
            joined, joined_parts = pipe.statistics()["joined"], pipe.chunks
    if stages is None or chunks is None:
        raise UsageError("plan needs --stages and --chunks, or --pipe")
    table = build(_read_schedule(chosen.schedule), stages, chunks)
    cost = StageCost(chosen.forward, chosen.backward, chosen.recompute)
    expected = forecast(table, [cost] * stages)
    if chosen.json:
        plan = {
            "schedule": chosen.schedule,
            "stages": stages,
            "micro_batches": chunks,
            "workers": len(table.workers),
            "actions_by_worker": [list(map(str, row)) for row in table.workers],
            "live_micro_batches_by_stage": list(table.live()),
            "total_in_cost_units": expected.total,
            "idle_percent": 100 * expected.bubble,
            "crossing_values": list(map(_route_to_json, routes)),
            "joined_values": [{"name": value.name, "size_bytes": value.bytes * joined_parts} for value in joined],
        }
        print(json.dumps(plan))
        return
    if routes:
        _draw_routes(routes, max(stages, *(1 + max(value.readers) for value in routes)))
    for value in joined:
        print(f"all rows: {value.bytes} bytes x {joined_parts}  {value.name}, joined for the end of forward()")
    print(table.text())
    print(f"live micro-batches of each stage: {' '.join(map(str, table.live()))}")
    print(f"forecast: takes {expected.total:g}, idle {expected.bubble:.1%} of the time of {len(table.workers)} workers")


def _route_to_json(value: Any) -> dict[str, Any]:
    ends = {"from_stage": value.source, "to_stages": sorted(value.readers)}
    return {"name": value.name, **ends, "size_bytes": value.bytes}


def _read_schedule(name: str) -> str:
    """A schedule's name, or the text of the file with its table."""
    if name in SCHEDULES or not Path(name).is_file():
        return name
    try:
        return Path(name).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--schedule {name} is not UTF-8 text, so it holds no table: {error}") from None


def _load_pipe(name: str) -> Pipe:
    """The pipe that the user's function returns. Raises ``UsageError``, and ``WeftError`` for the user's own errors."""
    module_name, _, function = name.partition(":")
    message = f"--pipe {name}: wanted MODULE:FUNCTION, a function that returns a Pipe"
    if not (module_name and function):
        raise UsageError(f"{message}, such as my_model:make_pipe")
    sys.path.insert(0, os.getcwd())
    try:
        module: ModuleType = import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):  # the module itself, or a package that it is in
            raise UsageError(f"{message}; {error}, neither installed nor in {os.getcwd()}") from None
        raise _user_error(name, f"the import of {module_name}", error) from None
    make = getattr(module, function, None)
    if not callable(make):
        fault = f"{module_name} has no function {function!r}{suggest(function, vars(module))}"
        raise UsageError(f"{message}; {fault}")
    try:
        pipe = make()
    except Exception as error:
        raise _user_error(name, f"{function}()", error) from None
    if not isinstance(pipe, Pipe):
        raise UsageError(f"{message}; {function}() returned {type(pipe).__name__}")
    return pipe


def _user_error(name: str, where: str, error: Exception) -> WeftError:
    """An exception of the user's code, with the frames of that code alone."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (Path(frame.filename).is_relative_to(_PACKAGE) or frame.filename.startswith("<frozen importlib"))
        and frame.filename != import_module.__code__.co_filename
    ]
    lines = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)])
    return WeftError(f"--pipe {name}: {where} raised {type(error).__name__}\n{lines.rstrip()}")


def _draw_routes(routes: list[Any], stages: int) -> None:
    """Draw each crossing value as a line from its source (o) to its readers (>)."""
    print("".join(f"{stage:<4}" for stage in range(stages)) + "stage")
    for value in routes:
        ends = range(max(value.readers) + 1)
        marks = ["o" if stage == value.source else ">" if stage in value.readers else "-" for stage in ends]
        line = "---".join(marks[value.source :])
        print(f"{' ' * 4 * value.source + line:<{4 * stages}}{value.bytes} bytes  {value.name}")
