"""A derived plan is an ordinary node of autograd, and nothing that computes something else is let through."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.cells_for_tests import CASES, Case
from weft.core.errors import BackwardTwiceError, DoubleBackwardError, InPlaceError
from weft.core.tree import flatten, unflatten
from weft.recurrent.capture import capture
from weft.recurrent.derived import run_derived
from weft.recurrent.plan import Plan
from weft.recurrent.verify import PlanError, verify

every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


def planned(case: Case) -> Plan:
    return Plan(capture(case.cell, case.x, case.state))


def sequence(case: Case, steps: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    """Fresh inputs and initial states that want gradients."""
    xs = torch.randn(steps, *case.x.shape, dtype=case.x.dtype, requires_grad=True)
    return [xs], [torch.randn_like(each).requires_grad_() for each in flatten(case.state)[0]]


def eager(case: Case, xs: list[Tensor], states: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All outputs, and the last state, summed."""
    state, total = unflatten(flatten(case.state)[1], states), torch.zeros((), dtype=torch.float64)
    for x in xs[0]:
        y, state = case.cell(x, state)
        total = total + sum(leaf.sin().sum() for leaf in flatten(y)[0])
    return total, sum(leaf.cos().sum() for leaf in flatten(state)[0])


@every_case
def test_gradients_come_through_outputs_states_and_the_last_state(make: Callable[[], Case]) -> None:
    case = make()
    plan, (xs, states) = planned(case), sequence(case)
    tensors = [*xs, *states, *case.parameters]
    outputs, last = eager(case, xs, states)
    seen = run_derived(plan, xs, states)
    parts = {
        outputs: sum(leaf.sin().sum() for leaf in seen.outputs),
        last: sum(leaf.cos().sum() for leaf in seen.last),
    }
    for wanted, found in [*parts.items(), (outputs + last, sum(parts.values()))]:
        torch.testing.assert_close(found, wanted)
        one = torch.autograd.grad(wanted, tensors, retain_graph=True, allow_unused=True)
        other = torch.autograd.grad(found, tensors, retain_graph=True, allow_unused=True)
        for a, b in zip(one, other, strict=True):
            zero = torch.zeros(()) if a is None and b is None else torch.zeros_like(b if a is None else a)
            torch.testing.assert_close(zero if b is None else b, zero if a is None else a, rtol=0, atol=1e-11)


def test_hooks_of_parameters_fire_once_for_the_whole_sequence() -> None:
    case = CASES["LSTM"]()
    plan, (xs, states) = planned(case), sequence(case)
    fired: list[int] = []
    for i, parameter in enumerate(case.parameters):
        parameter.register_hook(lambda gradient, i=i: fired.append(i))
    run_derived(plan, xs, states).outputs[0].sum().backward()
    assert sorted(fired) == list(range(len(case.parameters)))


def test_backward_twice_and_gradients_of_gradients_are_refused_by_name() -> None:
    case = CASES["GRU"]()
    plan, (xs, states) = planned(case), sequence(case)
    loss = run_derived(plan, xs, states).outputs[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(loss, case.parameters, create_graph=True)
    loss.backward()
    with pytest.raises(BackwardTwiceError):
        loss.backward()


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    case = CASES["LSTM"]()
    plan, (xs, states) = planned(case), sequence(case)
    with torch.no_grad():
        assert not run_derived(plan, xs, states).outputs[0].requires_grad


@every_case
def test_a_right_plan_passes_the_check_and_leaves_no_gradient_behind(make: Callable[[], Case]) -> None:
    case = make()
    xs, states = sequence(case)
    verify(planned(case), case.cell, xs, states)
    assert all(tensor.grad is None for tensor in [*xs, *states, *case.parameters])


@pytest.mark.parametrize(
    ("part", "words"),
    [("loop", "output 0 differs"), ("loop_back", "gradient of initial state"), ("after_back", "gradient of parameter")],
)
def test_a_wrong_plan_is_refused_and_every_wrong_value_named(part: str, words: str) -> None:
    """One operator of the plan is replaced by another: what a fault of the analysis would look like."""
    case = CASES["RNN"]()
    plan = planned(case)
    swap: dict[str, tuple[Any, Any]] = {
        "loop": (torch.ops.aten.tanh.default, torch.ops.aten.sin.default),
        "loop_back": (torch.ops.aten.tanh_backward.default, torch.ops.aten.sigmoid_backward.default),
        "after_back": (torch.ops.aten.sum.dim_IntList, torch.ops.aten.amax.default),
    }
    right, wrong = swap[part]
    node = next(node for node in getattr(plan.parts, part) if node.target is right)
    node.target = wrong
    xs, states = sequence(case)
    with pytest.raises(PlanError, match=words):
        verify(plan, case.cell, xs, states)


def test_nan_in_the_same_places_is_no_difference() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return (x - 10).sqrt() + state, state + x

    x = torch.randn(2, 3, dtype=torch.float64)
    plan = Plan(capture(Root(), x, x))
    verify(plan, Root(), [torch.randn(4, 2, 3, dtype=torch.float64)], [x])


@pytest.mark.parametrize("what", ["input 0", "output 0", "parameter 0"])
def test_what_backward_reads_again_must_not_be_written_to(what: str) -> None:
    case = CASES["RNN"]()
    plan, (xs, states) = planned(case), sequence(case)
    x = xs[0].detach()
    seen = run_derived(plan, [x], states)
    loss = seen.outputs[0].sum()
    victim = {"input 0": x, "output 0": seen.outputs[0].detach(), "parameter 0": case.parameters[0].detach()}[what]
    victim.add_(1)
    with pytest.raises(InPlaceError, match=what):
        loss.backward()
