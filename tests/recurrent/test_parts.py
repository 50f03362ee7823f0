"""The cut of a step: each operator once, nothing before what it needs, and as little as possible step by step."""

from collections.abc import Callable
from dataclasses import fields

import pytest
from torch import fx

from tests.recurrent.cells_for_tests import CASES, Case, every_case
from weft.recurrent.capture import capture
from weft.recurrent.graph import StepGraph
from weft.recurrent.plan import CARRIED, GIVEN, INPUT, STATE, dependences, explain, partition

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


def captured_of(make: Callable[[], Case]) -> StepGraph:
    case = make()
    return capture(case.cell, case.x, case.state)


def products(nodes: list[fx.Node]) -> int:
    return sum(node.target.__name__.split(".")[0] in PRODUCTS for node in nodes)


@every_case
def test_every_operator_is_in_one_part_and_needs_only_earlier_ones(make: Callable[[], Case]) -> None:
    captured = captured_of(make)
    parts = partition(captured)
    flat = [node for field in fields(parts) for node in getattr(parts, field.name)]
    assert sorted(flat, key=str) == sorted(captured.nodes, key=str)
    known = {node for node in captured.module.graph.nodes if node.op != "call_function"}
    # what backward needs of the forward loop's values may run after the loop, like the outputs
    for part in (
        parts.once,
        parts.before,
        parts.loop,
        parts.after,
        parts.before_back,
        parts.loop_back,
        parts.after_back,
    ):
        for node in part:
            assert set(node.all_input_nodes) <= known, node
            known.add(node)


@every_case
def test_only_what_the_carry_needs_runs_step_by_step(make: Callable[[], Case]) -> None:
    captured = captured_of(make)
    parts, on = partition(captured), dependences(captured)
    assert all(STATE in on[node] and not on[node] & {CARRIED, GIVEN} for node in parts.loop)
    assert all(CARRIED in on[node] for node in parts.loop_back)
    assert not any(INPUT in on[node] and STATE not in on[node] for node in parts.loop)
    ends = {
        each for each in captured.signature.parameter_gradients + captured.signature.input_gradients if each is not None
    }
    carried = set(captured.signature.state_gradients)
    assert not (ends - carried) & {n for n in parts.loop_back if not any(u in parts.loop_back for u in n.users)}


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_the_loops_of_the_classic_cells_hold_one_matrix_product_each(name: str) -> None:
    captured = captured_of(CASES[name])
    parts = partition(captured)
    assert products(parts.loop) == 1
    assert products(parts.loop_back) == 1
    assert products(parts.before) == 1, "the projection of all inputs is one product before the loop"
    weights = {node for node in captured.signature.parameter_gradients if node is not None}
    assert weights.isdisjoint(parts.loop_back), "no parameter's gradient is made step by step"


def test_the_explanation_names_every_part_and_what_is_in_it() -> None:
    text = explain(captured_of(CASES["LSTM"]))
    assert "loop_back (step by step, backward)" in text
    assert "mm.default" in text and "[3 x 16]" in text
