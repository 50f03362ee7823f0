"""One thread runs the pool with the oldest task, and no process function or callback can end it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.experts.concurrency import BlockingProcess, echo, wait_until
from tests.experts.expert_cases import fussy_backend, rows
from torchweft.core.errors import UsageError
from torchweft.core.spec import TensorSpec
from torchweft.experts.errors import ClosedError, ExpertError, RefusedError
from torchweft.experts.schema import Column, FlatSchema
from torchweft.experts.task import Answer, Task, answer_waiters
from torchweft.experts.task_pool import PoolOptions, Runtime, TaskPool

X = FlatSchema([Column("x", TensorSpec((None,), torch.float32))])
ROW = torch.ones(1)


def record_names(order: list[str], name: str) -> Callable[[Sequence[Task]], list[Answer]]:
    def process(tasks: Sequence[Task]) -> list[Answer]:
        order.append(name * len(tasks))
        return echo(tasks)

    return process


@contextmanager
def busy_runtime(
    answers: Callable[[Sequence[Task]], Any] = echo,
) -> Iterator[tuple[BlockingProcess, TaskPool, Runtime, "Future[Any]"]]:
    """Runtime that is blocked in a batch of its pool "gate" until ``go`` is released, and the future of that batch."""
    gate = BlockingProcess(answers)
    pool = TaskPool("gate", gate, X)
    with Runtime([pool]) as runtime:
        running = pool.submit_task(ROW)
        assert gate.entered.acquire(timeout=30)
        yield gate, pool, runtime, running
        gate.go.release(100)
        assert pool.wait_until_idle(30.0)


def is_closed(pool: TaskPool) -> bool:
    try:
        pool.submit_task(ROW).cancel()
    except ClosedError:
        return True
    return False


def test_pool_with_oldest_task_runs_all_that_waits() -> None:
    order: list[str] = []
    with busy_runtime() as (gate, _, runtime, _):
        a, b = (TaskPool(name, record_names(order, name), X) for name in "ab")
        runtime.add(a, b)
        futures = [pool.submit_task(ROW) for pool in (b, a, a, b, b)]
        gate.go.release(100)
        for future in futures:
            future.result(30)
    assert order == ["bbb", "aa"]


def test_shutdown_finishes_accepted_tasks_and_rejects_others() -> None:
    with busy_runtime() as (gate, pool, runtime, _):
        accepted = [pool.submit_task(ROW) for _ in range(3)]
        ended: list[bool] = []
        closing = threading.Thread(target=lambda: ended.append(runtime.shutdown(timeout=30.0)))
        closing.start()
        wait_until(lambda: is_closed(pool))
        with pytest.raises(ClosedError, match="shuts down"):
            pool.submit_task(ROW)
        gate.go.release(100)
        closing.join(30)
        assert ended == [True]
        assert all(future.done() and future.result(0) for future in accepted)


def test_shutdown_without_drain_leaves_only_the_running_batch() -> None:
    with busy_runtime() as (gate, pool, runtime, _):
        waiting = pool.submit_task(ROW)
        assert not runtime.shutdown(drain=False, timeout=0.05), "a running batch cannot be stopped"
        assert isinstance(waiting.exception(0), ClosedError)
        assert runtime.statistics().working_on == "gate"
        gate.go.release(100)
        assert runtime.shutdown(drain=False)
        assert not runtime.statistics().alive


def test_pools_are_added_and_removed_while_it_runs() -> None:
    other = TaskPool("other", echo, X)
    with Runtime([other]), Runtime(name="coming") as runtime:
        pool = TaskPool("a", echo, X)
        early = pool.submit_task(ROW)
        for pools in ((pool, other), (pool, pool)):
            with pytest.raises(UsageError):
                runtime.add(*pools)
        assert runtime.statistics().pools == 0, "all pools are added, or none"
        runtime.add(pool)
        assert early.result(30)
        with pytest.raises(UsageError, match="is in runtime 'coming' already"):
            runtime.add(pool)
        last = pool.submit_task(ROW)
        assert runtime.remove(pool)
        assert last.result(0)
        with pytest.raises(ClosedError, match="removed"):
            pool.submit_task(ROW)
        with pytest.raises(UsageError, match="has no pools"):
            runtime.remove(pool)
        assert runtime.statistics().pools == 0
        runtime.add(pool)
        assert pool.submit_task(ROW).result(30)
        with pytest.raises(UsageError, match="started already"):
            runtime.start()


def test_timeout_and_deadline_wake_the_thread() -> None:
    pool = TaskPool("a", echo, X, PoolOptions(min_batch_size=8, timeout=0.05))
    with Runtime([pool]):
        start = time.monotonic()
        assert pool.submit_task(ROW).result(30)
        assert time.monotonic() - start > 0.04
        expired = pool.submit_task(ROW, deadline=time.monotonic() + 0.01)
        assert isinstance(expired.exception(30), TimeoutError)


def test_callback_cannot_shut_its_own_runtime_down() -> None:
    caught: list[BaseException] = []
    with busy_runtime() as (gate, pool, runtime, _):

        def shut_down(_: object) -> None:
            try:
                runtime.shutdown()
            except UsageError as error:
                caught.append(error)

        future = pool.submit_task(ROW)
        future.add_done_callback(shut_down)
        gate.go.release(100)
        future.result(30)
    assert len(caught) == 1 and "its own thread" in str(caught[0])


def test_experts_share_a_runtime_and_clients_an_expert() -> None:
    experts = [fussy_backend(), fussy_backend()]
    with Runtime(experts) as runtime:
        futures = [(e, i, e.forward_pool.submit_task(rows(1 + i % 3, i))) for i in range(20) for e in experts]
        for expert, i, future in futures:
            with torch.no_grad():
                assert torch.allclose(future.result(30)[0], expert.module(rows(1 + i % 3, i)), atol=1e-12)
        stats = runtime.statistics()
        assert stats.pools == 6 and stats.batches <= 40 and 0 < stats.busy <= stats.seconds


class ThreadKilled(BaseException):
    """Exception of a kind with which some libraries end their threads."""


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, ThreadKilled, ValueError])
@pytest.mark.parametrize("fails", [False, True])
def test_raising_callback_withholds_no_answer(kind: type[BaseException], fails: bool) -> None:
    def fail(tasks: Sequence[Task]) -> Any:
        raise SystemExit

    called: list[object] = []

    def callback(future: object) -> None:
        called.append(future)
        raise kind

    with busy_runtime(fail if fails else echo) as (gate, pool, runtime, running):
        futures = [running, *[pool.submit_task(ROW) for _ in range(3)]]
        for future in futures:
            future.add_done_callback(callback)
            future.add_done_callback(callback)
        gate.go.release(9)
        assert [future.exception(30) is not None for future in futures] == [fails] * 4
        gate.answers = echo
        assert pool.submit_task(ROW).result(30)
        assert runtime.statistics().alive
    assert {*called} == {*futures}
    stats = pool.statistics()
    assert stats.waiting_tasks == stats.running_tasks == 0


def test_client_that_sets_its_own_future_disturbs_no_other() -> None:
    with busy_runtime() as (gate, pool, _, running):
        waiting, other = pool.submit_task(ROW), pool.submit_task(ROW)
        for future in (running, waiting):
            future.set_result([])
        gate.go.release(9)
        assert other.result(30)
        assert pool.submit_task(ROW).result(30)
    assert running.result(0) == [] == waiting.result(0)


def test_future_set_just_before_its_answer_keeps_its_result() -> None:
    class LooksRunning(Future[Any]):
        """Future that its client sets right after the runtime has checked it."""

        def running(self) -> bool:
            return True

    late, other = LooksRunning(), Future[Any]()
    late.set_result([])
    answer_waiters([late, other], [ROW])
    assert late.result(0) == [] and other.result(0) == [ROW]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("step", ["oldest_ready", "next_batch", "process_batch"])
def test_dead_thread_fails_all_tasks_and_can_be_restarted(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    gate = BlockingProcess()
    pool = TaskPool("p", gate, X, PoolOptions(max_client_tasks=2))
    other = TaskPool("other", echo, X, PoolOptions(min_batch_size=9, timeout=1000.0))
    original = getattr(pool, step)

    def fail(*arguments: Any) -> Any:
        if step == "next_batch":
            original()
        raise MemoryError("none left")

    runtime = Runtime([pool, other])
    runtime.start()
    waits: list[Future[Any]] = [other.submit_task(ROW)]
    done = pool.submit_task(ROW)
    assert gate.entered.acquire(timeout=30)
    monkeypatch.setattr(pool, step, fail)
    waits += [pool.submit_task(ROW, client="ann") for _ in range(2)]
    gate.go.release(9)
    assert done.result(30)
    for future in waits:
        error = future.exception(30)
        assert isinstance(error, ExpertError) and "MemoryError: none left" in str(error)
        never_ran = future is waits[0] or step == "oldest_ready"
        assert isinstance(error, RefusedError) == never_ran, "others can have been applied"
    for closed in (pool, other):
        with pytest.raises(ClosedError, match="the thread of runtime 'cpu' ended with MemoryError"):
            closed.submit_task(ROW)
        assert closed.wait_until_idle(30.0)
    with pytest.raises(UsageError, match="shut it down and start it again"):
        runtime.add(TaskPool("new", echo, X))
    monkeypatch.undo()
    assert runtime.shutdown() and not runtime.statistics().alive
    with runtime:
        again = [pool.submit_task(ROW, client="ann") for _ in range(2)]  # the client's share is free again
        assert all(future.result(30) for future in again)
    assert pool.statistics().running_tasks == 0


def test_pool_belongs_to_one_running_runtime() -> None:
    pool, own = TaskPool("p", echo, X), TaskPool("own", echo, X)
    first, second = Runtime([pool], name="first"), Runtime([pool, own], name="second")
    with first:
        with Runtime() as third:
            for claim in (second.start, lambda: third.add(own, pool)):
                with pytest.raises(UsageError, match="'p' is in runtime 'first'"):
                    claim()
        assert second.shutdown() and pool.submit_task(ROW).result(30)
    with second:
        assert pool.submit_task(ROW).result(30) and own.submit_task(ROW).result(30)
        assert first.shutdown() and first.remove(pool)
        assert pool.submit_task(ROW).result(30)
        assert second.remove(pool)
        with Runtime([pool]):
            assert pool.submit_task(ROW).result(30)


def test_pool_is_removed_by_one_of_two_threads() -> None:
    with busy_runtime() as (gate, pool, runtime, running):
        removed: list[bool] = []
        remover = threading.Thread(target=lambda: removed.append(runtime.remove(pool)))
        remover.start()
        wait_until(lambda: is_closed(pool))
        with pytest.raises(UsageError, match=r"has no pools \['gate'\], or they are being removed"):
            runtime.remove(pool)
        gate.go.release()
        remover.join(30)
        assert removed == [True] and running.result(0)
        runtime.add(pool)
        gate.go.release()
        assert pool.submit_task(ROW).result(30)
