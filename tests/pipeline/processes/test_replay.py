"""Transfers between GPUs never wait in a circle: played from notes of a run, and by the graph of every table."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.processes.replay import find_deadlock, run_all
from torchweft import Schedule
from torchweft.core.errors import ScheduleError
from torchweft.pipeline.actions import Action, waits
from torchweft.pipeline.processes.transfer_order import Sent, check_transfers, find_circle, wait_graph
from torchweft.pipeline.schedule import SCHEDULES


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_step_deadlocks_on_gpus(ranks, size: int) -> None:
    seed = torch.initial_seed() % 1000
    names = list(SCHEDULES)
    by_rank = ranks(size).run(run_all, names, seed, 2, 2 * size + 1, False)
    for name, runs in zip(names, zip(*by_rank, strict=True), strict=True):
        assert find_deadlock([log for log, _ in runs]) == [], (name, seed)
        assert len({loss for _, loss in runs}) == 1, name


def test_a_wait_for_sends_in_a_thread_deadlocks(ranks) -> None:
    by_rank = ranks(4).run(run_all, ["1f1b"], 0, 2, 16, True)
    assert find_deadlock([log for ((log, _),) in by_rank])


@pytest.mark.long
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_random_runs_never_deadlock(ranks, schedule: str) -> None:
    for seed in range(10):
        by_rank = ranks(2 + seed % 3).run(run_all, [schedule], seed, 1, 4 + seed % 5, False)
        assert find_deadlock([log for ((log, _),) in by_rank]) == [], seed


@st.composite
def tables(draw: st.DrawFn) -> Schedule:
    """A table with all actions of its stages, in any order within a row."""
    stages, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    workers = draw(st.integers(1, stages))
    owner = [*range(workers), *(draw(st.integers(0, workers - 1)) for _ in range(stages - workers))]
    rows: list[list[Action]] = [[] for _ in range(workers)]
    for stage in range(stages):
        for i in range(micro_batches):
            kinds = draw(st.sampled_from(["FB", "FIW"]))
            rows[owner[stage]] += [Action(stage, kind, i) for kind in kinds]
    if draw(st.booleans()):
        rows = [draw(st.permutations(row)) for row in rows]
        return Schedule(tuple(map(tuple, rows)))
    # A serial order that is drawn, so that the table is valid.
    waiting = waits(tuple(map(tuple, rows)))
    order: list[Action] = []
    while len(order) < len(waiting):
        order.append(draw(st.sampled_from([x for x in waiting if x not in order and set(waiting[x]) <= set(order)])))
    return Schedule(
        tuple(tuple(action for action in order if owner[action.stage] == worker) for worker in range(workers))
    )


@given(tables())
def test_every_valid_table_has_no_circle(table: Schedule) -> None:
    try:
        table.check()
    except ScheduleError:
        return
    check_transfers(table)


def test_a_table_that_deadlocks_has_a_circle() -> None:
    table = Schedule.parse("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0")
    with pytest.raises(ScheduleError, match=r"wait for each other for ever: .* to stage"):
        check_transfers(table)


@pytest.mark.parametrize(("name", "circle"), [("gpipe", False), ("1f1b", True), ("interleaved", True)])
def test_receives_on_the_compute_stream_make_a_circle(name: str, circle: bool) -> None:
    table = SCHEDULES[name](4, 4)
    graph = wait_graph(table)
    for row in table.workers:
        for before, after in pairwise(row):
            # The former code: the stream waits for the last send, and a receive for what the stream has got so far.
            graph[after] += [step for step in graph if isinstance(step, Sent) and step.action == before]
            for step in graph[after]:
                if isinstance(step, Sent) and step.reader == after.stage:
                    graph[step].append(before)
    assert bool(find_circle(graph)) is circle
