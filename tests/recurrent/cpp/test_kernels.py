"""The products of kernels.cpp are PyTorch's for any shape and stride, and their bits do not depend on threads."""

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.recurrent.recurrent_cases import grid, needs_compiler
from torchweft.recurrent.cpp.cpp_backend import kernels, panel_width

pytestmark = needs_compiler
DTYPES = [torch.float32, torch.float64]
NAMES = ("pack", "product", "some", "gather", "columns")
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
sizes = st.integers(0, 40)


def call_kernel(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Call a kernel with tensors by address and numbers as long."""

    def as_c(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return ctypes.c_void_p(argument.data_ptr())
        return ctypes.c_void_p() if argument is None else ctypes.c_long(argument)

    table = ctypes.cast(kernels().torchweft_kernels(), ctypes.POINTER(ctypes.c_void_p))
    address = table[2 * NAMES.index(name) + DTYPES.index(dtype)]
    ctypes.CFUNCTYPE(None)(address)(*map(as_c, arguments))


def random_matrix(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> Tensor:
    return torch.randn(columns, rows, dtype=dtype).t() if transposed else torch.randn(rows, columns, dtype=dtype)


def panel_count(columns: int, dtype: torch.dtype) -> int:
    return -(-columns // panel_width()[dtype])


def packed(b: Tensor) -> Tensor:
    inner, columns = b.shape
    panels = torch.full((panel_count(columns, b.dtype) * panel_width()[b.dtype] * inner + 1,), 7.0, dtype=b.dtype)
    call_kernel("pack", b.dtype, inner, columns, b, *b.stride(), panels)
    assert panels[-1] == 7.0, "nothing is written after the last panel"
    return panels


def multiply(a: Tensor, b: Tensor, c: Tensor, start: Tensor | None, share: Any = None, live: Any = None) -> None:
    """C = A B + start, for a share of the panels and for live rows only, if given."""
    strides = (0, 0) if start is None else start.stride()
    first, last = share or (0, panel_count(b.shape[1], b.dtype))
    name, mask = ("product", ()) if live is None else ("some", (live,))
    shape = (len(a), b.shape[1], b.shape[0])
    call_kernel(name, a.dtype, *shape, a, *a.stride(), packed(b), c, *c.stride(), start, *strides, first, last, *mask)


def assert_near(result: Tensor, expected: Tensor, inner: int) -> None:
    tolerance = torch.finfo(result.dtype).eps * (inner + 1) ** 0.5 * 20
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@by_dtype
@given(sizes, st.integers(1, 80), sizes, st.tuples(*[st.booleans()] * 4), st.booleans(), st.booleans())
def test_products_are_pytorchs(
    dtype: torch.dtype, rows: int, columns: int, inner: int, transposed: Any, has_start: bool, masked: bool
) -> None:
    """Rows that are not live get the start of their sums."""
    torch.manual_seed(0)
    shapes = [(rows, inner), (inner, columns), (rows, columns), (rows, columns)]
    a, b, c, start = (random_matrix(*shape, dtype, turn) for shape, turn in zip(shapes, transposed, strict=True))
    live = torch.rand(rows) < (0.5 if masked else 2.0)
    multiply(a, b, c, start if has_start else None, live=live if masked else None)
    begin = start if has_start else torch.zeros_like(c)
    assert_near(c, torch.where(live[:, None], begin + a @ b, begin), inner)
    assert torch.equal(c[~live], begin[~live])


@by_dtype
@given(
    sizes, st.integers(1, 50), st.integers(0, 600), st.tuples(*[st.booleans()] * 3), st.integers(1, 3), st.booleans()
)
def test_gather_adds_a_product_over_live_rows(
    dtype: torch.dtype, rows: int, columns: int, inner: int, transposed: Any, threads: int, masked: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(rows, inner), (inner, columns), (rows, columns)]
    a, b, c = (random_matrix(*shape, dtype, turn) for shape, turn in zip(shapes, transposed, strict=True))
    live = torch.rand(inner) < (0.6 if masked else 2.0)
    expected = c + a[:, live] @ b[live]
    room = torch.empty(256 * (columns + panel_width()[dtype] + 12) + 64, dtype=dtype)
    strides = (*a.stride(), b, *b.stride(), c, *c.stride())
    for thread in range(threads):
        mask = (live if masked else None, max(inner, 1), max(inner, 1))
        call_kernel("gather", dtype, rows, columns, inner, a, *strides, room, thread, threads, *mask)
    assert_near(c, expected, inner)


@grid(columns=[1, 37, 64, 200], dtype=DTYPES)
def test_bits_do_not_depend_on_other_rows_or_shares(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, start = torch.randn(29, 50, dtype=dtype), torch.randn(50, columns, dtype=dtype), torch.randn(columns)
    start = start.to(dtype).expand(29, columns)
    at_once, in_parts = torch.zeros(29, columns, dtype=dtype), torch.zeros(29, columns, dtype=dtype)
    multiply(a, b, at_once, start)
    for count in (1, 2, 3, 7):
        for i in range(0, 29, count):
            multiply(a[i : i + count], b, in_parts[i : i + count], start[i : i + count])
        assert torch.equal(at_once, in_parts)
    in_parts.zero_()
    middle = panel_count(columns, dtype) // 2
    multiply(a, b, in_parts, start, (0, middle))
    multiply(a, b, in_parts, start, (middle, panel_count(columns, dtype)))
    assert torch.equal(at_once, in_parts)


@by_dtype
@given(st.integers(0, 700), st.integers(1, 300), st.integers(0, 9), st.integers(1, 3))
def test_columns_adds_the_sum_of_rows(dtype: torch.dtype, rows: int, columns: int, gap: int, threads: int) -> None:
    torch.manual_seed(0)
    a = torch.randn(rows, columns + gap, dtype=dtype)[:, :columns]
    c = torch.randn(columns, dtype=dtype)
    expected = c + a.sum(0)
    for thread in range(threads):
        call_kernel("columns", dtype, rows, columns, a, columns + gap, c, thread, threads, max(rows, 1), max(rows, 1))
    assert_near(c, expected, rows)


def test_long_sums_keep_small_numbers() -> None:
    """Added one by one, the sum would be off by 3e-2."""
    rows, tenth = 300_000, torch.tensor(0.1)
    a, c = tenth.expand(rows, 1).contiguous(), torch.zeros(1)
    call_kernel("columns", torch.float32, rows, 1, a, 1, c, 0, 1, rows, rows)
    assert abs(float(c) / (rows * float(tenth)) - 1) < 1e-4
    c.zero_()
    one, room = torch.ones(rows, 1), torch.empty(256 * 64)
    call_kernel("gather", torch.float32, 1, 1, rows, a, 1, 1, one, 1, 1, c, 1, 1, room, 0, 1, None, rows, rows)
    assert abs(float(c) / (rows * float(tenth)) - 1) < 1e-4
