"""The third law: all executors agree bit for bit, including random numbers."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.laws.models import ModelPlan, blocks, difference, floats, gradients, mini_batch, objective, piped, twin
from tests.strategies import checkpoints, fitting_schedules, model_plans, valid_schedules

STEPS = 3
"""In the first step all stages lock the generator. Later, only those do that drew before."""


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A scalar of the output."""
    return objective(output) - target.mean()


def trained(plan: ModelPlan, rows: int, executor: Any, **options: Any) -> tuple[list[Tensor], list[Any], Tensor]:
    """The losses and gradients of some steps from one seed, and the state of the caller's generator."""
    layers, value = twin(blocks(plan), mini_batch(plan, rows))
    pipe = piped(plan, layers, loss=loss_of, executor=executor, **options)
    torch.manual_seed(plan.seed)
    losses: list[Tensor] = []
    for _ in range(STEPS):
        losses.append(pipe(value, target=torch.zeros(rows)))
        losses[-1].backward()
    return [loss.detach() for loss in losses], gradients(layers, value), torch.get_rng_state()


@given(data=st.data(), plan=model_plans(dropout=True))
def test_executors_agree_bit_for_bit(data: st.DataObject, plan: ModelPlan) -> None:
    chunks = data.draw(st.integers(1, 4), "chunks")
    rows = data.draw(st.integers(1, 6), "rows")
    table = data.draw(valid_schedules(len(plan.balance), chunks), "table")
    schedule = data.draw(st.sampled_from([*fitting_schedules(len(plan.balance)), table]), "schedule")
    checkpoint = data.draw(checkpoints(len(plan.balance)), "checkpoint")
    options = {"chunks": chunks, "schedule": schedule, "checkpoint": checkpoint}
    losses, grads, state = trained(plan, rows, "serial", **options)
    again, other_grads, other_state = trained(plan, rows, "threads", **options)
    assert all(map(torch.equal, losses, again))
    for (name, a), (_, b) in zip(grads, other_grads, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or b is None or torch.equal(a, b), name
    assert torch.equal(state, other_state)
    # These use another schedule or none, so they sum in another order, with the same random numbers.
    for executor in ("auto", "graph"):
        again, other_grads, other_state = trained(plan, rows, executor, **options)
        torch.testing.assert_close(again, losses, rtol=1e-12, atol=1e-12)
        assert not difference(other_grads, grads)
        assert torch.equal(state, other_state)


@given(data=st.data(), plan=model_plans(dropout=True))
def test_evaluated_outputs_agree_bit_for_bit(data: st.DataObject, plan: ModelPlan) -> None:
    layers, value = blocks(plan), mini_batch(plan, data.draw(st.integers(1, 6), "rows"))
    checkpoint = data.draw(checkpoints(len(plan.balance)), "checkpoint")
    chunks = data.draw(st.integers(1, 4), "chunks")
    outputs: list[list[Tensor]] = []
    for executor in ("serial", "threads", "auto", "graph"):
        pipe = piped(plan, layers, chunks=chunks, checkpoint=checkpoint, executor=executor).eval()
        with torch.no_grad():
            outputs.append(floats(pipe(value)))
    for other in outputs[1:]:
        assert all(map(torch.equal, outputs[0], other))
