"""Rates: one for all floating-point tensors, or nested; whatever would be ignored is an error."""

import pytest
import torch

from weft.core.errors import SpecError, UsageError
from weft.core.validation import Validator
from weft.recurrent.cells.wrappers import check_rates, rates_for

STATE = {"h": torch.zeros(2), "count": torch.zeros(2, dtype=torch.int64)}


def test_one_rate_is_for_all_that_has_floating_point_numbers() -> None:
    assert rates_for("rate", 0.5, STATE) == [0.5, 0.0]
    assert rates_for("rate", 0, STATE["count"]) == [0.0]
    with pytest.raises(UsageError, match=r"rate is 0\.5, but there are no floating-point numbers"):
        rates_for("rate", 0.5, STATE["count"])


def test_nested_rates_are_for_each_tensor_its_own() -> None:
    assert rates_for("rate", {"h": 0.25, "count": 0}, STATE) == [0.25, 0.0]
    with pytest.raises(UsageError, match=r"rate\['count'\]: not 0"):
        rates_for("rate", {"h": 0.25, "count": 0.1}, STATE)
    with pytest.raises(SpecError, match=r"rate should be a dict with keys .* but is a tuple of 2"):
        rates_for("rate", (0.25, 0.1), STATE)


def test_every_leaf_that_is_no_probability_is_named() -> None:
    check = Validator("rates")
    check_rates("rate", (0, 1, 0.5), check)
    assert check.faults == []
    check_rates("rate", (1.5, {"a": None, "b": float("nan")}), check)
    assert check.faults == [
        "rate[0] is 1.5, wanted a number from 0 to 1",
        "rate[1]['a'] is None, wanted a number from 0 to 1",
        "rate[1]['b'] is nan, wanted a number from 0 to 1",
    ]
