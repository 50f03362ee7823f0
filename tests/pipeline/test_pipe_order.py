"""Order inside a step: stages overlap, and recomputation does not wait for its gradient."""

import threading
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.pipe_cases import CHECKPOINTS, assert_gradients_equal, backward, chain, piped, rows, without_target
from torchweft import Pipe, Recorder
from torchweft.core.context import is_recomputing

DEADLINE = 20.0  # seconds, which only a failing test takes


class WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, event, heard):
        ctx.event, ctx.heard = event, heard
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.heard.append(ctx.event.wait(DEADLINE))
        return gradient, None, None


class WaitingLayer(nn.Module):
    """Identity whose backward waits for an event."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event
        self.heard: list[bool] = []

    def forward(self, x):
        return WaitsInBackward.apply(x, self.event, self.heard)


class SignalsRecomputation(nn.Module):
    """Sets an event when it is recomputed."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        if is_recomputing():
            self.event.set()
        return x * self.weight


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_stage_recomputes_before_its_gradient_arrives(chunks: int) -> None:
    """The last stage's backward ends only after the first stage has begun to recompute."""
    event = threading.Event()
    waits = WaitingLayer(event)
    pipe = Pipe(
        nn.Sequential(SignalsRecomputation(event), waits),
        chunks=chunks,
        balance=[1, 1],
        devices=["cpu", "cpu"],
        checkpoint=["always", "never"],
        executor="threads",
    )
    pipe(torch.ones(6, 2)).sum().backward()
    assert waits.heard == [True] * chunks


class MeetsOtherStage(nn.Module):
    """Continues only when the other stage is in its forward too."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier
        self.meetings = 0

    def forward(self, x):
        if x[0, 0] == 1:  # the micro-batch that each stage runs when they overlap
            self.barrier.wait(DEADLINE)
            self.meetings += 1
        return x.roll(1, 1)


def test_two_cpu_stages_really_run_at_once() -> None:
    """Stage 1 runs micro-batch 0 while stage 0 runs micro-batch 1. Each waits for the other."""
    barrier = threading.Barrier(2)
    first, second = MeetsOtherStage(barrier), MeetsOtherStage(barrier)
    pipe = Pipe(
        nn.Sequential(first, second), chunks=2, balance=[1, 1], devices=["cpu", "cpu"], executor="threads"
    ).eval()
    warm = torch.zeros(2, 2)
    with torch.no_grad():
        pipe(warm)  # until a stage is known to draw nothing, it locks the generator
        pipe(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    assert first.meetings == second.meetings == 1


MODES: dict[str, Any] = {
    "a mode per stage": ["always", "never"],
    "a function": lambda stage, micro_batch, micro_batches: stage == 0,
    **{mode: mode for mode in CHECKPOINTS},
}


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_only_micro_batches_of_the_mode_are_recomputed(executor: str, checkpoint: str) -> None:
    pipe, _ = piped(chain(4, 5, 3), chunks=4, executor=executor, checkpoint=MODES[checkpoint])
    for count, micro_batches in ((8, 4), (3, 3)):
        with pipe.observed_by(recorder := Recorder()):
            backward(pipe, rows(count, 4))
        recomputed = {event.action[::2] for event in recorder.events if event.kind == "R"}
        count = {"except_last": micro_batches - 1, "never": 0}.get(checkpoint, micro_batches)
        stages = range(2) if checkpoint in CHECKPOINTS else [0]
        assert recomputed == {*product(stages, range(count))}, "except_last means the last real micro-batch"


@without_target
@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_immediate_backward_recomputes_nothing(executor: str, checkpoint: str) -> None:
    """This holds for the last stage of 1F1B. The stage before it recomputes according to the mode."""
    settings = {"chunks": 4, "executor": executor, "checkpoint": checkpoint, "loss": nn.MSELoss()}
    pipe, plain = piped(chain(4, 5, 3), schedule="1f1b", **settings)
    calls = [0, 0]
    pipe[0].register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    pipe[2].register_forward_hook(lambda *_: calls.__setitem__(1, calls[1] + 1))
    pipe(rows(8, 4), target=rows(8, 3)).backward()
    assert calls == [{"always": 8, "except_last": 7, "never": 4}[checkpoint], 4]
    nn.functional.mse_loss(plain(rows(8, 4)), rows(8, 3)).backward()
    assert_gradients_equal(pipe, plain)
    calls[1] = 0
    backward(pipe, rows(8, 4))  # without a target, the caller's loss runs before backward
    assert calls[1] == {"always": 8, "except_last": 7, "never": 4}[checkpoint]


@pytest.mark.parametrize("executor", ["serial", "threads", "auto"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_worker_follows_its_row_of_the_schedule(executor: str, schedule: str) -> None:
    pipe = Pipe(
        chain(4, 4, 4, 4),
        chunks=4,
        balance=[1, 2, 2],
        devices=["cpu"] * 3,
        checkpoint="never",
        schedule=schedule,
        loss=nn.MSELoss(),
        executor=executor,
    )
    with pipe.observed_by(recorder := Recorder()):
        pipe(rows(8, 4), target=rows(8, 4)).backward()
    seen = [[event.action for event in recorder.events if event.action.stage == stage] for stage in range(3)]
    assert seen == [list(row) for row in pipe.schedule_for(8).workers]
