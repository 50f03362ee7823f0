"""Pipes over processes are bit-equal to the serial executor under the same table."""

import pytest

from tests.pipeline.processes import steps

PER_RANK = {"gpipe": 1, "1f1b": 1, "zero_bubble": 1, "interleaved": 2, "looped_bfs": 2, "zbv": 2, "dualpipev": 2}
SIZES = [8, 7, 3, 1, 12, 8]


@pytest.mark.parametrize("ties", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", PER_RANK)
@pytest.mark.parametrize("count", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_steps_are_bit_equal_to_serial(ranks, count: int, schedule: str, checkpoint: str, ties: bool) -> None:
    """This holds for loss, gradients and generator state, with dropout, long skips and changing batch sizes."""
    results = ranks(count).run(steps.compare, count * PER_RANK[schedule], schedule, checkpoint, SIZES, ties)
    assert [outcome["worst"] for outcome in results] == [0.0] * count
    assert all(outcome["states"] for outcome in results)
    keys = sorted(key for outcome in results for key in outcome["keys"])
    assert keys == results[0]["all_keys"], "every parameter is on one rank"
