"""Turns at the generators: one after another, inside each other, let go while waiting, begun anew in a fork."""

import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from tests.processes import forked, only_with_fork
from weft.core import rng as turns
from weft.core.rng import GeneratorWatch, carry_lock, lock_generators, seeded, waiting

CPU = [torch.default_generator]


def beside(work: Callable[[], object]) -> threading.Thread:
    """Do it in another thread, which has no part in this one's turn."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def taken() -> bool:
    """Whether somebody else would have to wait for a turn now."""
    found: list[bool] = []

    def look() -> None:
        lock = turns._ProcessLock.current._lock
        found.append(not lock.acquire(blocking=False))
        if not found[0]:
            lock.release()

    beside(look).join(10)
    return found[0]


def test_one_has_a_turn_while_others_wait_and_it_ends_also_on_error() -> None:
    with pytest.raises(KeyError), lock_generators(CPU):
        assert taken()
        raise KeyError
    assert not taken()


def test_turns_are_taken_inside_a_turn_in_whichever_thread_it_is_carried_to() -> None:
    done: list[str] = []
    with lock_generators(CPU):
        with lock_generators(CPU):
            done.append("here")
        carried = carry_lock()

        def inside() -> None:
            carried()
            with lock_generators(CPU):
                done.append("there")

        beside(inside).join(10)
    assert done == ["here", "there"]
    carried()  # into where that turn is over
    with lock_generators(CPU):
        assert taken()


def test_who_waits_lets_others_draw_and_goes_on_with_his_own_numbers() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(4, generator=torch.Generator().manual_seed(7))
    with seeded(CPU, 7):
        drawn = [torch.rand(2)]
        with waiting():
            assert not taken()
            torch.rand(5)
        assert taken()
        drawn.append(torch.rand(2))
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(5)
    assert torch.equal(torch.cat(drawn), wanted) and torch.equal(after, torch.rand(1))


def test_who_waits_may_wait_for_something_that_waits_or_draws_itself() -> None:
    with seeded(CPU, 7):
        wanted = torch.rand(2)
    with seeded(CPU, 7):
        with waiting(), waiting():
            assert not taken()
        with waiting(), seeded(CPU, 5):
            assert taken()
        assert torch.equal(torch.rand(2), wanted)


def test_a_watch_tells_what_moved_without_a_turn_and_nothing_of_what_had_one() -> None:
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
@pytest.mark.parametrize("mine", [False, True])
def test_a_child_that_is_forked_during_a_turn_has_turns_of_its_own(mine: bool) -> None:
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_generators(CPU):
            begun.set()
            over.wait(30)

    with ExitStack() as stack:

        def work() -> bool:
            with lock_generators(CPU):
                held = taken()
            if mine:
                stack.close()  # as where the child leaves the stage that it was forked in
            return held and not taken()

        if mine:
            stack.enter_context(lock_generators(CPU))
        else:
            stack.callback(over.set)
            beside(hold)
            assert begun.wait(10)
        assert forked(work)
