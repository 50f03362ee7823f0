"""The products of kernels.cpp against PyTorch's: any shape, any stride; and bits that do not depend on who computes."""

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.recurrent.recurrent_cases import grid, needs_compiler
from weft.recurrent.cpp.cpp_backend import kernels, panel_width

pytestmark = needs_compiler
LETTER = {torch.float32: "f", torch.float64: "d"}
everywhere = pytest.mark.parametrize("dtype", LETTER, ids=str)
sizes = st.integers(0, 40)


def run(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Call a kernel: tensors by address, numbers as long."""

    def as_c(each: Any) -> Any:
        if isinstance(each, Tensor):
            return ctypes.c_void_p(each.data_ptr())
        return ctypes.c_void_p() if each is None else ctypes.c_long(each)

    getattr(kernels(), f"weft_{name}_{LETTER[dtype]}")(*map(as_c, arguments))


def matrix(rows: int, columns: int, dtype: torch.dtype, turned: bool) -> Tensor:
    return torch.randn(columns, rows, dtype=dtype).t() if turned else torch.randn(rows, columns, dtype=dtype)


def panels(columns: int, dtype: torch.dtype) -> int:
    return -(-columns // panel_width()[dtype])


def packed(b: Tensor) -> Tensor:
    inner, columns = b.shape
    to = torch.full((panels(columns, b.dtype) * panel_width()[b.dtype] * inner + 1,), 7.0, dtype=b.dtype)
    run("pack", b.dtype, inner, columns, b, *b.stride(), to)
    assert to[-1] == 7.0, "nothing is written behind the last panel"
    return to


def product(a: Tensor, b: Tensor, c: Tensor, start: Tensor | None, share: Any = None, live: Any = None) -> None:
    strides = (0, 0) if start is None else start.stride()
    first, last = share or (0, panels(b.shape[1], b.dtype))
    name, counts = ("product", ()) if live is None else ("some", (live,))
    sizes = (len(a), b.shape[1], b.shape[0])
    run(name, a.dtype, *sizes, a, *a.stride(), packed(b), c, *c.stride(), start, *strides, first, last, *counts)


@everywhere
@given(sizes, st.integers(1, 80), sizes, st.tuples(*[st.booleans()] * 4), st.booleans(), st.booleans())
def test_a_product_is_pytorchs_and_rows_that_do_not_count_get_what_their_sums_start_with(
    dtype: torch.dtype, rows: int, columns: int, inner: int, turned: Any, begins: bool, some: bool
) -> None:
    torch.manual_seed(0)
    a, b, c, start = (
        matrix(*shape, dtype, each)
        for shape, each in zip([(rows, inner), (inner, columns), (rows, columns), (rows, columns)], turned, strict=True)
    )
    live = torch.rand(rows) < (0.5 if some else 2.0)
    product(a, b, c, start if begins else None, live=live if some else None)
    begun = start if begins else torch.zeros_like(c)
    near(c, torch.where(live[:, None], begun + a @ b, begun), inner)
    assert torch.equal(c[~live], begun[~live])


@everywhere
@given(
    sizes, st.integers(1, 50), st.integers(0, 600), st.tuples(*[st.booleans()] * 3), st.integers(1, 3), st.booleans()
)
def test_a_product_over_many_rows_is_added_whoever_shares_it_and_whichever_count(
    dtype: torch.dtype, rows: int, columns: int, inner: int, turned: Any, threads: int, some: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(rows, inner), (inner, columns), (rows, columns)]
    a, b, c = (matrix(*shape, dtype, each) for shape, each in zip(shapes, turned, strict=True))
    live = torch.rand(inner) < (0.6 if some else 2.0)
    wanted = c + a[:, live] @ b[live]
    room = torch.empty(256 * (columns + panel_width()[dtype] + 12) + 64, dtype=dtype)
    for thread in range(threads):
        strides = (*a.stride(), b, *b.stride(), c, *c.stride())
        run("gather", dtype, rows, columns, inner, a, *strides, room, thread, threads, live if some else None)
    near(c, wanted, inner)


def near(seen: Tensor, wanted: Tensor, inner: int) -> None:
    scale = torch.finfo(seen.dtype).eps * (inner + 1) ** 0.5 * 20
    torch.testing.assert_close(seen, wanted, rtol=scale, atol=scale)


@grid(columns=[1, 37, 64, 200], dtype=list(LETTER))
def test_a_row_has_the_same_bits_alone_and_among_others_and_however_panels_are_shared(
    columns: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    a, b, start = torch.randn(29, 50, dtype=dtype), torch.randn(50, columns, dtype=dtype), torch.randn(columns)
    start = start.to(dtype).expand(29, columns)
    whole, other = torch.zeros(29, columns, dtype=dtype), torch.zeros(29, columns, dtype=dtype)
    product(a, b, whole, start)
    for count in (1, 2, 3, 7):
        for i in range(0, 29, count):
            product(a[i : i + count], b, other[i : i + count], start[i : i + count])
        assert torch.equal(whole, other)
    other.zero_()
    middle = panels(columns, dtype) // 2
    product(a, b, other, start, (0, middle))
    product(a, b, other, start, (middle, panels(columns, dtype)))
    assert torch.equal(whole, other)


@everywhere
@given(st.integers(0, 700), st.integers(1, 300), st.integers(0, 9), st.integers(1, 3))
def test_rows_are_summed_whoever_shares_the_columns(
    dtype: torch.dtype, rows: int, columns: int, apart: int, threads: int
) -> None:
    torch.manual_seed(0)
    a = torch.randn(rows, columns + apart, dtype=dtype)[:, :columns]
    c = torch.randn(columns, dtype=dtype)
    wanted = c + a.sum(0)
    for thread in range(threads):
        run("columns", dtype, rows, columns, a, columns + apart, c, thread, threads)
    near(c, wanted, rows)


def test_a_long_sum_of_small_numbers_is_not_lost_in_a_large_one() -> None:
    rows, tenth = 300_000, torch.tensor(0.1)
    a, c = tenth.expand(rows, 1).contiguous(), torch.zeros(1)
    run("columns", torch.float32, rows, 1, a, 1, c, 0, 1)
    assert abs(float(c) / (rows * float(tenth)) - 1) < 1e-4  # added one by one: off by 3e-2
    c.zero_()
    one, room = torch.ones(rows, 1), torch.empty(256 * 64)
    run("gather", torch.float32, 1, 1, rows, a, 1, 1, one, 1, 1, c, 1, 1, room, 0, 1, None)
    assert abs(float(c) / (rows * float(tenth)) - 1) < 1e-4
