"""Loops in Python pay for every operator, so they hold few; and compute what the cell computes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import at_once, close, eagerly, planned, run_by
from weft.recurrent.capture import capture
from weft.recurrent.cells import LSTMCell
from weft.recurrent.graph import StepGraph
from weft.recurrent.plan import partition

STATE = (torch.zeros(2, 4), torch.zeros(2, 4))


def names(nodes: list[Any]) -> list[str]:
    """The operators, without views."""
    found = [str(getattr(node.target, "__name__", node.target)) for node in nodes]
    return [each for each in found if not each.startswith(("split", "getitem"))]


def lstm(composed: Any = None) -> StepGraph:
    cell = LSTMCell(3, 4)
    return capture(cell, torch.zeros(2, 3), STATE, [*cell.parameters()], composed=composed)


def test_the_loops_of_an_lstm_hold_what_they_must_and_no_more() -> None:
    parts = partition(lstm())
    gates, pointwise = ["addmm.default"], ["sigmoid.default"] * 3 + ["tanh.default"] * 2
    assert sorted(names(parts.loop)) == sorted([*gates, *pointwise, *["mul.Tensor"] * 2, "addcmul.default"])
    back = ["add.Tensor", "addcmul.default", *["mul.Tensor"] * 5, "cat.default", "mm.default"]
    assert sorted(names(parts.loop_back)) == sorted(back)


def test_what_loops_in_c_read_is_left_as_it_is() -> None:
    found = names(lstm(composed={}).nodes)
    assert "sigmoid_backward.default" in found and "addcmul.default" not in found


Step = Callable[[Tensor, Tensor, Tensor], Tensor]
W = torch.randn(3, 3, dtype=torch.float64)
SUMS: dict[str, tuple[Step, str, bool]] = {
    "a sum with a product": (lambda x, h, w: x + h * torch.tanh(h), "addcmul", True),
    "a sum with a matrix product": (lambda x, h, w: x + h @ w, "addmm", True),
    "a product is read twice": (lambda x, h, w: (p := h * torch.tanh(h)) * (x + p), "addcmul", False),
    "a summand is stretched": (lambda x, h, w: x[:1] + h * torch.tanh(h), "addcmul", False),
    "a factor is stretched": (lambda x, h, w: x + h * h[:, :1], "addcmul", False),
    "the sum has a factor": (lambda x, h, w: torch.add(x, h * torch.tanh(h), alpha=2), "addcmul", False),
    "a number is added": (lambda x, h, w: h * torch.tanh(h) + 1, "addcmul", False),
    "a sum of two matrix products": (lambda x, h, w: h @ w + torch.sin(h) @ w, "addmm", True),
    "a product that is known before": (lambda x, h, w: torch.sin(x) * x + h, "addcmul", False),
    "the same twice": (lambda x, h, w: (p := h * x) + p, "addcmul", False),
}


@at_once(("step", "operator", "merged"), SUMS.values(), ids=SUMS)
def test_a_sum_takes_in_the_operator_before_it_where_that_changes_nothing(
    step: Step, operator: str, merged: bool
) -> None:

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(W.clone())

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(step(x, h, self.w))
            return h, h

    cell, found = Cell(), []
    loop = partition(capture(cell, torch.zeros(2, 3).double(), torch.zeros(2, 3).double())).loop
    assert any(each.startswith(operator) for each in names(loop)) == merged
    x, h = torch.randn(5, 2, 3).double().requires_grad_(), torch.randn(2, 3).double().requires_grad_()
    ours, loop = planned(cell, "python"), eagerly(cell)
    for net in (ours, loop):
        result = net(x, h)
        found.append((result.outputs, torch.autograd.grad(result.outputs.sin().sum(), [x, h], allow_unused=True)))
    assert run_by(ours) == {"python"}
    close(found[0], found[1], 1e-12)
