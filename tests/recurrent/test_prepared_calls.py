"""Repeated calls skip checks and searches, and nothing else: the same bits, errors and reactions to changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import at_once, close, equal, needs_compiler, outcome
from tests.recurrent.test_guards import CHANGES, Reader
from torchweft.core.errors import SpecError
from torchweft.recurrent import Recurrent
from torchweft.recurrent.guards import CellGuards

D, H, N = 3, 4, 2


@at_once("change", CHANGES.values(), ids=CHANGES)
def test_snapshot_reports_every_change_that_a_walk_sees(change: Callable[[Reader], Any]) -> None:
    cell = Reader()
    cell.part = torch.abs  # a cell with a partial has no snapshot
    snapshot = CellGuards(cell).snapshot(cell)
    assert snapshot is not None and snapshot.unchanged_tensors() is not None
    change(cell)
    assert snapshot.unchanged_tensors() is None


def test_snapshot_of_a_function_covers_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, weight = [1.0], torch.ones(3, 3)

    def cell(x: Tensor, h: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x @ weight + h * rate[0] * scale * D, h

    def other(x: Tensor, h: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return (weight, rate) and (h, x)

    changes: list[Callable[[], Any]] = [
        lambda: rate.append(2.0),
        weight.requires_grad_,
        lambda: setattr(cell, "__defaults__", (2.0,)),
        lambda: monkeypatch.setitem(cell.__globals__, "D", 5),
        lambda: setattr(cell, "__code__", other.__code__),
    ]
    for change in changes:
        snapshot = CellGuards(cell).snapshot(cell)
        assert snapshot is not None and snapshot.unchanged_tensors() is not None
        change()
        assert snapshot.unchanged_tensors() is None


class Nested(nn.Module):
    """A state in a dict and an output that is None: forms that take the general way."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, H)

    def initial_state(self, x: Tensor) -> Any:
        return {"h": x.new_zeros(1, H)}

    def forward(self, x: Tensor, state: Any) -> Any:
        h = self.cell(x, state["h"])
        return (h, None), {"h": h}


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        pytest.param(lambda: nn.LSTMCell(D, H), "auto", marks=pytest.mark.long),
        pytest.param(lambda: nn.LSTMCell(D, H), "c", marks=needs_compiler),
        (Nested, "python"),
    ],
)
def test_repeated_calls_equal_those_of_a_new_network(make: Any, backend: Any) -> None:
    torch.manual_seed(0)
    net = Recurrent(make(), backend=backend, verify="never")
    for steps in (5, 1, 5):
        x = torch.randn(steps, N, D).requires_grad_()
        new = Recurrent(net.cell, backend=backend, verify="never")
        assert equal(outcome(net, x), outcome(new, x))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1.1)
        with torch.inference_mode():
            seen = net(x)
        close(tuple(seen), tuple(net(x)), 1e-5)
    assert len(net.why()) == 2, "with gradients, and without"


def test_given_states_are_part_of_the_form() -> None:
    net, x = Recurrent(nn.GRUCell(D, H), backend="python", verify="never"), torch.randn(5, N, D)
    for state in (torch.zeros(N, H), torch.zeros(H), torch.zeros(1, H)):
        for _ in range(2):
            assert equal(tuple(net(x, state)), tuple(net(x)))
            assert equal(net.step(x[0], state), net.step(x[0]))
    for run in (lambda state: net(x, state), lambda state: net.step(x[0], state)):
        with pytest.raises(SpecError, match="wanted 2 rows"):
            run(torch.zeros(3, H))
    net.cell = nn.GRUCell(D, H)
    assert not torch.equal(net.step(x[0], torch.ones(N, H))[0], Recurrent(nn.GRUCell(D, H)).step(x[0])[0])
