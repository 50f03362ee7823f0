"""Operators in compiled loops give PyTorch's results."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import as_the_loop, needs_compiler
from torchweft.recurrent import Recurrent

pytestmark = needs_compiler


Make = Callable[[Tensor, Tensor], Tensor]


def operators(text: str) -> dict[str, Make]:
    """Functions of x and y by their expressions, which semicolons separate."""
    expressions = [expression.strip() for expression in text.replace("\n", ";").split(";")]
    return {expression: eval(f"lambda x, y: {expression}") for expression in expressions if expression}


ANY = operators("""
    x + y; x * y; x + 3; x / y; x == y; x < 0.5; torch.maximum(x, y); torch.minimum(x, y); x.clamp(min=0.5)
    torch.logical_and(x, y); torch.logical_xor(x, y); torch.logical_not(x); x.isnan(); x.isinf(); x.isfinite()
    torch.where(x > y, x, y); torch.where(x > 1, x > y, y > 1); x.masked_fill(y > 0, 1)
    torch.full_like(x, 2); torch.full_like(x, 2, dtype=torch.bool); x.bool(); x.float() * y.double()
    torch.tensor(2, dtype=x.dtype) * x + torch.tensor(1.5); x.nan_to_num(0, 0, 0).long() > y.double(); x.any(1)
    (x > 2).any(); x.all(0, keepdim=True); x.amax(1); x.amin(0, keepdim=True); x.max(); x.sum(1); x.sum(0, keepdim=True)
    (x > 0).sum((0, 1)); (x > 0).sum(); x[:, :0].sum(1); x.t()[1:].t(); torch.slice_scatter(x, y[:, 1:3], 1, 1, 3)
    torch.cat([x, x[:, :0], y.bool(), y], 1); torch.stack([x, y], 1).reshape(x.shape[0], -1)
    x[:, torch.tensor([[0], [2]]), None][torch.tensor([[1], [-1]]), torch.tensor([0, 1])]
    x[None, :, :, None][[0, 0], :, [1, -2]]
""")
NUMBERS = operators("""
    x.abs(); x.sign(); x.relu(); x.square(); x**3; x**0; x.floor(); torch.remainder(x, 3); torch.fmod(x, 3)
    x.clamp(max=1); torch.clamp(x, y, y + 1)
""")
SIGNED = operators("x.clamp(-1, 2)")  # a bound that the dtype cannot hold is rejected, see test_lowering.py
FLOATING = operators("""
    -x; x - y; torch.sub(x, y, alpha=0.5); x.exp(); torch.exp2(x); x.expm1(); x.log(); x.log2(); x.log10(); x.log1p()
    x.tanh(); x.sigmoid(); x.sqrt(); x.rsqrt(); x.sin(); x.cos(); x.asin(); x.acos(); x.atan(); x.sinh(); x.cosh()
    x.erf(); x.erfc(); x.ceil(); x.trunc(); x.round(); x.reciprocal(); x.sgn(); x**0.5; x**-0.5; x**1; x**2; x**-1
    x**-2; x**2.5; x**-3; x ** (1 / 3); x**math.inf; x**y; 2**x; torch.atan2(x, y); torch.remainder(x, -1.5)
    torch.remainder(x, y); torch.fmod(x, y); torch.ops.aten._safe_softmax(torch.where(y > 0, x, -math.inf), 1)
    torch.softmax(x, 1); x.mean(1); x.mean(); x[:, :0].mean(1); torch.where(x.isfinite(), x, 0).var(1)
    torch.where(x.isfinite(), x, 0).std(unbiased=False); x.norm(dim=1)
""")
INTEGER = operators("~x; x & y; x | 5; x.mean(1, dtype=torch.float64)")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-3, 90.0, math.inf, -math.inf, math.nan)


def operators_of(dtype: torch.dtype) -> tuple[dict[str, Make], Tensor, Tensor]:
    """Operators, and two tensors that together hold every pair of special numbers."""
    if dtype.is_floating_point:
        pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL)).to(dtype)
        return ANY | NUMBERS | SIGNED | FLOATING, pairs[:, 0].view(24, 6), pairs[:, 1].view(24, 6)
    draw = torch.Generator().manual_seed(0)
    low, high = (0, 2) if dtype == torch.bool else (0 if dtype == torch.uint8 else -9, 9)
    x, y = (torch.randint(low, high, (24, 6), generator=draw).to(dtype) for _ in range(2))
    numbers = {} if dtype == torch.bool else NUMBERS | (operators("x.clamp(1, 4)") if dtype == torch.uint8 else SIGNED)
    return ANY | INTEGER | numbers, x, y


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool], ids=str
)
def test_operators_give_pytorchs_results(dtype: torch.dtype) -> None:
    table, x, y = operators_of(dtype)

    def cell(inputs: tuple[Tensor, Tensor], state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {name: make(*inputs) for name, make in table.items()}, state + 1

    state = torch.zeros(24)
    expected = cell((x, y), state)[0]
    net = Recurrent(cell, backend="c", verify="never")
    outputs = net((x[None], y[None]), state).outputs
    assert net.why()[0][1] == "c", net.why()
    faults = [name for name in table if not nearly_equal(outputs[name][0], expected[name])]
    assert not faults, {name: (outputs[name][0], expected[name]) for name in faults[:2]}


def nearly_equal(result: Tensor, expected: Tensor) -> bool:
    """Equal, for floats up to a few units in the last place."""
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return False
    if not expected.is_floating_point():
        return torch.equal(result, expected)
    rtol = 32 * torch.finfo(expected.dtype).eps
    return torch.allclose(result, expected, rtol=rtol, atol=rtol, equal_nan=True)


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2.0), (0, 1)])
def test_products_with_factors_are_pytorchs(beta: float, alpha: float) -> None:
    weight, x, state = torch.randn(3, 4).double(), torch.randn(5, 2, 3).double(), torch.randn(2, 4).double()
    if beta == 0:
        state[0, 0] = math.nan  # a factor of 0 drops even NaN
    as_the_loop(lambda x, h: (torch.addmm(h, x, weight, beta=beta, alpha=alpha),) * 2, "c", x, state, verify="never")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hardsigmoid_has_pytorchs_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, h = torch.randn(5, 3, 7, dtype=dtype).requires_grad_(), torch.randn(3, 7, dtype=dtype)
    small = 1e-12 if dtype is torch.float64 else 1e-5
    as_the_loop(lambda x, h: (nn.functional.hardsigmoid(3 * x * h) + 0.5 * h,) * 2, "c", x, h, small)
