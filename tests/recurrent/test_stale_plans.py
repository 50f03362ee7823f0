"""A plan never outlives what it was made for, and making one leaves no trace."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.core.errors import InPlaceError, UsageError
from weft.recurrent import NoPlanWarning, Recurrent
from weft.recurrent.workspace import Workspaces

SCALE = 2.0
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


class Scaled(nn.Module):
    """Reads a number of its module of code."""

    def forward(self, x: Tensor, s: Tensor) -> Pair:
        new = torch.tanh(x * SCALE + s)
        return new, new


class Buffered(nn.Module):
    """Looks at the value of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.tensor(2.0))

    def forward(self, x: Tensor, s: Tensor) -> Pair:
        new = torch.tanh(x * self.k.item() + s)
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


def switch_layer(cell: nn.Module) -> None:
    assert isinstance(cell, Switched)
    cell.current = cell.b


def scale_more(cell: nn.Module) -> None:
    global SCALE  # noqa: PLW0603
    SCALE += 3.0


def write_buffer(cell: nn.Module) -> None:
    assert isinstance(cell, Buffered) and isinstance(cell.k, Tensor)
    cell.k.fill_(5.0)


@pytest.mark.filterwarnings("ignore::weft.recurrent.NoPlanWarning")
@pytest.mark.parametrize(("make", "change"), [(Switched, switch_layer), (Scaled, scale_more), (Buffered, write_buffer)])
def test_what_a_cell_reads_may_change_between_calls(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], None]
) -> None:
    cell, (x, s) = make(), sequence()
    net, loop = Recurrent(cell, backend="python"), Recurrent(cell, backend="eager")
    before = net(x, s).outputs
    change(cell)
    after = net(x, s).outputs
    assert not torch.allclose(before, after)
    assert torch.allclose(after, loop(x, s).outputs, atol=1e-6)


def test_a_look_at_a_buffer_is_refused_by_name() -> None:
    net = Recurrent(Buffered(), backend="python")
    with pytest.warns(NoPlanWarning, match="looks at the value of a buffer"):
        net(*sequence())


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


def test_a_plan_can_be_made_within_checkpointing() -> None:
    net, (x, s) = Recurrent(Switched(), backend="python"), sequence()

    def run(x: Tensor) -> Tensor:
        return net(x, s).outputs

    x.requires_grad_()
    gradient = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).sum(), x)[0]
    assert torch.allclose(gradient, torch.autograd.grad(run(x).sum(), x)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_workspaces_of_its_own() -> None:
    spaces = Workspaces()
    buffer = spaces.take(1 << 20)
    buffer.zero_()
    child = os.fork()
    if child == 0:
        buffer.fill_(7)
        os._exit(0)
    os.waitpid(child, 0)
    assert not buffer.any()
