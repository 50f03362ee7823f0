"""A plan never outlives what it was made for, and making one leaves no trace."""

import gc
import os
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.recurrent.recurrent_cases import by_plan, close, run_by
from weft.core.errors import InPlaceError, UsageError
from weft.recurrent import Recurrent, recurrent_net
from weft.recurrent.cpp.workspace import WorkspacePool

Pair = tuple[Tensor, Tensor]


class Switched(nn.Module):
    """Reads one of two layers by a third name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.current = self.a

    def forward(self, x: Tensor, s: Tensor) -> Pair:
        new = torch.tanh(self.current(x) + s)
        return new, new


class Frozen(nn.Module):
    """Multiplies by a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3), requires_grad=False)

    def forward(self, x: Tensor, s: Tensor) -> Pair:
        new = torch.tanh(x + s @ self.w)
        return new, new


def sequence() -> Pair:
    return torch.randn(4, 2, 3), torch.zeros(2, 3)


def test_a_frozen_weight_that_changes_before_backward_is_noticed() -> None:
    cell, (x, s) = Frozen(), sequence()
    outputs = Recurrent(cell, backend="python")(x.requires_grad_(), s).outputs
    with torch.no_grad():
        cell.w.mul_(3)
    with pytest.raises(InPlaceError, match="constant 0"):
        outputs.sum().backward()


def test_a_setting_may_be_changed_later() -> None:
    net = Recurrent(Frozen(), backend="python")
    net(*sequence())
    net.backend = "eager"
    net(*sequence())
    assert net.why() == [("sequences of every kind", "eager", "it was asked for")]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("memory", "little", "memory is 'little'"),
        ("truncate", 0, "truncate is 0"),
        ("truncate", -1, "truncate is -1"),
        ("truncate", 2.5, "truncate is 2.5"),
        ("initial", torch.zeros(3), "initial is of type Tensor"),
    ],
)
def test_a_setting_that_is_changed_later_to_nonsense_is_refused_by_name(name: str, value: object, words: str) -> None:
    net = Recurrent(Frozen(), backend="eager")
    net(*sequence())
    setattr(net, name, value)
    with pytest.raises(UsageError, match=words):
        net(*sequence())


@by_plan
def test_a_plan_keeps_nothing_alive_and_goes_with_what_it_was_made_for(backend: str) -> None:
    net, (x, s) = Recurrent(Frozen(), backend=backend, verify="never"), sequence()
    for _ in range(3):
        net.cell = cell = Switched()
        net(x, s).outputs.sum().backward()
        watched = [weakref.ref(each) for each in (*cell.parameters(), x)]
        del cell
    assert [each() is None for each in watched] == [False] * 5
    net.cell = Frozen()
    gc.collect()
    assert [each() is None for each in watched] == [True] * 4 + [False]
    net(x, s)
    assert len(net.why()) == 1 and run_by(net) == {backend}


def test_a_step_net_that_is_gone_leaves_no_weights_behind() -> None:
    def trained() -> "weakref.ref[Tensor]":
        weight = torch.randn(3, 3, requires_grad=True)

        def step(inputs: dict[str, Tensor], states: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"h": torch.tanh(inputs["x"] @ weight + states["h"])}

        x, s = sequence()
        recurrent_net(step, {"x": x}, {"h": s}, {"h": "h"}, backend="python").last["h"].sum().backward()
        assert weight.grad is not None
        return weakref.ref(weight)

    watched = trained()
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("leaf", [True, False], ids=["leaves", "computed"])
def test_a_functional_call_has_gradients_of_gradients_and_plans_only_for_leaves(leaf: bool) -> None:
    x, found = torch.randn(4, 2, 3, dtype=torch.float64), list[list[Tensor]]()
    torch.manual_seed(2)
    cell = nn.GRUCell(3, 3).double()
    net, loop = Recurrent(cell, backend="python"), Recurrent(cell, backend="eager")
    for each in (loop, net):
        given = {name: value.detach().clone().requires_grad_() for name, value in each.named_parameters()}
        used = given if leaf else {name: value * 2 for name, value in given.items()}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loss = torch.func.functional_call(each, used, (x,)).outputs.square().sum()
        before = [*each.parameters()]
        first = torch.autograd.grad(loss, list(given.values()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(given.values()))
        assert all(one is other for one, other in zip(before, each.parameters(), strict=True))
        found.append([*first, *second])
    close(*found)
    assert run_by(net) == ({"python"} if leaf else {"eager"})
    assert ["computed from others" in str(each.message) for each in told] == ([] if leaf else [True])


def test_a_plan_can_be_made_within_checkpointing() -> None:
    net, (x, s) = Recurrent(Switched(), backend="python"), sequence()

    def run(x: Tensor) -> Tensor:
        return net(x, s).outputs

    x.requires_grad_()
    gradient = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).sum(), x)[0]
    assert torch.allclose(gradient, torch.autograd.grad(run(x).sum(), x)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_workspaces_of_its_own() -> None:
    spaces = WorkspacePool()
    buffer = spaces.take(1 << 20)
    buffer.zero_()
    child = os.fork()
    if child == 0:
        buffer.fill_(7)
        os._exit(0)
    os.waitpid(child, 0)
    assert not buffer.any()
