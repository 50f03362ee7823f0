"""The first law: a Pipe has the outputs and all gradients of the undivided model, to rounding.

The law holds for every model, cut, skip, mini-batch, checkpoint mode, schedule and executor.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.laws.models import (
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
from tests.strategies import checkpoints, fitting_schedules, forwards_first, model_plans, valid_schedules

STEPS = 2
"""The second step starts from the state that the first one left. Under "auto" another candidate runs it."""


def loss_against(output: Any, target: Tensor) -> Tensor:
    """A loss inside the pipeline: the mean over rows."""
    return ((torch.stack(floats(output)).sum(0) - target) ** 2).sum(1).mean()


@st.composite
def schedules_for(draw: st.DrawFn, kind: str, stages: int, chunks: int) -> tuple[Any, bool]:
    """A schedule of the kind, and whether the loss is computed inside."""
    if kind == "named":
        name = draw(st.sampled_from(fitting_schedules(stages)))
        return name, name not in ("gpipe", "looped_bfs") or draw(st.booleans())
    inside = kind != "table, loss outside"
    table = draw(valid_schedules(stages, chunks))
    return (table if inside else forwards_first(table)), inside


@pytest.mark.parametrize("executor", ["serial", "threads", "auto", "graph"])
@pytest.mark.parametrize("kind", ["named", "table", "table, loss outside"])
@given(data=st.data(), plan=model_plans())
def test_outputs_and_gradients_equal_the_undivided_model(
    executor: Any, kind: str, data: st.DataObject, plan: ModelPlan
) -> None:
    stages, chunks = len(plan.balance), data.draw(st.integers(1, 4), "chunks")
    schedule, inside = data.draw(schedules_for(kind, stages, chunks), "schedule")
    layers, value = blocks(plan), mini_batch(plan, data.draw(st.integers(1, 7), "rows"))
    target = torch.ones_like(floats(value)[0])
    twins, twin_value = twin(layers, value)
    pipe = piped(
        plan,
        layers,
        chunks=chunks,
        checkpoint=data.draw(checkpoints(stages), "checkpoint"),
        schedule=schedule,
        loss=loss_against if inside else None,
        executor=executor,
    )
    plain = Plain(twins)
    for step in range(STEPS):  # gradients add up over the steps, as they do in PyTorch
        expected = plain(twin_value)
        if inside:
            loss, plain_loss = pipe(value, target=target), loss_against(expected, target)
        else:
            output = pipe(value)
            assert_equal_values(output, expected)
            loss, plain_loss = objective(output), objective(expected)
        torch.testing.assert_close(loss, plain_loss, rtol=1e-10, atol=1e-10)
        ((step + 2) * loss).backward()
        ((step + 2) * plain_loss).backward()
    assert not difference(gradients(layers, value), gradients(twins, twin_value))


def assert_equal_values(value: Any, expected: Any) -> None:
    """Assert equal structures, tensors equal to rounding, and other leaves equal."""
    assert pytree.tree_structure(value) == pytree.tree_structure(expected)
    for x, y in zip(pytree.tree_leaves(value), pytree.tree_leaves(expected), strict=True):
        if isinstance(y, Tensor):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
            assert x.requires_grad == y.requires_grad
        else:
            assert x == y
