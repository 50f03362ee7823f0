"""Batches of many sizes share plans: missing rows are filled up, and all results keep their bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import equal, floats, gradients, needs_compiler, planned, run_by
from torchweft.recurrent import Recurrent

pytestmark = needs_compiler

D, H = 3, 8
SIZES = (5, 7, 9, 11, 5)
"""The first two have their own plans. 9 and 11 are filled up to 12."""
Cell = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Normed(nn.Module):
    """A norm, a nested state with a counter, and an output that is not a state. Singular where x is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.norm = nn.Linear(D + H, H), nn.LayerNorm(H)

    def initial_state(self, x: Tensor) -> Any:
        return {"h": x.new_zeros(x.shape[0], H), "n": x.new_zeros(x.shape[0], dtype=torch.int64)}

    def forward(self, x: Tensor, state: Any) -> Any:
        unit = x / x.norm(dim=-1, keepdim=True)
        h = self.norm(self.gates(torch.cat([unit, state["h"]], -1))).tanh() + 0.5 * state["h"]
        return h.relu(), {"h": h, "n": state["n"] + 1}


def filled_up(net: Recurrent) -> list[bool]:
    return ["filled up" in why for _, _, why in net.why()]


def outcome(net: Recurrent, x: Tensor, **call: Any) -> Any:
    x = x.clone().requires_grad_()
    result = net(x, **call)
    ends = (result.outputs, result.last, result.states) if net.memory != "sqrt" else (result.outputs, result.last)
    return ends, gradients(ends, [x, *net.parameters()])


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "steps", "options"),
    [
        (lambda: nn.LSTMCell(D, 128), 300, {}),  # chunks, in the order of which gradients are summed
        (lambda: nn.GRUCell(D, H), 300, {"memory": "sqrt", "reset": True}),
        (Normed, 20, {"memory": "states", "lengths": True}),
    ],
    ids=["chunks", "resets, by sqrt", "lengths, by states"],
)
def test_filled_up_batches_have_the_same_bits(make: Callable[[], nn.Module], steps: int, options: Any) -> None:
    """Outputs, states and gradients equal those of a network that ran only this size."""
    cell, memory = make(), options.get("memory", "full")
    net = planned(cell, "c", memory=memory)
    for rows in SIZES:
        torch.manual_seed(rows)
        x = torch.randn(steps, rows, D)
        call = {"lengths": torch.randint(steps + 1, (rows,))} if "lengths" in options else {}
        call |= {"reset": torch.rand(steps, rows) < 0.2} if "reset" in options else {}
        assert equal(outcome(net, x, **call), outcome(planned(cell, "c", memory=memory), x, **call))
        assert outcome(net, x, **call)[0][0].is_contiguous()
    assert filled_up(net).count(True) == 2 and len(net.why()) == 5  # one of them is the plan for 12 rows
    assert run_by(net) == {"c"}


@pytest.mark.long
def test_padding_of_a_filled_up_batch_yields_no_nan() -> None:
    """Filled-up rows copy a real row. With zeros the cell is singular, and 0 * inf would reach summed gradients."""
    cell = Normed()
    net, seen = planned(cell, "c"), []
    for rows in (5, 7, 10):
        x = torch.randn(6, rows, D)
        seen = outcome(net, x)[1]
    assert all(gradient.isfinite().all() for gradient in seen) and filled_up(net)[-1]


ALONE: dict[str, Cell] = {
    "rows meet": lambda x, h: ((h + x - x.mean(0)).tanh(),) * 2,
    "the number of rows counts": lambda x, h: ((h + x / x.shape[0]).tanh(),) * 2,
    "the number of the row counts": lambda x, h: ((h + x * torch.arange(x.shape[0])[:, None]).tanh(),) * 2,
    "it draws": lambda x, h: ((h + nn.functional.dropout(x)).tanh(),) * 2,
    "a product by PyTorch": lambda x, h: (x.sort(-1).values, (h + x).tanh()),
}


@pytest.mark.parametrize(
    "cell",
    [pytest.param(ALONE[name], id=name, marks=[pytest.mark.long] if "number" in name else []) for name in ALONE],
)
def test_cells_that_mix_rows_get_a_plan_per_size(cell: Cell) -> None:
    net = planned(cell, "c")
    for rows in (5, 7, 9):
        net(torch.randn(4, rows, D), torch.zeros(rows, D))
    assert len(net.why()) == 3 and not any(filled_up(net)), net.why()


def test_branch_on_the_number_of_rows_is_detected() -> None:
    """Each size is compared with the eager loop on exactly its rows before it is filled up."""

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return (h + (2 * x if x.shape[0] == 11 else x)).tanh(), h

    net = planned(cell, "c")
    for rows in (5, 7, 10, 11):
        x, h = torch.randn(4, rows, D), torch.ones(rows, D)
        torch.testing.assert_close(net(x, h).outputs, Recurrent(cell, backend="eager")(x, h).outputs)
    assert filled_up(net).count(True) == 1 and len(net.why()) == 5  # one of them is the plan for 12 rows


def test_byte_budget_disables_filling_up() -> None:
    net = planned(nn.RNNCell(D, H), "c", memory=10_000_000)
    for rows in (5, 7, 9):
        net(torch.randn(4, rows, D, requires_grad=True))
    assert not any(filled_up(net))


@pytest.mark.long
def test_double_backward_of_filled_up_batches() -> None:
    """The eager loop computes the second gradients, on the filled-up rows."""
    cell = Normed().double()
    net = planned(cell, "c")
    for rows in (5, 7, 10):
        x = torch.randn(4, rows, D).double().requires_grad_()
        results = []
        for network in (net, Recurrent(cell, backend="eager")):
            lengths = torch.arange(rows) % 5
            (first,) = torch.autograd.grad(network(x, lengths=lengths).outputs.sin().sum(), [x], create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), [x, *floats(tuple(cell.parameters()))]))
        torch.testing.assert_close(*results)
    assert any(filled_up(net))
