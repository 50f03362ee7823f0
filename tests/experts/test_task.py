"""A task has waiters, who come and go by themselves."""

from concurrent.futures import Future, wait

import pytest
import torch

from weft.experts.errors import ExpiredError, OverloadError, reason_of
from weft.experts.task import Task, answer


def ignore(task: Task) -> None:
    """Nobody has to be told."""


def test_a_task_lasts_as_long_as_its_most_patient_waiter() -> None:
    task = Task((), 1, deadline=5.0)
    task.join(5.0, ignore)
    task.join(3.0, ignore)
    assert task.deadline == 5.0
    task.join(9.0, ignore)
    assert task.expired(9.0) and not task.expired(8.0)
    task.join(None, ignore)
    assert task.deadline is None and not task.expired(1e9)


def test_who_gave_up_is_forgotten_and_the_others_are_answered() -> None:
    told: list[Task] = []
    task = Task((), 1)
    first, second, third = (task.join(None, told.append) for _ in range(3))
    first.cancel()
    assert told == [task] and task.wanted() and len(task.waiters) == 2
    second.cancel()
    assert task.take() and not third.cancel()
    joined = task.join(None, told.append)
    assert not joined.cancel()
    result = [torch.ones(1)]
    answer(task.release(), result)
    assert third.result(0) is result and joined.result(0) is result and not task.waiters


def test_a_task_that_nobody_waits_for_is_not_taken() -> None:
    task = Task((), 1)
    task.join(None, ignore).cancel()
    assert not task.wanted() and not task.take()


def test_who_waits_for_a_cancelled_future_among_others_is_woken() -> None:
    for taken in (False, True):
        task = Task((), 1)
        future = task.join(None, ignore)
        future.cancel()
        assert not (task.take() if taken else task.wanted())
        assert wait([future], timeout=5.0).not_done == set()


def test_an_answer_reaches_those_who_were_never_taken_and_skips_those_who_left() -> None:
    gone: Future[list[torch.Tensor]] = Future()
    gone.cancel()
    waits: Future[list[torch.Tensor]] = Future()
    answer([gone, waits], ExpiredError("late"))
    with pytest.raises(TimeoutError, match="late"):
        waits.result(0)


def test_every_error_has_one_word() -> None:
    words = [reason_of(error) for error in (OverloadError(), ValueError(), ExpiredError())]
    assert words == ["overload", "module", "expired"]
