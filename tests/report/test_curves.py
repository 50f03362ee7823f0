"""Curves are well-formed, hold bytes until they change, and tell their peaks."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.report.curves import loss_curve, memory_curve, running_mean

POINTS = st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 2**40)), max_size=20)
NAMES = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)


def lines(text: str) -> list[list[tuple[float, float]]]:
    """The corners of every curve."""
    found: list[list[tuple[float, float]]] = []
    for line in ElementTree.fromstring(text).iter("polyline"):
        pairs = [pair.split(",") for pair in (line.get("points") or "").split()]
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


def words(text: str) -> str:
    return " | ".join(element.text or "" for element in ElementTree.fromstring(text).iter("text"))


@given(st.dictionaries(NAMES, POINTS, max_size=4))
def test_any_memory_curves_make_a_picture_in_which_time_never_runs_back(
    curves: dict[str, list[tuple[float, int]]],
) -> None:
    drawn = lines(memory_curve(curves))
    assert len(drawn) == sum(1 for points in curves.values() if points)
    for corners in drawn:
        assert all(a[0] <= b[0] for a, b in pairwise(corners))


@given(st.lists(st.floats(), max_size=30))
def test_any_losses_make_a_picture_also_when_some_are_no_numbers(losses: list[float]) -> None:
    for corners in lines(loss_curve(losses)):
        assert all(0 <= x <= 960 and -1 <= y <= 330 for x, y in corners)


def test_bytes_hold_until_they_change() -> None:
    [corners] = lines(memory_curve({"a": [(0.0, 0), (1.0, 1024), (2.0, 0)]}))
    assert len(corners) == 5
    assert corners[0][1] == corners[1][1] and corners[2][1] == corners[3][1] < corners[1][1]
    assert corners[1][0] == corners[2][0]


def test_the_legend_names_every_curve_with_its_peak_and_the_axes_have_units() -> None:
    seen = words(memory_curve({"gpipe": [(0.0, 0), (0.01, 3 * 2**20)], "<1f1b>": [(0.0, 512)]}))
    assert "gpipe, peak 3 MiB" in seen and "<1f1b>, peak 512 bytes" in seen
    assert "time in ms" in seen and "MiB" in seen


def test_losses_above_zero_stand_on_a_logarithmic_axis() -> None:
    _, mean = lines(loss_curve([1.0, 1.0, 1.0])), lines(loss_curve([1.0, 0.1, 0.01]))[0]
    assert mean[1][1] - mean[0][1] == pytest.approx(mean[2][1] - mean[1][1], abs=0.05)


def test_the_running_mean_of_a_constant_is_that_constant() -> None:
    every, mean = lines(loss_curve([-2.0] * 9))
    assert every == mean


def test_the_running_mean_lies_on_the_line_that_it_is_the_mean_of() -> None:
    for losses in ([5.0 - 0.1 * step for step in range(60)], [2.0**-step for step in range(60)]):
        every, mean = lines(loss_curve(losses))  # straight lines, on an axis that is linear and one that is not
        assert all(one == pytest.approx(other, abs=0.02) for one, other in zip(every, mean, strict=True))
    noisy = [(float(step), 1.0 + (-1) ** step) for step in range(60)]
    assert all(mean == pytest.approx(1.0, abs=0.1) for _, mean in [*running_mean(noisy)][10:-10])


def test_a_loss_that_is_no_number_is_left_out() -> None:
    assert len(lines(loss_curve([1.0, float("nan"), 2.0, float("inf")]))[0]) == 2
