"""Clipping by the norm over all ranks."""

import math

import pytest

from tests.pipeline.processes import weights
from torchweft.errors import UsageError


@pytest.mark.long
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [2, 3])
def test_the_norm_is_that_of_all_ranks(ranks, size: int, norm_type: float) -> None:
    for max_norm in (0.01, 100.0):
        reports = ranks(size).run(weights.clip, norm_type, max_norm)
        assert len({report["norm"] for report in reports}) == 1
        assert max(report["difference"] for report in reports) < 1e-14
        assert max(report["worst"] for report in reports) < 1e-16


def test_a_nan_of_one_rank_is_in_the_norm_of_all(ranks) -> None:
    assert all(math.isnan(norm) for norm in ranks(2).run(weights.clip_not_finite, False))
    for outcome in ranks(2).outcomes(weights.clip_not_finite, True):
        assert isinstance(outcome.error, RuntimeError) and "nan" in str(outcome.error)


def test_a_module_around_a_pipe_is_refused(ranks) -> None:
    for outcome in ranks(2).outcomes(weights.clip_around):
        assert isinstance(outcome.error, UsageError) and "the Pipe '0'" in str(outcome.error)


def test_norms_that_do_not_combine_are_refused(ranks) -> None:
    for outcome in ranks(2).outcomes(weights.clip, 0.0, 1.0):
        assert isinstance(outcome.error, UsageError), outcome.text
