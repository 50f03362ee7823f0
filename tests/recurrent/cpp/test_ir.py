"""The intermediate representation: dtypes and numbers in C, and where elements lie in memory."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.recurrent.recurrent_cases import at_once
from weft.recurrent.cpp.codegen import converted, literal
from weft.recurrent.cpp.ir import C_TYPES, MemoryLayout, Row, Unsupported, check_dtype


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_said_exactly(number: float) -> None:
    text = literal(number, torch.float64)
    assert float.fromhex(text.removeprefix("(double)")) == number


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_whole_number_is_said_exactly_and_fits_its_type(number: int) -> None:
    text = literal(number, torch.int64).removeprefix("(int64_t)")
    assert eval(re.sub("LL", "", text)) == number
    assert all(int(each) < 2**63 for each in re.findall(r"\d+", text)), "C reads the sign apart from the number"


def test_a_conversion_to_a_truth_value_compares() -> None:
    assert converted("x", torch.bool, torch.float32) == "(x != 0)"
    assert converted("x", torch.int8, torch.float32) == "(int8_t)x"
    assert converted("x", torch.int8, torch.int8) == "x"


def test_a_dtype_that_loops_cannot_hold_is_refused_with_those_that_they_can() -> None:
    with pytest.raises(Unsupported, match=r"the input is of torch.complex64; loops in C hold torch.float32"):
        check_dtype(torch.complex64, "the input")
    for each in C_TYPES:
        check_dtype(each, "it")


ROWS: dict[Row, tuple[str, str | None]] = {
    "same": ("a", "a"),
    "step": ("(a + t * 6L)", "(a + 0 * 6L)"),
    "next": ("(a + (t + 1) * 6L)", "(a + 1 * 6L)"),
    "in": ("(a + ((t + 1) & 1) * 6L)", None),
    "out": ("(a + (t & 1) * 6L)", None),
}


def test_an_element_of_a_matrix_is_reached_by_its_strides() -> None:
    place = MemoryLayout("a", "same", 24, (12, 3, 1), 5)
    assert place.at(2, "r0", "q") == "a + 5L + b * 12L + r0 * 3L + q * 1L"
    assert place.at(None, "0") == "a + 5L"
    assert place.transposed().strides == (12, 1, 3)


def test_a_broadcast_axis_has_no_stride() -> None:
    assert MemoryLayout("a", "same", 3, (3, 1)).broadcast((1, 3), (4, 2, 3)).strides == (0, 0, 1)


SAID: list[tuple[float, torch.dtype, str]] = [
    (math.nan, torch.float32, "(float)NAN"),
    (-math.inf, torch.float64, "(double)-INFINITY"),
    *((each, torch.bool, "(boolean)1") for each in (True, 2, -1, 0.5, math.nan)),
    (False, torch.float32, "(float)0"),
]


@at_once(("value", "dtype", "text"), SAID)
def test_what_is_no_number_has_a_name_and_a_truth_value_is_0_or_1(value: float, dtype: torch.dtype, text: str) -> None:
    assert literal(value, dtype) == text


@at_once("row", ROWS)
def test_a_row_is_found_in_any_step_and_in_the_first_if_each_step_has_one(row: Row) -> None:
    here, first = ROWS[row]
    place = MemoryLayout("a", row, 6, (3, 1), 2)
    assert place.pointer == f"{here} + 2L"
    assert place.per_step == (row in ("step", "next"))
    if first is not None:
        assert place.first == f"{first} + 2L"
    else:
        with pytest.raises(KeyError):
            _ = place.first
