"""The plan of a step: every operator is in its part, and results equal the eager loop."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import fx

from tests.recurrent.recurrent_cases import BACKENDS, as_the_loop, grid
from tests.recurrent.step_cases import CASES, Case, every_case
from torchweft.core.pytree import flatten
from torchweft.recurrent.capture import capture
from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.python_backend import PythonBackend
from torchweft.recurrent.step_plan import CARRIED, GIVEN, INPUT, STATE, dependences, explain, partition

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


def captured_of(make: Callable[[], Case]) -> StepGraph:
    case = make()
    return capture(case.cell, case.x, case.state)


def products(nodes: list[fx.Node]) -> int:
    return sum(node.target.__name__.split(".")[0] in PRODUCTS for node in nodes)


@every_case
def test_partition_is_complete_and_ordered(make: Callable[[], Case]) -> None:
    captured = captured_of(make)
    parts = partition(captured)
    flat = [node for field in fields(parts) for node in getattr(parts, field.name)]
    assert sorted(flat, key=str) == sorted(captured.nodes, key=str)
    known = {node for node in captured.module.graph.nodes if node.op != "call_function"}
    for node in flat:  # the fields are in the order of execution
        assert set(node.all_input_nodes) <= known, node
        known.add(node)


@every_case
def test_loops_hold_only_carried_dependences(make: Callable[[], Case]) -> None:
    captured = captured_of(make)
    parts, on = partition(captured), dependences(captured)
    assert all(STATE in on[node] and not on[node] & {CARRIED, GIVEN} for node in parts.loop)
    assert all(CARRIED in on[node] for node in parts.loop_back)
    assert not any(INPUT in on[node] and STATE not in on[node] for node in parts.loop)
    gradients = captured.signature.parameter_gradients + captured.signature.input_gradients
    ends = {gradient for gradient in gradients if gradient is not None}
    carried = set(captured.signature.state_gradients)
    assert not (ends - carried) & {n for n in parts.loop_back if not any(u in parts.loop_back for u in n.users)}


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_loops_of_classic_cells_have_one_product_each(name: str) -> None:
    captured = captured_of(CASES[name])
    parts, text = partition(captured), explain(captured)
    assert "loop_back (step by step, backward)" in text and "mm.default" in text and "[3 x " in text
    assert products(parts.loop) == 1
    assert products(parts.loop_back) == 1
    assert products(parts.before) == 1, "the projection of all inputs is one product before the loop"
    weights = {node for node in captured.signature.parameter_gradients if node is not None}
    assert weights.isdisjoint(parts.loop_back), "parameter gradients are not computed step by step"


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_weight_gradient_is_one_product_over_all_steps(name: str) -> None:
    case = CASES[name]()
    plan = PythonBackend(capture(case.cell, case.x, case.state))
    steps = 6
    with torch.no_grad():
        seen, _, trail = plan.run_forward(
            [torch.randn(steps, *case.x.shape, dtype=case.x.dtype)], flatten(case.state)[0]
        )
        with torch.profiler.profile(record_shapes=True) as profile:
            ones = [torch.ones_like(s) for s in flatten(case.state)[0]]
            plan.run_backward(trail, [torch.ones_like(y) for y in seen], None, ones)
    products = [event for event in profile.key_averages(group_by_input_shape=True) if event.key == "aten::mm"]
    rows = steps * len(case.x)
    over_all_steps = [event for event in products if event.input_shapes[0][1] == rows]
    assert sum(event.count for event in over_all_steps) == 2, "one for each weight"
    assert not [event for event in products if event.input_shapes[0][1] == len(case.x)], "no product runs step by step"


@grid(steps=[1, 2, 5], backend=BACKENDS)
def test_swapped_states_keep_their_gradients(steps: int, backend: str) -> None:
    """In a short sequence, a carried gradient comes out unchanged for another state."""
    x, *state = (torch.randn(*shape).double().requires_grad_() for shape in ((steps, 2, 4), *[(2, 4)] * 3))
    as_the_loop(lambda x, s: (x * s[0], (s[1], s[2], s[0])), backend, x, tuple(state))
