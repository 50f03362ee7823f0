"""The functions of loops.h: their error in units in the last place, and their values at NaN, infinity and zero."""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.recurrent.recurrent_cases import grid, needs_compiler
from torchweft.recurrent.cpp import compiler
from torchweft.recurrent.cpp.compiler import load

pytestmark = [needs_compiler, pytest.mark.usefixtures("optimized_cells")]
ONE_ARGUMENT = ("exp", "tanh", "sigmoid", "sign", "sqrt", "abs", "log", "expm1", "log1p")
TWO_ARGUMENTS = ("max", "min", "pow", "atan2")
KINDS = {torch.float32: "float", torch.float64: "double"}
NAN, INF = math.nan, math.inf
SPECIAL = (0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1e-310, -1e-310, 1e-40, 88.8, -88.8, -103.9, 709.8, -745.1)


@cache
def library() -> ctypes.CDLL:
    """Each function over an array, in both precisions."""
    lines = [(Path(compiler.__file__).parent / "loops.h").read_text()]
    for kind in KINDS.values():
        for names, arguments in ((ONE_ARGUMENT, "x[i]"), (TWO_ARGUMENTS, "x[i], y[i]")):
            lines += [
                f'extern "C" void {name}_{kind}(long n, const {kind} *x, const {kind} *y, {kind} *to) '
                f"{{ for (long i = 0; i < n; i++) to[i] = w_{name}({arguments}); }}"
                for name in names
            ]
    return load("\n".join(lines), exact=True)


def compute(name: str, x: Tensor, y: Tensor | None = None) -> Tensor:
    """The values of a function of loops.h."""
    x, to = x.contiguous(), torch.empty_like(x)
    other = x if y is None else y.contiguous()
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, other, to)]
    getattr(library(), f"{name}_{KINDS[x.dtype]}")(ctypes.c_long(x.numel()), *addresses)
    return to


def numbers(dtype: torch.dtype) -> Tensor:
    """Numbers of every magnitude, dense where the functions curve, and on both sides of every branch."""
    magnitudes = torch.logspace(math.log10(torch.finfo(dtype).tiny), 3, 20_001, dtype=torch.float64)
    dense = torch.linspace(-120, 120, 100_001, dtype=torch.float64)
    borders = torch.tensor([0.625, 0.6249999, 88.0, 88.72, 89.0, 104.0, 709.78, 710.0, 746.0]).double()
    return torch.cat([magnitudes, -magnitudes, dense, borders, -borders]).to(dtype)


def largest_error(result: Tensor, expected: Tensor) -> float:
    """The largest distance in units in the last place. Subnormal results use their own unit."""
    dtype = result.dtype
    assert torch.equal(result.isnan(), expected.isnan())
    rounded = expected.to(dtype)
    finite = rounded.isfinite() & result.isfinite()
    assert torch.equal(rounded[~finite].nan_to_num(1.0), result[~finite].nan_to_num(1.0)), "infinity at equal places"
    unit = torch.maximum(
        torch.nextafter(rounded.abs(), torch.tensor(math.inf, dtype=dtype)) - rounded.abs(),
        torch.tensor(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, dtype=dtype),
    )
    return float(((result.double() - expected.double()).abs()[finite] / unit.double()[finite]).max())


GATES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "exp": (torch.exp, 1.0),
    "tanh": (torch.tanh, 2.5),
    "sigmoid": (torch.sigmoid, 3.0),
}


@grid(name=list(GATES), dtype=list(KINDS))
def test_gate_functions_err_by_a_few_units(name: str, dtype: torch.dtype) -> None:
    function, limit = GATES[name]
    x = numbers(dtype)
    if name == "sigmoid":  # 1 / (1 + e^-x) has no subnormal results in its own precision: e^-x overflows before
        x = x[(x > (-88.0 if dtype == torch.float32 else -709.0))]
    # In float64 PyTorch's own error counts too.
    assert largest_error(compute(name, x), function(x.double())) <= limit + (dtype == torch.float64)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_special_numbers_give_the_results_of_pytorch(dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    for name in (*GATES, "sqrt", "abs", "log", "expm1", "log1p", "sign"):
        result, expected = compute(name, x), getattr(torch, name)(x)
        if name == "sign":
            result, expected = result.nan_to_num(7.0), expected.nan_to_num(7.0)
        torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-5, atol=1e-44)
        assert torch.equal(result.isinf(), expected.isinf()), name


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_tanh_is_odd_and_gates_keep_their_bounds(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    y = compute("tanh", x)
    assert torch.equal(compute("tanh", -x), -y) and y.abs().max() == 1
    assert torch.equal(torch.signbit(y), torch.signbit(x))
    assert bool((compute("sigmoid", x) <= 1).all()) and bool((compute("sigmoid", x) >= 0).all())


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_functions_of_two_numbers_are_pytorchs(dtype: torch.dtype) -> None:
    values = torch.tensor([*SPECIAL[:6], 1.0, -1.0, 2.0, 3.0, 0.5, -2.5], dtype=torch.float64).to(dtype)
    x, y = torch.cartesian_prod(values, values).unbind(1)
    pytorch_errs = (x == -math.inf) & (y == 0.5)  # NaN or infinity, depending on the release
    x, y = x[~pytorch_errs], y[~pytorch_errs]
    for name, function in (("max", torch.maximum), ("min", torch.minimum), ("pow", torch.pow), ("atan2", torch.atan2)):
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(compute(name, x, y), function(x, y), equal_nan=True, rtol=tolerance, atol=0)
