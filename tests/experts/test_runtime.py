"""One thread works on the oldest task of all pools, and nothing that a process or a callback does ends it."""

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
from weft.core.errors import UsageError
from weft.core.spec import TensorSpec
from weft.experts.errors import ClosedError, ExpertError, RefusedError
from weft.experts.runtime import Runtime
from weft.experts.schema import Column, FlatSchema
from weft.experts.task import Answer, Task, answer_waiters
from weft.experts.task_pool import PoolOptions, TaskPool, validate_metadata

X = FlatSchema([Column("x", TensorSpec((None,), torch.float32))])
ROW = torch.ones(1)


def noting(order: list[str], name: str) -> Callable[[Sequence[Task]], list[Answer]]:
    def process(tasks: Sequence[Task]) -> list[Answer]:
        order.append(name * len(tasks))
        return echo(tasks)

    return process


@contextmanager
def held() -> Iterator[tuple[BlockingProcess, TaskPool, Runtime]]:
    gate = BlockingProcess()
    pool = TaskPool("gate", gate, X)
    with Runtime([pool]) as runtime:
        first = pool.submit_task(ROW)
        assert gate.entered.acquire(timeout=30)
        yield gate, pool, runtime
        gate.go.release(100)
        first.result(30)


def test_the_pool_with_the_oldest_task_goes_first_and_takes_all_that_waits() -> None:
    order: list[str] = []
    with held() as (gate, _, runtime):
        a, b = (TaskPool(name, noting(order, name), X) for name in "ab")
        runtime.add(a, b)
        futures = [pool.submit_task(ROW) for pool in (b, a, a, b, b)]
        gate.go.release(100)
        for future in futures:
            future.result(30)
    assert order == ["bbb", "aa"]


def test_shutdown_does_what_was_accepted_and_refuses_the_rest() -> None:
    with held() as (gate, pool, runtime):
        accepted = [pool.submit_task(ROW) for _ in range(3)]
        ended: list[bool] = []
        closing = threading.Thread(target=lambda: ended.append(runtime.shutdown(timeout=30.0)))
        closing.start()
        wait_until(lambda: pool._closed is not None)
        with pytest.raises(ClosedError, match="shuts down"):
            pool.submit_task(ROW)
        gate.go.release(100)
        closing.join(30)
        assert ended == [True]
        assert all(future.done() and future.result(0) for future in accepted)


def test_shutdown_without_drain_fails_what_waits_but_ends_the_batch_that_runs() -> None:
    with held() as (gate, pool, runtime):
        waits = pool.submit_task(ROW)
        assert not runtime.shutdown(drain=False, timeout=0.05)  # the batch hangs; the thread cannot be stopped
        assert isinstance(waits.exception(0), ClosedError)
        assert runtime.statistics().working_on == "gate"
        gate.go.release(100)
        assert runtime.shutdown(drain=False)
        assert not runtime.statistics().alive


def test_pools_come_and_go_while_it_runs() -> None:
    held = TaskPool("held", echo, X)
    with Runtime([held]), Runtime(name="coming") as runtime:
        pool = TaskPool("a", echo, X)
        waited = pool.submit_task(ROW)  # before anybody works on it
        for pools in ((pool, held), (pool, pool)):  # as a whole, or not at all
            with pytest.raises(UsageError):
                runtime.add(*pools)
        assert runtime.statistics().pools == 0
        runtime.add(pool)
        assert waited.result(30)
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


def test_a_deadline_and_a_short_wait_wake_the_thread_by_themselves() -> None:
    order: list[str] = []
    pool = TaskPool("a", noting(order, "a"), X, PoolOptions(min_batch_size=8, timeout=0.05))
    with Runtime([pool]):
        start = time.monotonic()
        assert pool.submit_task(ROW).result(30)
        assert time.monotonic() - start > 0.04
        hopeless = pool.submit_task(ROW, deadline=time.monotonic() + 0.01)
        assert isinstance(hopeless.exception(30), TimeoutError)


def test_a_callback_that_shuts_its_own_runtime_down_is_told_that_this_cannot_be() -> None:
    caught: list[BaseException] = []
    with held() as (gate, pool, runtime):

        def callback(_: object) -> None:
            try:
                runtime.shutdown()
            except UsageError as error:
                caught.append(error)

        future = pool.submit_task(ROW)
        future.add_done_callback(callback)  # the runtime is in a batch, so this is there in time
        gate.go.release(100)
        future.result(30)
    assert len(caught) == 1 and "its own thread" in str(caught[0])


def test_two_experts_share_a_runtime_and_many_clients_an_expert() -> None:
    experts = [fussy_backend(), fussy_backend()]
    with Runtime(experts) as runtime:
        futures = [(e, i, e.forward_pool.submit_task(rows(1 + i % 3, i))) for i in range(20) for e in experts]
        for expert, i, future in futures:
            with torch.no_grad():
                assert torch.allclose(future.result(30)[0], expert.module(rows(1 + i % 3, i)), atol=1e-12)
        stats = runtime.statistics()
        assert stats.pools == 6 and stats.batches <= 40 and 0 < stats.busy <= stats.seconds


class Stopped(BaseException):
    """What some libraries end their threads with."""


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, Stopped, ValueError])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_callback_raises_ends_nothing_and_keeps_no_answer_back(kind: type[BaseException], fails: bool) -> None:
    def boom(tasks: Sequence[Task]) -> Any:
        raise SystemExit

    called: list[object] = []
    gate = BlockingProcess(boom if fails else echo)
    pool = TaskPool("p", gate, X)

    def callback(future: object) -> None:
        called.append(future)
        raise kind

    with Runtime([pool]) as runtime:
        futures = [pool.submit_task(ROW)]
        assert gate.entered.acquire(timeout=30)
        futures += [pool.submit_task(ROW) for _ in range(3)]
        for future in futures:
            future.add_done_callback(callback)
            future.add_done_callback(callback)
        gate.go.release(9)
        assert [future.exception(30) is not None for future in futures] == [fails] * 4
        gate.answers = echo
        assert pool.submit_task(ROW).result(30)
        assert runtime.statistics().alive
    assert {*called} == {*futures}
    expired = pool.statistics()
    assert expired.waiting_tasks == expired.running_tasks == 0


SHORT: list[Callable[[Sequence[Task]], Any]] = [
    lambda tasks: [],
    lambda tasks: echo(tasks)[1:],
    lambda tasks: [*echo(tasks), [ROW]],
]


@pytest.mark.parametrize("answers", SHORT, ids=["none", "too few", "too many"])
def test_a_process_that_does_not_answer_everyone_fails_its_batch_and_nothing_else(answers: Any) -> None:
    gate = BlockingProcess()
    pool, other = TaskPool("p", gate, X), TaskPool("other", echo, X)
    with Runtime([pool, other]) as runtime:
        first = pool.submit_task(ROW)
        assert gate.entered.acquire(timeout=30)
        waiting = [pool.submit_task(ROW) for _ in range(2)]
        gate.go.release()
        assert first.result(30)
        gate.answers = answers
        gate.go.release()
        for future in waiting:
            with pytest.raises(ExpertError, match=r"pool 'p': its process gave \d answers for 2 tasks"):
                future.result(30)
        gate.answers = echo
        gate.go.release()
        assert pool.submit_task(ROW).result(30) and other.submit_task(ROW).result(30)
        assert runtime.statistics().alive
    assert pool.statistics().failed == {"expert": 2}


def test_who_sets_his_own_future_gets_nothing_else_and_disturbs_nobody() -> None:
    gate = BlockingProcess()
    pool = TaskPool("p", gate, X)
    mine = [ROW]
    with Runtime([pool]):
        running = pool.submit_task(ROW)
        assert gate.entered.acquire(timeout=30)
        waiting, other = pool.submit_task(ROW), pool.submit_task(ROW)
        for future in (running, waiting):
            future.set_result(mine)
        gate.go.release(9)
        assert other.result(30)
        assert pool.submit_task(ROW).result(30)
    assert running.result(0) is mine and waiting.result(0) is mine


def test_a_future_that_is_set_a_moment_before_its_answer_keeps_what_it_has() -> None:
    late, other = Future[Any](), Future[Any]()
    late.set_result([])
    late.running = lambda: True  # type: ignore[method-assign]  # as it was that moment before
    answer_waiters([late, other], [ROW])
    assert late.result(0) == [] and other.result(0) == [ROW]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("step", ["oldest_ready", "next_batch", "process_batch"])
def test_if_the_thread_ends_all_the_same_everyone_is_told_and_it_may_be_started_again(step: str) -> None:
    gate = BlockingProcess()
    pool = TaskPool("p", gate, X, PoolOptions(max_client_tasks=9))
    other = TaskPool("other", echo, X, PoolOptions(min_batch_size=9, timeout=1000.0))
    original = getattr(pool, step)

    def fails(*arguments: Any) -> Any:
        if step == "next_batch":
            original()
        raise MemoryError("none left")

    runtime = Runtime([pool, other])
    runtime.start()
    waits: list[Future[Any]] = [other.submit_task(ROW)]
    done = pool.submit_task(ROW)
    assert gate.entered.acquire(timeout=30)
    setattr(pool, step, fails)
    waits += [pool.submit_task(ROW, client="ann") for _ in range(2)]
    gate.go.release(9)
    assert done.result(30)
    for future in waits:
        error = future.exception(30)
        assert isinstance(error, ExpertError) and "MemoryError: none left" in str(error)
        assert isinstance(error, RefusedError) == (future is waits[0] or step == "oldest_ready"), "else it may have run"
    for each in (pool, other):
        with pytest.raises(ClosedError, match="the thread of runtime 'cpu' ended with MemoryError"):
            each.submit_task(ROW)
        assert each.wait_until_idle(30.0)
    with pytest.raises(UsageError, match="shut it down and start it again"):
        runtime.add(TaskPool("new", echo, X))
    setattr(pool, step, original)
    assert runtime.shutdown() and not runtime.statistics().alive
    with runtime:
        assert pool.submit_task(ROW, client="ann").result(30)
    assert pool.statistics().running_tasks == 0 and not pool._pending._shares


def test_a_pool_is_worked_on_by_one_runtime_which_no_other_disturbs() -> None:
    pool, own = TaskPool("p", echo, X), TaskPool("own", echo, X)
    first, second = Runtime([pool], name="first"), Runtime([pool, own], name="second")
    with first:
        with Runtime() as third:
            for refused in (second.start, lambda: third.add(own, pool)):
                with pytest.raises(UsageError, match="'p' is in runtime 'first'"):
                    refused()
        assert second.shutdown() and pool.submit_task(ROW).result(30)
    with second:
        assert pool.submit_task(ROW).result(30) and own.submit_task(ROW).result(30)
        assert first.shutdown() and first.remove(pool)
        assert pool.submit_task(ROW).result(30)
        assert second.remove(pool)
        with Runtime([pool]):
            assert pool.submit_task(ROW).result(30)


def test_of_two_who_remove_a_pool_one_does_and_the_other_is_told() -> None:
    gate = BlockingProcess()
    pool = TaskPool("p", gate, X)
    removed: list[bool] = []
    with Runtime([pool]) as runtime:
        future = pool.submit_task(ROW)
        assert gate.entered.acquire(timeout=30)
        remover = threading.Thread(target=lambda: removed.append(runtime.remove(pool)))
        remover.start()
        wait_until(lambda: runtime._pools[pool])
        with pytest.raises(UsageError, match=r"has no pools \['p'\], or they are being removed"):
            runtime.remove(pool)
        gate.go.release()
        remover.join(30)
        assert removed == [True] and future.result(0)
        runtime.add(pool)
        gate.go.release()
        assert pool.submit_task(ROW).result(30)
        assert runtime.remove(pool)


def test_a_deadline_may_be_any_number_and_all_wrong_words_are_told_at_once() -> None:
    for deadline in (None, 1, 1.5, float("inf"), 10**400):
        validate_metadata("p", "ann", "k", None, deadline, by_mini_batch=False)
    for wrong in ("soon", True, float("nan"), [1.0], torch.tensor(1e18)):
        with pytest.raises(
            UsageError, match=r"(?s)client is '', .*- key is 5, .*- deadline is .*, wanted None or a time"
        ):
            validate_metadata("p", "", 5, None, wrong, by_mini_batch=False)  # type: ignore[arg-type]
