"""Share of the ideal schedule that a pipeline reaches if its stages need no processor.

    stage 0   F0 F1 F2 F3 ...                        Layers sleep, so that no thread waits for a core.
    stage 1      F0 F1 F2 F3 ...                     All lost time is therefore overhead of the pipeline.

The ideal is the forecast of the same table with the nominal times. A table that allows an external loss is forecast in
two parts, because its backward starts when the caller requests it. torchgpipe has one worker per device, so that its
stages on one CPU run in turn.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

import torchweft as weft
from benchmarks.harness import Work, progress, race
from benchmarks.pipeline.work import PEER, decide, peer_of, pipe_of, step, step_with_target
from benchmarks.table import Row, Table, at_least
from torchweft.pipeline.simulate import StageCost, forecast

STAGES, CHUNKS = 4, 8
REQUIRED = 0.97


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class Sleep(nn.Module):
    """Identity layer that sleeps in forward and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = (forward, backward)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x + self.shift, *self.seconds)


def ideal(schedule: weft.Schedule, forward: float, backward: float, checkpoint: str) -> float:
    """Seconds of the table if only the layers take time."""
    last = schedule.micro_batches - 1

    def recomputed(stage: int, micro_batch: int) -> bool:
        return checkpoint == "always" or (checkpoint == "except_last" and micro_batch < last)

    combined = StageCost(forward, backward, recompute=forward)
    forward_part, backward_part = StageCost(forward, 0.0), StageCost(0.0, backward, recompute=forward)
    parts = [forward_part, backward_part] if schedule.allows_external_loss else [combined]
    return sum(forecast(schedule, [part] * schedule.stages, checkpointed=recomputed).total for part in parts)


def run(quick: bool) -> Table:
    """Share of the ideal, by schedule, checkpoint mode and executor."""
    scale = 0.03 if quick else 1.0
    times = (0.020 * scale, 0.040 * scale)
    model = nn.Sequential(*[Sleep(*times) for _ in range(STAGES)])
    rows: list[Row] = []
    for checkpoint in ("never", "except_last", "always"):
        rows += _gpipe(model, times, checkpoint, 1 if quick else 5)
    for checkpoint in ("never", "always"):
        rows += _one_f_one_b(model, times, checkpoint, 1 if quick else 5)
    title = f"{STAGES} sleeping stages, {CHUNKS} micro-batches: share of the ideal schedule"
    return Table(title, rows)


def _gpipe(model: nn.Sequential, times: tuple[float, float], checkpoint: str, rounds: int) -> list[Row]:
    progress(f"gpipe, checkpoint {checkpoint}")
    x, parameters = torch.zeros(CHUNKS, 1), list(model.parameters())
    pipes = {executor: pipe_of(model, STAGES, CHUNKS, checkpoint, executor) for executor in ("threads", "auto")}
    candidates = {name: step(pipe, parameters, x, torch.sum) for name, pipe in pipes.items()}
    choice = decide(pipes["auto"], candidates["auto"])
    peer = peer_of(model, STAGES, CHUNKS, checkpoint)
    if peer is not None:
        candidates[PEER] = step(peer, parameters, x, torch.sum)
    best = ideal(pipes["threads"].schedule_for(CHUNKS), *times, checkpoint)
    return _rows(candidates, "gpipe", checkpoint, best, rounds, {"auto": f"auto: {choice}"})


def _one_f_one_b(model: nn.Sequential, times: tuple[float, float], checkpoint: str, rounds: int) -> list[Row]:
    progress(f"1f1b, checkpoint {checkpoint}")
    pipe = pipe_of(model, STAGES, CHUNKS, checkpoint, "threads", schedule="1f1b", loss=nn.MSELoss())
    x = torch.zeros(CHUNKS, 1)
    best = ideal(pipe.schedule_for(CHUNKS), *times, checkpoint)
    return _rows({"threads": step_with_target(pipe, x, x)}, "1f1b", checkpoint, best, rounds, {})


def _rows(
    candidates: dict[str, Work], schedule: str, checkpoint: str, best: float, rounds: int, labels: dict[str, str]
) -> list[Row]:
    result = race(candidates, rounds=rounds, sample=0.0)
    rows: list[Row] = []
    for name in candidates:
        share = best / result.median(name)
        judged = {"required": "", "verdict": ""} if name == PEER else at_least(share, REQUIRED)
        rows.append(
            {
                "schedule": schedule,
                "checkpoint": checkpoint,
                "run by": labels.get(name, name),
                "ms": f"{result.median(name) * 1e3:.1f}",
                "ideal ms": f"{best * 1e3:.1f}",
                "share": f"{share:.3f}",
                **judged,
                "rounds": result.note(),
            }
        )
    return rows
