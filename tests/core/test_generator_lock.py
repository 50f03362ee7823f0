"""The generator lock: exclusive, nested, released during a wait, and new in a forked child."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from tests.processes import forked, only_with_fork
from torchweft.core.rng import GeneratorWatch, carry_lock, lock_generators, lock_released, seed_generators

CPU = [torch.default_generator]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Start work in another thread, which does not hold the lock."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_locked() -> bool:
    """Whether another thread would have to wait for the lock."""
    entered = threading.Event()

    def enter() -> None:
        with lock_generators(CPU):
            entered.set()

    attempts.append(in_thread(enter))
    return not entered.wait(0.1)


attempts: list[threading.Thread] = []


@pytest.fixture(autouse=True)
def finished_attempts() -> Iterator[None]:
    yield
    for attempt in attempts:
        attempt.join(10)
    attempts.clear()


def test_lock_excludes_other_threads_until_its_end() -> None:
    """An error releases it too."""
    with pytest.raises(KeyError), lock_generators(CPU):
        assert is_locked()
        raise KeyError
    assert not is_locked()


def test_lock_is_nested_in_every_thread_that_it_is_carried_to() -> None:
    done: list[str] = []
    with lock_generators(CPU):
        with lock_generators(CPU):
            done.append("caller")
        carry = carry_lock()

        def nest() -> None:
            carry()
            with lock_generators(CPU):
                done.append("thread")

        in_thread(nest).join(10)
    assert done == ["caller", "thread"]
    carry()  # the lock was released, so it must not count as held
    with lock_generators(CPU):
        assert is_locked()


def test_waiting_releases_the_lock_and_keeps_the_numbers() -> None:
    """Other threads draw from the caller's stream during the wait. Afterwards the stage continues its own stream."""
    torch.manual_seed(0)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(7))
    with seed_generators(CPU, 7):
        drawn = [torch.rand(2)]
        with lock_released():
            assert not is_locked()
            torch.rand(5)
        assert is_locked()
        drawn.append(torch.rand(2))
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(5)
    assert torch.equal(torch.cat(drawn), expected) and torch.equal(after, torch.rand(1))


def test_waits_and_locks_nest_inside_a_wait() -> None:
    expected = torch.rand(2, generator=torch.Generator().manual_seed(7))
    with seed_generators(CPU, 7):
        with lock_released(), lock_released():
            assert not is_locked()
        with lock_released(), seed_generators(CPU, 5):
            assert is_locked()
        assert torch.equal(torch.rand(2), expected)


def test_watch_detects_only_draws_without_the_lock() -> None:
    watch = GeneratorWatch(CPU)
    assert not watch.moved()
    torch.rand(1)
    assert watch.moved()
    watch.put_back()
    watch = GeneratorWatch(CPU)
    with lock_generators(CPU):
        torch.rand(1)
    assert not watch.moved()


@only_with_fork[0]
@only_with_fork[1]
@pytest.mark.parametrize("own", [False, True], ids=["other thread", "own thread"])
def test_forked_child_has_a_lock_of_its_own(own: bool) -> None:
    """Another thread, or the forking one, holds the lock during the fork."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_generators(CPU):
            begun.set()
            over.wait(30)

    with ExitStack() as stack:

        def work() -> bool:
            with lock_generators(CPU):
                held = is_locked()
            if own:
                stack.close()  # as if the child left the stage in which it was forked
            return held and not is_locked()

        if own:
            stack.enter_context(lock_generators(CPU))
        else:
            stack.callback(over.set)
            in_thread(hold)
            assert begun.wait(10)
        assert forked(work)
