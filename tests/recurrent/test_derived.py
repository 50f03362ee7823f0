"""A derived plan is an ordinary node of autograd, by whatever engine it runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.recurrent.cells_for_tests import CASES, Case, engine_of
from tests.recurrent.recurrent_cases import BACKENDS, by_plan, grid
from weft.core.errors import BackwardTwiceError, DoubleBackwardError, InPlaceError
from weft.core.pytree import flatten, unflatten
from weft.recurrent.autograd import run_derived
from weft.recurrent.memory import Memory


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


@grid(make=CASES, backend=BACKENDS)
def test_gradients_come_through_outputs_states_and_the_last_state(make: Callable[[], Case], backend: str) -> None:
    case = make()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    tensors = [*xs, *states, *case.parameters]
    outputs, last = eager(case, xs, states)
    seen = run_derived(engine, xs, states)
    parts = {
        outputs: sum(leaf.sin().sum() for leaf in seen.outputs),
        last: sum(leaf.cos().sum() for leaf in seen.last),
    }
    for wanted, found in [*parts.items(), (outputs + last, sum(parts.values()))]:
        torch.testing.assert_close(found, wanted)
        one = torch.autograd.grad(wanted, tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
        other = torch.autograd.grad(found, tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-11)


@by_plan
def test_hooks_of_parameters_fire_once_for_the_whole_sequence(backend: str) -> None:
    case = CASES["LSTM"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    fired: list[int] = []
    for i, parameter in enumerate(case.parameters):
        parameter.register_hook(lambda gradient, i=i: fired.append(i))
    run_derived(engine, xs, states).outputs[0].sum().backward()
    assert sorted(fired) == list(range(len(case.parameters)))


@grid(memory=["full", "states", "sqrt"], backend=BACKENDS)
def test_a_retained_graph_gives_the_same_bits_again_and_a_freed_one_is_refused(backend: str, memory: str) -> None:
    case = CASES["GRU"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    loss = run_derived(engine, xs, states, memory).outputs[0].sum()
    tensors = [*xs, *states, *case.parameters]
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, tensors), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(BackwardTwiceError):
        torch.autograd.grad(loss, tensors)


@grid(memory=["full", "states", "sqrt"], backend=BACKENDS)
def test_a_loss_that_is_kept_holds_nothing_of_the_call_once_backward_is_done(backend: str, memory: Memory) -> None:
    case = CASES["LSTM"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    xs, states = [each * 1 for each in xs], [each * 1 for each in states]
    seen = run_derived(engine, xs, states, memory)
    watched = [StorageWeakRef(each.untyped_storage()) for each in (*xs, *states, *seen.outputs, *seen.states)]
    loss = seen.outputs[0].sum() + seen.last[0].sum()
    del xs, states, seen
    loss.backward(retain_graph=True)
    assert not any(each.expired() for each in watched[:2]), "a graph that is retained reads its inputs again"
    loss.backward()
    assert all(each.expired() for each in watched) and loss.requires_grad


@by_plan
def test_gradients_of_gradients_are_refused_by_name_where_the_cell_is_not_known(backend: str) -> None:
    case = CASES["GRU"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    loss = run_derived(engine, xs, states).outputs[0].sum()
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(loss, case.parameters, create_graph=True)
    loss.backward()


@by_plan
def test_nothing_is_kept_where_no_gradient_is_wanted(backend: str) -> None:
    case = CASES["LSTM"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    with torch.no_grad():
        seen = run_derived(engine, xs, states)
    assert not any(each.requires_grad for each in (*seen.outputs, *seen.states, *seen.last))


@grid(what=["input 0", "output 0", "state 0", "parameter 0"], backend=BACKENDS)
def test_what_backward_reads_again_must_not_be_written_to(what: str, backend: str) -> None:
    case = CASES["RNN"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    x = xs[0].detach()
    seen = run_derived(engine, [x], states)
    loss = seen.outputs[0].sum()
    victim = {
        "input 0": x,
        "output 0": seen.outputs[0].detach(),
        "state 0": seen.states[0].detach(),
        "parameter 0": case.parameters[0].detach(),
    }[what]
    victim.add_(1)
    with pytest.raises(InPlaceError, match=what):
        loss.backward()


@by_plan
def test_the_initial_state_may_be_written_to_as_a_stream_does(backend: str) -> None:
    """A training loop that keeps its hidden state in one tensor writes the last one into it before backward."""
    case = CASES["GRU"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    kept = states[0].detach().clone()
    wanted = torch.autograd.grad(run_derived(engine, xs, [kept.clone()]).outputs[0].sin().sum(), case.parameters)
    seen = run_derived(engine, xs, [kept])
    kept.copy_(seen.last[0].detach())
    for one, other in zip(wanted, torch.autograd.grad(seen.outputs[0].sin().sum(), case.parameters), strict=True):
        assert torch.equal(one, other)


class Attending(nn.Module):
    """Reads a state that every step hands on as it is, as an encoded source is."""

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, source = state
        h = torch.tanh(h + x * source)
        return h, (h, source)


@by_plan
def test_a_state_that_is_handed_on_as_it_is_must_not_be_written_to(backend: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    case = Case(Attending(), x, (x, x), [])
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    seen = run_derived(engine, xs, states)
    states[1].detach().add_(1)
    with pytest.raises(InPlaceError, match="initial state"):
        seen.outputs[0].sum().backward()
