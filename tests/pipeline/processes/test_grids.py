"""Pipes over processes: with data parallelism, over many steps, observed, copied."""

from pathlib import Path

import pytest

from tests.pipeline.processes import grids


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
def test_replicas_of_a_pipeline_train_as_plain(ranks, inside: bool) -> None:
    assert max(ranks(4).run(grids.train_replicas, inside)) < 1e-12


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_a_reduction_begins_before_the_walk_ends(ranks, tmp_path: Path, kind: str, inside: bool) -> None:
    """By the order of events: the first stage ends its backward only after the last stage has begun to reduce. All
    ranks of a pipe raise a failure, and the next step works."""
    for rank, outcomes in enumerate(ranks(4).run(grids.reduce_early, str(tmp_path), kind, inside)):
        failed = "RankFailedError" if rank % 2 else "ValueError"
        assert outcomes == (["", failed, "", failed] if kind == "DDP" else ["", ""])


def test_a_pipe_per_rank_works_under_ddp(ranks) -> None:
    assert max(ranks(2).run(grids.train_pipe_per_rank)) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_fifty_steps_equal_plain_training(ranks, schedule: str) -> None:
    assert max(ranks(2).run(grids.train_fifty_steps, schedule)) < 1e-10


def test_a_rank_observes_its_own_stages(ranks) -> None:
    first, last = ranks(2).run(grids.observe)
    assert (first["stages"], last["stages"]) == ([0], [1])
    activation = 4 * 6 * 8
    assert activation in first["wire"]["1"].values()
    assert activation in last["wire"]["0"].values()


def test_a_copy_keeps_the_group_and_a_pickle_raises(ranks) -> None:
    for equal, message in ranks(2).run(grids.copy_and_pickle):
        assert equal == "True"
        assert "does not keep the process group" in message


def test_output_can_stay_on_the_last_rank(ranks) -> None:
    assert all(value == 0.0 for differences in ranks(2).run(grids.output_on_last) for value in differences)
