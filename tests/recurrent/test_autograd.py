"""A sequence as one autograd node: gradients, freed memory, in-place writes, and double backward."""

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
from torchweft.core.errors import BackwardTwiceError, DoubleBackwardError, InPlaceError
from torchweft.core.pytree import flatten, unflatten
from torchweft.recurrent import Recurrent
from torchweft.recurrent.plan_backends import Memory
from torchweft.recurrent.sequence_function import run_derived


def sequence(case: Case, steps: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    """New inputs and initial states that require gradients."""
    xs = torch.randn(steps, *case.x.shape, dtype=case.x.dtype, requires_grad=True)
    return [xs], [torch.randn_like(leaf).requires_grad_() for leaf in flatten(case.state)[0]]


@by_plan
def test_parameter_hooks_fire_once_per_sequence(backend: str) -> None:
    net = planned(nn.GRUCell(D, H), backend)
    fired: list[int] = []
    for i, parameter in enumerate(net.parameters()):
        parameter.register_hook(lambda gradient, i=i: fired.append(i))
    for create_graph in (False, True):
        fired.clear()
        with warnings.catch_warnings():  # PyTorch warns once about the reference cycle of create_graph
            warnings.simplefilter("ignore", UserWarning)
            net(torch.randn(T, N, D)).outputs.sum().backward(create_graph=create_graph)
        assert sorted(fired) == list(range(4))


@grid(memory=["full", "states", "sqrt"], backend=BACKENDS)
def test_retained_graph_repeats_bits_and_freed_one_raises(backend: str, memory: str) -> None:
    case = CASES["GRU"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    loss = run_derived(engine, xs, states, memory).outputs[0].sum()
    tensors = [*xs, *states, *case.parameters]
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    assert equal(first, torch.autograd.grad(loss, tensors))
    with pytest.raises(BackwardTwiceError):
        torch.autograd.grad(loss, tensors)


@grid(memory=["full", "states", "sqrt"], backend=BACKENDS)
def test_backward_frees_all_memory_of_the_call(backend: str, memory: Memory) -> None:
    case = CASES["LSTM"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    xs, states = [x * 1 for x in xs], [state * 1 for state in states]
    seen = run_derived(engine, xs, states, memory)
    watched = [StorageWeakRef(tensor.untyped_storage()) for tensor in (*xs, *states, *seen.outputs, *seen.states)]
    loss = seen.outputs[0].sum() + seen.last[0].sum()
    del xs, states, seen
    loss.backward(retain_graph=True)
    assert not any(storage.expired() for storage in watched[:2]), "a retained graph reads its inputs again"
    loss.backward()
    assert all(storage.expired() for storage in watched) and loss.requires_grad


@by_plan
def test_double_backward_without_a_cell_raises(backend: str) -> None:
    case = CASES["GRU"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    loss = run_derived(engine, xs, states).outputs[0].sum()
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(loss, case.parameters, create_graph=True)
    loss.backward()


@by_plan
def test_writes_before_backward_are_reported(backend: str) -> None:
    case = CASES["RNN"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    for name in ("input", "output", "state", "parameter"):
        x = xs[0].detach()
        seen = run_derived(engine, [x], states)
        tensors = {"input": x, "output": seen.outputs[0], "state": seen.states[0], "parameter": case.parameters[0]}
        tensors[name].detach().add_(1)
        with pytest.raises(InPlaceError, match=f"{name} 0"):
            seen.outputs[0].sum().backward()


@by_plan
def test_initial_state_can_be_overwritten_before_backward(backend: str) -> None:
    """A training loop that keeps its hidden state in one tensor overwrites it before backward."""
    case = CASES["GRU"]()
    engine, (xs, states) = engine_of(backend, case), sequence(case)
    stream = states[0].detach().clone()
    expected = torch.autograd.grad(run_derived(engine, xs, [stream.clone()]).outputs[0].sin().sum(), case.parameters)
    seen = run_derived(engine, xs, [stream])
    stream.copy_(seen.last[0].detach())
    assert equal(expected, torch.autograd.grad(seen.outputs[0].sin().sum(), case.parameters))


@by_plan
def test_write_into_an_invariant_state_is_reported(backend: str) -> None:
    """An example is an encoded source, which every step reads."""

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
    """An LSTM with dropout of its hidden state at every step."""

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


def build(make: Callable[[], nn.Module], **options: Any) -> tuple[Recurrent, Tensor]:
    torch.manual_seed(3)
    net = Recurrent(make().double(), **{"backend": "python", **options})
    return net, torch.randn(T, N, D, dtype=torch.float64, requires_grad=True)


def second_gradients(net: Recurrent, x: Tensor, states: bool = True, **call: Any) -> list[Tensor]:
    """First gradients of a loss with or without all `states`, and the gradients of a sum of their squares."""
    torch.manual_seed(5)
    result = net(x, **call)
    loss = sum(leaf.sin().sum() for leaf in floats(tuple(result if states else result[:2])))
    leaves = [x, *net.parameters()]
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    number = sum((gradient * gradient).sum() for gradient in first)
    return [*first, *torch.autograd.grad(number, leaves)]


@grid(make=CELLS, memory=MEMORY, call={"whole": {}, "lengths": {"lengths": [4, 2]}})
def test_double_backward_equals_plain_autograd(
    make: Callable[[], nn.Module], memory: Any, call: dict[str, Any]
) -> None:
    backend = "auto" if make is CELLS["GRU"] and memory == "full" else "python"
    (net, x), (loop, _) = build(make, memory=memory, backend=backend), build(make, backend="eager")
    with_states = net(x, **call).states is not None
    close(second_gradients(net, x, with_states, **call), second_gradients(loop, x, with_states, **call))
    assert "eager" not in run_by(net)


@pytest.mark.parametrize("call", [{"reset": torch.tensor([[0, 0], [0, 1], [1, 0], [0, 0]]).bool()}, {"start": 3}])
def test_double_backward_honors_resets_and_truncation(call: dict[str, Any]) -> None:
    (net, x), (loop, _) = (build(CELLS["dropout"], truncate=2, backend=backend) for backend in ("python", "eager"))
    close(second_gradients(net, x, **call), second_gradients(loop, x, **call))


def test_input_computed_from_a_weight_counts_once() -> None:
    """The weight is reached twice: through the node's input, and inside the node."""
    results: list[list[Tensor]] = []
    for backend in ("eager", "python"):
        net, x = build(CELLS["GRU"], backend=backend)
        cell: Any = net.cell
        leaves = [x, cell.weight_hh, cell.weight_ih]
        loss = net(x @ cell.weight_hh[:D], x[0] @ cell.weight_ih[:D]).outputs.pow(2).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(grad.pow(2).sum() for grad in first), leaves)])
    close(*results)


def test_third_gradients_equal_plain_autograd() -> None:
    values: list[Tensor] = []
    for backend in ("eager", "python"):
        net, x = build(CELLS["LSTM"], backend=backend)
        value = net(x).outputs.sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = gradient.pow(2).sum()
        values.append(gradient)
    close(*values)


@grid(backend=["python", "auto"], memory=["full", "sqrt"], further=[False, True])
def test_batched_gradients_equal_single_ones(backend: Any, memory: Any, further: bool) -> None:
    net, x = build(CELLS["dropout"], memory=memory, backend=backend)
    result = net(x * 1, lengths=[4, 2])
    ends = [result.outputs[2, 0], result.last[1][1]]
    seeds = [torch.randn(3, H, dtype=torch.float64) for _ in ends]
    leaves = [x, *net.parameters()]
    single = [torch.autograd.grad(ends, leaves, [seed[k] for seed in seeds], retain_graph=True) for k in range(3)]
    batch = torch.autograd.grad(ends, leaves, seeds, is_grads_batched=True, create_graph=further)
    close(list(batch), [torch.stack(column) for column in zip(*single, strict=True)])
    assert all(gradient.requires_grad == further for gradient in batch)
    if not further:
        with pytest.raises(BackwardTwiceError):
            torch.autograd.grad(ends, leaves, seeds, is_grads_batched=True)


def test_double_backward_uses_autocast_of_forward() -> None:
    results: list[Tensor] = []
    for backend in ("eager", "python"):
        torch.manual_seed(1)
        net = Recurrent(nn.RNNCell(D, H), backend=backend)
        x = torch.randn(T, N, D, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).outputs.float().sum()
        results.append(torch.autograd.grad(loss, x, create_graph=True)[0].float())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-2)


def test_double_backward_rejects_changed_conditions() -> None:
    """Changes are a flag, a freed sequence, and a written state. Without one, the generator does not advance."""
    net, x = build(CELLS["dropout"])
    loss = net(x).outputs.sum()
    before = torch.get_rng_state()
    torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(torch.get_rng_state(), before)
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
def test_gradients_of_outputs_or_last_state_alone(make: Callable[[], Case], backend: str) -> None:
    case = make()
    (x,), states = sequence(case)
    state, net = unflatten(flatten(case.state)[1], states), planned(case.cell, backend)
    for part in (0, 1):
        ends = [network(x, state)[part] for network in (net, eagerly(case.cell))]
        close(*ends, 1e-11)
        close(*(gradients(end, [x, *states, *case.parameters]) for end in ends), 1e-11)
    assert run_by(net) == {backend}
