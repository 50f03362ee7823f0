"""A plan never outlives its cell, and making one has no side effects."""

import gc
import os
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.recurrent.recurrent_cases import by_plan, close, run_by
from torchweft.core.errors import InPlaceError, UsageError
from torchweft.recurrent import Recurrent, recurrent_net
from torchweft.recurrent.cpp.workspace import WorkspacePool

Pair = tuple[Tensor, Tensor]


class Switched(nn.Module):
    """Uses one of two layers by a third name."""

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


def test_frozen_weight_changed_before_backward_is_reported() -> None:
    cell, (x, s) = Frozen(), sequence()
    outputs = Recurrent(cell, backend="python")(x.requires_grad_(), s).outputs
    with torch.no_grad():
        cell.w.mul_(3)
    with pytest.raises(InPlaceError, match="constant 0"):
        outputs.sum().backward()


def test_settings_can_be_changed_later_and_are_validated() -> None:
    net = Recurrent(Frozen(), backend="python")
    net(*sequence())
    net.backend = "eager"
    net(*sequence())
    assert net.why() == [("sequences of every kind", "eager", "it was asked for")]
    for name, value, words in (
        ("memory", "little", "memory is 'little'"),
        ("truncate", 0, "truncate is 0"),
        ("truncate", 2.5, "truncate is 2.5"),
        ("initial", torch.zeros(3), "initial is of type Tensor"),
    ):
        before = getattr(net, name)
        setattr(net, name, value)
        with pytest.raises(UsageError, match=words):
            net(*sequence())
        setattr(net, name, before)


@pytest.mark.long
@by_plan
def test_plan_is_dropped_with_its_cell(backend: str) -> None:
    net, (x, s) = Recurrent(Frozen(), backend=backend, verify="never"), sequence()
    for _ in range(3):
        net.cell = cell = Switched()
        net(x, s).outputs.sum().backward()
        watched = [weakref.ref(tensor) for tensor in (*cell.parameters(), x)]
        del cell
    assert [reference() is None for reference in watched] == [False] * 5
    net.cell = Frozen()
    gc.collect()
    assert [reference() is None for reference in watched] == [True] * 4 + [False]
    net(x, s)
    assert len(net.why()) == 1 and run_by(net) == {backend}


def test_deleted_step_net_leaves_no_weights() -> None:
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
def test_functional_call_has_double_backward(leaf: bool) -> None:
    x, results = torch.randn(4, 2, 3, dtype=torch.float64), list[list[Tensor]]()
    torch.manual_seed(2)
    cell = nn.GRUCell(3, 3).double()
    net, loop = Recurrent(cell, backend="python"), Recurrent(cell, backend="eager")
    for network in (loop, net):
        given = {name: value.detach().clone().requires_grad_() for name, value in network.named_parameters()}
        used = given if leaf else {name: value * 2 for name, value in given.items()}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loss = torch.func.functional_call(network, used, (x,)).outputs.square().sum()
        before = [*network.parameters()]
        first = torch.autograd.grad(loss, list(given.values()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(given.values()))
        assert all(one is other for one, other in zip(before, network.parameters(), strict=True))
        results.append([*first, *second])
    close(*results)
    assert run_by(net) == ({"python"} if leaf else {"eager"})
    assert ["computed from others" in str(warning.message) for warning in warned] == ([] if leaf else [True])


def test_plan_inside_activation_checkpointing() -> None:
    net, (x, s) = Recurrent(Switched(), backend="python"), sequence()

    def run(x: Tensor) -> Tensor:
        return net(x, s).outputs

    x.requires_grad_()
    gradient = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).sum(), x)[0]
    assert torch.allclose(gradient, torch.autograd.grad(run(x).sum(), x)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_child_has_its_own_workspaces() -> None:
    spaces = WorkspacePool()
    buffer = spaces.acquire(1 << 20)
    buffer.zero_()
    child = os.fork()
    if child == 0:
        buffer.fill_(7)
        os._exit(0)
    os.waitpid(child, 0)
    assert not buffer.any()
