"""What runs as a wavefront, what does not, and who says so."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.layers.layer_cases import WIDTH, layers
from weft.core.errors import SpecError, UsageError
from weft.recurrent import Recurrent
from weft.recurrent.layers import Stack, at_once
from weft.recurrent.layers.borrowed import BorrowedError


def said(stack: Stack) -> str:
    return stack.explain().splitlines()[0]


def test_calls_that_cannot_be_cut_run_whole_and_say_why() -> None:
    one, two = layers(2)
    x = torch.randn(6, 2, WIDTH).double()
    stack = Stack([one, two], wavefront=2)
    stack(x)
    assert said(stack) == "The last call ran as a wavefront: 3 chunks of 2 steps."
    stack(x, reset=torch.zeros(6, 2, dtype=torch.bool))
    assert "a reset may bring back" in said(stack)
    stack(x[:2])
    assert "the 2 steps are a single chunk" in said(stack)
    stack(x[:0])
    assert "the 0 steps are a single chunk" in said(stack)
    for net, why in ((Stack([one], wavefront=2), "one layer"), (Stack([two, two], wavefront=2), "in common")):
        net(x)
        assert why in said(net)
    for net, why in ((Stack([one, two], wavefront=None), "wavefront is None"), (Stack([one, two]), "layers 0, 1 hold")):
        net(x)
        assert why in said(net)


def test_arguments_are_checked_before_they_are_cut() -> None:
    stack, x = Stack(layers(2), wavefront=2), torch.randn(6, 2, WIDTH).double()
    with pytest.raises(SpecError, match="row 1 has 7"):
        stack(x, lengths=[3, 7])
    with pytest.raises(UsageError, match="start is -1"):
        stack(x, start=-1)


class Scaled(nn.Module):
    """A layer over time that is a single product."""

    def __init__(self, drawn: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.drawn = drawn

    def forward(self, x: Tensor, s: Tensor) -> Any:
        s = 0.5 * s + x * self.weight * (torch.rand(()) if self.drawn else 1)
        return s, s


def calls(
    monkeypatch: pytest.MonkeyPatch, cells: list[Any], *, wave: float = 1.0, whole: float = 1.0
) -> tuple[Stack, list[str]]:
    """What an "auto" stack does in a row of calls, by a clock that says how long each way takes."""
    stack = Stack([Recurrent(cell, initial=torch.zeros(1), backend="eager") for cell in cells])
    begun, now, ways = [False], [0.0], list[str]()

    def clock() -> float:
        now[0] += (wave if "as a wavefront" in said(stack) else whole) if begun[0] else 0.0
        begun[0] = not begun[0]
        return now[0]

    monkeypatch.setattr(at_once, "perf_counter", clock)
    monkeypatch.setattr(at_once.AtOnce, "_unsure", lambda self: None)
    for _ in range(15):
        begun[0] = False
        stack(torch.randn(40, 2, WIDTH, requires_grad=True))
        ways.append("wave" if "as a wavefront" in said(stack) else "whole")
    return stack, ways


def test_auto_tries_both_by_turns_and_keeps_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ways = calls(monkeypatch, [Scaled(), Scaled()], wave=0.5)
    assert ways == ["whole", "wave"] * 6 + ["wave"] * 3
    stack, ways = calls(monkeypatch, [Scaled(), Scaled()], wave=0.96)
    assert ways == ["whole", "wave"] * 6 + ["whole"] * 3
    assert "it was faster" in said(stack)
    stack(torch.randn(20, 2, WIDTH))
    assert "to be measured" in said(stack)  # without gradients it is another kind of call
    stack(torch.randn(16, 2, WIDTH))
    assert "single chunk" in said(stack)


def test_auto_lets_the_clock_change_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, ways = calls(monkeypatch, [Scaled(), Scaled(drawn=True)], wave=0.1)
    assert set(ways) == {"whole"}
    assert "random numbers" in said(stack)


def test_what_a_layer_borrows_keeps_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.ones(WIDTH, requires_grad=True)

    def borrows(x: Tensor, s: Tensor) -> Any:
        s = 0.5 * s + scale * x
        return s, s

    stack, ways = calls(monkeypatch, [Scaled(), borrows], wave=0.1)
    assert set(ways) == {"whole"}
    assert "computes with tensors that want a gradient" in said(stack)
    asked = Stack(list(stack.layers), wavefront=16)
    with pytest.raises(BorrowedError, match=r"layer 1 computes .* \(shapes \(3,\)\)"):
        asked(torch.randn(40, 2, WIDTH))


def test_auto_does_not_try_where_it_could_change_more_than_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Recurrent(nn.GRUCell(WIDTH, WIDTH), backend="python") for _ in range(2))
    x = torch.randn(40, 2, WIDTH)
    monkeypatch.setattr(at_once, "_cores", lambda: 1)
    stack = Stack([one, two])
    stack(x)
    assert "there is one core" in said(stack)
    monkeypatch.setattr(at_once, "_cores", lambda: 2)
    stack(x)
    assert "to be measured" in said(stack)
    stack = Stack([one, Recurrent(two.cell, backend="eager")])
    stack(x)
    assert "layers 1 hold" in said(stack)
