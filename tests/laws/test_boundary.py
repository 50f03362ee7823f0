"""The fourth law: for PyTorch's autograd a step of a Pipe is one ordinary node, in every mode.

Hooks fire once, `torch.autograd.grad` works, a retained step can be differentiated again, and unsupported derivatives
are rejected with a reason.
"""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from tests.laws.models import (
    LayerPlan,
    ModelPlan,
    Plain,
    blocks,
    difference,
    floats,
    gradients,
    mini_batch,
    objective,
    piped,
    twin,
)
from tests.strategies import model_plans
from torchweft import Pipe
from torchweft.core.errors import BackwardTwiceError, DoubleBackwardError

EVERY_MODE = [
    pytest.param(checkpoint, schedule, id=f"{checkpoint}-{schedule}")
    for checkpoint in ("never", "except_last", "always")
    for schedule in ("gpipe", "1f1b")
]
CUT = ["serial", "threads", "auto"]
every_mode = pytest.mark.parametrize(("checkpoint", "schedule"), EVERY_MODE)
some = settings(max_examples=5)


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A loss inside the pipeline, for schedules that need it. Squared, so that second derivatives are not zero."""
    return (objective(output) - target.mean()) ** 2


def pipe_of(plan: ModelPlan, layers: nn.ModuleList, checkpoint: Any, schedule: str, executor: Any) -> Pipe:
    """A pipe with one chunk per row, so that the mean over micro-batches is that of the mini-batch."""
    loss = None if schedule == "gpipe" else loss_of
    return piped(plan, layers, chunks=3, checkpoint=checkpoint, schedule=schedule, loss=loss, executor=executor)


def loss_by(pipe: Pipe, schedule: str, value: Any) -> Tensor:
    """The loss, computed inside the pipe if the schedule needs it."""
    if schedule == "gpipe":
        return objective(pipe(value)) ** 2
    return pipe(value, target=torch.zeros_like(floats(value)[0]))


def plain_loss(layers: nn.ModuleList, schedule: str, value: Any) -> Tensor:
    """The loss of the undivided model. A loss inside the pipeline is a mean over the rows."""
    model = Plain(layers)
    if schedule == "gpipe":
        return objective(model(value)) ** 2
    rows = len(floats(value)[0])
    pieces = [torch.utils._pytree.tree_map_only(Tensor, lambda x, i=i: x[i : i + 1], value) for i in range(rows)]
    return torch.stack([objective(model(piece)) ** 2 for piece in pieces]).mean()


def leaves_of(layers: nn.Module, value: Any) -> list[Tensor]:
    """All tensors that require a gradient."""
    return [x for x in [*layers.parameters(), *floats(value)] if x.requires_grad]


@every_mode
@pytest.mark.parametrize("executor", CUT)
@some
@given(plan=model_plans())
def test_hook_fires_once_per_step_with_the_whole_gradient(
    checkpoint: Any, schedule: str, executor: Any, plan: ModelPlan
) -> None:
    layers, value = blocks(plan), mini_batch(plan, 3)
    pipe = pipe_of(plan, layers, checkpoint, schedule, executor)
    hooked: dict[str, list[Tensor]] = {}
    accumulated: Counter[str] = Counter()

    def record(name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # None for a parameter that the step did not use
            hooked.setdefault(name, []).append(gradient.clone())

    for name, p in layers.named_parameters():
        if p.requires_grad:
            p.register_hook(partial(record, name))
            p.register_post_accumulate_grad_hook(lambda _, name=name: accumulated.update([name]))
    for step in (1, 2):
        hooked.clear()
        layers.zero_grad()
        loss_by(pipe, schedule, value).backward()
        with_gradient = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
        assert hooked.keys() == with_gradient.keys()
        for name, grads in hooked.items():
            assert len(grads) == 1 and torch.equal(grads[0], with_gradient[name])
        assert all(accumulated[name] == step for name in with_gradient)


@every_mode
@pytest.mark.parametrize("executor", [*CUT, "graph"])
@some
@given(plan=model_plans())
def test_retained_step_repeats_and_a_freed_one_is_rejected(
    checkpoint: Any, schedule: str, executor: Any, plan: ModelPlan
) -> None:
    layers, value = blocks(plan), mini_batch(plan, 3)
    loss = loss_by(pipe_of(plan, layers, checkpoint, schedule, executor), schedule, value)
    leaves = leaves_of(layers, value)
    expected = torch.autograd.grad(plain_loss(layers, schedule, value), leaves, allow_unused=True)
    keeps = (True, True, False)
    walks = [torch.autograd.grad(loss, leaves, retain_graph=keep, allow_unused=True) for keep in keeps]
    for plain, first, *others in zip(expected, *walks, strict=True):
        assert not difference([("", first)], [("", plain)])
        assert all(other is None if first is None else torch.equal(other, first) for other in others)
    assert all(leaf.grad is None for leaf in leaves)
    with pytest.raises(RuntimeError, match="second time") as raised:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    # If the loss is outside, its own graph can raise first, with PyTorch's error.
    if executor != "graph" and schedule == "1f1b":
        assert raised.type is BackwardTwiceError


@every_mode
@pytest.mark.parametrize("executor", CUT)
def test_backward_over_a_freed_step_is_rejected(checkpoint: Any, schedule: str, executor: Any) -> None:
    plan = ModelPlan((LayerPlan(), LayerPlan()), (1, 1))
    pipe, x = pipe_of(plan, blocks(plan), checkpoint, schedule, executor), mini_batch(plan, 4)
    y = pipe(x) if schedule == "gpipe" else pipe(x, target=torch.zeros(4, 3))
    y.backward(torch.ones_like(y))
    with pytest.raises(BackwardTwiceError, match="retain_graph=True"):
        y.backward(torch.ones_like(y))


@every_mode
@pytest.mark.parametrize("executor", CUT)
@some
@given(plan=model_plans())
def test_gradient_of_a_gradient_is_rejected(checkpoint: Any, schedule: str, executor: Any, plan: ModelPlan) -> None:
    layers, value = blocks(plan), mini_batch(plan, 3)
    loss = loss_by(pipe_of(plan, layers, checkpoint, schedule, executor), schedule, value)
    with pytest.raises(DoubleBackwardError, match="executor='graph'"):
        loss.backward(create_graph=True)


@every_mode
@settings(max_examples=15)
@given(plan=model_plans())
def test_visible_graph_has_gradients_of_gradients(checkpoint: Any, schedule: str, plan: ModelPlan) -> None:
    layers, value = blocks(plan), mini_batch(plan, 3)
    twins, twin_value = twin(layers, value)

    def penalty(loss: Tensor, layers: nn.Module, value: Any) -> Tensor:
        first = torch.autograd.grad(loss, leaves_of(layers, value), create_graph=True, allow_unused=True)
        return loss + torch.stack([(x**2).sum() for x in first if x is not None]).sum()

    penalty(loss_by(pipe_of(plan, layers, checkpoint, schedule, "graph"), schedule, value), layers, value).backward()
    penalty(plain_loss(twins, schedule, twin_value), twins, twin_value).backward()
    assert not difference(gradients(layers, value), gradients(twins, twin_value))
