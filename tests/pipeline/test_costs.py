"""Costs are medians of a recording. A forecast from them equals the bytes that a recorder counts."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torchweft as weft
from torchweft.core.errors import UsageError
from torchweft.pipeline.schedule import Action, build
from torchweft.pipeline.simulate import MemoryRecorder, costs_from
from torchweft.pipeline.step import Observer
from torchweft.pipeline.tracing import ActionEvent, Recorder


@weft.skippable(stash=["far", "same"])
class Source(nn.Linear):
    def forward(self, x: Tensor):
        y = super().forward(x).tanh()
        yield weft.stash("far", x.exp())
        yield weft.stash("same", y)
        return y


@weft.skippable(pop=["far"])
class Middle(nn.Linear):
    def forward(self, x: Tensor):
        far = yield weft.pop("far")
        return super().forward(x).tanh() * far


@weft.skippable(pop=["far", "same"])
class Sink(nn.Linear):
    def forward(self, x: Tensor):
        far = yield weft.pop("far")
        same = yield weft.pop("same")
        return (super().forward(x) + far) * same


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Source(8, 8), nn.Linear(8, 8), nn.Tanh(), Middle(8, 8), nn.ReLU(), Sink(8, 8))


def recorder_of(times: Sequence[tuple[str, int, float]]) -> Recorder:
    """A recorder with consecutive events of these (kind, stage, seconds)."""
    recorder = Recorder()
    now = 0.0
    for kind, stage, seconds in times:
        action = Action(stage, "B" if kind == "R" else kind, 0)
        recorder.events.append(ActionEvent(kind, action, "t", now, now + seconds))
        now += seconds
    return recorder


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_a_cost_is_the_median_over_all_recordings(seconds: list[float]) -> None:
    parts = [("F", 0, 1), ("R", 0, 2), ("B", 0, 3), ("F", 1, 1), ("I", 1, 2), ("W", 1, 4)]
    costs = costs_from([recorder_of([(kind, stage, times * s) for kind, stage, times in parts]) for s in seconds])
    middle = (sorted(seconds)[(len(seconds) - 1) // 2] + sorted(seconds)[len(seconds) // 2]) / 2
    stage, split = costs.stages
    assert stage.forward == pytest.approx(middle, rel=1e-6)
    assert stage.recompute == pytest.approx(2 * middle, rel=1e-6)
    assert stage.backward == pytest.approx(3 * middle, rel=1e-6)
    assert split.backward == pytest.approx(6 * middle, rel=1e-6)


def test_forecast_repeats_a_recorded_recomputation() -> None:
    costs = costs_from([recorder_of([("F", 0, 1.0), ("F", 1, 1.0), ("R", 1, 1.0), ("B", 1, 2.0), ("B", 0, 2.0)])])
    spans = costs.forecast(weft.Schedule.parse("0F0,0B0\n1F0,1B0")).spans
    assert [str(span.action) for span in spans] == ["0F0", "1F0", "1R0", "1B0", "0B0"]


def test_recorders_that_saw_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="have no event"):
        costs_from([Recorder()])


CHECKPOINTS = [
    "never",
    "always",
    "except_last",
    ["never", "always", "always", "never"],
    ["except_last", "never", "always", "except_last"],
    lambda stage, micro_batch, micro_batches: (stage + micro_batch) % 2 == 0,
]


@pytest.mark.parametrize(("rows", "error"), [(24, 0.0), (22, 0.05)])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_forecast_of_live_bytes_equals_the_recorder(schedule: str, checkpoint: Any, rows: int, error: float) -> None:
    # One worker runs all stages, so that only the table decides which values are alive.
    in_turn = weft.Schedule((tuple(action for _, action in build(schedule, 4, 4).order),))
    pipe = weft.Pipe(
        model(),
        chunks=4,
        balance=[2, 2, 1, 2],
        devices=["cpu"] * 4,
        schedule=in_turn,
        checkpoint=checkpoint,
        loss=nn.functional.mse_loss,
        executor="serial",
    )
    batch = torch.randn(rows, 8), torch.randn(rows, 8)
    known = [*pipe.parameters(), *batch]

    def step(observer: Observer) -> None:
        with pipe.observed_by(observer):
            pipe(batch[0], target=batch[1]).backward()

    timed, sizes, memory = Recorder(), MemoryRecorder(known), Recorder(memory=True)
    memory.ignore(known)
    for observer in (timed, sizes, memory):
        step(observer)
    predicted = costs_from([timed], sizes).forecast(pipe.schedule_for(rows))
    assert predicted.peak_bytes == pytest.approx(memory.peak_bytes, rel=error)


class Rewrites(nn.Module):
    """Overwrites a tensor that its backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sigmoid()
        z = y * 1
        y.mul_(2)
        return y + z


@pytest.mark.parametrize("observer", [Recorder(), Recorder(memory=True), MemoryRecorder()])
def test_overwritten_saved_tensor_is_an_error_when_observed(observer: Observer) -> None:
    pipe = weft.Pipe(nn.Sequential(nn.Linear(4, 4), Rewrites()), chunks=2, devices=["cpu"] * 2, checkpoint="never")
    with pipe.observed_by(observer):
        loss = pipe(torch.ones(4, 4)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
    assert any("backward of stage 1" in note for note in caught.value.__notes__)


class Fails(nn.Module):
    """Identity that raises on request."""

    now = False

    def forward(self, x: Tensor) -> Tensor:
        if self.now:
            raise ArithmeticError
        return x


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("fails", [True, False])
def test_failed_or_dropped_steps_are_no_longer_counted(executor: str, fails: bool) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Fails())
    pipe = weft.Pipe(layers, chunks=4, balance=[2, 1], devices=["cpu"] * 2, executor=executor, checkpoint="never")
    batch, live = torch.randn(8, 8), list[int]()
    for before in (0, 3):
        recorder = Recorder(memory=True)
        recorder.ignore([*pipe.parameters(), batch])
        with pipe.observed_by(recorder):
            for _ in range(before):
                layers[2].now = fails
                with pytest.raises(ArithmeticError) if fails else nullcontext():
                    pipe(batch)
            layers[2].now = False
            output = pipe(batch)
            live.append(recorder.bytes[-1][1])
            later = pipe(batch)
            del output  # its step began before that of `later`
            assert pipe(batch).sum().backward() is None and recorder.bytes[-1][1] == live[0]
            later.sum().backward()
        assert recorder.bytes[-1][1] == 0
    assert live[0] == live[1] > 0


def test_tensor_returned_twice_is_one_value_with_all_readers() -> None:
    pipe = weft.Pipe(
        model(), chunks=2, balance=[2, 2, 1, 2], devices=["cpu"] * 4, checkpoint="never", executor="threads"
    )
    batch = torch.randn(12, 8)
    sizes = MemoryRecorder([*pipe.parameters(), batch])
    with pipe.observed_by(sizes):
        pipe(batch).sum().backward()
    of_first = [(value.readers, value.bytes, value.kept_by_source) for value in sizes.values() if value.source == 0]
    assert of_first == [((1, 3), 6 * 8 * 4, True), ((2, 3), 6 * 8 * 4, True)]
