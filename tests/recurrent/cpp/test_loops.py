"""The functions of loops.h: how far from the truth in units of the last place, and what they do to NaN and zero."""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.recurrent.recurrent_cases import grid, needs_compiler
from weft.recurrent.cpp import compiler
from weft.recurrent.cpp.compiler import load

pytestmark = needs_compiler
ONE_ARGUMENT = ("exp", "tanh", "sigmoid", "sign", "sqrt", "abs", "log", "expm1", "log1p")
TWO_ARGUMENTS = ("max", "min", "pow", "atan2")
KINDS = {torch.float32: "float", torch.float64: "double"}
NAN, INF = math.nan, math.inf
SPECIAL = (0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1e-310, -1e-310, 1e-40, 88.8, -88.8, -103.9, 709.8, -745.1)


@cache
def library() -> ctypes.CDLL:
    """Each function over an array, in either precision."""
    lines = [(Path(compiler.__file__).parent / "loops.h").read_text()]
    for kind in KINDS.values():
        head = (
            f'extern "C" void {{}}_{kind}(long n, const {kind} *x, const {kind} *y, {kind} *to) {{{{ for (long i = 0;'
        )
        for names, call in ((ONE_ARGUMENT, "w_{}(x[i])"), (TWO_ARGUMENTS, "w_{}(x[i], y[i])")):
            lines += [f"{head.format(name)} i < n; i++) to[i] = {call.format(name)}; }}" for name in names]
    return load("\n".join(lines).replace("{{", "{").replace("}}", "}"), exact=True)


def ours(name: str, x: Tensor, y: Tensor | None = None) -> Tensor:
    """The function of loops.h."""
    x, to = x.contiguous(), torch.empty_like(x)
    other = x if y is None else y.contiguous()
    places = [ctypes.c_void_p(each.data_ptr()) for each in (x, other, to)]
    getattr(library(), f"{name}_{KINDS[x.dtype]}")(ctypes.c_long(x.numel()), *places)
    return to


def wide(dtype: torch.dtype) -> Tensor:
    """Numbers of every size, dense where the functions bend, and both sides of every border."""
    bits = torch.finfo(dtype)
    sizes = torch.logspace(math.log10(bits.tiny), 3, 20_001, dtype=torch.float64)
    dense = torch.linspace(-120, 120, 100_001, dtype=torch.float64)
    borders = torch.tensor([0.625, 0.6249999, 88.0, 88.72, 89.0, 104.0, 709.78, 710.0, 746.0]).double()
    x = torch.cat([sizes, -sizes, dense, borders, -borders])
    return x.to(dtype)


def ulps(seen: Tensor, wanted: Tensor) -> float:
    """The largest distance in units of the last place of what is wanted; subnormal results count by their own unit."""
    dtype = seen.dtype
    assert torch.equal(seen.isnan(), wanted.isnan())
    near = wanted.to(dtype)
    finite = near.isfinite() & seen.isfinite()
    assert torch.equal(near[~finite].nan_to_num(1.0), seen[~finite].nan_to_num(1.0)), "infinity at the same places"
    unit = torch.maximum(
        torch.nextafter(near.abs(), torch.tensor(math.inf, dtype=dtype)) - near.abs(),
        torch.tensor(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, dtype=dtype),
    )
    gap = (seen.double() - wanted.double()).abs()[finite] / unit.double()[finite]
    return float(gap.max())


TRUE: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "exp": (torch.exp, 1.0),
    "tanh": (torch.tanh, 2.5),
    "sigmoid": (torch.sigmoid, 3.0),
}


@grid(name=list(TRUE), dtype=list(KINDS))
def test_the_functions_of_gates_are_right_to_a_few_units_in_the_last_place(name: str, dtype: torch.dtype) -> None:
    true, limit = TRUE[name]
    x = wide(dtype)
    if name == "sigmoid":  # 1 / (1 + e^-x) has no subnormal results in its own precision: e^-x overflows before
        x = x[(x > (-88.0 if dtype == torch.float32 else -709.0))]
    wanted = true(x.double())
    assert ulps(ours(name, x), wanted) <= limit + (1.0 if dtype == torch.float64 else 0.0)  # torch errs as well


@grid(name=[*TRUE, "sqrt", "abs", "log", "expm1", "log1p", "sign"], dtype=list(KINDS))
def test_special_numbers_go_where_pytorch_sends_them(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    seen, wanted = ours(name, x), getattr(torch, name)(x)
    if name == "sign":
        seen, wanted = seen.nan_to_num(7.0), wanted.nan_to_num(7.0)
    torch.testing.assert_close(seen, wanted, equal_nan=True, rtol=1e-5, atol=1e-44)
    assert torch.equal(seen.isinf(), wanted.isinf())


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_tanh_is_odd_and_keeps_to_its_bounds(dtype: torch.dtype) -> None:
    x = wide(dtype)
    y = ours("tanh", x)
    assert torch.equal(ours("tanh", -x), -y) and y.abs().max() == 1
    assert torch.equal(torch.signbit(y), torch.signbit(x))
    assert bool((ours("sigmoid", x) <= 1).all()) and bool((ours("sigmoid", x) >= 0).all())


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("name", "like"), [("max", torch.maximum), ("min", torch.minimum), ("pow", torch.pow)])
def test_functions_of_two_numbers_are_pytorchs(name: str, like: Callable[..., Tensor], dtype: torch.dtype) -> None:
    values = torch.tensor([*SPECIAL[:6], 1.0, -1.0, 2.0, 3.0, 0.5, -2.5], dtype=torch.float64).to(dtype)
    x, y = (each.flatten() for each in torch.meshgrid(values, values, indexing="ij"))
    x, y = (each[~((x == -math.inf) & (y == 0.5))] for each in (x, y))  # where PyTorch itself gives NaN or infinity
    torch.testing.assert_close(ours(name, x, y), like(x, y), equal_nan=True, rtol=4 * torch.finfo(dtype).eps, atol=0)
