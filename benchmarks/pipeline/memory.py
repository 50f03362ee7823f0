"""Bytes that stay alive for backward: measured, and forecast from the cost of one micro-batch on each stage.

`weft.Recorder` measures the curve, and `weft.pipeline.simulate` forecasts it. The peak of a stage counts its graphs and
the values that it made. 1F1B begins backward early, so that stage s of n holds at most n - s micro-batches. GPipe holds
all of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn

import torchweft as weft
from benchmarks.harness import progress
from benchmarks.pipeline.costs import measure_bytes
from benchmarks.pipeline.unet import BALANCE, CHUNKS, READERS, SOURCE, STAGES, unet
from benchmarks.pipeline.work import step_with_target
from benchmarks.table import Row, Table
from torchweft.pipeline.simulate import Forecast, StageCost, ValueCost, forecast
from torchweft.pipeline.tracing import ActionEvent

REQUIRED = 0.05
MODES = (("gpipe", "never"), ("gpipe", "except_last"), ("gpipe", "always"), ("1f1b", "never"), ("1f1b", "always"))


def run(quick: bool) -> Table:
    """Peak bytes of every stage, by schedule, checkpoint mode and executor."""
    rows, width, seconds = (4, 16, 0.002) if quick else (64, 128, 0.005)
    model = unet(width, seconds)
    x, target = torch.randn(2, rows * CHUNKS, width)
    table_rows: list[Row] = []
    for schedule, checkpoint in MODES:
        for executor in ("threads", "serial"):
            progress(f"{schedule}, checkpoint {checkpoint}, {executor}")
            table_rows.append(_row(_pipe(model, schedule, checkpoint, executor), x, target))
    title = f"live bytes of {STAGES} stages, {CHUNKS} micro-batches, a skip with two readers"
    notes = ["  four numbers: stages 0 to 3; live: micro-batches between the start of F and the end of B"]
    return Table(title, table_rows, notes)


def _pipe(model: nn.Sequential, schedule: str, checkpoint: str, executor: str) -> weft.Pipe:
    return weft.Pipe(
        model,
        chunks=CHUNKS,
        devices=["cpu"] * STAGES,
        balance=BALANCE,
        schedule=schedule,
        checkpoint=checkpoint,
        executor=executor,
        loss=nn.MSELoss(),
    )


def _row(pipe: weft.Pipe, x: Tensor, target: Tensor) -> Row:
    work = step_with_target(pipe, x, target)
    work()  # warm up
    recorder = weft.Recorder(memory=True)
    recorder.ignore([x, target, *pipe.parameters()])
    with pipe.observed_by(recorder):
        work()
    predicted = _forecast(pipe, recorder.events, x, target)
    live = _live(recorder.events)
    most = [min(STAGES - stage, CHUNKS) if pipe.schedule == "1f1b" else CHUNKS for stage in range(STAGES)]
    peaks = [max(count for _, count in recorder.stage_bytes[stage]) for stage in range(STAGES)]
    measured, expected = [*peaks, recorder.peak_bytes], [*predicted.stage_peaks, predicted.peak_bytes]
    error = max((one / other - 1 for one, other in zip(measured, expected, strict=True)), key=abs)
    holds = abs(error) <= REQUIRED and all(one <= other for one, other in zip(live, most, strict=True))
    return {
        "schedule": str(pipe.schedule),
        "checkpoint": str(pipe.checkpoint),
        "run by": pipe.executor,
        "live": _text(live),
        "at most": _text(most),
        "peak bytes of stages": _text(peaks),
        "of all": f"{recorder.peak_bytes}",
        "forecast": f"{_text(predicted.stage_peaks)}; {predicted.peak_bytes}",
        "largest error": f"{error:+.1%}",
        "required": f"within {REQUIRED:.0%}",
        "verdict": "holds" if holds else "falls short",
    }


def _text(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _forecast(pipe: weft.Pipe, events: Sequence[ActionEvent], x: Tensor, target: Tensor) -> Forecast:
    """Forecast from the times of a recorded step and the bytes of one micro-batch."""
    sizes = measure_bytes(pipe.partitions, x.chunk(CHUNKS)[0], target.chunk(CHUNKS)[0], nn.MSELoss())
    spent: defaultdict[tuple[int, str], list[float]] = defaultdict(lambda: [])
    for event in events:
        spent[event.action.stage, event.kind].append(event.end - event.start)
    seconds = {key: median(times) for key, times in spent.items()}
    stages = [
        StageCost(seconds[s, "F"], seconds[s, "B"], seconds.get((s, "R"), 0.0), sizes[s].saved) for s in range(STAGES)
    ]
    skip = ValueCost(SOURCE, READERS, sizes[SOURCE].output)  # as wide as the main path
    main = [ValueCost(s, (s + 1,), sizes[s].output, sizes[s].saves_output) for s in range(STAGES - 1)]
    recomputed = {(event.action.stage, event.action.micro_batch) for event in events if event.kind == "R"}
    return forecast(_executed_table(pipe), stages, [*main, skip], checkpointed=lambda *at: at in recomputed)


def _executed_table(pipe: weft.Pipe) -> weft.Schedule:
    """The table as executed: by one worker per stage, or by one worker for all."""
    schedule = pipe.schedule_for(CHUNKS)
    if pipe.executor == "threads":
        return schedule
    parts = [schedule.forward_only, schedule.backward_only] if schedule.allows_external_loss else [schedule]
    return weft.Schedule((tuple(action for part in parts for _, action in part.order),))


def _live(events: Sequence[ActionEvent]) -> list[int]:
    """Largest number of micro-batches of each stage between the start of F and the end of B."""
    now: defaultdict[int, int] = defaultdict(int)
    most: defaultdict[int, int] = defaultdict(int)
    changes = [(event.start, 1, event.action.stage) for event in events if event.kind == "F"]
    changes += [(event.end, -1, event.action.stage) for event in events if event.kind == "B"]
    for _, change, stage in sorted(changes):
        now[stage] += change
        most[stage] = max(most[stage], now[stage])
    return [most[stage] for stage in range(STAGES)]
