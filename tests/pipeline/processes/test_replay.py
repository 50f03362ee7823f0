"""Transfers between GPUs never wait in a circle: played from notes of a run, and by the graph of every table."""

import warnings
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.processes.replay import Block, count_reads, find_deadlock, log, noted, run_all
from torchweft import Schedule
from torchweft.core.errors import ScheduleError, UsageError
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
        assert [count_reads(log) for log, _ in runs] == [0] * size, name


def test_losses_of_a_step_are_one_transfer(ranks) -> None:
    logs = [log for ((log, _),) in ranks(3).run(run_all, ["1f1b"], 0, 2, 5, False)]
    # The last rank is no neighbour of the first. It sends the losses, and the gradient of the copy that it borrowed.
    assert len([entry for entry in logs[2] if entry[0] == "send" and entry[3] == 0]) == 2 * 2


def run_with_another_gradient() -> list[str]:
    with noted():
        pipe = weft.Pipe(
            nn.Sequential(Block(), Block()), group=dist.group.WORLD, balance=[1, 1], chunks=2, schedule="1f1b",
            loss=nn.functional.mse_loss,
        )  # fmt: skip
        texts = []
        for factor in (1, 1 + dist.get_rank(), 1):
            loss = pipe(torch.ones(4, 3), target=torch.zeros(4, 3)) * factor
            try:
                loss.backward()
                texts.append("")
            except UsageError as error:
                texts.append(str(error))
        return texts


def test_a_loss_gradient_that_differs_is_found_a_step_later(ranks) -> None:
    for texts in ranks(2).run(run_with_another_gradient):
        assert texts[:2] == ["", ""] and "the gradient of the loss differs between ranks: 1.0, 2.0" in texts[2]


def record_a_split_model() -> list[int]:
    """Transfers of the first step, in which the forward is recorded, and of the second."""
    with noted():
        model = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3)))
        pipe = weft.Pipe(Wrapped(model), group=dist.group.WORLD, split=["inner.b"], chunks=2, output="last")
        counts = []
        for _ in range(2):
            before = len(log)
            pipe(torch.ones(4, 3)).sum().backward()
            counts.append(sum(entry[0] == "send" for entry in log[before:]))
        return counts


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.b(self.inner.a(x) + 1)


def test_a_recording_makes_no_transfers_between_gpus(ranks) -> None:
    for first, second in ranks(2).run(record_a_split_model):
        assert first == second > 0


def send_large_outputs() -> list[str]:
    pipe = weft.Pipe(nn.Sequential(nn.Identity(), nn.Identity()), group=dist.group.WORLD, balance=[1, 1], chunks=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe(torch.ones(2, 3 << 20))
    return [str(warning.message) for warning in caught]


def test_large_outputs_for_all_ranks_warn_once(ranks) -> None:
    others, (text,) = ranks(2).run(send_large_outputs)
    assert others == [] and text.startswith("each step sends 24 MiB of output")


def test_a_wait_for_sends_on_the_compute_stream_deadlocks(ranks) -> None:
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
