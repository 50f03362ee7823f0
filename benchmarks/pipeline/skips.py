"""Lifetime of a skip tensor, which must end with its last reader.

    stage 0   F0 ──stash──┐                                      B0
    stage 2         F0    │ reads                     B0 ──┐ last reader
    stage 3            F0 │ reads             B0           │
                          ├────────── alive ───────────────┤~~ too long ~~

The skip tensors use memory of numpy arrays, and a finalizer records when it is freed. This tracks the storage itself,
which several tensors can view. A recomputation of the source makes a copy for the graph alone. No stage reads that
copy, so it is counted but not judged.
"""

import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchweft as weft
from benchmarks.harness import progress
from benchmarks.pipeline.unet import BALANCE, CHUNKS, READERS, SOURCE, STAGES, unet
from benchmarks.pipeline.work import step_with_target
from benchmarks.table import Row, Table, at_most
from torchweft.pipeline.tracing import ActionEvent

REQUIRED = 1.0  # milliseconds; the freeing itself takes some time
MODES = (("gpipe", "never"), ("gpipe", "always"), ("1f1b", "never"), ("1f1b", "always"))


@dataclass
class Life:
    """When one storage was allocated, and when it was freed."""

    start: float
    end: float = float("inf")


class _Watched(torch.autograd.Function):
    """Copy whose storage is recorded in `lives`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lives: list[Life]) -> Tensor:
        life = Life(time.perf_counter())
        lives.append(life)
        memory = np.array(x.detach().numpy())
        weakref.finalize(memory, _record_end, life)
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _record_end(life: Life) -> None:
    life.end = time.perf_counter()


def run(quick: bool) -> Table:
    """Time by which skip tensors outlive their last reader."""
    seconds = 0.002 if quick else 0.005
    rows = [_row(schedule, checkpoint, seconds) for schedule, checkpoint in MODES]
    title = f"lifetime of a skip tensor from stage {SOURCE} to {READERS} of {STAGES}, {CHUNKS} micro-batches"
    return Table(title, rows)


def _row(schedule: str, checkpoint: str, seconds: float) -> Row:
    progress(f"{schedule}, checkpoint {checkpoint}")
    lives: list[Life] = []
    model = unet(16, seconds, lambda x: _Watched.apply(x, lives))
    pipe = weft.Pipe(
        model,
        chunks=CHUNKS,
        devices=["cpu"] * STAGES,
        balance=BALANCE,
        schedule=schedule,
        checkpoint=checkpoint,
        executor="threads",
        loss=nn.MSELoss(),
    )
    work = step_with_target(pipe, *torch.randn(2, 4 * CHUNKS, 16))
    work()  # warm up
    lives.clear()
    recorder = weft.Recorder()
    with pipe.observed_by(recorder):
        work()
    beyond = [_beyond(life, recorder.events) for life in lives if _made_in(life, recorder.events).kind == "F"]
    longest = max(beyond) * 1e3
    return {
        "schedule": schedule,
        "checkpoint": checkpoint,
        "tensors": f"{len(beyond)}",
        "copies recomputed": f"{len(lives) - len(beyond)}",
        "longest lifetime ms": f"{max(life.end - life.start for life in lives) * 1e3:.1f}",
        "alive too long, at most ms": f"{longest:.2f}",
        **at_most(longest, REQUIRED),
    }


def _beyond(life: Life, events: list[ActionEvent]) -> float:
    """Seconds between the end of the last reader and the end of the storage."""
    index = _made_in(life, events).action.micro_batch
    last = max(e.end for e in events if e.action.stage in READERS and e.action.micro_batch == index)
    return life.end - last


def _made_in(life: Life, events: list[ActionEvent]) -> ActionEvent:
    """The action that allocated the storage."""
    return next(e for e in events if e.action.stage == SOURCE and e.start <= life.start <= e.end)
