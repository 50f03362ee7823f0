"""Operators in loops in C compute what PyTorch computes, and what they cannot is refused."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import as_the_loop, needs_compiler
from weft.recurrent import Recurrent

pytestmark = needs_compiler


Make = Callable[[Tensor, Tensor], Tensor]

ANY: dict[str, Make] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "add number": lambda x, y: x + 3,
    "abs": lambda x, y: x.abs(),
    "sign": lambda x, y: x.sign(),
    "relu": lambda x, y: x.relu(),
    "square": lambda x, y: x.square(),
    "cube": lambda x, y: x**3,
    "to the 0": lambda x, y: x**0,
    "divided": lambda x, y: x / y,
    "floor": lambda x, y: x.floor(),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, y: x.clamp(-1, 2),
    "clamp below": lambda x, y: x.clamp(max=1),
    "clamp by tensors": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp by a fraction": lambda x, y: x.clamp(min=0.5),
    "equal": lambda x, y: x == y,
    "less than a fraction": lambda x, y: x < 0.5,
    "and": torch.logical_and,
    "xor": torch.logical_xor,
    "not": lambda x, y: torch.logical_not(x),
    "nan": lambda x, y: x.isnan(),
    "infinite": lambda x, y: x.isinf(),
    "finite": lambda x, y: x.isfinite(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where of truth": lambda x, y: torch.where(x > 1, x > y, y > 1),
    "masked": lambda x, y: x.masked_fill(y > 0, 1),
    "filled": lambda x, y: torch.full_like(x, 2),
    "filled with truth": lambda x, y: torch.full_like(x, 2, dtype=torch.bool),
    "as truth": lambda x, y: x.bool(),
    "as float": lambda x, y: x.float() * y.double(),
    "as long, compared with a float": lambda x, y: x.nan_to_num(0, 0, 0).long() > y.double(),
    "remainder": lambda x, y: torch.remainder(x, 3),
    "fmod": lambda x, y: torch.fmod(x, 3),
    "any": lambda x, y: x.any(1),
    "any of all": lambda x, y: (x > 2).any(),
    "all": lambda x, y: x.all(0, keepdim=True),
    "two indices": lambda x, y: x[:, torch.tensor([[0], [2]]), None][torch.tensor([[1], [-1]]), torch.tensor([0, 1])],
    "two indices apart": lambda x, y: x[None, :, :, None][[0, 0], :, [1, -2]],
    "amax": lambda x, y: x.amax(1),
    "amin": lambda x, y: x.amin(0, keepdim=True),
    "max of all": lambda x, y: x.max(),
    "sum": lambda x, y: x.sum(1),
    "sum of rows": lambda x, y: x.sum(0, keepdim=True),
    "sum of truth": lambda x, y: (x > 0).sum((0, 1)),
    "count": lambda x, y: (x > 0).sum(),
    "sum of nothing": lambda x, y: x[:, :0].sum(1),
    "turned": lambda x, y: x.t()[1:].t(),
    "put in": lambda x, y: torch.slice_scatter(x, y[:, 1:3], 1, 1, 3),
    "joined": lambda x, y: torch.cat([x, x[:, :0], y.bool(), y], 1),
    "stacked": lambda x, y: torch.stack([x, y], 1).reshape(x.shape[0], -1),
    "number by tensor": lambda x, y: torch.tensor(2, dtype=x.dtype) * x + torch.tensor(1.5),
}
FLOATING: dict[str, Make] = {
    "neg": lambda x, y: -x,
    "sub": lambda x, y: x - y,
    "sub with a factor": lambda x, y: torch.sub(x, y, alpha=0.5),
    **{
        name: (lambda x, y, name=name: getattr(torch, name)(x))
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt"),
            *("sin", "cos", "asin", "acos", "atan", "sinh", "cosh", "erf", "erfc", "ceil", "trunc", "round"),
            *("reciprocal", "sgn"),
        )
    },
    **{
        f"to the {power}": (lambda x, y, power=power: x**power)
        for power in (0.5, -0.5, 1, 2, -1, -2, 2.5, -3, 1 / 3, math.inf)
    },
    "to the y": lambda x, y: x**y,
    "2 to the x": lambda x, y: 2**x,
    "atan2": torch.atan2,
    "remainder of a fraction": lambda x, y: torch.remainder(x, -1.5),
    "remainder by y": torch.remainder,
    "fmod by y": torch.fmod,
    "safe softmax": lambda x, y: torch.ops.aten._safe_softmax(torch.where(y > 0, x, -math.inf), 1),
    "mean": lambda x, y: x.mean(1),
    "mean of all": lambda x, y: x.mean(),
    "mean of nothing": lambda x, y: x[:, :0].mean(1),
    "var": lambda x, y: torch.where(x.isfinite(), x, 0).var(1),
    "std of all": lambda x, y: torch.where(x.isfinite(), x, 0).std(unbiased=False),
    "softmax": lambda x, y: torch.softmax(x, 1),
    "norm": lambda x, y: x.norm(dim=1),
}
WHOLE: dict[str, Make] = {
    "not, bit by bit": lambda x, y: ~x,
    "and, bit by bit": lambda x, y: x & y,
    "or a number": lambda x, y: x | 5,
    "mean as float": lambda x, y: x.mean(1, dtype=torch.float64),
}
TRUTH: dict[str, Make] = {
    name: make
    for name, make in (ANY | WHOLE).items()
    if name
    not in ("sign", "abs", "relu", "floor", "clamp", "clamp below", "clamp by tensors", "square", "cube", "to the 0")
    and name not in ("remainder", "fmod")
}
NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-3, 90.0, math.inf, -math.inf, math.nan)


def table(dtype: torch.dtype) -> tuple[dict[str, Make], Tensor, Tensor]:
    """Operators, and two tensors that meet every pair of special numbers."""
    if dtype.is_floating_point:
        pairs = torch.cartesian_prod(torch.tensor(NUMBERS), torch.tensor(NUMBERS)).to(dtype)
        return ANY | FLOATING, pairs[:, 0].view(24, 6), pairs[:, 1].view(24, 6)
    draw = torch.Generator().manual_seed(0)
    low, high = (0, 2) if dtype == torch.bool else (0 if dtype == torch.uint8 else -9, 9)
    x, y = (torch.randint(low, high, (24, 6), generator=draw).to(dtype) for _ in range(2))
    if dtype == torch.uint8:  # a bound below 0 is refused, see test_lowering.py
        return ANY | WHOLE | {"clamp": lambda x, y: x.clamp(1, 4)}, x, y
    return (TRUTH if dtype == torch.bool else ANY | WHOLE), x, y


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool], ids=str
)
def test_every_operator_gives_what_pytorch_gives(dtype: torch.dtype) -> None:
    operators, x, y = table(dtype)

    def cell(inputs: tuple[Tensor, Tensor], state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {name: make(*inputs) for name, make in operators.items()}, state + 1

    state = torch.zeros(24)
    wanted = cell((x, y), state)[0]
    net = Recurrent(cell, backend="c", verify="never")
    seen = net((x[None], y[None]), state).outputs
    assert net.why()[0][1] == "c", net.why()
    faults = [name for name in operators if not alike(seen[name][0], wanted[name])]
    assert not faults, {name: (seen[name][0], wanted[name]) for name in faults[:2]}


def alike(seen: Tensor, wanted: Tensor) -> bool:
    """Equal, up to a few units in the last place where a dtype has such."""
    if (seen.dtype, seen.shape) != (wanted.dtype, wanted.shape):
        return False
    if not wanted.is_floating_point():
        return torch.equal(seen, wanted)
    rtol = 32 * torch.finfo(wanted.dtype).eps
    return torch.allclose(seen, wanted, rtol=rtol, atol=rtol, equal_nan=True)


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2.0), (0, 1)])
def test_a_product_with_factors_is_pytorchs(beta: float, alpha: float) -> None:
    weight, x, state = torch.randn(3, 4).double(), torch.randn(5, 2, 3).double(), torch.randn(2, 4).double()
    if beta == 0:
        state[0, 0] = math.nan  # a factor of 0 makes even that go away
    as_the_loop(lambda x, h: (torch.addmm(h, x, weight, beta=beta, alpha=alpha),) * 2, "c", x, state, verify="never")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hardsigmoid_has_the_gradient_of_pytorch_in_every_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, h = torch.randn(5, 3, 7, dtype=dtype).requires_grad_(), torch.randn(3, 7, dtype=dtype)
    small = 1e-12 if dtype is torch.float64 else 1e-5
    as_the_loop(lambda x, h: (nn.functional.hardsigmoid(3 * x * h) + 0.5 * h,) * 2, "c", x, h, small)
