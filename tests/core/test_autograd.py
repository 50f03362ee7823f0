"""`apply_as_node`: any function becomes one autograd node."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from torchweft.core.autograd import apply_as_node, silence_hooks
from torchweft.core.errors import DoubleBackwardError


class Product:
    """A function with two outputs: a * b, and b as an integer."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a.detach(), b.detach()
        self.calls: list[tuple[list[Tensor | None], bool, bool]] = []

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        assert not torch.is_grad_enabled()
        return [self.a * self.b, self.b.long()], [True, False]

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        self.calls.append((list(gradients), retain, torch.is_grad_enabled()))
        (gradient, _) = gradients
        return [None, None] if gradient is None else [gradient * self.b, None]


def apply_product() -> tuple[Product, Tensor, Tensor, Tensor, Tensor]:
    """The function, its inputs and its outputs."""
    a, b = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    function = Product(a, b)
    y, n = apply_as_node(function, [a, b])
    return function, a, b, y, n


def test_backward_runs_once_and_skips_integer_outputs() -> None:
    function, a, b, y, n = apply_product()
    assert y.requires_grad and not n.requires_grad and not function.calls
    assert y.item() == 6 and n.item() == 3
    (y * 2 + y).sum().backward()
    assert a.grad == 9
    assert b.grad is None
    ((gradient, other), retain, grad_mode), *more = function.calls
    assert gradient == 3 and other is None
    assert not retain and not grad_mode and not more


def test_backward_receives_whether_the_graph_is_retained() -> None:
    function, a, _, y, _ = apply_product()
    torch.autograd.grad(y, a, retain_graph=True)
    y.backward(retain_graph=True)
    y.backward()
    assert [retain for _, retain, _ in function.calls] == [True, True, False]


class Explained(Product):
    """Explains why it can be differentiated only once."""

    only_once = "this product has no second derivative"


@pytest.mark.parametrize(
    ("kind", "words"), [(Product, "executor='graph'"), (Explained, "but this product has no second derivative$")]
)
def test_gradient_of_a_gradient_is_rejected_with_the_reason(kind: type[Product], words: str) -> None:
    a = torch.tensor([2.0], requires_grad=True)
    y, _ = apply_as_node(kind(a, a), [a, a])
    with pytest.raises(DoubleBackwardError, match=words):
        torch.autograd.grad(y, a, create_graph=True)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_quiet_inside_and_back_afterwards(fails: bool) -> None:
    p = torch.tensor([2.0], requires_grad=True)
    fired: list[float] = []
    handle = p.register_hook(lambda gradient: fired.append(gradient.item()))
    other = torch.tensor([1.0], requires_grad=True)
    with pytest.raises(KeyError) if fails else nullcontext(), silence_hooks([p, other]):
        torch.autograd.grad(p * 5, p)
        if fails:
            raise KeyError
    assert fired == []
    torch.autograd.grad(p * 7, p)
    assert fired == [7]
    handle.remove()
    torch.autograd.grad(p * 9, p)
    assert fired == [7]
