"""The fourth law: for PyTorch's autograd a step of a Pipe is one ordinary node, in every mode.

Hooks fire once, `torch.autograd.grad` works, a step can be kept and walked again, and what cannot be had is
refused by name.
"""

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
from weft import Pipe
from weft.core.errors import BackwardTwiceError, DoubleBackwardError

EVERY_MODE = [
    pytest.param(checkpoint, schedule, id=f"{checkpoint}-{schedule}")
    for checkpoint in ("never", "except_last", "always")
    for schedule in ("gpipe", "1f1b")
]
CUT = ["serial", "threads", "auto"]
every_mode = pytest.mark.parametrize(("checkpoint", "schedule"), EVERY_MODE)
some = settings(max_examples=5)


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Computed inside where the schedule needs it. Squares, so that second derivatives are not zero."""
    return (objective(output) - target.mean()) ** 2


def pipe_of(plan: ModelPlan, layers: nn.ModuleList, checkpoint: Any, schedule: str, executor: Any) -> Pipe:
    """One chunk per row: then the mean over micro-batches of the mean over rows is that of the mini-batch."""
    loss = None if schedule == "gpipe" else loss_of
    return piped(plan, layers, chunks=3, checkpoint=checkpoint, schedule=schedule, loss=loss, executor=executor)


def loss_by(pipe: Pipe, schedule: str, value: Any) -> Tensor:
    """The loss outside, or inside where the schedule needs it."""
    if schedule == "gpipe":
        return objective(pipe(value)) ** 2
    return pipe(value, target=torch.zeros_like(floats(value)[0]))


def plain_loss(layers: nn.ModuleList, schedule: str, value: Any) -> Tensor:
    """The same of the undivided model; a loss inside is a mean over the rows."""
    model = Plain(layers)
    if schedule == "gpipe":
        return objective(model(value)) ** 2
    rows = len(floats(value)[0])
    pieces = [torch.utils._pytree.tree_map_only(Tensor, lambda x, i=i: x[i : i + 1], value) for i in range(rows)]
    return torch.stack([objective(model(piece)) ** 2 for piece in pieces]).mean()


def leaves_of(layers: nn.Module, value: Any) -> list[Tensor]:
    """All that wants a gradient."""
    return [x for x in [*layers.parameters(), *floats(value)] if x.requires_grad]


@every_mode
@pytest.mark.parametrize("executor", CUT)
@some
@given(plan=model_plans())
def test_a_hook_fires_once_per_step_with_the_whole_gradient(
    checkpoint: Any, schedule: str, executor: Any, plan: ModelPlan
) -> None:
    layers, value = blocks(plan), mini_batch(plan, 3)
    pipe = pipe_of(plan, layers, checkpoint, schedule, executor)
    heard: dict[str, list[Tensor]] = {}
    accumulated: dict[str, int] = {}

    def hear(name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # a parameter that the step did not use
            heard.setdefault(name, []).append(gradient.clone())

    def count(name: str, parameter: Tensor) -> None:
        accumulated[name] = accumulated.get(name, 0) + 1

    for name, p in layers.named_parameters():
        if p.requires_grad:
            p.register_hook(partial(hear, name))
            p.register_post_accumulate_grad_hook(partial(count, name))
    for step in (1, 2):
        heard.clear()
        layers.zero_grad()
        loss_by(pipe, schedule, value).backward()
        with_gradient = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
        assert heard.keys() == with_gradient.keys()
        for name, grads in heard.items():
            assert len(grads) == 1
            assert torch.equal(grads[0], with_gradient[name])
        assert all(accumulated[name] == step for name in with_gradient)


@every_mode
@pytest.mark.parametrize("executor", [*CUT, "graph"])
@some
@given(plan=model_plans())
def test_a_kept_step_gives_the_plain_gradients_again_and_a_freed_one_is_refused(
    checkpoint: Any, schedule: str, executor: Any, plan: ModelPlan
) -> None:
    layers, value = blocks(plan), mini_batch(plan, 3)
    loss = loss_by(pipe_of(plan, layers, checkpoint, schedule, executor), schedule, value)
    leaves = leaves_of(layers, value)
    wanted = torch.autograd.grad(plain_loss(layers, schedule, value), leaves, allow_unused=True)
    kept = [torch.autograd.grad(loss, leaves, retain_graph=each, allow_unused=True) for each in (True, True, False)]
    for plain, first, *others in zip(wanted, *kept, strict=True):
        assert not difference([("", first)], [("", plain)])
        assert all(each is None if first is None else torch.equal(each, first) for each in others)
    assert all(each.grad is None for each in leaves)
    with pytest.raises(RuntimeError, match="second time") as refused:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    # Where the loss is outside, its own graph may be the first to refuse, in PyTorch's words.
    if executor != "graph" and schedule == "1f1b":
        assert refused.type is BackwardTwiceError


@every_mode
@pytest.mark.parametrize("executor", CUT)
def test_backward_over_a_freed_step_is_refused_by_name(checkpoint: Any, schedule: str, executor: Any) -> None:
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
def test_the_gradient_of_a_gradient_is_refused_by_name(
    checkpoint: Any, schedule: str, executor: Any, plan: ModelPlan
) -> None:
    layers, value = blocks(plan), mini_batch(plan, 3)
    loss = loss_by(pipe_of(plan, layers, checkpoint, schedule, executor), schedule, value)
    with pytest.raises(DoubleBackwardError, match="executor='graph'"):
        loss.backward(create_graph=True)


@every_mode
@settings(max_examples=15)
@given(plan=model_plans())
def test_the_visible_graph_has_gradients_of_gradients(checkpoint: Any, schedule: str, plan: ModelPlan) -> None:
    layers, value = blocks(plan), mini_batch(plan, 3)
    twins, twin_value = twin(layers, value)

    def penalty(loss: Tensor, layers: nn.Module, value: Any) -> Tensor:
        found = torch.autograd.grad(loss, leaves_of(layers, value), create_graph=True, allow_unused=True)
        return loss + torch.stack([(x**2).sum() for x in found if x is not None]).sum()

    penalty(loss_by(pipe_of(plan, layers, checkpoint, schedule, "graph"), schedule, value), layers, value).backward()
    penalty(plain_loss(twins, schedule, twin_value), twins, twin_value).backward()
    assert not difference(gradients(layers, value), gradients(twins, twin_value))
