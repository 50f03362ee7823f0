"""The intermediate representation: dtypes and numbers in C."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.recurrent.recurrent_cases import at_once
from torchweft.recurrent.cpp.codegen import literal
from torchweft.recurrent.cpp.ir import C_TYPES, Unsupported, check_dtype


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**63), 2**63 - 1))
def test_literals_are_exact_and_fit_their_types(number: float, whole: int) -> None:
    text = literal(number, torch.float64)
    assert float.fromhex(text.removeprefix("(double)")) == number
    text = literal(whole, torch.int64).removeprefix("(int64_t)")
    assert eval(re.sub("LL", "", text)) == whole
    assert all(int(digits) < 2**63 for digits in re.findall(r"\d+", text)), "C reads the sign apart from the number"


SPECIAL: list[tuple[float, torch.dtype, str]] = [
    (math.nan, torch.float32, "(float)NAN"),
    (-math.inf, torch.float64, "(double)-INFINITY"),
    *((value, torch.bool, "(boolean)1") for value in (True, 2, -1, 0.5, math.nan)),
    (False, torch.float32, "(float)0"),
]


@at_once(("value", "dtype", "text"), SPECIAL)
def test_special_numbers_and_booleans_have_literals(value: float, dtype: torch.dtype, text: str) -> None:
    assert literal(value, dtype) == text


def test_unknown_dtypes_are_rejected_with_the_known_ones() -> None:
    with pytest.raises(Unsupported, match=r"the input is of torch.complex64; loops in C hold torch.float32"):
        check_dtype(torch.complex64, "the input")
    for dtype in C_TYPES:
        check_dtype(dtype, "it")
