"""An error in a layer reaches the caller unchanged, names its place, and ends only its own step."""

import itertools
import re
import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as checkpoint_again

from tests.pipeline.pipe_cases import CHECKPOINTS, EXECUTORS, backward, chain, every_run, piped, rows
from torchweft import Pipe, pop, skippable
from torchweft.core.context import is_recomputing
from torchweft.core.errors import (
    BatchError,
    SkipWiringError,
    SpecError,
)


class LayerError(Exception):
    """An exception that no other code raises."""


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer, number):
        ctx.layer, ctx.number = layer, number
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.layer.where == "backward" and ctx.number == ctx.layer.when:
            raise LayerError(f"backward of {ctx.number}")
        return gradient, None, None


class FailingLayer(nn.Module):
    """A layer that fails on the micro-batch with the number `when` in its rows, in the phase `where`."""

    def __init__(self, where: str = "", when: int = 0) -> None:
        super().__init__()
        self.where, self.when = where, when

    def forward(self, x):
        number = int(x.detach()[0, 0])
        phase = "recomputation" if is_recomputing() else "forward"
        if self.where == phase and number == self.when:
            raise LayerError(f"{phase} of {number}")
        return FailsBackward.apply(x, self, number)


def numbered(micro_batches: int = 4) -> torch.Tensor:
    """One row per micro-batch, which holds its number."""
    return torch.arange(float(micro_batches)).repeat(2, 1).T.contiguous().requires_grad_()


def step(pipe: nn.Module) -> torch.Tensor:
    x = numbered()
    pipe(x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("where", ["forward", "backward", "recomputation"])
def test_an_exception_names_its_place_and_the_next_step_works(executor: str, checkpoint: str, where: str) -> None:
    if where == "recomputation" and checkpoint == "never":
        return
    model = nn.Sequential(nn.Identity(), FailingLayer(), nn.Identity(), FailingLayer(), nn.Identity(), FailingLayer())
    pipe = Pipe(model, chunks=4, balance=[2, 2, 2], devices=["cpu"] * 3, executor=executor, checkpoint=checkpoint)
    for stage, when in itertools.product((0, 1, 2), (0, 2, 3)):
        layer = model[2 * stage + 1]
        if where == "recomputation" and checkpoint == "except_last" and when == 3:
            continue
        layer.where, layer.when = where, when
        with pytest.raises(LayerError, match=f"{where} of {when}") as caught:
            step(pipe)
        notes = "\n".join(caught.value.__notes__)
        word = "forward" if where == "forward" else "backward"
        assert f"in {word} of stage {stage}, micro-batch {when}" in notes
        if where != "backward":
            assert f"layer '{2 * stage + 1}' (FailingLayer) of stage {stage}" in notes
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-1] in ("forward", "backward") and "step" in frames
        layer.where = ""
        assert torch.equal(step(pipe), torch.ones(4, 2))


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("where", ["forward", "backward", "recomputation"])
@pytest.mark.parametrize("full", [False, True])
def test_traceback_has_the_users_frames_and_one_of_torchweft(
    executor: str, checkpoint: str, where: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (checkpoint, where) == ("never", "recomputation"):
        return
    monkeypatch.setenv("TORCHWEFT_FULL_TRACEBACK", str(int(full)))
    layer = FailingLayer(where)
    pipe, _ = piped(nn.Sequential(nn.Identity(), nn.Sequential(layer)), balance=[1, 1], executor=executor)
    pipe.checkpoint = checkpoint
    with pytest.raises(LayerError) as caught:
        step(pipe)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    frames = [frame for frame in frames if not frame.f_code.co_filename.startswith("<@beartype")]  # only in tests
    names = [(str(frame.f_globals["__name__"]), frame.f_code.co_name) for frame in frames]
    ours = [name for name in names if name[0].startswith("torchweft.")]
    user = [name for module, name in names if module == __name__]
    assert user[1:] == ["step", "backward" if where == "backward" else "forward"]
    assert len(ours) > 9 if full else len(ours) == 1


def test_internal_error_keeps_its_full_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, _ = piped(chain(4, 4), executor="serial")
    monkeypatch.setattr("torchweft.pipeline.pipe_runtime.build", lambda schedule, *_: schedule.nothing)
    with pytest.raises(AttributeError) as caught:
        pipe(rows(5, 4))
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 4


@pytest.mark.parametrize("executor", ["serial", "threads", "auto"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_an_exception_with_the_loss_inside_is_the_same(executor: str, schedule: str, where: str) -> None:
    broken = [True]

    def loss(output, target):
        if broken[0] and where == "loss" and target[0] == 2:
            raise LayerError("loss")
        return (output * target).sum()

    model = nn.Sequential(FailingLayer(where, 2), nn.Identity(), nn.Identity())
    pipe, _ = piped(model, chunks=4, executor=executor, schedule=schedule, loss=loss, loss_reduction="sum")
    for _ in range(2):
        broken[0], model[0].where = True, where
        with pytest.raises(LayerError) as caught:
            pipe(numbered(), target=torch.arange(4.0).unsqueeze(1)).backward()
        notes = "\n".join(caught.value.__notes__)
        assert re.search(r"stage \d, micro-batch \d", notes)
        assert ("in the loss function" in notes) == (where == "loss")
        broken[0], model[0].where = False, ""
        x = numbered()
        pipe(x, target=torch.ones(4, 1)).backward()
        assert torch.equal(x.grad, torch.ones(4, 2))


@every_run
def test_an_exception_under_no_grad_is_the_same(executor: str, checkpoint: str) -> None:
    model = nn.Sequential(nn.Identity(), FailingLayer("forward", 1))
    pipe, _ = piped(model, chunks=4, executor=executor, checkpoint=checkpoint)
    with torch.no_grad():
        with pytest.raises(LayerError):
            pipe(numbered())
        model[1].where = ""
        assert torch.equal(pipe(numbered()), numbered())


class Hooks(nn.Module):
    def forward(self, x):
        x = x * 2
        x.register_hook(lambda gradient: gradient)
        return x


class Reentrant(nn.Module):
    def forward(self, x):
        return checkpoint_again(torch.sin, x, use_reentrant=True)


class Writes(nn.Module):
    def forward(self, x):
        return functional.relu(x, inplace=True)


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize(
    ("layer", "checkpoint", "advice"),
    [
        (Hooks(), "always", r"if y.requires_grad.*checkpoint='never'"),
        (Reentrant(), "never", "use_reentrant=False"),
        (Writes(), "never", "inplace=False"),
    ],
)
def test_layer_that_cannot_be_cut_fails_with_advice(executor, layer, checkpoint: str, advice: str) -> None:
    pipe, _ = piped(nn.Sequential(*chain(4, 4), layer), balance=[1, 1], executor=executor, checkpoint=checkpoint)
    with pytest.raises(RuntimeError) as caught:
        backward(pipe, rows(5, 4))
    notes = caught.value.__notes__
    assert any(re.search(advice, note) for note in notes) and any("of stage 1" in note for note in notes)


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
@pytest.mark.parametrize("words", ["CUDA out of memory. Tried", "DefaultCPUAllocator: not enough memory: you tried"])
def test_an_out_of_memory_error_suggests_recomputation(executor: str, words: str) -> None:
    class Huge(nn.Module):
        def forward(self, x):
            raise torch.OutOfMemoryError(f"{words} to allocate 2.00 GiB")

    pipe, _ = piped(nn.Sequential(*chain(4, 4), Huge()), balance=[1, 1], executor=executor)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe(rows(5, 4))
    assert sum("checkpoint='except_last'" in note for note in caught.value.__notes__) == 1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_simultaneous_failures_raise_one_error(executor: str) -> None:
    model = nn.Sequential(FailingLayer("backward", 3), FailingLayer("backward", 3), FailingLayer("backward", 2))
    pipe = Pipe(model, chunks=4, balance=[1, 1, 1], devices=["cpu"] * 3, executor=executor)
    for _ in range(5):
        with pytest.raises(LayerError):
            step(pipe)


# --- arguments


def test_skips_that_do_not_fit_are_refused() -> None:
    @skippable(pop=["early"])
    class Late(nn.Module):
        def forward(self, x):
            return x + (yield pop("early"))

    with pytest.raises(SkipWiringError, match="early"):
        Pipe(nn.Sequential(Late()), chunks=2)


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_a_target_of_another_length_is_refused(executor: str) -> None:
    pipe, _ = piped(chain(4, 3, 2), executor=executor, loss=nn.MSELoss())
    with pytest.raises(BatchError, match=r"\(input, target\)(.|\n)*7 rows(.|\n)*6 rows"):
        pipe(rows(7, 4), target=rows(6, 2))


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_a_target_without_its_name_gets_a_hint(executor: str) -> None:
    pipe, _ = piped(chain(4, 3, 2), executor=executor, loss=nn.MSELoss())
    with pytest.raises(TypeError, match="positional") as caught:
        pipe(rows(7, 4), rows(7, 2))
    assert "target=y" in caught.value.__notes__[-1]


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_loss_must_be_a_number(executor: str) -> None:
    pipe, _ = piped(chain(4, 3, 2), executor=executor, loss=lambda output, target: output - target)
    with pytest.raises(SpecError, match=r"shape \(3, 2\)"):
        pipe(rows(7, 4), target=rows(7, 2))
