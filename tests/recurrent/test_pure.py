"""Writes of a step into tensors that it made itself, which a plan says without writes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, eagerly, planned, run_by


class Weights(nn.Module):
    """A cell whose recurrent weight is made, in every step, by a function of its parameter and its buffer."""

    def __init__(self, made: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made = made
        self.weight = nn.Parameter(torch.randn(4, 4).double())
        self.buffer: Tensor
        self.register_buffer("buffer", torch.randn(4, 4).double())

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ self.made(self.weight, self.buffer))
        return h, h


def _copied(weight: Tensor, buffer: Tensor) -> Tensor:
    made = buffer.clone()
    made[0] = weight[1]
    return made + buffer


def _filled(weight: Tensor, buffer: Tensor) -> Tensor:
    mask = buffer.tril(-1)
    mask.diagonal().fill_(1.0)
    return weight * mask


def _orthogonal(weight: Tensor, buffer: Tensor) -> Tensor:
    return torch.linalg.householder_product(weight.tril(-1), buffer[0])


@pytest.mark.parametrize("made", [_copied, _filled, _orthogonal])
def test_a_step_may_write_into_what_it_made_of_weights(made: Callable[[Tensor, Tensor], Tensor]) -> None:
    cell = Weights(made)
    x, h = (torch.randn(*shape).double().requires_grad_() for shape in ((5, 3, 4), (3, 4)))
    before = [each.clone() for each in (cell.weight, cell.buffer)]
    net, found = planned(cell, "python", verify="never"), []
    for each in (eagerly(cell), net):
        outputs = each(x, h).outputs
        found.append((outputs, *torch.autograd.grad(outputs.sin().sum(), [x, h, cell.weight])))
    assert run_by(net) == {"python"}, net.why()
    close(found[1], found[0], 1e-10)
    assert all(torch.equal(one, other) for one, other in zip(before, (cell.weight, cell.buffer), strict=True))


def _strided(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x * 2, torch.zeros_like(h)
    a[:, ::2] *= h[:, ::2]
    b[:, 1::2].copy_(h[:, 1::2])
    return a, b + a.cos()


def _empty(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.empty_like(h)
    made[:, ::2], made[:, 1::2] = x[:, ::2], h[:, 1::2]
    return made.cos(), made * 0.5


def _selected(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    a, b = h * 1, x * 1
    a.select(1, 0).fill_(0.5)
    b.t()[-2:].mul_(a.t()[1:3])
    return a * b, b


def _diagonal(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    made = (x * h).t().contiguous()
    made.fill_diagonal_(0.3)
    return made, made.t() + h


def _by_strides(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.tanh(x + h)
    return (made * 2).as_strided((3, 2), (4, 2), 1), made.t().clone().as_strided((3, 4), (1, 3))


def _masked(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    a, b, c = x * 1, x * h, h + x
    a[x > 0] = 0.5
    b[h[:, 0] > 0] = 0.0
    c[c > 0] = torch.tensor(0.25).double()
    return a * b, c


@pytest.mark.parametrize("cell", [_strided, _empty, _selected, _diagonal, _by_strides, _masked])
def test_a_step_may_write_into_any_view_of_what_it_made(cell: Callable[..., tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(0)
    x, h = (torch.randn(*shape).double().requires_grad_() for shape in ((5, 3, 4), (3, 4)))
    net, found = planned(cell, "python", verify="never"), []
    for each in (eagerly(cell), net):
        outputs, last, _ = each(x, h)
        found.append((outputs, last, *torch.autograd.grad(outputs.sin().sum() + last.cos().sum(), [x, h])))
    assert run_by(net) == {"python"}, net.why()
    close(found[1], found[0], 1e-10)
