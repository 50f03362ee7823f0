"""A backward in two parts gives the gradients of an ordinary backward, and repeats no work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from torchweft.core.segment import SplitBackward


class CountedScale(torch.autograd.Function):
    """Multiplies by a weight, and counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        CountedScale.calls += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return CountedScale.apply(x, self.weight)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Scale(), nn.LayerNorm(4), nn.Linear(4, 4, bias=False)).double()


def straight(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x)


def tied(model: nn.Sequential, x: Tensor) -> Tensor:
    return model[0](model(x))


def parameter_term(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x) + model[4].weight.square().sum(0)


def weight_of_weights(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x) @ (model[0].weight @ model[4].weight).t()


def output_of_parameters(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    return [model(x).sum(), model[0].weight.sum()]


FUNCTIONS = [straight, tied, parameter_term, weight_of_weights, output_of_parameters]


@pytest.mark.parametrize("with_input", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_parts_equal_one_and_run_python_once(function: Callable[..., Any], with_input: bool) -> None:
    model, unused = chain(), nn.Parameter(torch.zeros(1))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=with_input)
    inputs, parameters = ([x] if with_input else []), [*model.parameters(), unused]

    def outputs() -> list[Tensor]:
        result = function(model, x)
        return result if isinstance(result, list) else [result]

    seeds = [torch.randn_like(output) for output in outputs()]
    expected = torch.autograd.grad(outputs(), [*inputs, *parameters], seeds, allow_unused=True)
    edges = [get_gradient_edge(output) for output in outputs()]
    CountedScale.calls = 0
    split = SplitBackward(edges, seeds, inputs, parameters)
    gradients = [*split.input_gradients(), *split.parameter_gradients()]
    assert expected[-1] is None and CountedScale.calls == 1
    torch.testing.assert_close(gradients, list(expected), rtol=0, atol=1e-13)


def test_first_part_computes_no_weight_gradient() -> None:
    """Each part runs one matrix product per layer, so both together run as many as an ordinary backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def products(call: Callable[[], object]) -> int:
        with torch.profiler.profile() as profile:
            call()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")

    out = model(x)
    split = SplitBackward([get_gradient_edge(out)], [torch.ones_like(out)], [x], list(model.parameters()))
    assert products(split.input_gradients) == 2
    assert products(split.parameter_gradients) == 2
