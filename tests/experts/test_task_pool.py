"""A task pool rejects invalid tasks on submission, batches without a timer, and keeps nothing of past clients."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.experts.concurrency import in_threads
from tests.processes import python
from torchweft.core.errors import SpecError, UsageError
from torchweft.core.spec import TensorSpec
from torchweft.experts.errors import (
    ClosedError,
    ExpertError,
    ExpiredError,
    OverloadError,
    QuotaError,
    TooManyRowsError,
)
from torchweft.experts.schema import Column, FlatSchema
from torchweft.experts.task import Answer, Task
from torchweft.experts.task_pool import PoolOptions, TaskPool, validate_metadata

COLUMNS = FlatSchema(
    [Column("x", TensorSpec((None, 3), torch.float32)), Column("n", TensorSpec((None, None), torch.int64))]
)


def double(tasks: Sequence[Task]) -> list[Answer]:
    return [[task.tensors[0] * 2] for task in tasks]


def make_pool(**options: float | int | None) -> TaskPool:
    return TaskPool("p", double, COLUMNS, PoolOptions(**options))  # type: ignore[arg-type]


def pair(rows: int, length: int = 1, value: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.full((rows, 3), value), torch.zeros(rows, length, dtype=torch.int64)


def run_all(pool: TaskPool) -> list[list[int]]:
    """Run all batches. Returns the rows of the tasks of each batch."""
    batches: list[list[int]] = []
    while tasks := pool.next_batch():
        batches.append([task.rows for task in tasks])
        pool.process_batch(tasks)
    return batches


def test_invalid_task_is_rejected_with_all_faults() -> None:
    pool = make_pool()
    x, n = torch.ones(2, 4, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(SpecError) as caught:
        pool.submit_task(x, n)
    assert str(caught.value).splitlines() == [
        "pool 'p' does not take these tensors:",
        "  - x axis 1 has size 4, wanted 3",
        "  - x has dtype torch.float64, wanted torch.float32",
        "  - n has dtype torch.int32, wanted torch.int64",
        "  - axis 0 is the batch and must have one size everywhere: x has 2, n has 3",
    ]
    for tensors in ((x,), (), (torch.ones(2, 3).to_sparse(), n[:2]), pair(0), (torch.tensor(1.0), n)):
        with pytest.raises(SpecError):
            pool.submit_task(*tensors)
    stats = pool.statistics()
    assert stats.waiting_tasks == stats.submitted == 0
    assert stats.refused == {"spec": 6}


def test_invalid_metadata_is_rejected_with_all_faults() -> None:
    for deadline in (None, 1, 1.5, float("inf"), 10**400):
        validate_metadata("p", "ann", "k", None, deadline, by_mini_batch=False)
    for wrong in ("soon", True, float("nan"), [1.0], torch.tensor(1e18)):
        with pytest.raises(
            UsageError,
            match=r"(?s)client is '', .*- key is 5, .*- deadline is .*, wanted None or a time.*accumulate gradients",
        ):
            validate_metadata("p", "", 5, "m", wrong, by_mini_batch=False)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 2)), max_size=12), st.integers(5, 9))
def test_batches_are_greedy_in_order_of_arrival(tasks: list[tuple[int, int]], most: int) -> None:
    pool = make_pool(max_batch_size=most)
    futures = [pool.submit_task(*pair(rows, length, float(i))) for i, (rows, length) in enumerate(tasks)]
    batches = run_all(pool)
    assert sum(map(len, batches)) == len(tasks)
    for i, (future, (rows, _)) in enumerate(zip(futures, tasks, strict=True)):
        assert torch.equal(future.result(0)[0], torch.full((rows, 3), 2.0 * i))
    # A batch of one length ends only where the next task would not have fitted.
    for length in (1, 2):
        greedy: list[list[int]] = []
        for rows in [rows for rows, other in tasks if other == length]:
            if greedy and sum(greedy[-1]) + rows <= most:
                greedy[-1].append(rows)
            else:
                greedy.append([rows])
        assert all(batch in batches for batch in greedy)


def test_full_queue_and_too_large_task_are_rejected() -> None:
    by_tasks, by_rows = make_pool(max_tasks=2), make_pool(max_batch_size=4, max_rows=5)
    with pytest.raises(TooManyRowsError, match="a task of 5 rows, but its largest batch has 4"):
        by_rows.submit_task(*pair(5))
    for _ in range(2):
        by_tasks.submit_task(*pair(1))
    with pytest.raises(OverloadError, match=r"pool 'p' is full: 2 of 2 tasks"):
        by_tasks.submit_task(*pair(1))
    by_rows.submit_task(*pair(4))
    with pytest.raises(OverloadError, match="4 of 5 rows wait, and 2 more"):
        by_rows.submit_task(*pair(2))


def test_statistics_count_merged_tasks() -> None:
    pool = make_pool()
    for count, rows in ((5, 2), (1, 1)):
        for _ in range(count):
            pool.submit_task(*pair(rows))
        run_all(pool)
    stats = pool.statistics()
    assert (stats.answered, stats.batches, stats.rows, stats.merged) == (6, 2, 11, {8: 1, 1: 1})
    assert stats.oldest_age == 0.0
    pool.submit_task(*pair(1))
    time.sleep(0.01)
    assert 0.01 <= pool.statistics().oldest_age < 60


def test_client_share_returns_with_answers_and_cancellation() -> None:
    pool = make_pool(max_client_tasks=2, max_client_rows=5)
    pool.submit_task(*pair(2), client="ann")
    with pytest.raises(QuotaError, match="client 'ann' has 1 tasks with 2 rows"):
        pool.submit_task(*pair(4), client="ann")
    pool.submit_task(*pair(1), client="ann")
    with pytest.raises(QuotaError):
        pool.submit_task(*pair(1), client="ann")
    pool.submit_task(*pair(4), client="bob")
    pool.submit_task(*pair(4))
    run_all(pool)
    for _ in range(2):
        pool.submit_task(*pair(5), client="ann").cancel()


def test_expired_task_never_runs() -> None:
    pool, now = make_pool(), time.monotonic()
    with pytest.raises(ExpiredError, match="had passed"):
        pool.submit_task(*pair(1), deadline=now - 1)
    expired, other = pool.submit_task(*pair(1), deadline=now + 600.0), pool.submit_task(*pair(2))
    pool.process_batch(pool.next_batch(now + 601.0))
    assert isinstance(expired.exception(0), ExpiredError) and other.result(0)
    assert pool.statistics().expired == 1


def test_waiting_task_can_be_cancelled_and_running_one_not() -> None:
    pool = make_pool()
    waiting, running = pool.submit_task(*pair(1)), pool.submit_task(*pair(2))
    assert waiting.cancel() and pool.statistics().waiting_rows == 2
    batch = pool.next_batch()
    assert not running.cancel()
    pool.process_batch(batch)
    assert running.result(0)
    with pytest.raises(CancelledError):
        waiting.result(0)


# Runs in a separate interpreter, because type-checking every call would take minutes.
FLOOD = """
import gc, sys, time
import torch
from torchweft.core.spec import TensorSpec
from torchweft.experts.task_pool import PoolOptions, TaskPool
from torchweft.experts.schema import Column, FlatSchema
columns = FlatSchema([Column("x", TensorSpec((None, 3), torch.float32))])
pool = TaskPool("p", lambda tasks: [], columns, PoolOptions(max_tasks=50, max_client_tasks=100))
x = torch.ones(1, 3)
def flood(count):
    for number in range(count):
        waits = [pool.submit_task(x, client=f"client {number % 1000}", deadline=time.monotonic() + 60) for _ in "abc"]
        assert all(future.cancel() for future in reversed(waits))
flood(100)
gc.collect()
gc.disable()  # no object may survive in a reference cycle
before, blocks = len(gc.get_objects()), sys.getallocatedblocks()
flood(10_000)
objects, blocks = len(gc.get_objects()) - before, sys.getallocatedblocks() - blocks
stats = pool.statistics()
assert stats.waiting_tasks == stats.waiting_rows == 0 and stats.cancelled == 30_300, stats
assert objects < 100 and blocks < 2000, (objects, blocks)  # shares of a thousand clients would exceed this
"""


@pytest.mark.long
def test_flood_of_cancelled_tasks_leaves_no_objects() -> None:
    flood = python(FLOOD)
    assert flood.returncode == 0, flood.stderr


def test_small_batch_waits_for_more_rows_until_timeout() -> None:
    pool = make_pool(min_batch_size=4, timeout=600.0)
    pool.submit_task(*pair(2))
    now = time.monotonic()
    number, later = pool.oldest_ready(now)
    assert number is None and later is not None and now < later <= now + 600.0
    assert pool.next_batch() == []
    pool.submit_task(*pair(2))
    assert run_all(pool) == [[2, 2]]
    pool.submit_task(*pair(1))
    assert [task.rows for task in pool.next_batch(time.monotonic() + 601.0)] == [1]


def fail(tasks: Sequence[Task]) -> list[Answer]:
    raise ZeroDivisionError("of the process")


FAULTY: dict[str, Callable[[Sequence[Task]], list[Answer]]] = {
    "raises": fail,
    "no answers": lambda tasks: [],
    "too few": lambda tasks: double(tasks)[1:],
    "too many": lambda tasks: [*double(tasks), []],
}


@pytest.mark.parametrize("fault", FAULTY)
def test_faulty_process_fails_only_its_batch(fault: str) -> None:
    pool = TaskPool("p", FAULTY[fault], COLUMNS)
    futures = [pool.submit_task(*pair(1)) for _ in range(2)]
    pool.run_batch()
    kind, words = (ZeroDivisionError, "of the") if fault == "raises" else (ExpertError, "answers for 2 tasks")
    for future in futures:
        with pytest.raises(kind, match=words):
            future.result(0)
    assert pool.wait_until_idle(0.0) and sum(pool.statistics().failed.values()) == 2


def test_closed_pool_rejects_but_finishes_accepted_tasks() -> None:
    pool = make_pool(min_batch_size=10, timeout=60.0)
    first, second = pool.submit_task(*pair(1)), pool.submit_task(*pair(1, length=2))
    pool.set_closed("the server drains")
    with pytest.raises(ClosedError, match="accepts no more tasks: the server drains"):
        pool.submit_task(*pair(1))
    pool.run_batch()
    assert first.result(0) and not pool.wait_until_idle(0.0)
    pool.fail_waiting()
    assert isinstance(second.exception(0), ClosedError) and pool.wait_until_idle(0.0)
    pool.set_closed(None)
    pool.submit_task(*pair(1)).cancel()


def test_many_threads_submit_and_cancel_while_one_works() -> None:
    pool, stop = make_pool(max_tasks=10_000), threading.Event()

    def client(number: int) -> bool:
        futures = [pool.submit_task(*pair(1 + i % 3, value=float(i))) for i in range(200)]
        cancelled = {i for i in range(number, 200, 5) if futures[i].cancel()}
        answers = {i: future.result(30)[0] for i, future in enumerate(futures) if i not in cancelled}
        return all(torch.equal(y, torch.full((1 + i % 3, 3), 2.0 * i)) for i, y in answers.items())

    def worker() -> None:
        while not stop.is_set():
            run_all(pool)

    working = threading.Thread(target=worker)
    working.start()
    try:
        assert all(in_threads(client, range(4)))
    finally:
        stop.set()
        working.join(10)
    stats = pool.statistics()
    assert stats.answered + stats.cancelled == 800 and pool.wait_until_idle(0.0)
