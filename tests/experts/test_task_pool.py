"""A task pool refuses at the edge, batches without a timer, and holds nothing for those who left."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.experts.concurrency import in_threads
from tests.processes import python
from weft.core.errors import SpecError, UsageError
from weft.core.spec import TensorSpec
from weft.experts.errors import ClosedError, ExpiredError, OverloadError, QuotaError, TooManyRowsError
from weft.experts.schema import Column, FlatSchema
from weft.experts.task import Answer, Task
from weft.experts.task_pool import PoolOptions, TaskPool

COLUMNS = FlatSchema(
    [Column("x", TensorSpec((None, 3), torch.float32)), Column("n", TensorSpec((None, None), torch.int64))]
)


def twice(tasks: Sequence[Task]) -> list[Answer]:
    return [[each.tensors[0] * 2] for each in tasks]


def pool(**options: float | int | None) -> TaskPool:
    return TaskPool("p", twice, COLUMNS, PoolOptions(**options))  # type: ignore[arg-type]


def pair(rows: int, length: int = 1, value: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.full((rows, 3), value), torch.zeros(rows, length, dtype=torch.int64)


def drain(one: TaskPool) -> list[list[int]]:
    batches: list[list[int]] = []
    while tasks := one.next_batch():
        batches.append([each.rows for each in tasks])
        one.process_batch(tasks)
    return batches


def test_every_fault_of_a_task_is_told_to_its_author_at_once_and_nothing_is_queued() -> None:
    one = pool()
    x, n = torch.ones(2, 4, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(SpecError) as caught:
        one.submit_task(x, n)
    assert str(caught.value).splitlines() == [
        "pool 'p' does not take these tensors:",
        "  - x axis 1 has size 4, wanted 3",
        "  - x has dtype torch.float64, wanted torch.float32",
        "  - n has dtype torch.int32, wanted torch.int64",
        "  - axis 0 is the batch and must have one size everywhere: x has 2, n has 3",
    ]
    for wrong in ((x,), (), (torch.ones(2, 3).to_sparse(), n[:2]), pair(0), (torch.tensor(1.0), n)):
        with pytest.raises(SpecError):
            one.submit_task(*wrong)
    stats = one.statistics()
    assert stats.waiting_tasks == stats.submitted == 0
    assert stats.refused == {"spec": 6}


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 2)), max_size=12), st.integers(5, 9))
def test_batches_are_lanes_in_order_of_arrival_up_to_the_maximum(tasks: list[tuple[int, int]], most: int) -> None:
    one = pool(max_batch_size=most)
    futures = [one.submit_task(*pair(rows, length, float(i))) for i, (rows, length) in enumerate(tasks)]
    batches = drain(one)
    assert sum(map(len, batches)) == len(tasks)
    assert all(sum(batch) <= most for batch in batches)
    for i, (future, (rows, _)) in enumerate(zip(futures, tasks, strict=True)):
        assert torch.equal(future.result(0)[0], torch.full((rows, 3), 2.0 * i))
    # Greedy: within a lane, a batch ends only where the next task would not have fitted.
    for length in (1, 2):
        waiting = [rows for rows, other in tasks if other == length]
        greedy: list[list[int]] = []
        for rows in waiting:
            if greedy and sum(greedy[-1]) + rows <= most:
                greedy[-1].append(rows)
            else:
                greedy.append([rows])
        assert all(batch in batches for batch in greedy)


def test_a_full_queue_refuses_and_what_no_batch_can_hold() -> None:
    one, by_rows = pool(max_tasks=2), pool(max_batch_size=4, max_rows=5)
    with pytest.raises(TooManyRowsError, match="a task of 5 rows, but its largest batch has 4"):
        by_rows.submit_task(*pair(5))
    for _ in range(2):
        one.submit_task(*pair(1))
    with pytest.raises(OverloadError, match=r"pool 'p' is full: 2 of 2 tasks"):
        one.submit_task(*pair(1))
    by_rows.submit_task(*pair(4))
    with pytest.raises(OverloadError, match="4 of 5 rows wait, and 2 more"):
        by_rows.submit_task(*pair(2))
    for words, message in ({"key": ""}, "key is ''"), ({"mini_batch": "m"}, "does not accumulate gradients"):
        with pytest.raises(UsageError, match=message):
            pool().submit_task(*pair(1), **words)


def test_statistics_tell_what_was_merged() -> None:
    one = pool()
    for count, rows in ((5, 2), (1, 1)):
        for _ in range(count):
            one.submit_task(*pair(rows))
        drain(one)
    stats = one.statistics()
    assert (stats.answered, stats.batches, stats.rows, stats.merged) == (6, 2, 11, {8: 1, 1: 1})
    assert stats.oldest_age == 0.0
    one.submit_task(*pair(1))
    time.sleep(0.01)
    assert 0.01 <= one.statistics().oldest_age < 60


def test_a_client_has_its_own_share_and_gets_it_back_with_its_answers() -> None:
    one = pool(max_client_tasks=2, max_client_rows=5)
    one.submit_task(*pair(2), client="ann")
    with pytest.raises(QuotaError, match="client 'ann' has 1 tasks with 2 rows"):
        one.submit_task(*pair(4), client="ann")
    one.submit_task(*pair(1), client="ann")
    with pytest.raises(QuotaError):
        one.submit_task(*pair(1), client="ann")
    one.submit_task(*pair(4), client="bob")
    one.submit_task(*pair(4))
    drain(one)
    one.submit_task(*pair(5), client="ann").cancel()
    one.submit_task(*pair(5), client="ann")
    drain(one)
    assert not one._pending._shares


def test_an_expired_task_never_runs() -> None:
    one, now = pool(), time.monotonic()
    with pytest.raises(ExpiredError, match="had passed"):
        one.submit_task(*pair(1), deadline=now - 1)
    future, late = one.submit_task(*pair(1), deadline=now + 600.0), one.submit_task(*pair(2))
    one.process_batch(one.next_batch(now + 601.0))
    assert isinstance(future.exception(0), ExpiredError) and late.result(0)
    assert one.statistics().expired == 1


def test_a_cancelled_task_leaves_at_once_and_one_that_runs_cannot_be_cancelled() -> None:
    one = pool()
    first, second = one.submit_task(*pair(1)), one.submit_task(*pair(2))
    assert first.cancel() and one.statistics().waiting_rows == 2
    [taken] = one.next_batch()
    assert not second.cancel()
    one.process_batch([taken])
    assert second.result(0)
    with pytest.raises(CancelledError):
        first.result(0)


# Run by an interpreter of its own: the checks of every call's types would take minutes.
FLOOD = """
import gc, sys, time
import torch
from weft.core.spec import TensorSpec
from weft.experts.task_pool import PoolOptions
from weft.experts.task_pool import TaskPool
from weft.experts.schema import Column, FlatSchema
columns = FlatSchema([Column("x", TensorSpec((None, 3), torch.float32))])
pool = TaskPool("p", lambda tasks: [], columns, PoolOptions(max_tasks=50, max_client_tasks=100))
x = torch.ones(1, 3)
def flood(count):
    for number in range(count):
        waits = [pool.submit_task(x, client=f"client {number % 1000}", deadline=time.monotonic() + 60) for _ in "abc"]
        assert all(future.cancel() for future in reversed(waits))
flood(100)
gc.collect()
gc.disable()  # nothing may wait in a cycle either
before, blocks = len(gc.get_objects()), sys.getallocatedblocks()
flood(10_000)
objects, blocks = len(gc.get_objects()) - before, sys.getallocatedblocks() - blocks
stats = pool.statistics()
assert stats.waiting_tasks == stats.waiting_rows == 0 and stats.cancelled == 30_300, stats
assert not pool._pending._shares
assert objects < 100 and blocks < 2000, (objects, blocks)
"""


@pytest.mark.long
def test_tens_of_thousands_of_tasks_that_are_cancelled_leave_nothing_behind() -> None:
    seen = python(FLOOD)
    assert seen.returncode == 0, seen.stderr


def test_fewer_rows_than_wanted_wait_for_more_but_not_for_ever() -> None:
    one = pool(min_batch_size=4, timeout=600.0)
    one.submit_task(*pair(2))
    now = time.monotonic()
    number, later = one.oldest_ready(now)
    assert number is None and later is not None and now < later <= now + 600.0
    assert one.next_batch() == []
    one.submit_task(*pair(2))
    assert drain(one) == [[2, 2]]
    one.submit_task(*pair(1))
    assert [each.rows for each in one.next_batch(time.monotonic() + 601.0)] == [1]


def test_a_process_that_raises_fails_its_batch_and_nothing_else() -> None:
    def fails(tasks: Sequence[Task]) -> list[Answer]:
        raise ZeroDivisionError("of the process")

    one = TaskPool("p", fails, COLUMNS)
    future = one.submit_task(*pair(1))
    one.process_batch(one.next_batch())
    assert isinstance(future.exception(0), ZeroDivisionError)
    assert one.wait_until_idle(0.0) and one.statistics().failed == {"module": 1}


def test_a_closed_pool_refuses_but_what_waits_may_be_done() -> None:
    one = pool(min_batch_size=10, timeout=60.0)
    done, left = one.submit_task(*pair(1)), one.submit_task(*pair(1, length=2))
    one.close_pool("the server drains")
    with pytest.raises(ClosedError, match="accepts no more tasks: the server drains"):
        one.submit_task(*pair(1))
    one.process_batch(one.next_batch())
    assert done.result(0) and not one.wait_until_idle(0.0)
    one.fail_waiting()
    assert isinstance(left.exception(0), ClosedError) and one.wait_until_idle(0.0)
    one.open_pool()
    one.submit_task(*pair(1)).cancel()


def test_many_threads_may_submit_and_cancel_while_another_works() -> None:
    one, stop = pool(max_tasks=10_000), threading.Event()

    def client(number: int) -> bool:
        futures = [one.submit_task(*pair(1 + i % 3, value=float(i))) for i in range(200)]
        cancelled = {i for i in range(number, 200, 5) if futures[i].cancel()}
        seen = {i: future.result(30)[0] for i, future in enumerate(futures) if i not in cancelled}
        return all(torch.equal(y, torch.full((1 + i % 3, 3), 2.0 * i)) for i, y in seen.items())

    def worker() -> None:
        while not stop.is_set():
            drain(one)

    working = threading.Thread(target=worker)
    working.start()
    try:
        assert all(in_threads(client, range(4)))
    finally:
        stop.set()
        working.join(10)
    stats = one.statistics()
    assert stats.answered + stats.cancelled == 800 and one.wait_until_idle(0.0)
