"""A plan is held against the eager loop by its numbers, and its time is taken by turns with its peers."""

import pytest
import torch
from torch import Tensor, nn

from weft.demo import speeds as module
from weft.demo.speeds import LIMIT, largest_difference, speeds
from weft.demo.speller import IntegratingCell
from weft.recurrent import Recurrent


def test_the_plan_agrees_with_the_loop_and_leaves_the_cell_alone() -> None:
    cell = IntegratingCell(4, 8)
    assert 0 < largest_difference(cell, "python") < LIMIT
    assert cell.product.dtype == torch.float32 and all(each.grad is None for each in cell.parameters())


def test_a_difference_anywhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = module._numbers
    for at in range(3):

        def off(net: Recurrent, x: Tensor, state: tuple[Tensor, ...], at: int = at) -> list[Tensor]:
            found = numbers(net, x, state)
            if net.backend != "eager":
                found[at] = found[at] + 1e-3
            return found

        monkeypatch.setattr(module, "_numbers", off)
        assert largest_difference(IntegratingCell(4, 8), "python") == pytest.approx(1e-3)


def test_all_are_timed_in_each_shape_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, tuple[int, ...]]] = []

    def seconds(net: nn.Module, x: Tensor) -> float:
        order.append((net.backend if isinstance(net, Recurrent) else type(net).__name__, tuple(x.shape)))
        return float(len(order))

    monkeypatch.setattr(module, "seconds", seconds)
    monkeypatch.setattr(module, "SHAPES", ((3, 2), (5, 1)))
    found = speeds(IntegratingCell(4, 8))
    assert [(each.steps, each.rows) for each in found] == [(3, 2), (5, 1)]
    assert order[:6] == [(name, (3, 2, 4)) for name in ("auto", "eager", "LSTM")] * 2
    assert found[0].loop - found[0].weft == found[0].lstm - found[0].loop == 1.0


def test_a_forward_and_its_backward_are_timed() -> None:
    x = torch.randn(3, 2, 4, requires_grad=True)
    assert module.seconds(nn.LSTM(4, 8), x) > 0 and x.grad is not None
