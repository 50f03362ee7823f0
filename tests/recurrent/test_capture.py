"""A captured graph has the results of its cell, and a cell that cannot be captured is rejected with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recurrent.recurrent_cases import at_once
from tests.recurrent.step_cases import CASES, Case, every_case
from torchweft.recurrent.capture import CaptureError, capture


@every_case
def test_captured_graph_is_pure_without_duplicates(make: Callable[[], Case]) -> None:
    case = make()
    nodes = capture(case.cell, case.x, case.state).nodes
    assert not any(node.target._schema.is_mutable for node in nodes if hasattr(node.target, "_schema"))
    calls = [f"{node.target} {node.args} {node.kwargs}" for node in nodes]
    assert len(calls) == len(set(calls))
    assert not any("detach" in call or "clone" in call for call in calls)


def test_capture_has_no_side_effects() -> None:
    case = CASES["LSTM"]()
    fired: list[int] = []
    case.parameters[0].register_hook(lambda gradient: fired.append(1))
    before = case.x.clone()
    capture(case.cell, case.x, case.state)
    assert fired == []
    assert all(parameter.grad is None for parameter in case.parameters)
    assert torch.equal(case.x, before)


def test_one_tensor_given_as_two_states_stays_two() -> None:
    case = CASES["LSTM"]()
    zero = torch.zeros(3, 4, dtype=torch.float64)
    captured = capture(case.cell, case.x, (zero, zero))
    h, c = torch.randn_like(zero), torch.randn_like(zero)
    expected = case.cell(case.x, (h, c))[1]
    results = captured.module([case.x], [h, c], [zero, zero], [zero])
    for one, other in zip(expected, results, strict=False):
        torch.testing.assert_close(other, one)


def test_closed_over_tensors_become_references() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(4, dtype=torch.float64)

    def cell(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        after = torch.tanh(x + state @ weight) * scale
        return after, after

    x = torch.randn(2, 4, dtype=torch.float64)
    captured = capture(cell, x, torch.zeros_like(x), [weight])
    tensors = [getattr(captured.module, str(node.target)) for node in captured.signature.references]
    assert any(tensor is weight for tensor in tensors) and any(tensor is scale for tensor in tensors)
    assert captured.signature.parameter_gradients[0] is not None


COUNTER = torch.zeros(3)

REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a write into the state": (lambda x, s: (x, s.add_(1)), "carry them as a state"),
    "a write into a view of the input": (lambda x, s: (x.t().mul_(2), s), "outlive the step"),
    "a write into a reference": (lambda x, s: (x + COUNTER.add_(1), s), "outlive the step"),
    "a state of another shape": (lambda x, s: (x, s[:1]), r"\(1, 3\).*\(2, 3\)"),
    "a state of another nesting": (lambda x, s: (x, (s, s)), "match the old one"),
    "not a pair": (lambda x, s: x, "returns \\(output, new state\\)"),
    "an output that is not a tensor": (lambda x, s: ([x, 3], s), "some are int"),
}


@at_once(("cell", "words"), REFUSED.values(), ids=REFUSED)
def test_uncapturable_cells_are_rejected_with_a_reason(cell: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(cell, torch.randn(2, 3), torch.randn(2, 3))


def test_error_of_the_cell_passes_through() -> None:
    def cell(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        capture(cell, torch.randn(2, 3), torch.randn(2, 3))
