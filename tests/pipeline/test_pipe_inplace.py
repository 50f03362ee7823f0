"""Layers that write into their input or running statistics. The results are exact, or there is an error."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.pipe_cases import (
    EXECUTORS,
    Early,
    Late,
    assert_alike,
    assert_close,
    assert_gradients_equal,
    backward,
    every_run,
    piped,
    rows,
)
from torchweft import NoChunk
from torchweft.core.errors import InPlaceError


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 4).double()


def models() -> dict[str, nn.Sequential]:
    """Models with in-place layers at different places around a cut after two layers."""
    return {
        "relu": nn.Sequential(linear(), nn.Identity(), nn.ReLU(inplace=True), linear()),
        "nested": nn.Sequential(linear(), nn.Identity(), nn.Sequential(nn.ReLU(inplace=True), linear())),
        "later": nn.Sequential(linear(), nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True), linear()),
        "last": nn.Sequential(linear(), nn.Identity(), linear(), nn.ReLU(inplace=True)),
        "everywhere": nn.Sequential(nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True), linear()),
        "dropout": nn.Sequential(linear(), nn.Identity(), nn.Dropout(0.0, inplace=True), linear()),
    }


@every_run
@pytest.mark.parametrize("name", models())
def test_in_place_layers_of_pytorch_give_plain_gradients(name: str, executor: str, checkpoint: str) -> None:
    model = models()[name]
    pipe, plain = piped(model, balance=[2, len(model) - 2], executor=executor, checkpoint=checkpoint)
    for _ in range(2):
        assert_alike(pipe, plain)


@every_run
def test_input_with_gradient_can_enter_an_in_place_layer(executor: str, checkpoint: str) -> None:
    pipe, _ = piped(models()["everywhere"], executor=executor, checkpoint=checkpoint)
    x = rows(7, 4).requires_grad_()
    before = x.detach().clone()
    backward(pipe, x)
    assert torch.equal(x.detach(), before)
    assert (x.grad[before <= 0] == 0).all() and x.grad.abs().sum() > 0


class Doubles(nn.Module):
    """In-place layer without an `inplace` attribute."""

    def forward(self, x):
        return x.mul_(2)


@every_run
@pytest.mark.parametrize("where", [0, 1, 2, 3, "into a skip"])
def test_a_layer_that_writes_unannounced_is_right_or_an_error(executor: str, checkpoint: str, where: Any) -> None:
    layers = [linear(), nn.Tanh(), linear(), linear()]
    if where == "into a skip":
        layers = [linear(), Early(), Doubles(), linear(), Late()]
    else:
        layers.insert(where, Doubles())
    pipe, plain = piped(nn.Sequential(*layers), balance=[2, 3], executor=executor, checkpoint=checkpoint)
    for _ in range(2):
        try:
            seen = backward(pipe, rows(7, 4))
        except RuntimeError as error:
            assert re.search(r"in.?place", str(error))
            # With executor="graph", backward is run by autograd, which does not know the stages.
            assert "stage" in "".join([str(error), *getattr(error, "__notes__", [])]) or executor == "graph"
            return
        assert_close(seen, backward(plain, rows(7, 4)))
        assert_gradients_equal(pipe, plain)


class Decays(nn.Module):
    """Writes into its second input."""

    def forward(self, x, factor):
        return x * factor.mul_(0.5)


@every_run
@pytest.mark.parametrize("whole", [NoChunk(torch.ones(4)), torch.ones(())])
def test_a_write_into_a_shared_value_is_an_error(executor: str, checkpoint: str, whole) -> None:
    pipe, _ = piped(nn.Sequential(Decays(), linear()), executor=executor, checkpoint=checkpoint)
    with pytest.raises(InPlaceError, match=r"clone|out-of-place"):
        pipe(rows(7, 4), whole)
    with torch.no_grad(), pytest.raises(InPlaceError, match="clone"):
        pipe(rows(7, 4), whole)
    pipe, _ = piped(nn.Sequential(Decays(), linear()), executor=executor, checkpoint="never", chunks=1)
    factor = torch.ones(4)
    pipe(rows(7, 4), NoChunk(factor))
    assert factor.tolist() == [0.5] * 4, "one micro-batch: one write, as without a pipe"


@every_run
def test_in_place_layer_leaves_a_skip_of_its_input_alone(executor: str, checkpoint: str) -> None:
    """The layer writes into a copy made by the stage, so that the stashed tensor is unchanged."""
    layers = [linear(), Early(), nn.ReLU(inplace=True), linear(), Late()]
    pipe, plain = piped(nn.Sequential(*layers), balance=[2, 3], executor=executor, checkpoint=checkpoint)
    plain[2].inplace = False
    for _ in range(2):
        assert_alike(pipe, plain)


@every_run
@pytest.mark.parametrize(("count", "schedule"), [(8, None), (3, "gpipe"), (2, None), (8, "1f1b")])
def test_a_deferred_batch_norm_counts_the_mini_batch_once(
    executor: str, checkpoint: str, count: int, schedule: str | None
) -> None:
    """With 3 and 2 images, there are fewer rows than chunks. With a schedule, the pipe computes the loss."""
    model = nn.Sequential(nn.BatchNorm2d(2).double(), nn.Tanh(), nn.BatchNorm2d(2, momentum=None).double())
    settings = {"executor": executor, "checkpoint": checkpoint, "deferred_batch_norm": True}
    if schedule:
        settings.update(schedule=schedule, loss=nn.MSELoss())
    pipe, plain = piped(model, chunks=4, balance=[1, 2], **settings)
    for step in range(1, 3):
        x = rows(count, 2, 3, 3, seed=step)
        if schedule:
            pipe(x, target=x).backward()
        else:
            backward(pipe, x)
        plain[0](x)
        assert pipe[0].num_batches_tracked == pipe[2].num_batches_tracked == step
        # The input of the second norm is normalized per micro-batch, so only the first norm is compared.
        assert_close(pipe[0].running_mean, plain[0].running_mean)
        assert_close(pipe[0].running_var, plain[0].running_var)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failed_step_leaves_no_trace_in_deferred_statistics(executor: str) -> None:
    class Fails(nn.Module):
        broken = True

        def forward(self, x):
            if self.broken:
                raise ValueError("no")
            return x

    model = nn.Sequential(nn.BatchNorm1d(4).double(), Fails())
    pipe, _ = piped(model, executor=executor, deferred_batch_norm=True)
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(ValueError, match="no"):
        pipe(rows(8, 4))
    for name, seen in pipe.state_dict().items():
        assert torch.equal(seen, before[name]), name
    pipe[1].broken = False
    backward(pipe, rows(8, 4))
    assert pipe[0].num_batches_tracked == 1


class Overlapping(nn.Module):
    """Returns one tensor twice, a view of it, and the input."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.line, self.apart = nn.Linear(4, 4), apart

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.line(x)
        returned = (y, y, y[:, :2], x)
        return tuple(tensor.clone() for tensor in returned) if self.apart else returned


@every_run
@pytest.mark.parametrize("chunks", [1, 3])
def test_write_to_an_output_changes_nothing_else(executor: str, checkpoint: str, chunks: int) -> None:
    torch.manual_seed(3)
    pipe, plain = piped(
        nn.Sequential(Overlapping(False)).double(),
        executor=executor,
        checkpoint=checkpoint,
        chunks=chunks,
        devices="cpu",
    )
    plain[0].apart = True

    def step(model: nn.Module) -> list[Tensor | None]:
        x = rows(6, 4).requires_grad_()
        h = 2 * x
        outputs = list(model(h))
        outputs[0].mul_(3)
        outputs[3].add_(1)
        sum((tensor * tensor).sum() for tensor in (*outputs, h)).backward()
        return [*outputs, h, x.grad]

    assert_alike(pipe, plain, step)
