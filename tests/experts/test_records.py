"""A backward that is asked for twice steps once, within bounds that hold."""

import random
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.expert_cases import fussy_backend, good, rows, spoiled_gradient, weights, work
from tests.experts.waiting import Clock
from weft.core.errors import UsageError
from weft.experts import ExpertBackend, RecordsOptions, Runtime
from weft.experts.errors import GradientError, RepeatedError
from weft.experts.records import Records
from weft.experts.task import Results, Task


def send(backend: ExpertBackend, key: str, client: str | None = "ann", seed: int = 0) -> "Future[Results]":
    return backend.backward_pool.submit_task(rows(2, seed), rows(2, seed + 1), client=client, key=key)


def test_a_repeated_key_gets_the_recorded_answer_and_does_not_step_again() -> None:
    backend = fussy_backend()
    first, joined = send(backend, "k"), send(backend, "k")
    work(backend)
    after = weights(backend)
    again = send(backend, "k")
    assert all(torch.equal(first.result(0)[0], each.result(0)[0]) for each in (joined, again))
    assert backend.steps == 1 and weights(backend) == after
    again.result(0)[0].zero_()  # what somebody does with an answer does not reach the record
    assert send(backend, "k").result(0)[0].any()
    assert backend.records.step_of("backward", "ann", "k") == 1
    assert backend.backward_pool.statistics().joined == 3


def test_a_key_belongs_to_its_client() -> None:
    backend = fussy_backend()
    futures = [send(backend, "k", client) for client in ("ann", "bob", None)]
    work(backend)
    assert len({id(future) for future in futures}) == 3
    assert backend.records.statistics().keys == 3
    assert backend.backward_pool.statistics().joined == 0


def test_those_who_joined_may_give_up_without_hurting_each_other() -> None:
    backend = fussy_backend()
    first, joined = send(backend, "k"), send(backend, "k")
    assert first.cancel()
    work(backend)
    assert joined.result(0) and backend.steps == 1
    both = [send(backend, "l"), send(backend, "l")]
    assert all(future.cancel() for future in both)
    assert backend.backward_pool.statistics().waiting_tasks == 0
    send(backend, "l")  # a new start
    work(backend)
    assert backend.steps == 2


def test_a_task_that_failed_may_be_sent_again_under_its_key() -> None:
    backend = fussy_backend()
    bad = backend.backward_pool.submit_task(*spoiled_gradient(), client="ann", key="k")
    work(backend)
    assert isinstance(bad.exception(0), GradientError)
    again = send(backend, "k")
    work(backend)
    assert again.result(0) and backend.steps == 1


def test_a_key_that_is_used_for_another_kind_of_task_is_refused() -> None:
    backend = fussy_backend()
    send(backend, "k")
    with pytest.raises(UsageError, match="use a new key for every new task"):
        backend.backward_pool.submit_task(rows(3, 0), rows(3, 1), client="ann", key="k")


def test_an_answer_that_is_gone_is_an_error_and_not_a_second_step() -> None:
    backend = fussy_backend(records=RecordsOptions(result_bytes=0))
    send(backend, "k")
    work(backend)
    with pytest.raises(RepeatedError, match="was part of step 1; its answer is not held"):
        send(backend, "k")
    assert backend.steps == 1


def result(size: int) -> Results:
    return [torch.zeros(size, dtype=torch.uint8)]


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 3)), max_size=60))
def test_bytes_keys_and_ages_stay_within_their_bounds(history: list[tuple[int, float]]) -> None:
    clock = Clock()
    records = Records(RecordsOptions(result_bytes=100, keys=8, seconds=10.0), clock.monotonic)
    born: dict[str, float] = {}
    for number, (size, pause) in enumerate(history):
        clock.now += pause
        task = Task((), 1, key=str(number))
        records.of("backward").settle(task, result(size), number)
        born[str(number)] = clock.now
        stats = records.statistics()
        assert stats.result_bytes <= 100 and stats.keys <= 8
        for key, when in list(born.items())[-3:]:
            known = records.step_of("backward", None, key) is not None
            assert known == (when > clock.now - 10.0)


def test_the_state_of_records_goes_into_others() -> None:
    backend = fussy_backend()
    sent = [send(backend, f"k{i}", seed=i) for i in range(3)]
    work(backend)
    open_one = backend.backward_pool.submit_task(rows(2, 0), rows(2, 1), client="ann", key="o", mini_batch="m")
    work(backend)
    assert open_one.result(0)
    restarted = fussy_backend()
    restarted.load_state_dict(backend.state_dict())
    restarted.records.load_state_dict(backend.records.state_dict())
    for i, future in enumerate(sent):
        assert torch.equal(send(restarted, f"k{i}", seed=i).result(0)[0], future.result(0)[0])
    assert restarted.records.step_of("backward", "ann", "o") is None  # its sum is not part of any step
    assert restarted.steps == 1


def test_under_lost_replies_every_step_is_taken_exactly_once() -> None:
    backend = fussy_backend()
    dice = random.Random(0)
    with Runtime([backend]):
        for number in range(60):
            while dice.random() < 0.5:  # asked, and the reply is lost
                future = send(backend, str(number), seed=number)
                if dice.random() < 0.5:
                    future.cancel()
                else:
                    future.result(30)
            send(backend, str(number), seed=number).result(30)
    assert backend.steps == 60
    plain = fussy_backend()
    for number in range(60):
        send(plain, str(number), seed=number)
        work(plain)
    assert weights(plain) == weights(backend)
    assert good([]) == []
