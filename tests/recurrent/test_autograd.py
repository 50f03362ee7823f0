"""A sequence as one autograd node: gradients, what is freed, writes, and gradients of gradients."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.recurrent.recurrent_cases import (
    BACKENDS,
    by_plan,
    close,
    eagerly,
    equal,
    floats,
    gradients,
    grid,
    planned,
    run_by,
)
from tests.recurrent.step_cases import CASES, Case, engine_of
from weft.core.errors import BackwardTwiceError, DoubleBackwardError, InPlaceError
from weft.core.pytree import flatten, unflatten
from weft.recurrent import Recurrent
from weft.recurrent.plan_backends import Memory
from weft.recurrent.sequence_function import run_derived


def sequence(case: Case, steps: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    """Fresh inputs and initial states that want gradients."""
    xs = torch.randn(steps, *case.x.shape, dtype=case.x.dtype, requires_grad=True)
    return [xs], [torch.randn_like(each).requires_grad_() for each in flatten(case.state)[0]]


@by_plan
def test_hooks_of_parameters_fire_once_for_the_whole_sequence(backend: str) -> None:
    net = planned(nn.GRUCell(D, H), backend)
    fired: list[int] = []
    for i, parameter in enumerate(net.parameters()):
        parameter.register_hook(lambda gradient, i=i: fired.append(i))
    for further in (False, True):
        fired.clear()
        with warnings.catch_warnings():  # PyTorch warns of the cycle that this makes, once in a process
            warnings.simplefilter("ignore", UserWarning)
            net(torch.randn(T, N, D)).outputs.sum().backward(create_graph=further)
        assert sorted(fired) == list(range(4))


@grid(memory=["full", "states", "sqrt"], backend=BACKENDS)
def test_a_retained_graph_gives_the_same_bits_again_and_a_freed_one_is_refused(backend: str, memory: str) -> None:
    case = CASES["GRU"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    loss = run_derived(engine, xs, states, memory).outputs[0].sum()
    tensors = [*xs, *states, *case.parameters]
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    assert equal(first, torch.autograd.grad(loss, tensors))
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


@grid(what=["input 0", "output 0", "state 0", "parameter 0"], backend=BACKENDS)
def test_what_backward_reads_again_must_not_be_written_to(what: str, backend: str) -> None:
    case = CASES["RNN"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    x = xs[0].detach()
    seen = run_derived(engine, [x], states)
    victims = {"input": x, "output": seen.outputs[0], "state": seen.states[0], "parameter": case.parameters[0]}
    victims[what.split(maxsplit=1)[0]].detach().add_(1)
    with pytest.raises(InPlaceError, match=what):
        seen.outputs[0].sum().backward()


@by_plan
def test_the_initial_state_may_be_written_to_as_a_stream_does(backend: str) -> None:
    """A training loop that keeps its hidden state in one tensor writes the last one into it before backward."""
    case = CASES["GRU"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    kept = states[0].detach().clone()
    wanted = torch.autograd.grad(run_derived(engine, xs, [kept.clone()]).outputs[0].sin().sum(), case.parameters)
    seen = run_derived(engine, xs, [kept])
    kept.copy_(seen.last[0].detach())
    assert equal(wanted, torch.autograd.grad(seen.outputs[0].sin().sum(), case.parameters))


@by_plan
def test_a_state_that_is_handed_on_as_it_is_must_not_be_written_to(backend: str) -> None:
    """As an encoded source is, which every step reads."""

    def attending(x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = torch.tanh(state[0] + x * state[1])
        return h, (h, state[1])

    x = torch.randn(3, 4, dtype=torch.float64)
    case = Case(attending, x, (x, x), [])
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    seen = run_derived(engine, xs, states)
    states[1].detach().add_(1)
    with pytest.raises(InPlaceError, match="initial state"):
        seen.outputs[0].sum().backward()


T, N, D, H = 4, 2, 2, 2
MEMORY: dict[str, Any] = {"full": "full", "states": "states", "sqrt": "sqrt", "bytes": 1 << 20}


class Dropping(nn.Module):
    """An LSTM whose hidden state is dropped in part at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(D, H)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, c = self.cell(x, state)
        h = nn.functional.dropout(h, 0.4, self.training)
        return h.sin(), (h, c)

    def initial_state(self, x: Tensor) -> Any:
        return (x.new_full((x.shape[0], H), 0.2),) * 2


CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTMCell(D, H),
    "GRU": lambda: nn.GRUCell(D, H),
    "dropout": Dropping,
}


def made(make: Callable[[], nn.Module], **options: Any) -> tuple[Recurrent, Tensor]:
    torch.manual_seed(3)
    net = Recurrent(make().double(), **{"backend": "python", **options})
    return net, torch.randn(T, N, D, dtype=torch.float64, requires_grad=True)


def second(net: Recurrent, x: Tensor, states: bool = True, **call: Any) -> list[Tensor]:
    """First gradients, and the gradients of a number that is made of them; of a loss with all `states`, or without."""
    torch.manual_seed(5)
    result = net(x, **call)
    loss = sum(leaf.sin().sum() for leaf in floats(tuple(result if states else result[:2])))
    leaves = [x, *net.parameters()]
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    number = sum((each * each).sum() for each in first)
    return [*first, *torch.autograd.grad(number, leaves)]


@grid(make=CELLS, memory=MEMORY, call={"whole": {}, "lengths": {"lengths": [4, 2]}})
def test_it_equals_that_of_plain_autograd(make: Callable[[], nn.Module], memory: Any, call: dict[str, Any]) -> None:
    (net, x), (loop, _) = made(make, memory=memory), made(make, backend="eager")
    whole = net(x, **call).states is not None
    close(second(net, x, whole, **call), second(loop, x, whole, **call))
    assert run_by(net) == {"python"}


def test_the_compiled_loop_has_it_too() -> None:
    (net, x), (loop, _) = (made(CELLS["GRU"], backend=each) for each in ("auto", "eager"))
    close(second(net, x), second(loop, x))


@pytest.mark.parametrize("call", [{"reset": torch.tensor([[0, 0], [0, 1], [1, 0], [0, 0]]).bool()}, {"start": 3}])
def test_resets_and_stops_hold_for_it(call: dict[str, Any]) -> None:
    (net, x), (loop, _) = (made(CELLS["dropout"], truncate=2, backend=each) for each in ("python", "eager"))
    close(second(net, x, **call), second(loop, x, **call))


def test_an_input_that_was_made_of_the_cells_own_weight_counts_once() -> None:
    """The weight is reached twice: through the node's input, and inside the node."""
    found: list[list[Tensor]] = []
    for backend in ("eager", "python"):
        net, x = made(CELLS["GRU"], backend=backend)
        cell: Any = net.cell
        leaves = [x, cell.weight_hh, cell.weight_ih]
        loss = net(x @ cell.weight_hh[:D], x[0] @ cell.weight_ih[:D]).outputs.pow(2).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(each.pow(2).sum() for each in first), leaves)])
    close(*found)


def test_third_gradients_are_there_as_well() -> None:
    values: list[Tensor] = []
    for backend in ("eager", "python"):
        net, x = made(CELLS["LSTM"], backend=backend)
        value = net(x).outputs.sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = gradient.pow(2).sum()
        values.append(gradient)
    close(*values)


@grid(backend=["python", "auto"], memory=["full", "sqrt"], further=[False, True])
def test_a_batch_of_gradients_equals_one_after_the_other(backend: Any, memory: Any, further: bool) -> None:
    net, x = made(CELLS["dropout"], memory=memory, backend=backend)
    result = net(x * 1, lengths=[4, 2])
    ends = [result.outputs[2, 0], result.last[1][1]]
    seeds = [torch.randn(3, H, dtype=torch.float64) for _ in ends]
    leaves = [x, *net.parameters()]
    single = [torch.autograd.grad(ends, leaves, [each[k] for each in seeds], retain_graph=True) for k in range(3)]
    batch = torch.autograd.grad(ends, leaves, seeds, is_grads_batched=True, create_graph=further)
    close(list(batch), [torch.stack(column) for column in zip(*single, strict=True)])
    assert all(each.requires_grad == further for each in batch)
    if not further:
        with pytest.raises(BackwardTwiceError):
            torch.autograd.grad(ends, leaves, seeds, is_grads_batched=True)


def test_the_generator_goes_on_as_if_nobody_had_asked() -> None:
    net, x = made(CELLS["dropout"])
    loss = net(x).outputs.sum()
    before = torch.get_rng_state()
    torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_of_the_forward_holds_for_it() -> None:
    found: list[Tensor] = []
    for backend in ("eager", "python"):
        torch.manual_seed(1)
        net = Recurrent(nn.RNNCell(D, H), backend=backend)
        x = torch.randn(T, N, D, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).outputs.float().sum()
        found += [each.float() for each in torch.autograd.grad(loss, [x], create_graph=True)]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-2)


def test_a_freed_sequence_a_changed_cell_and_a_written_state_are_refused() -> None:
    net, x = made(CELLS["dropout"])
    loss = net(x).outputs.sum()
    net.eval()
    with pytest.raises(DoubleBackwardError, match="training"):
        torch.autograd.grad(loss, x, create_graph=True)
    net.train()
    torch.autograd.grad(loss, x)
    with pytest.raises(BackwardTwiceError):
        torch.autograd.grad(loss, x, create_graph=True)
    state = tuple([torch.zeros(N, H, dtype=torch.float64) for _ in range(2)])
    loss = net(x, state).outputs.sum()
    state[0].add_(1)
    with pytest.raises(InPlaceError, match="initial state 0"):
        torch.autograd.grad(loss, x, create_graph=True)


@grid(make=CASES, backend=BACKENDS)
def test_gradients_come_through_outputs_alone_and_through_the_last_state_alone(
    make: Callable[[], Case], backend: str
) -> None:
    case = make()
    (x,), states = sequence(case)
    state, net = unflatten(flatten(case.state)[1], states), planned(case.cell, backend)
    for part in (0, 1):
        ends = [each(x, state)[part] for each in (net, eagerly(case.cell))]
        close(*ends, 1e-11)
        close(*(gradients(each, [x, *states, *case.parameters]) for each in ends), 1e-11)
    assert run_by(net) == {backend}
