"""``backend="python"`` gives the numbers of the eager loop, or is the eager loop and says why."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.core.errors import UsageError
from weft.core.tree import flatten
from weft.recurrent import Recurrent
from weft.recurrent.backends import NoPlanWarning
from weft.recurrent.network import _check

CELLS: dict[str, Any] = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}


def both(cell: nn.Module, **options: Any) -> tuple[Recurrent, Recurrent]:
    """The same cell by the eager loop and by its plan."""
    return Recurrent(cell, **options), Recurrent(cell, backend="python", **options)


def results(net: Recurrent, x: Tensor, state: Any = None, **call: Any) -> list[Tensor]:
    """Outputs, states, and the gradients of input and parameters."""
    x = x.clone().requires_grad_()
    seen = net(x, state, **call)
    leaves = [leaf for part in seen for leaf in flatten(part)[0]]
    parameters = list(net.parameters())
    gradients = torch.autograd.grad(sum(leaf.sin().sum() for leaf in leaves), [x, *parameters])
    return [*(leaf.detach() for leaf in leaves), *gradients]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_a_plan_gives_the_numbers_of_the_eager_loop(make: Any, batch_first: bool) -> None:
    eager, planned = both(make(5, 4).double(), batch_first=batch_first)
    for steps in (1, 6, 3):
        x = torch.randn(2, steps, 5).double() if batch_first else torch.randn(steps, 2, 5).double()
        for one, other in zip(results(eager, x), results(planned, x), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-11)
    assert "loop_back" in planned.explain()
    assert eager.explain() == ""


def test_one_plan_serves_all_lengths_and_a_new_one_a_new_batch_size() -> None:
    _, net = both(nn.GRUCell(5, 4))
    for shape in [(3, 2, 5), (9, 2, 5), (3, 7, 5)]:
        net(torch.randn(shape))
    assert len(net._plans.explanations()) == 2


def test_chunks_and_steps_agree_with_the_whole() -> None:
    _, net = both(nn.LSTMCell(5, 4).double())
    x = torch.randn(6, 2, 5).double()
    whole = net(x)
    first = net(x[:2])
    second = net(x[2:], first.last)
    torch.testing.assert_close(torch.cat([first.outputs, second.outputs]), whole.outputs, rtol=0, atol=1e-13)
    y, _ = net.step(x[2], first.last)
    torch.testing.assert_close(y, whole.outputs[2], rtol=0, atol=1e-13)


def test_the_optimizer_is_seen_and_a_copy_has_plans_of_its_own() -> None:
    eager, net = both(nn.GRUCell(5, 4).double())
    x = torch.randn(4, 2, 5).double()
    net(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        torch.testing.assert_close(other(x).outputs, Recurrent(other.cell)(x).outputs)
        torch.testing.assert_close(net(x).outputs, eager(x).outputs)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(net(x).outputs, eager(x).outputs)


@pytest.mark.parametrize(
    "call", [{"lengths": [4, 2]}, {"mask": torch.ones(4, 2, dtype=torch.bool)}, {"reset": torch.zeros(4, 2).bool()}]
)
def test_what_no_plan_can_run_is_run_by_the_eager_loop_without_a_word(call: dict[str, Any]) -> None:
    eager, net = both(nn.GRUCell(5, 4).double())
    x = torch.randn(4, 2, 5).double()
    for one, other in zip(results(eager, x, **call), results(net, x, **call), strict=True):
        assert torch.equal(one, other)
    assert net(torch.randn(0, 2, 5).double()).outputs.shape == (0, 2, 4)


class Branching(nn.Module):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        after = state + x if x.sum() > 0 else state - x
        return after, after


class Dropping(nn.Module):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        after = state + nn.functional.dropout(x, 0.5)
        return after, after


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = [torch.randn(3)]

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        after = state + x * self.table[0]
        return after, after


def function(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return x + state, x + state


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (Branching(), "torch.where"),
        (Dropping(), "random numbers"),
        (Borrowing(), "neither parameters nor buffers"),
        (function, "make it a module"),
    ],
)
def test_a_cell_without_a_plan_runs_by_the_eager_loop_and_is_warned_of_once(cell: Any, words: str) -> None:
    net = Recurrent(cell, backend="python")
    x, state = torch.randn(4, 2, 3), torch.zeros(2, 3)
    with pytest.warns(NoPlanWarning, match=words):
        net(x, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x, state)
    assert words in net.explain()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="there are eager, python"):
        _check(nn.GRUCell(2, 2), None, None, False, None, "c")
