"""The validator collects all faults of one call."""

import math
from typing import Any

import pytest

from torchweft.core.errors import SpecError, UsageError, split_faults
from torchweft.core.validation import Validator, suggest


def test_all_faults_are_raised_as_one_error() -> None:
    with pytest.raises(UsageError) as caught, Validator("invalid options") as check:
        check.count("rows", 0)
        check.seconds("timeout", math.inf)
        check.number("rate", 1.5, most=1.0)
        check.boolean("keep", 1)
        check.choice("mode", "fast", ["slow", "auto"])
        check.instance("text", object(), str, "a text")
        check.known(["rows", "colour"], ["rows"], "the table")
        check.require(False, "low is above high")
    assert str(caught.value).startswith("invalid options:")
    assert split_faults(str(caught.value)) == [
        "rows is 0, wanted an int of at least 1",
        "timeout is inf, wanted seconds, above 0 and at most 1e+09",
        "rate is 1.5, wanted a number from 0 to 1",
        "keep is 1, wanted True or False",
        "mode is 'fast', wanted one of 'slow', 'auto'",
        "text is of type object, wanted a text",
        "the table has 'colour', known are rows",
        "low is above high",
    ]


@pytest.mark.parametrize(
    ("check", "valid", "invalid"),
    [
        ("count", [1, 10**9], [0, -1, True, 1.0, "1", None]),
        ("seconds", [1, 0.5], [0, -1, math.nan, math.inf, 1e10, True, "1", None]),
        ("number", [0, 1.5], [-1, math.nan, True, "1", None]),
        ("boolean", [True, False], [0, 1, None, "yes"]),
    ],
)
def test_valid_and_invalid_values(check: str, valid: list[Any], invalid: list[Any]) -> None:
    validator = Validator("invalid")
    assert [getattr(validator, check)("x", value) for value in valid] == [True] * len(valid)
    assert [getattr(validator, check)("x", value) for value in invalid] == [False] * len(invalid)
    assert len(validator.faults) == len(invalid)


def test_none_is_valid_if_optional() -> None:
    with Validator("invalid") as check:
        assert check.count("a", None, optional=True) and check.seconds("b", None, optional=True)
        assert check.choice("c", None, ["x"], optional=True) and check.instance("d", None, str, "a text", optional=True)


def test_error_class_is_chosen_and_other_errors_pass() -> None:
    with pytest.raises(SpecError), Validator("invalid", SpecError) as check:
        check.add("no tensor")
    with pytest.raises(ZeroDivisionError), Validator("invalid") as check:
        check.add("a fault")
        raise ZeroDivisionError


def test_spec_mismatch_raises_a_spec_error() -> None:
    with pytest.raises(SpecError) as caught, Validator("invalid call") as check:
        check.add("lengths were given twice")
        check.mismatch()
        check.mismatch("x has shape (2,), wanted (3,)")
    assert split_faults(str(caught.value)) == ["lengths were given twice", "x has shape (2,), wanted (3,)"]
    with pytest.raises(UsageError), Validator("invalid call") as check:
        check.mismatch()
        check.add("lengths were given twice")


@pytest.mark.parametrize(("name", "near"), [("1F1B", "1f1b"), ("zero-bubble", "zero_bubble"), ("chunk", "chunks")])
def test_a_name_that_is_near_is_suggested(name: str, near: str) -> None:
    assert suggest(name, ["gpipe", "1f1b", "zero_bubble", "chunks"]) == f"; did you mean {near!r}?"
    assert not suggest("far away", ["gpipe", "1f1b"])
