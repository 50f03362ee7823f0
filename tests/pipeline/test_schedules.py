"""Named schedules, and schedules given as a table or as a function."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.pipeline.pipe_cases import assert_close, assert_gradients_equal, chain, gradients, piped, rows
from tests.strategies import any_schedules, fitting_schedules
from tests.type_checks import without_type_checks
from torchweft.core.errors import ScheduleError
from torchweft.pipeline.schedule import (
    SCHEDULES,
    Schedule,
    build,
    dualpipev,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from torchweft.pipeline.simulate import StageCost, forecast

IN_V = ("zbv", "dualpipev")
ONE_STAGE_EACH = ("gpipe", "1f1b", "zero_bubble")


def live_of_workers(schedule: Schedule) -> list[int]:
    """The largest number of (stage, micro-batch) pairs that each worker holds for backward at one time."""
    most: list[int] = []
    for row in schedule.workers:
        held = [0]
        for action in row:
            held.append(held[-1] + {"F": 1, "I": 0}.get(action.kind, -1))
        most.append(max(held))
    return most


def duration(schedule: Schedule, forward: float = 1.0, backward: float = 2.0) -> float:
    """The forecast time if all stages cost the same. I and W take half of `backward` each."""
    return forecast(schedule, [StageCost(forward, backward)] * schedule.stages).total


@given(st.data(), st.integers(1, 10), st.integers(1, 9))
def test_named_schedules_are_valid(data: st.DataObject, stages: int, micro_batches: int) -> None:
    name = data.draw(st.sampled_from(fitting_schedules(stages)))
    schedule = SCHEDULES[name](stages, micro_batches)
    assert build(name, stages, micro_batches) is build(name, stages, micro_batches) == schedule
    schedule.check(stages=stages, micro_batches=micro_batches)
    assert schedule.allows_external_loss == (name in ("gpipe", "looped_bfs") or micro_batches == 1)
    workers = stages if name in ONE_STAGE_EACH else stages // 2
    place = [min(s, stages - 1 - s) if name in IN_V else s % workers for s in range(stages)]
    assert schedule.worker_of == tuple(place)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 20))
def test_any_number_of_stages_per_worker_is_valid(workers: int, per_worker: int, micro_batches: int) -> None:
    for make in (interleaved, looped_bfs, zero_bubble):
        schedule = make(workers * per_worker, micro_batches, workers=workers)
        schedule.check(stages=workers * per_worker, micro_batches=micro_batches)
        assert len(schedule.workers) == workers


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 13), st.sampled_from([1.0, 2.0, 3.0]))
def test_bubbles_are_those_published(workers: int, per_worker: int, more: int, backward: float) -> None:
    enough = workers + more  # fewer micro-batches than workers cannot fill them
    work = per_worker * enough * (1 + backward)
    for make in (interleaved, looped_bfs):
        taken = duration(make(workers * per_worker, enough, workers=workers), backward=backward)
        assert taken == pytest.approx(work + (workers - 1) * (1 + backward))
    for make in (gpipe, one_f_one_b):
        assert duration(make(workers, enough), backward=backward) == pytest.approx(
            (enough + workers - 1) * (1 + backward)
        )


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 13))
def test_split_backward_leaves_one_forward_per_hop_idle(workers: int, per_worker: int, more: int) -> None:
    for make, enough in ((zbv, 2 * workers - 1), (dualpipev, 2 * workers)):
        assert duration(make(2 * workers, enough + more)) == 6 * (enough + more) + workers - 1
    enough = workers + more
    table = zero_bubble(workers * per_worker, enough, workers=workers)
    assert duration(table) == 3 * per_worker * enough + workers - 1


@given(st.integers(1, 6), st.integers(0, 9))
def test_zbv_workers_never_idle_once_they_have_begun(workers: int, more: int) -> None:
    table = zbv(2 * workers, 2 * workers - 1 + more)
    spans = forecast(table, [StageCost(1.0, 2.0)] * table.stages).spans
    for worker in range(workers):
        own = [span for span in spans if span.worker == worker]
        assert max(span.end for span in own) - min(span.start for span in own) == len(own)  # every action takes 1


@given(st.integers(1, 6), st.integers(1, 14))
def test_live_micro_batches_are_those_published(workers: int, micro_batches: int) -> None:
    size = workers, micro_batches
    assert gpipe(*size).live() == (micro_batches,) * workers
    assert one_f_one_b(*size).live() == tuple(min(workers - stage, micro_batches) for stage in range(workers))
    assert zero_bubble(*size).live() == (min(workers, micro_batches),) * workers
    assert looped_bfs(2 * workers, micro_batches).live() == (micro_batches,) * (2 * workers)
    assert max(live_of_workers(zbv(2 * workers, micro_batches))) <= 2 * workers
    assert max(live_of_workers(dualpipev(2 * workers, micro_batches))) <= 2 * workers + 1
    whole = workers * micro_batches  # the paper requires a multiple of the number of workers
    ahead = [workers + 2 * (workers - 1 - worker) + 1 if workers > 1 else 2 for worker in range(workers)]
    assert live_of_workers(interleaved(2 * workers, whole)) == [min(count, 2 * whole) for count in ahead]


def test_the_tables_of_small_sizes_are_as_written() -> None:
    assert gpipe(2, 3).text() == "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n"
    assert one_f_one_b(2, 3).text() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert zero_bubble(2, 3).text() == "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"
    assert looped_bfs(4, 2).text() == "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\n1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0\n"


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("schedule", [*SCHEDULES, partial(interleaved, workers=1), partial(zero_bubble, workers=2)])
def test_schedules_train_as_the_plain_model_does(schedule: object, micro_batches: int) -> None:
    settings = {"devices": ["cpu"] * 4, "chunks": micro_batches, "schedule": schedule, "loss": nn.functional.mse_loss}
    x, target = rows(9, 4), rows(9, 3, seed=1)
    steps = []
    for executor in ("serial", "threads"):
        pipe, plain = piped(chain(4, 5, 6, 5, 3), executor=executor, **settings)
        loss = pipe(x, target=target)
        loss.backward()
        expected = nn.functional.mse_loss(plain(x), target)
        expected.backward()
        assert_close(loss, expected)
        assert_gradients_equal(pipe, plain, 1e-10)
        steps.append([loss, *gradients(pipe).values()])
    assert all(map(torch.equal, *steps))


def test_a_function_makes_the_schedule_of_each_batch_size() -> None:
    sizes = []

    def halves(stages: int, micro_batches: int) -> Schedule:
        sizes.append((stages, micro_batches))
        return interleaved(stages, micro_batches, workers=2)

    pipe, plain = piped(chain(4, 5, 6, 5, 3), devices=["cpu"] * 4, schedule=halves, loss=nn.functional.mse_loss)
    assert "schedule='a function'" in str(pipe)
    for count in (7, 2, 7):
        x, target = rows(count, 4), rows(count, 3, seed=1)
        pipe(x, target=target).backward()
        nn.functional.mse_loss(plain(x), target).backward()
        assert_gradients_equal(pipe, plain, 1e-10)
    assert sizes == [(4, 3), (4, 2)]
    assert pipe.schedule_for(2) == interleaved(4, 2)


def test_a_function_must_return_a_schedule_that_fits() -> None:
    with without_type_checks(), pytest.raises(ScheduleError, match=r"returned '1f1b' for 4 stages and 2 micro-batches"):
        build(lambda stages, micro_batches: "1f1b", 4, 2)
    with pytest.raises(ScheduleError, match="the table has 3 stages, but 4 are needed"):
        build(lambda stages, micro_batches: gpipe(3, micro_batches), 4, 2)


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "zbv", "dualpipev"])
def test_an_odd_number_of_stages_is_rejected(name: str) -> None:
    for stages in (1, 3):
        with pytest.raises(ScheduleError, match=f"needs two stages per worker, but got {stages} stages; give the pipe"):
            build(name, stages, 2)


@pytest.mark.parametrize("workers", [0, -2, 3, 8])
def test_workers_that_do_not_divide_the_stages_are_rejected(workers: int) -> None:
    for make in (interleaved, looped_bfs, zero_bubble):
        with pytest.raises(ScheduleError, match=f"equally many stages on each of {workers} workers, but got 4 stages"):
            make(4, 2, workers=workers)


@given(any_schedules(), st.integers(1, 4))
def test_a_table_of_more_micro_batches_serves_fewer(schedule: Schedule, wanted: int) -> None:
    wanted = min(wanted, schedule.micro_batches)
    for given_as in (schedule, schedule.text()):
        assert build(given_as, schedule.stages, wanted) == schedule.restricted(wanted)


@pytest.mark.parametrize("name", ["1F1B", "zero bubble", "", "0F0 0B0"])
def test_an_unknown_name_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ScheduleError, match="Give one of gpipe, 1f1b, interleaved"):
        build(name, 2, 2)


def test_faults_beyond_the_wanted_micro_batches_are_faults_too() -> None:
    with pytest.raises(ScheduleError, match="B, or I and W, is missing for micro-batch 1"):
        build("0F0,0B0,0F1", 1, 1)


@pytest.mark.parametrize(("stages", "micro_batches"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "0F0,0B0"])
def test_sizes_below_one_are_refused(schedule: str, stages: int, micro_batches: int) -> None:
    with pytest.raises(ScheduleError, match="at least one stage and one micro-batch"):
        build(schedule, stages, micro_batches)
