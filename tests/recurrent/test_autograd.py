"""A sequence as one autograd node: gradients, what is freed, writes, and gradients of gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.recurrent.cells_for_tests import CASES, Case, engine_of
from tests.recurrent.recurrent_cases import BACKENDS, by_plan, grid
from weft.core.errors import BackwardTwiceError, DoubleBackwardError, InPlaceError
from weft.core.pytree import flatten, unflatten
from weft.recurrent import Recurrent
from weft.recurrent.autograd import run_derived
from weft.recurrent.backends import Memory


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
        return (x.new_full((len(x), H), 0.2),) * 2


CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTMCell(D, H),
    "GRU": lambda: nn.GRUCell(D, H),
    "dropout": Dropping,
}


def made(make: Callable[[], nn.Module], **options: Any) -> tuple[Recurrent, Tensor, list[nn.Parameter]]:
    torch.manual_seed(3)
    net = Recurrent(make().double(), **{"backend": "python", **options})
    return net, torch.randn(T, N, D, dtype=torch.float64, requires_grad=True), list(net.parameters())


def second(net: Recurrent, x: Tensor, **call: Any) -> list[Tensor]:
    """First gradients, and the gradients of a number that is made of them."""
    torch.manual_seed(5)
    result = net(x, **call)
    loss = sum(leaf.sin().sum() for part in result if part is not None for leaf in flatten(part)[0])
    leaves = [x, *net.parameters()]
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    number = sum((each * each).sum() for each in first)
    return [*first, *torch.autograd.grad(number, leaves)]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@grid(make=CELLS, memory=MEMORY, call={"whole": {}, "lengths": {"lengths": [4, 2]}})
def test_it_equals_that_of_plain_autograd(make: Callable[[], nn.Module], memory: Any, call: dict[str, Any]) -> None:
    net, x, _ = made(make, memory=memory)
    loop, _, _ = made(make, backend="eager", memory=memory)
    whole = net(x, **call).states is not None
    assert net.why()[0][1] == "python"
    wanted = second(loop if whole else _Without(loop), x, **call)  # what is not kept must not count in the loop either
    close(second(net, x, **call), wanted)


class _Without(nn.Module):
    """The same network without its states."""

    def __init__(self, net: Recurrent) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, **call: Any) -> Any:
        result = self.net(x, **call)
        return result.outputs, result.last


def test_the_compiled_loop_has_it_too() -> None:
    net, x, _ = made(CELLS["GRU"], backend="auto")
    loop, _, _ = made(CELLS["GRU"], backend="eager")
    close(second(net, x), second(loop, x))


@pytest.mark.parametrize("call", [{"reset": torch.tensor([[0, 0], [0, 1], [1, 0], [0, 0]]).bool()}, {"start": 3}])
def test_resets_and_stops_hold_for_it(call: dict[str, Any]) -> None:
    net, x, _ = made(CELLS["dropout"], truncate=2)
    loop, _, _ = made(CELLS["dropout"], truncate=2, backend="eager")
    close(second(net, x, **call), second(loop, x, **call))


def test_an_input_that_was_made_of_the_cells_own_weight_counts_once() -> None:
    """The weight is reached twice: through the node's input, and inside the node."""
    wanted: list[list[Tensor]] = []
    for backend in ("eager", "python"):
        net, x, _ = made(CELLS["GRU"], backend=backend)
        cell: Any = net.cell
        state = x[0] @ cell.weight_ih[:D]
        loss = net(x @ cell.weight_hh[:D], state).outputs.pow(2).sum()
        first = torch.autograd.grad(loss, [x, cell.weight_hh, cell.weight_ih], create_graph=True)
        again = torch.autograd.grad(sum(each.pow(2).sum() for each in first), [x, cell.weight_hh, cell.weight_ih])
        wanted.append([*first, *again])
    close(wanted[1], wanted[0])


def test_third_gradients_are_there_as_well() -> None:
    values: list[Tensor] = []
    for backend in ("eager", "python"):
        net, x, _ = made(CELLS["LSTM"], backend=backend)
        value = net(x).outputs.sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = gradient.pow(2).sum()
        values.append(gradient)
    close(values[1:], values[:1])


@grid(backend=["python", "auto"], memory=["full", "sqrt"], further=[False, True])
def test_a_batch_of_gradients_equals_one_after_the_other(backend: Any, memory: Any, further: bool) -> None:
    net, x, parameters = made(CELLS["dropout"], memory=memory, backend=backend)
    result = net(x * 1, lengths=[4, 2])
    ends = [result.outputs[2, 0], result.last[1][1]]
    seeds = [torch.randn(3, H, dtype=torch.float64) for _ in ends]
    leaves = [x, *parameters]
    single = [torch.autograd.grad(ends, leaves, [each[k] for each in seeds], retain_graph=True) for k in range(3)]
    batch = torch.autograd.grad(ends, leaves, seeds, is_grads_batched=True, create_graph=further)
    close(list(batch), [torch.stack(column) for column in zip(*single, strict=True)])
    assert all(each.requires_grad == further for each in batch)
    if not further:
        with pytest.raises(BackwardTwiceError):
            torch.autograd.grad(ends, leaves, seeds, is_grads_batched=True)


def test_the_generator_goes_on_as_if_nobody_had_asked() -> None:
    net, x, _ = made(CELLS["dropout"])
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
    net, x, _ = made(CELLS["dropout"])
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
