"""With the loss inside, a plain ``backward()`` gives the gradients of the undivided loss under any schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor

from tests.pipeline.pipe_cases import (
    EXECUTORS,
    assert_close,
    assert_gradients_equal,
    backward,
    chain,
    every_run,
    piped,
    rows,
)
from weft import Pipe, Schedule
from weft.core.errors import UsageError

TABLE = """
0F0,0F1,,0B0,0F2,0B2,0B1
1F0,1B0,1F1,1F2,1B2,1B1
"""  # nobody's schedule, but a valid one
SPLIT = """
0F0,0F1,0F2,0I0,0W0,0I1,0I2,0W2,0W1
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2
"""
SCHEDULES = ("gpipe", "1f1b", TABLE, SPLIT)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=("gpipe", "1f1b", "table", "split"))


@every_schedule
@every_run
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_and_its_gradients_are_those_of_the_undivided_mini_batch(
    executor: str, checkpoint: str, schedule: str, reduction: str
) -> None:
    loss = nn.MSELoss(reduction=reduction)
    pipe, plain = piped(
        chain(4, 5, 3), balance=[2, 1], executor=executor, checkpoint=checkpoint, schedule=schedule, loss=loss
    )
    for count in (7, 3, 8):
        x, y = rows(count, 4, seed=count), rows(count, 3, seed=count + 1)
        seen, wanted = pipe(x, target=y), loss(plain(x), y)
        assert seen.shape == ()
        assert_close(seen, wanted)
        seen.backward()
        wanted.backward()
        assert_gradients_equal(pipe, plain)


@pytest.mark.usefixtures("process_group")
@every_schedule
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("from_layer", [0, 2])
def test_a_loss_may_be_a_distributed_tensor(executor: str, schedule: str, from_layer: int) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).sum()

    def entered(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(DTensor.from_local(each, mesh) for each in args)

    pipe, plain = piped(
        chain(4, 5, 3), balance=[2, 1], executor=executor, schedule=schedule, loss=loss, loss_reduction="sum"
    )
    for layer in list(pipe)[from_layer:]:
        distribute_module(layer, mesh)
    pipe[from_layer].register_forward_pre_hook(entered)
    x, y = rows(7, 4), rows(7, 3)
    for factor in (1, 3):
        seen = pipe(x, target=distribute_tensor(y, mesh))
        (factor * seen).backward()
        (factor * loss(plain(x), y)).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert_close(getattr(mine.grad, "to_local", lambda g=mine.grad: g)(), theirs.grad)


@given(
    count=st.integers(1, 9),
    chunks=st.integers(1, 9),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    factor=st.floats(-8, 8),
)
def test_whatever_is_done_with_the_loss_scales_the_gradients(
    count: int, chunks: int, schedule: str, factor: float
) -> None:
    loss = nn.L1Loss()
    pipe, plain = piped(chain(3, 4, 2), chunks=chunks, executor="serial", schedule=schedule, loss=loss)
    x, y = rows(count, 3), rows(count, 2, seed=1)
    (factor * pipe(x, target=y)).backward()
    (factor * loss(plain(x), y)).backward()
    assert_gradients_equal(pipe, plain)


@every_schedule
@every_run
def test_gradients_accumulate_over_scaled_steps(executor: str, checkpoint: str, schedule: str) -> None:
    loss = nn.MSELoss()
    pipe, plain = piped(
        chain(4, 5, 3), balance=[2, 1], executor=executor, checkpoint=checkpoint, schedule=schedule, loss=loss
    )
    for step in range(1, 4):
        x, y = rows(6, 4, seed=step), rows(6, 3, seed=-step)
        (pipe(x, target=y) / step).backward()
        (loss(plain(x), y) / step).backward()
    assert_gradients_equal(pipe, plain)


@every_schedule
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_input_and_the_target_get_gradients_too(executor: str, schedule: str) -> None:
    loss = nn.MSELoss()
    pipe, plain = piped(chain(4, 5, 3), balance=[2, 1], executor=executor, schedule=schedule, loss=loss)
    found = []
    for call in (lambda x, y: pipe(x, target=y), lambda x, y: loss(plain(x), y)):
        x, y = rows(7, 4).requires_grad_(), rows(7, 3).requires_grad_()
        (2 * call(x, y)).backward()
        found.append([x.grad, y.grad])
    assert_close(*found)


class Learned(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))

    def forward(self, output, target):
        return ((output - target) * self.weight).square().mean()


@every_schedule
@every_run
def test_a_loss_may_have_parameters_of_its_own(executor: str, checkpoint: str, schedule: str) -> None:
    loss = Learned()
    pipe, plain = piped(
        chain(4, 5, 3), balance=[2, 1], executor=executor, checkpoint=checkpoint, schedule=schedule, loss=loss
    )
    x, y = rows(7, 4), rows(7, 3)
    pipe(x, target=y).backward()
    seen, loss.weight.grad = loss.weight.grad, None
    loss(plain(x), y).backward()
    assert_close(seen, loss.weight.grad)
    assert_gradients_equal(pipe, plain)
    assert list(pipe.state_dict()) == list(plain.state_dict())


@every_schedule
@every_run
def test_without_a_target_the_pipe_returns_its_output_and_trains(executor: str, checkpoint: str, schedule: str) -> None:
    pipe, plain = piped(
        chain(4, 5, 3), balance=[2, 1], executor=executor, checkpoint=checkpoint, schedule=schedule, loss=nn.MSELoss()
    )
    for _ in range(2):
        assert_close(backward(pipe, rows(7, 4)), backward(plain, rows(7, 4)))
    assert_gradients_equal(pipe, plain)


@every_schedule
@pytest.mark.parametrize("executor", EXECUTORS)
def test_under_no_grad_the_loss_is_a_number(executor: str, schedule: str) -> None:
    loss = nn.MSELoss()
    pipe, plain = piped(chain(4, 5, 3), balance=[2, 1], executor=executor, schedule=schedule, loss=loss)
    with torch.no_grad():
        seen = pipe(rows(7, 4), target=rows(7, 3))
    assert not seen.requires_grad
    assert_close(seen, loss(plain(rows(7, 4)), rows(7, 3)))


@every_schedule
@every_run
def test_retain_graph_works_with_the_loss_inside(executor: str, checkpoint: str, schedule: str) -> None:
    loss = nn.MSELoss()
    pipe, plain = piped(
        chain(4, 5, 3), balance=[2, 1], executor=executor, checkpoint=checkpoint, schedule=schedule, loss=loss
    )
    seen, wanted = pipe(rows(7, 4), target=rows(7, 3)), loss(plain(rows(7, 4)), rows(7, 3))
    for each in (seen, wanted):
        each.backward(retain_graph=True)
        each.backward()
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            each.backward()
    assert_gradients_equal(pipe, plain)


@every_schedule
@pytest.mark.parametrize("executor", EXECUTORS)
def test_targets_may_be_nested_whole_numbers(executor: str, schedule: str) -> None:
    def loss(output, target):
        return nn.functional.cross_entropy(output, target["class"]) * target["factor"]

    pipe, plain = piped(chain(4, 5, 3), balance=[2, 1], executor=executor, schedule=schedule, loss=loss)
    target = {"class": torch.tensor([0, 1, 2, 0, 1, 2, 0]), "factor": 3}
    pipe(rows(7, 4), target=target).backward()
    loss(plain(rows(7, 4)), target).backward()
    assert_gradients_equal(pipe, plain)


def test_a_schedule_may_be_a_value_and_is_cut_for_smaller_batches() -> None:
    schedule = Schedule.parse(TABLE)
    loss = nn.MSELoss()
    pipe, plain = piped(chain(4, 5, 3), balance=[2, 1], schedule=schedule, loss=loss)
    for count in (9, 2, 1):
        pipe(rows(count, 4), target=rows(count, 3)).backward()
        loss(plain(rows(count, 4)), rows(count, 3)).backward()
    assert_gradients_equal(pipe, plain)
    assert pipe.schedule_for(2) == schedule.restricted(2)


def test_a_reduction_that_is_no_number_per_micro_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="'none'"):
        Pipe(chain(4, 3), chunks=2, loss=nn.MSELoss(reduction="none"))
