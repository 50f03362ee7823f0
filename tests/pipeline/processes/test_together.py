"""Calls that ranks make together outside of a step: all ranks succeed, or all raise, and a lost rank is named."""

import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import torchweft as weft
from tests.pipeline.processes import together
from tests.pipeline.processes.launch import fresh_ranks
from torchweft import checkpoint
from torchweft.errors import UsageError

POINTS = [(name, number) for name, work in together.WORK.items() for number in range(len(work))]


@pytest.mark.parametrize(("name", "number"), POINTS)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_failure_of_one_rank_is_raised_on_all(ranks, tmp_path: Path, name: str, number: int, bad: int) -> None:
    where = together.WORK[name][number]
    only_first = where[1] in ("_clear_way", "finish", "_publish")
    results = ranks(3).run(together.fail_in, name, number, 0 if only_first else bad, str(tmp_path))
    for kind, text, works in results:
        assert kind and "on purpose" in text and works, (kind, text)


@pytest.mark.parametrize("how", ["missing", "cut", "overwritten"])
def test_a_damaged_file_changes_nothing_on_any_rank(ranks, tmp_path: Path, how: str) -> None:
    for kind, text, same in ranks(2).run(together.load_damaged, str(tmp_path), how):
        assert kind == "WeightsError" and "__1_0.distcp" in text and same, text


@pytest.mark.long
@pytest.mark.parametrize("name", together.WORK)
def test_a_rank_that_dies_in_a_call_is_named(ranks, tmp_path: Path, name: str) -> None:
    """The last rank is killed before its first exchange, one in the middle, and the last one."""
    count = ranks(3).run(together.count_exchanges, name, str(tmp_path / "counted"))[2]
    assert count
    for number in sorted({1, (count + 1) // 2, count}):
        with fresh_ranks(3) as three:
            folder = str(tmp_path / str(number))
            outcomes = three.run_without(2, together.lose_at, name, number, signal.SIGKILL, folder)
        for kind, text, seconds in outcomes:
            assert kind == "RankLostError" and "rank 2 (host" in text, (number, kind, text)
            assert seconds < 5


@pytest.mark.long
@pytest.mark.parametrize("name", together.WORK)
def test_a_rank_that_stops_in_a_call_is_named(ranks, tmp_path: Path, name: str) -> None:
    with fresh_ranks(3, timeout=4.0) as three:
        outcomes = three.run_without(2, together.lose_at, name, 1, signal.SIGSTOP, str(tmp_path))
    for kind, text, _ in outcomes:
        assert kind == "RankLostError" and "rank 2 (host" in text, (kind, text)


def hold(folder: Path, held: Any, done: Any) -> None:
    lock = checkpoint.SaveLock(folder)
    lock.take()
    held.set()
    done.wait(30)


def test_two_jobs_cannot_save_into_one_folder(tmp_path: Path) -> None:
    folder, context = tmp_path / "latest", multiprocessing.get_context("forkserver")
    held, done = context.Event(), context.Event()
    job = context.Process(target=hold, args=(folder, held, done))
    job.start()
    try:
        assert held.wait(30)
        with pytest.raises(UsageError, match="another job is saving into"):
            weft.checkpoint.save(folder, nn.Linear(2, 2))
    finally:
        done.set()
        job.join(30)
    weft.checkpoint.save(folder, nn.Linear(2, 2))  # a lock ends with its process
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest"]
