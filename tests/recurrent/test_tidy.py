"""A graph that was tidied means what it meant."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import eagerly, planned, run_by


def _channels(a: Tensor) -> Tensor:
    return torch.stack([a, 2 * a, a * a, a.sin()], 1).view(-1, 4, 2, 2)


NORMED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "expanded gradient": lambda norm, a: norm(_channels(a)).sum(1).view_as(a),
    "permuted": lambda norm, a: norm(_channels(a).permute(0, 1, 3, 2))[..., 0].reshape(-1, 8)[:, ::2],
    "channels last": lambda norm, a: norm(_channels(a).to(memory_format=torch.channels_last)).sum(1).reshape(a.shape),
}


@pytest.mark.parametrize("form", NORMED.values(), ids=NORMED)
def test_group_norm_takes_values_wherever_they_lie(form: Callable[[nn.Module, Tensor], Tensor]) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, 4).double()

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            after = form(self.norm, x + h).tanh()
            return after, after

    torch.manual_seed(0)
    cell = Cell()
    x, h = torch.rand(4, 3, 4).double().requires_grad_(), torch.rand(3, 4).double().requires_grad_()
    net, found = planned(cell, "python"), []
    for each in (eagerly(cell), net):
        outputs = each(x, h).outputs
        found.append((outputs, *torch.autograd.grad(outputs.sin().sum(), [x, h, *cell.parameters()])))
    assert run_by(net) == {"python"}
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


FILLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "atanh": lambda x, h: torch.atanh(x * h),
    "addcdiv": lambda x, h: torch.addcdiv(h, x, x + 1),
    "lerp": lambda x, h: torch.lerp(h, x, 0.3 * x),
}


@pytest.mark.parametrize("step", FILLED.values(), ids=FILLED)
def test_a_plan_passes_on_no_warning_of_pytorch_about_vmap(step: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, h = torch.rand(4, 3, 4).double().requires_grad_() * 0.5, torch.rand(3, 4).double()
    nets, found = [each(lambda x, h: (step(x, h),) * 2) for each in (eagerly, lambda c: planned(c, "python"))], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for net in nets:
            found.append(torch.autograd.grad(net(x, h).outputs.sin().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
