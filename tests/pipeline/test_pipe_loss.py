"""With the loss inside, a plain ``backward()`` gives the gradients of the undivided loss under any schedule."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor

from tests.pipeline.pipe_cases import (
    EXECUTORS,
    TABLE,
    assert_alike,
    assert_close,
    assert_gradients_equal,
    chain,
    every_run,
    every_schedule,
    piped,
    rows,
    without_target,
)
from torchweft import Pipe, Schedule


def pipe_with_loss(loss: Any, **settings: Any) -> tuple[Pipe, nn.Sequential]:
    """A pipe that computes the loss, and the plain model."""
    return piped(chain(4, 5, 3), balance=[2, 1], loss=loss, **settings)


@every_schedule
@every_run
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_equals_that_of_the_undivided_mini_batch(
    executor: str, checkpoint: str, schedule: str, reduction: str
) -> None:
    loss = nn.MSELoss(reduction=reduction)
    pipe, plain = pipe_with_loss(loss, executor=executor, checkpoint=checkpoint, schedule=schedule)
    for count in (7, 3, 8):
        x, y = rows(count, 4, seed=count), rows(count, 3, seed=count + 1)
        seen, expected = pipe(x, target=y), loss(plain(x), y)
        assert seen.shape == ()
        assert_close(seen, expected)
        for pair in (seen, expected):
            pair.backward(retain_graph=True)
            (pair / count).backward()
            with pytest.raises(RuntimeError, match="retain_graph=True"):
                pair.backward()
        assert_gradients_equal(pipe, plain)
    with torch.no_grad():
        evaluated = pipe(x, target=y)
    assert not evaluated.requires_grad
    assert_close(evaluated, expected.detach())


@pytest.mark.usefixtures("process_group")
@every_schedule
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("from_layer", [0, 2])
def test_a_loss_may_be_a_distributed_tensor(executor: str, schedule: str, from_layer: int) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).sum()

    def to_distributed(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(DTensor.from_local(arg, mesh) for arg in args)

    pipe, plain = pipe_with_loss(loss, executor=executor, schedule=schedule, loss_reduction="sum")
    for layer in list(pipe)[from_layer:]:
        distribute_module(layer, mesh)
    pipe[from_layer].register_forward_pre_hook(to_distributed)
    x, y = rows(7, 4), rows(7, 3)
    for factor in (1, 3):
        seen = pipe(x, target=distribute_tensor(y, mesh))
        (factor * seen).backward()
        (factor * loss(plain(x), y)).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert_close(getattr(mine.grad, "to_local", lambda g=mine.grad: g)(), theirs.grad)


class Learned(nn.Module):
    """Loss with a trainable weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))

    def forward(self, output, target):
        return ((output - target) * self.weight).square().mean()


@every_schedule
@every_run
def test_input_target_and_loss_parameters_get_gradients_too(executor: str, checkpoint: str, schedule: str) -> None:
    loss, gradients = Learned(), list[list[Tensor | None]]()
    pipe, plain = pipe_with_loss(loss, executor=executor, checkpoint=checkpoint, schedule=schedule)
    for call in (lambda x, y: pipe(x, target=y), lambda x, y: loss(plain(x), y)):
        x, y = rows(7, 4).requires_grad_(), rows(7, 3).requires_grad_()
        loss.weight.grad = None
        (2 * call(x, y)).backward()
        gradients.append([x.grad, y.grad, loss.weight.grad])
    assert_close(*gradients)
    assert_gradients_equal(pipe, plain)
    assert list(pipe.state_dict()) == list(plain.state_dict())


@without_target
@every_schedule
@every_run
def test_without_a_target_the_pipe_returns_its_output_and_trains(executor: str, checkpoint: str, schedule: str) -> None:
    pipe, plain = pipe_with_loss(nn.MSELoss(), executor=executor, checkpoint=checkpoint, schedule=schedule)
    for _ in range(2):
        assert_alike(pipe, plain)


def test_schedule_value_is_shortened_for_small_batches() -> None:
    schedule, loss = Schedule.parse(TABLE), nn.MSELoss()
    pipe, plain = pipe_with_loss(loss, schedule=schedule)
    for count in (9, 2, 1):
        pipe(rows(count, 4), target=rows(count, 3)).backward()
        loss(plain(rows(count, 4)), rows(count, 3)).backward()
    assert_gradients_equal(pipe, plain)
    assert pipe.schedule_for(2) == schedule.restricted(2)
