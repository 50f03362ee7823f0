"""A gradient of a gradient through a derived sequence is that of plain autograd, whatever is kept
from forward."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import grid
from weft.core.errors import BackwardTwiceError, DoubleBackwardError, InPlaceError
from weft.core.pytree import flatten
from weft.recurrent import Recurrent

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


@pytest.mark.long
@grid(make=CELLS, memory=MEMORY)
def test_it_equals_a_difference_quotient(make: Callable[[], nn.Module], memory: Any) -> None:
    net, x, parameters = made(make, memory=memory)

    def run(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        result = net(x, lengths=[4, 3])
        return (result.outputs, *flatten(result.last)[0])

    assert torch.autograd.gradgradcheck(run, (x, *parameters), atol=1e-6, fast_mode=True)


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


def test_hooks_of_parameters_fire_once() -> None:
    net, x, parameters = made(CELLS["GRU"])
    fired: list[int] = []
    for i, parameter in enumerate(parameters):
        parameter.register_hook(lambda gradient, i=i: fired.append(i))
    with warnings.catch_warnings():  # PyTorch warns of the cycle that this makes, once in a process
        warnings.simplefilter("ignore", UserWarning)
        net(x).outputs.sum().backward(create_graph=True)
    assert sorted(fired) == list(range(len(parameters)))


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
