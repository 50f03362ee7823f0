"""Calls that no plan can run: the eager loop runs them, with one warning that gives the reason, or silently."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.recurrent.recurrent_cases import at_once, by_plan, close, eagerly, equal, run_by
from torchweft.core.errors import SpecError
from torchweft.recurrent import Recurrent
from torchweft.recurrent.plan_cache import NoPlanWarning

ONE, ZERO = torch.randn(4, 2, 3), torch.zeros(2, 3)


class BufferWriter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(x.sum(0).detach())
        return x + self.seen, state


class BufferReader(BufferWriter):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.seen[0].item() + state, state


class Nothing(nn.Module):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Any, Tensor]:
        return {"y": x + state, "nothing": None}, state + x


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.register_forward_hook(lambda module, given, out: out * 2)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x) + state, state


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Recurrent(add, backend="eager")

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x.unsqueeze(0), state).outputs[0], state + x


def reading(words: Iterator[str]) -> Callable[..., Any]:
    return lambda x, s: (x + s + len(str(words)) * 0, s)


CANNOT: dict[str, tuple[Any, str]] = {
    "a branch on data": (lambda: lambda x, s: (s + x if x.sum() > 0 else s - x,) * 2, "torch.where"),
    "an item": (lambda: lambda x, s: (s + x * x.sum().item(),) * 2, "value of a tensor"),
    "a look at a buffer": (BufferReader, "reads the value of a buffer"),
    "a draw that depends on values": (lambda: lambda x, s: (s + torch.bernoulli(x.sigmoid()),) * 2, "random numbers"),
    "a write into a buffer": (BufferWriter, "carry them as a state"),
    "a compiled module": (lambda: torch.compile(Nothing(), backend="eager"), "a compiled or scripted module"),
    "hooks": (Hooked, "the hooks of Identity"),
    "a network": (Nested, "by a plan of its own"),
    "an iterator": (lambda: reading(iter("ab")), "can change unnoticed"),
}


@pytest.mark.parametrize("backend", ["auto", "python"])
@pytest.mark.parametrize(("make", "words"), CANNOT.values(), ids=CANNOT)
def test_cell_without_a_plan_runs_eagerly_with_one_warning(make: Any, words: str, backend: str) -> None:
    net, other = Recurrent(make(), backend=backend), eagerly(make())
    with pytest.warns(NoPlanWarning, match=words) as warned:
        torch.manual_seed(0)
        seen = net(ONE, ZERO)
    assert len(warned) == 1
    torch.manual_seed(0)
    assert equal(tuple(seen), tuple(other(ONE, ZERO)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(ONE, ZERO)
    assert run_by(net) == {"eager"} and words in net.explain()


class Named(Tensor):
    """A tensor subclass, as users define them."""


def add(x: Any, state: Tensor) -> tuple[Tensor, Tensor]:
    after = torch.tanh((x if isinstance(x, Tensor) else x[0] * x[1]) + state)
    return after, after


def traced(net: Recurrent) -> Tensor:
    graph = make_fx(lambda x: net(x, ZERO).outputs)(ONE + 1)
    return graph(ONE)  # not the input that it was traced on


def tangent(net: Recurrent) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(ONE, torch.ones_like(ONE))
        return torch.autograd.forward_ad.unpack_dual(net(dual, ZERO).outputs).tangent


def counted(net: Recurrent) -> int:
    with FlopCounterMode(display=False) as mode:
        net(ONE, ZERO)
    return mode.get_total_flops()


SILENT: dict[str, Callable[[Recurrent], Any]] = {
    "vmap": lambda net: torch.func.vmap(lambda x, h: net(x, h).outputs, (1, 0))(ONE, ZERO),
    "jvp": lambda net: torch.func.jvp(lambda x: net(x, ZERO).outputs, (ONE,), (torch.ones_like(ONE),)),
    "gradients in forward mode": tangent,
    "grad of torch.func": lambda net: torch.func.grad(lambda h: net(ONE, h).outputs.sum())(ZERO),
    "make_fx": traced,
    "a subclass": lambda net: net(ONE.as_subclass(Named), ZERO).outputs.as_subclass(Tensor),
    "no rows": lambda net: tuple(net(ONE[:, :0], ZERO[:0])),
    "no features": lambda net: tuple(net(ONE[..., :0], ZERO[:, :0])),
    "no steps": lambda net: tuple(net(ONE[:0], ZERO)),
    "an input that is not a tensor": lambda net: net((ONE, 2.0), ZERO).outputs,
}


@at_once("run", SILENT.values(), ids=SILENT)
def test_unfit_call_runs_eagerly_without_a_warning(run: Any) -> None:
    net = Recurrent(add)
    close(run(net), run(eagerly(add)))
    assert run_by(net) == {"eager"}


@by_plan
def test_output_none_stays_none(backend: str) -> None:
    net, loop = Recurrent(Nothing(), backend=backend), eagerly(Nothing())
    for rows in ({}, {"lengths": [4, 2]}):
        close(tuple(net(ONE, ZERO, **rows)), tuple(loop(ONE, ZERO, **rows)), 1e-6)
    x = ONE.clone().requires_grad_()
    once = torch.autograd.grad(net(x, ZERO).outputs["y"].square().sum(), x, create_graph=True)[0]
    assert torch.autograd.grad(once.sum(), x)[0].all()
    assert run_by(net) == {backend}


def numbers(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Creates tensors from numbers in every step."""
    after = torch.tanh(x + state * torch.tensor([1.0, 2.0, 3.0]))
    y = after.clone()
    y[:, [0, 2]] = 0
    return y, after


class Unkept(nn.Module):
    """Batch norm without running statistics writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        after = torch.tanh(self.norm(x) + state)
        return after, after


def asking(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Depends on the grad mode."""
    after = torch.tanh(x + state) * (2 if torch.is_grad_enabled() else 1)
    return after, after


@pytest.mark.parametrize("cell", [numbers, Unkept(), asking])
def test_cells_that_only_look_unfit_have_a_plan(cell: Any) -> None:
    net, loop = Recurrent(cell, backend="python"), eagerly(cell)
    x = ONE.clone().requires_grad_()
    for on in (True, False, True):
        with torch.set_grad_enabled(on):
            seen, expected = (n(x, ZERO).outputs for n in (net, loop))
        assert seen.requires_grad == on
        ends = (seen, expected)
        close(*([torch.autograd.grad(end.square().sum(), x)[0] if on else end, end] for end in ends), 1e-5)
    assert run_by(net) == {"python"}


class Passing(nn.Module):
    """Its output and one of its states are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        return self.weight, (self.weight, state[1])


@by_plan
def test_parameters_as_results_in_both_grad_modes(backend: str) -> None:
    cell = Passing()
    net = Recurrent(cell, backend=backend)
    for on in (False, True):
        with torch.set_grad_enabled(on):
            close(tuple(net(ONE, (ZERO, ZERO))), tuple(eagerly(cell)(ONE, (ZERO, ZERO))))
    assert run_by(net) == {backend}


def test_operator_counter_sees_every_step() -> None:
    cell = nn.RNNCell(3, 3)
    net = Recurrent(cell)
    net(ONE, ZERO)
    assert counted(net) == counted(eagerly(cell)) > 0
    assert "eager" in run_by(net)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(3)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        after = torch.tanh(self.linear(x) + state)
        return after, after


def test_lazy_module_gets_a_plan_after_its_first_input() -> None:
    cell = Lazy()
    net = Recurrent(cell, backend="python")
    first = net(ONE, ZERO).outputs
    assert run_by(net) == set()
    close([first, net(ONE, ZERO).outputs], [eagerly(cell)(ONE, ZERO).outputs] * 2, 1e-6)
    assert run_by(net) == {"python"}


def test_faulty_cell_raises_without_a_plan_warning() -> None:
    for cell in (lambda x, h: x, lambda x, h: (x, h[:1]), lambda x, h: (x, (h, h))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(SpecError):
                Recurrent(cell)(ONE, ZERO)
