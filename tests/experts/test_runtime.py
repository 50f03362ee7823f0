"""One thread works on the oldest task of all pools, and outlives neither its block nor its shutdown."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.experts.expert_cases import fussy_backend, rows
from tests.experts.gate import Gate, X, same
from weft.core.errors import UsageError
from weft.experts.errors import ClosedError
from weft.experts.runtime import Runtime
from weft.experts.task import Answer, Task
from weft.experts.task_pool import PoolOptions, TaskPool


def noting(order: list[str], name: str) -> Callable[[Sequence[Task]], list[Answer]]:
    def process(tasks: Sequence[Task]) -> list[Answer]:
        order.append(name * len(tasks))
        return same(tasks)

    return process


def one() -> Tensor:
    return torch.ones(1)


@contextmanager
def held() -> Iterator[tuple[Gate, TaskPool, Runtime]]:
    """A runtime that is in the middle of a batch."""
    gate = Gate()
    pool = TaskPool("gate", gate, X)
    with Runtime([pool]) as runtime:
        first = pool.submit_task(one())
        assert gate.entered.acquire(timeout=30)
        yield gate, pool, runtime
        gate.go.release(100)
        first.result(30)


def test_the_pool_with_the_oldest_task_goes_first_and_takes_all_that_waits() -> None:
    order: list[str] = []
    with held() as (gate, _, runtime):
        a, b = (TaskPool(name, noting(order, name), X) for name in "ab")
        runtime.add(a, b)
        futures = [pool.submit_task(one()) for pool in (b, a, a, b, b)]
        gate.go.release(100)
        for future in futures:
            future.result(30)
    assert order == ["bbb", "aa"]


def test_shutdown_does_what_was_accepted_and_refuses_the_rest() -> None:
    with held() as (gate, pool, runtime):
        accepted = [pool.submit_task(one()) for _ in range(3)]
        ended: list[bool] = []
        closing = threading.Thread(target=lambda: ended.append(runtime.shutdown(timeout=30.0)))
        closing.start()
        while pool._closed is None:
            time.sleep(0.001)
        with pytest.raises(ClosedError, match="shuts down"):
            pool.submit_task(one())
        gate.go.release(100)
        closing.join(30)
        assert ended == [True]
        assert all(future.done() and future.result(0) for future in accepted)


def test_shutdown_without_drain_fails_what_waits_but_ends_the_batch_that_runs() -> None:
    with held() as (gate, pool, runtime):
        waits = pool.submit_task(one())
        assert not runtime.shutdown(drain=False, timeout=0.05)  # the batch hangs; the thread cannot be stopped
        assert isinstance(waits.exception(0), ClosedError)
        assert runtime.statistics().working_on == "gate"
        gate.go.release(100)
        assert runtime.shutdown(drain=False)
        assert not runtime.statistics().alive


def test_pools_come_and_go_while_it_runs() -> None:
    order: list[str] = []
    with Runtime(name="coming") as runtime:
        pool = TaskPool("a", noting(order, "a"), X)
        waited = pool.submit_task(one())  # before anybody works on it
        runtime.add(pool)
        assert waited.result(30)
        with pytest.raises(UsageError, match="is in runtime 'coming' already"):
            runtime.add(pool)
        last = pool.submit_task(one())
        assert runtime.remove(pool)
        assert last.result(0)
        with pytest.raises(ClosedError, match="removed"):
            pool.submit_task(one())
        with pytest.raises(UsageError, match="has no pools"):
            runtime.remove(pool)
        assert runtime.statistics().pools == 0
        runtime.add(pool)
        assert pool.submit_task(one()).result(30)


def test_it_runs_again_after_a_shutdown_but_not_twice_at_once() -> None:
    order: list[str] = []
    pool = TaskPool("a", noting(order, "a"), X)
    runtime = Runtime([pool])
    for _ in range(2):
        with runtime:
            assert pool.submit_task(one()).result(30)
            with pytest.raises(UsageError, match="started already"):
                runtime.start()
        assert runtime.shutdown()
    with pytest.raises(ClosedError):
        pool.submit_task(one())


def test_a_deadline_and_a_short_wait_wake_the_thread_by_themselves() -> None:
    order: list[str] = []
    pool = TaskPool("a", noting(order, "a"), X, PoolOptions(min_batch_size=8, timeout=0.05))
    with Runtime([pool]):
        start = time.monotonic()
        assert pool.submit_task(one()).result(30)
        assert time.monotonic() - start > 0.04
        hopeless = pool.submit_task(one(), deadline=time.monotonic() + 0.01)
        assert isinstance(hopeless.exception(30), TimeoutError)


def test_a_callback_that_shuts_its_own_runtime_down_is_told_that_this_cannot_be() -> None:
    caught: list[BaseException] = []
    with held() as (gate, pool, runtime):

        def callback(_: object) -> None:
            try:
                runtime.shutdown()
            except UsageError as error:
                caught.append(error)

        future = pool.submit_task(one())
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
