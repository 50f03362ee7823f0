"""Numbers as C: exactly those that they were."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.recurrent.cpp.ir import TYPES, Unsupported, check_dtype
from weft.recurrent.cpp.loop_nests import converted, literal


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_said_exactly(number: float) -> None:
    text = literal(number, torch.float64)
    assert float.fromhex(text.removeprefix("(double)")) == number


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_whole_number_is_said_exactly_and_fits_its_type(number: int) -> None:
    text = literal(number, torch.int64).removeprefix("(int64_t)")
    assert eval(re.sub("LL", "", text)) == number
    assert all(int(each) < 2**63 for each in re.findall(r"\d+", text)), "C reads the sign apart from the number"


def test_what_is_no_number_has_a_name() -> None:
    assert literal(math.nan, torch.float32) == "(float)NAN"
    assert literal(-math.inf, torch.float64) == "(double)-INFINITY"


@pytest.mark.parametrize("value", [True, 2, -1, 0.5, math.nan])
def test_a_truth_value_is_0_or_1_whatever_it_is_made_of(value: float) -> None:
    assert literal(value, torch.bool) == "(boolean)1"
    assert literal(False, torch.float32) == "(float)0"


def test_a_conversion_to_a_truth_value_compares() -> None:
    assert converted("x", torch.bool, torch.float32) == "(x != 0)"
    assert converted("x", torch.int8, torch.float32) == "(int8_t)x"
    assert converted("x", torch.int8, torch.int8) == "x"


def test_a_dtype_that_loops_cannot_hold_is_refused_with_those_that_they_can() -> None:
    with pytest.raises(Unsupported, match=r"the input is of torch.complex64; loops in C hold torch.float32"):
        check_dtype(torch.complex64, "the input")
    for each in TYPES:
        check_dtype(each, "it")
