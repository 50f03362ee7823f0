"""A parameter that a segment reads without registering it is reported, not lost."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.pipeline.pipe_cases import CUTS, assert_alike, assert_close, backward, chain, every_cut_run, piped, rows
from torchweft import Pipe
from torchweft.core.errors import UsageError


class Reads(nn.Module):
    """Layer that adds a tensor of another module, without registering it."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.others[0].sum()


@every_cut_run
def test_a_parameter_of_another_stage_is_an_error_that_names_it(executor: str, checkpoint: str) -> None:
    model = chain(4, 5, 3)
    model.append(Reads(model[0].bias))
    pipe, _ = piped(model, executor=executor, checkpoint=checkpoint, balance=[2, 2])
    for _ in range(2):  # also in later steps
        with pytest.raises(UsageError, match=r"stage 1 .*\n  - 0\.bias of stage 0"):
            backward(pipe, rows(7, 4))


@pytest.mark.parametrize("executor", CUTS)
def test_late_penalty_is_found_before_the_steps_have_doubled(executor: str) -> None:
    model, scale = chain(4, 5, 3), [0.0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        penalty = scale[0] * model[0].weight.square().sum() if scale[0] else 0
        return (output - target).square().mean() + penalty

    pipe = Pipe(model, chunks=2, devices=["cpu"] * 2, executor=executor, loss=loss)
    for _ in range(4):
        pipe(rows(6, 4), target=rows(6, 3)).backward()
    scale[0] = 1.0
    with pytest.raises(UsageError, match="penalty on weights"):
        for _ in range(5):
            pipe(rows(6, 4), target=rows(6, 3)).backward()


@every_cut_run
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_penalty_on_weights_inside_the_loss_is_an_error(executor: str, checkpoint: str, schedule: str) -> None:
    model = chain(4, 5, 3)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() + sum(parameter.square().sum() for parameter in model.parameters())

    pipe = Pipe(
        model, chunks=3, devices=["cpu"] * 2, executor=executor, checkpoint=checkpoint, schedule=schedule, loss=loss
    )
    with pytest.raises(UsageError, match="penalty on weights"):
        pipe(rows(7, 4), target=rows(7, 3)).backward()


@pytest.mark.parametrize(("executor", "balance"), [("graph", [2, 2]), ("serial", [4]), ("threads", [4])])
def test_no_error_without_a_lost_gradient(executor: str, balance: list[int]) -> None:
    model = chain(4, 5, 3)
    model.append(Reads(model[0].bias))
    pipe = Pipe(model, chunks=3, devices=["cpu"] * len(balance), executor=executor, balance=balance)
    plain = chain(4, 5, 3)
    plain.append(Reads(plain[0].bias))
    assert_alike(pipe, plain)


@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.requires_grad_])
@pytest.mark.parametrize("executor", CUTS)
def test_unregistered_trainable_tensor_is_warned_of_once(executor: str, kind: Callable[[Tensor], Tensor]) -> None:
    hidden = kind(torch.ones(2, dtype=torch.float64))
    model = chain(4, 5, 3)
    model.append(Reads(hidden))
    pipe, _ = piped(model, executor=executor, balance=[2, 2])
    with pytest.warns(UserWarning, match=r"stage 1 .*\(2,\).*requires_grad_\(False\)"):
        backward(pipe, rows(7, 4))
    with warnings.catch_warnings(action="error"):
        backward(pipe, rows(7, 4))
    frozen, _ = piped(nn.Sequential(*chain(4, 5), Reads(hidden.requires_grad_(False))), executor=executor)
    with warnings.catch_warnings(action="error"):
        backward(frozen, rows(7, 4))


class Force(nn.Module):
    """Layer that differentiates with respect to a leaf that it creates."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return torch.zeros_like(x)
        leaf = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(leaf).square().sum(), leaf, create_graph=True)
        return force


@pytest.mark.parametrize("executor", CUTS)
def test_leaf_that_a_layer_creates_is_accepted(executor: str) -> None:
    pipe, plain = piped(nn.Sequential(*chain(4, 4), Force()).double(), executor=executor, checkpoint="never")
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            assert_alike(pipe, plain)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("executor", CUTS)
def test_sharded_layers_are_refused_and_a_sharded_pipe_works(executor: str) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = chain(4, 5, 3)
    sharded = Pipe(copy.deepcopy(model), chunks=3, devices=["cpu"] * 2, executor=executor)
    fully_shard(sharded, mesh=mesh)
    backward(sharded, rows(7, 4))
    backward(model, rows(7, 4))
    for seen, expected in zip(sharded.parameters(), model.parameters(), strict=True):
        assert_close(cast(Any, seen.grad).full_tensor(), expected.grad)
    fully_shard(model[2], mesh=mesh)
    with pytest.raises(UsageError, match=r"stage 1 shards its own parameters \(FSDPLinear\).*fully_shard\(pipe\)"):
        backward(Pipe(model, chunks=3, devices=["cpu"] * 2, executor=executor), rows(7, 4))
