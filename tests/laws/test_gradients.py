"""The first law: a Pipe computes what the undivided model computes, output and every gradient, to rounding.

Whatever the model, its cut, its skips, the mini-batch, the checkpoint mode, the schedule and the executor.
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
from tests.strategies import checkpoints, fitting_schedules, model_plans, splitting, valid_schedules

STEPS = 2
"""The second step finds what the first one left behind; under "auto" it is run by the other candidate."""


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
    return (table if inside else splitting(table)), inside


@pytest.mark.parametrize("executor", ["serial", "threads", "auto", "graph"])
@pytest.mark.parametrize("kind", ["named", "table", "table, loss outside"])
@given(data=st.data(), plan=model_plans())
def test_outputs_and_gradients_are_those_of_the_undivided_model(
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
        wanted = plain(twin_value)
        if inside:
            loss, wanted_loss = pipe(value, target=target), loss_against(wanted, target)
        else:
            output = pipe(value)
            assert_equal_values(output, wanted)
            loss, wanted_loss = objective(output), objective(wanted)
        torch.testing.assert_close(loss, wanted_loss, rtol=1e-10, atol=1e-10)
        ((step + 2) * loss).backward()
        ((step + 2) * wanted_loss).backward()
    assert not difference(gradients(layers, value), gradients(twins, twin_value))


def assert_equal_values(seen: Any, wanted: Any) -> None:
    """Nested alike, tensors equal to rounding, all else equal."""
    pairs = zip(pytree.tree_leaves(seen), pytree.tree_leaves(wanted), strict=True)
    assert pytree.tree_structure(seen) == pytree.tree_structure(wanted)
    for x, y in pairs:
        if isinstance(y, Tensor):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
            assert x.requires_grad == y.requires_grad
        else:
            assert x == y
