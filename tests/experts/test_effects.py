"""What a module changes besides its outputs is seen and can be undone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.expert_cases import good, rows, task, weights
from weft.core.spec import TensorSpec
from weft.experts import ExpertBackend

X = TensorSpec((None, 3), torch.float64)


class Replaces(nn.Module):
    """Puts a new tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * self.scale


class Renorms(nn.Module):
    """Rescales its own weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.abs().sum(1).long() % 5)


def normed() -> nn.Module:
    return nn.BatchNorm1d(3, dtype=torch.float64)


def toggled() -> nn.Module:
    """Is put into training only after the dummy run."""
    return normed().eval()


def still(parameters: Any) -> torch.optim.Optimizer:
    """Steps, and leaves the weights to the module."""
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.mark.parametrize("make", [Replaces, Renorms, normed, toggled])
def test_a_forward_changes_nothing_and_a_backward_what_the_module_changes(make: type[nn.Module]) -> None:
    backend = ExpertBackend("e", make(), still, args_schema=(X,))
    backend.module.train()
    before = weights(backend)
    good(backend.executor.forward([task(rows(4, 0, 3))]))
    assert weights(backend) == before
    gradient = torch.ones(4, 3, dtype=torch.float64)
    answers = backend.executor.backward([task(rows(4, 0, 3), gradient), task(rows(4, 0, 3), gradient * torch.nan)])
    assert isinstance(answers[0], list) and isinstance(answers[1], Exception)
    once = weights(backend)
    assert once[0] != before[0]
    other = ExpertBackend("e", make(), still, args_schema=(X,))
    other.module.train()
    if make is not Renorms:  # its first numbers are drawn
        good(other.executor.backward([task(rows(4, 0, 3), gradient)]))
        assert weights(other) == once


class LateDropout(nn.Module):
    """Draws in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def test_a_mode_that_is_switched_later_is_observed_anew() -> None:
    backend = ExpertBackend("late", LateDropout().eval(), args_schema=(X,))
    state = torch.get_rng_state()
    x = rows(20, 0, 3)
    assert torch.equal(good(backend.executor.forward([task(x)]))[0][0], x)
    backend.module.train()
    one, other = (good(backend.executor.forward([task(x)]))[0][0] for _ in range(2))
    assert not torch.equal(one, x) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
