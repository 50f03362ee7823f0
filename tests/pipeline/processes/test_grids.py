"""Pipes over processes: with data parallelism, over many steps, observed, copied."""

from pathlib import Path

import pytest

from tests.pipeline.processes import grids
from tests.pipeline.processes.launch import fresh_ranks


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
def test_replicas_of_a_pipeline_train_as_plain(ranks, inside: bool) -> None:
    assert max(ranks(4).run(grids.train_replicas, inside)) < 1e-12


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_a_reduction_begins_before_the_walk_ends(ranks, tmp_path: Path, kind: str, inside: bool) -> None:
    """By the order of events: the first stage ends its backward only after the last stage has begun to reduce."""
    assert ranks(4).run(grids.reduce_early, str(tmp_path), kind, inside) == [["", "", ""]] * 4


@pytest.mark.parametrize("failing", ["layer", "front"])
def test_a_failed_backward_with_replicas_ends_the_pipe(tmp_path: Path, failing: str) -> None:
    with fresh_ranks(4) as four:
        for rank, outcomes in enumerate(four.run(grids.reduce_early, str(tmp_path), "DDP", False, failing)):
            assert outcomes == ["", "RankFailedError" if rank % 2 else "ValueError", "RankFailedError"]


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


def test_pipes_leave_one_hook_in_a_process(ranks) -> None:
    for counts in ranks(2).run(grids.count_hooks):
        assert len(set(counts)) == 1


def test_output_can_stay_on_the_last_rank(ranks) -> None:
    assert all(value == 0.0 for differences in ranks(2).run(grids.output_on_last) for value in differences)
