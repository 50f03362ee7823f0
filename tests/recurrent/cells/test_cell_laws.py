"""Laws of every cell of the zoo, for all backends and memory modes, in chunks of two steps."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recurrent.cells.zoo_cases import SAMPLE, ZOO, ZooCase, sampled
from tests.recurrent.recurrent_cases import (
    BACKENDS,
    as_the_loop,
    close,
    eagerly,
    equal,
    floats,
    gradients,
    learned,
    needs_compiler,
    outcome,
    planned,
    run_by,
)
from torchweft.core.pytree import flatten, map_leaves
from torchweft.recurrent import Recurrent, plan_backends

STEPS, ROWS = 4, 2
COMPILED = (
    *SAMPLE,
    *("Elman relu", "RHN", "peephole LSTM", "MI-LSTM", "minimal gated", "additive attention", "zoneout in eval"),
    *("sequence dropout", "torch's LSTM, residual"),
)
"""Cells whose operators differ most. The others are `long`."""
POINTS = [
    pytest.param(
        case,
        backend,
        marks=[
            *([needs_compiler] if backend == "c" else []),
            *([] if case.name in (COMPILED if backend == "c" else SAMPLE) else [pytest.mark.long]),
        ],
        id=f"{case.name}-{backend}",
    )
    for backend in BACKENDS
    for case in ZOO
]
every_plan = pytest.mark.parametrize(("case", "backend"), POINTS)
"""Most cells in compiled loops, and a few in Python loops, which use the operators of PyTorch."""
most_plans = pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(
            *point.values,
            marks=[*point.marks, *([] if point.values[0].name in SAMPLE else [pytest.mark.long])],
            id=point.id,
        )
        for point in POINTS
        if point.values[1] == "c" or point.values[0].name in SAMPLE
    ],
)
"""All cells in compiled loops and a few in Python loops, for laws that depend little on the cell."""


def initial_state_of(case: ZooCase, cell: Any, x: Tensor) -> Any:
    """An initial state that is not zero, with gradients."""
    state = case.state(cell, x)
    state = cell.initial_state(x[0]) if state is None else state
    draw = torch.Generator().manual_seed(1)

    def perturbed(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf.clone()
        return learned(leaf.detach() + 0.3 * torch.rand(leaf.shape, generator=draw, dtype=leaf.dtype))

    return map_leaves(perturbed, state)


@cache
def network(case: ZooCase, backend: str) -> tuple[Recurrent, Any]:
    """A network and an initial state. All laws share its compiled plans."""
    cell, x = case.cell(), case.inputs(STEPS, ROWS)
    net, state = planned(cell, backend, verify="never"), initial_state_of(case, cell, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_backends, "CHUNK_BYTES", 0)
        patch.setattr(plan_backends, "CHUNK_ROWS", 2 * ROWS)
        net(x, state)
    return net, state


@every_plan
def test_results_and_gradients_equal_the_eager_loop(case: ZooCase, backend: str) -> None:
    (net, state), x = network(case, backend), case.inputs(STEPS, ROWS)
    close(outcome(net, x, state), outcome(eagerly(net.cell), x, state))
    assert run_by(net) == {backend}


@most_plans
def test_sequences_with_lengths_equal_the_eager_loop(case: ZooCase, backend: str) -> None:
    cell, x = case.cell(), case.inputs(STEPS, ROWS)
    as_the_loop(cell, backend, x, initial_state_of(case, cell, x), verify="never", lengths=[2, STEPS])


@sampled()
def test_a_cell_can_be_copied_saved_and_loaded(case: ZooCase) -> None:
    cell, x = case.cell(), case.inputs(STEPS, ROWS)
    other = copy.deepcopy(cell)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    results = []
    for copied in (cell, other):
        copied.load_state_dict(cell.state_dict())
        torch.manual_seed(0)
        results.append(eagerly(copied)(x, case.state(copied, x)))
    assert equal(tuple(results[0]), tuple(results[1]))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{dtype}", marks=[] if case.name in few else [pytest.mark.long])
        for dtype, few in ((torch.float32, SAMPLE[::2]), (torch.bfloat16, SAMPLE[1::2]))
        for case in ZOO
    ],
)
def test_a_cell_keeps_to_the_dtype_of_its_weights(case: ZooCase, dtype: torch.dtype) -> None:
    cell, x = case.cell(dtype), case.inputs(STEPS, ROWS, dtype)
    leaves = flatten(Recurrent(cell)(x, case.state(cell, x))[:2])[0]
    assert {leaf.dtype for leaf in leaves} - {torch.bool} == {dtype}
    assert all(leaf.isfinite().all() for leaf in leaves)


@pytest.mark.filterwarnings("ignore::torchweft.recurrent.NoPlanWarning")  # in bfloat16 a plan can round too much
@sampled()
def test_cell_runs_and_carries_its_state_under_autocast(case: ZooCase) -> None:
    cell, x = case.cell(torch.float32), case.inputs(STEPS, ROWS, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = Recurrent(cell)(x, case.state(cell, x))
    sum(leaf.float().sum() for leaf in flatten(result.outputs)[0]).backward()
    assert x.grad is not None and x.grad.isfinite().all()


@most_plans
def test_all_memory_modes_give_the_same_bits(case: ZooCase, backend: str) -> None:
    (net, state), x = network(case, backend), case.inputs(11, ROWS)
    results: dict[Any, tuple[Any, Any]] = {}
    for memory in ("full", "states", "sqrt", 1 << 30):
        net._plans._memory = memory  # so that one plan serves all modes
        net._plans.forget_prepared()
        torch.manual_seed(5)
        result = net(x, state)
        parts = tuple(result[:2])
        results[memory] = parts, gradients(parts, [x, *floats(state), *net.parameters()])
        assert (result.states is None) == (memory == "sqrt")
    net._plans._memory = "full"
    assert len(net.why()) == 1 and run_by(net) == {backend}
    assert all(equal(result, results["full"]) for result in results.values())
