"""Scales reach their ends, ticks are round and inside, and units suit their numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.report.axes import Scale, log_ticks, show_bytes, show_time, ticks

FINITE = st.floats(-1e9, 1e9, allow_nan=False)
POSITIVE = st.floats(1e-9, 1e9)


@given(FINITE, st.floats(1e-6, 1e9), st.integers(5, 12))
def test_ticks_are_few_and_inside_and_at_least_two(low: float, span: float, most: int) -> None:
    high = low + span
    if not high - low > 1e-9 * abs(low):
        return  # floating point cannot tell ticks apart there
    found = ticks(low, high, most)
    assert 2 <= len(found) <= most
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in found)


@given(st.floats(1e-6, 1e9), st.integers(5, 12))
def test_steps_between_ticks_are_one_two_or_five_times_a_power_of_ten(high: float, most: int) -> None:
    found = ticks(0.0, high, most)
    step = found[1] - found[0] if len(found) > 1 else 1.0
    assert round(step / 10 ** math.floor(math.log10(step * (1 + 1e-9))), 6) in (1, 2, 5)


@pytest.mark.parametrize("low, high", [(3.0, 3.0), (5.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_where_there_is_nothing_to_divide_one_tick_remains(low: float, high: float) -> None:
    assert len(ticks(low, high)) == 1


@given(POSITIVE, st.floats(1.5, 1e6))
def test_ticks_of_a_logarithm_are_inside(low: float, factor: float) -> None:
    high = low * factor
    assert all(low <= tick <= high for tick in log_ticks(low, high))
    assert factor < 10 or log_ticks(low, high)


@given(POSITIVE, st.floats(1.1, 1e6), st.booleans())
def test_a_scale_meets_both_ends_and_keeps_the_order(low: float, factor: float, log: bool) -> None:
    scale = Scale(low, low * factor, 10.0, 110.0, log)
    assert scale(scale.low) == pytest.approx(10) and scale(scale.high) == pytest.approx(110)
    assert 10 < scale(low * (1 + factor) / 2) < 110


def test_a_scale_without_extent_stays_at_its_start() -> None:
    assert Scale(2.0, 2.0, 10.0, 20.0)(2.0) == 10


def test_times_and_bytes_have_the_unit_that_suits_them() -> None:
    assert [show_time(t) for t in (2.0, 0.0123, 1.5e-6, 0.0)] == ["2 s", "12.3 ms", "1.50 µs", "0 µs"]
    assert [show_bytes(b) for b in (0, 512, 2048, 3.5 * 2**20, 2**31)] == [
        "0 bytes", "512 bytes", "2 KiB", "3.50 MiB", "2 GiB",
    ]  # fmt: skip
