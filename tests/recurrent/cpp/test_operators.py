"""What larger operators are made of computes what PyTorch's kernels do."""

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import eagerly, needs_compiler, planned, run_by


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hardsigmoid_has_the_gradient_of_pytorch_in_every_type(dtype: torch.dtype) -> None:
    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        after = nn.functional.hardsigmoid(3 * x * h) + 0.5 * h
        return after, after

    torch.manual_seed(0)
    x, h = torch.randn(5, 3, 7, dtype=dtype).requires_grad_(), torch.randn(3, 7, dtype=dtype)
    net = planned(step, "c")
    ours, theirs = (torch.autograd.grad(each(x, h).outputs.sin().sum(), x)[0] for each in (net, eagerly(step)))
    assert run_by(net) == {"c"}
    small = 1e-12 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=small, atol=small)
