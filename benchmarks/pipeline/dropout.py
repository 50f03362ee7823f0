"""Random numbers must not depend on the order of stages: gradients are bit-equal for every seed.

    stage       0              1         2              3
                Linear         Linear    Linear         Linear
                Dropout draws  GELU      Dropout draws  GELU
                sleep          sleep     sleep          sleep
                Dropout draws            Dropout draws

All stages on the CPU share one generator. The test is therefore only meaningful if stages run at the same time, so
they sleep between draws. The recorder's events show for how many seeds they overlapped. Stages that draw hold the
generator in turn, so a pair counts only if at most one of its stages draws.
"""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

import torchweft as weft
from benchmarks.harness import progress
from benchmarks.pipeline.sleep import Sleep
from benchmarks.pipeline.work import pipe_of, step
from benchmarks.table import Row, Table
from torchweft.pipeline.tracing import ActionEvent

STAGES, CHUNKS, WIDTH = 4, 6, 32
SECONDS = 0.0001
DRAWING = (0, 2)
RUNS = (("serial", "never"), ("threads", "never"), ("serial", "always"), ("threads", "always"))
"""Executor and checkpoint mode. The first run is the reference."""


def run(quick: bool) -> Table:
    """Number of seeds with bit-equal gradients, and of stages that overlapped."""
    seeds = 5 if quick else 1000
    model = _model()
    runs = [_Runner(model, *names) for names in RUNS]
    x = torch.randn(16 * CHUNKS, WIDTH)
    progress(f"{seeds} seeds")
    for seed in range(seeds):
        expected, *others = [run.gradients(x, seed) for run in runs]
        runs[0].compare(expected, expected)
        for run, actual in zip(runs[1:], others, strict=True):
            run.compare(actual, expected)
    title = f"dropout in {len(DRAWING)} of {STAGES} stages: bit-equal gradients over {seeds} seeds"
    return Table(title, [run.row(seeds) for run in runs])


class _Runner:
    """One executor and checkpoint mode, with its results."""

    def __init__(self, model: nn.Sequential, executor: str, checkpoint: str) -> None:
        self._names = (executor, checkpoint)
        self._pipe = pipe_of(model, STAGES, CHUNKS, checkpoint, executor)
        self._equal = self._overlapped = self._pairs = 0
        self._seen: set[bytes] = set()

    def gradients(self, x: Tensor, seed: int) -> list[Tensor]:
        """All gradients of one step with this seed."""
        recorder, parameters = weft.Recorder(), list(self._pipe.parameters())
        torch.manual_seed(seed)
        with self._pipe.observed_by(recorder):
            step(self._pipe, parameters, x, lambda y: y.square().mean())()
        pairs = _overlaps(recorder.events)
        self._pairs += pairs
        self._overlapped += pairs > 0
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def compare(self, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        """Compare bit by bit."""
        self._seen.add(actual[0].numpy().tobytes())
        self._equal += all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))

    def row(self, seeds: int) -> Row:
        """Results. Different seeds must give different gradients, otherwise dropout drew nothing."""
        executor, checkpoint = self._names
        at_once = executor == "serial" or self._overlapped > 0.9 * seeds
        return {
            "run by": executor,
            "checkpoint": checkpoint,
            "bit-equal": f"{self._equal}",
            "distinct": f"{len(self._seen)}",
            "seeds with stages at once": f"{self._overlapped}",
            "pairs at once": f"{self._pairs / seeds:.1f} a step",
            "required": f"{seeds} equal",
            "verdict": "holds" if self._equal == len(self._seen) == seeds and at_once else "falls short",
        }


def _overlaps(events: Sequence[ActionEvent]) -> int:
    """Number of overlapping pairs of actions of two stages, at most one of which draws."""
    pairs = combinations(sorted(events, key=lambda event: event.start), 2)
    return sum(
        later.start < earlier.end
        and earlier.action.stage != later.action.stage
        and not (earlier.action.stage in DRAWING and later.action.stage in DRAWING)
        for earlier, later in pairs
    )


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    stages: list[nn.Module] = []
    for stage in range(STAGES):
        sleep = Sleep(SECONDS, SECONDS)
        last = [nn.Dropout(0.3), sleep, nn.Dropout(0.3)] if stage in DRAWING else [nn.GELU(), sleep]
        stages.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), *last))
    return nn.Sequential(*stages)
