"""Units of replication: versions of a state, their messages, leadership, and received states."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.expert_cases import fussy_backend, rows, weights, work
from tests.experts.server.replica_cases import LEASED, owning
from torchweft.experts.discovery import Ownership
from torchweft.experts.errors import DamagedError, FencedError, MalformedError, NotOwnerError
from torchweft.experts.replication import Leadership, Replica
from torchweft.experts.replication.replica import StateVersion
from torchweft.experts.replication.streams import PullRequest, PullResponse, UpdateKind, read_request, read_response

numbers = st.integers(0, 2**64 - 1)
versions = st.builds(StateVersion, numbers, numbers, numbers)
MINE = Ownership("fussy", "here:1", 7)
THEIRS = Ownership("fussy", "there:1", 12)


@given(versions, numbers, numbers, numbers, st.sampled_from(UpdateKind), st.binary(min_size=16, max_size=16))
def test_state_messages_survive_the_wire(
    mark: StateVersion, one: int, two: int, three: int, news: UpdateKind, digest: bytes
) -> None:
    request, response = PullRequest(mark, one, two, three), PullResponse(news, mark, one, digest)
    assert read_request(request.to_bytes()) == request and read_response(response.to_bytes()) == response


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_malformed(data: bytes) -> None:
    for read in (read_request, read_response):
        try:
            message = read(data)
        except MalformedError:
            continue
        assert message.to_bytes() == data


def test_a_leadership_follows_the_directory_and_its_lease() -> None:
    end = [float("inf")]
    leadership = Leadership("fussy", lambda lease: end[0])
    with pytest.raises(NotOwnerError, match="not known"):
        leadership.check(steps=False)
    leadership.become("taking over", MINE, LEASED)
    with pytest.raises(NotOwnerError, match="taking over"):
        leadership.check(steps=False)
    leadership.become("owner", MINE, LEASED)
    leadership.check(steps=True)
    leadership.check(steps=True, carried=7)
    with pytest.raises(NotOwnerError, match="token 8"):
        leadership.check(steps=True, carried=8)
    end[0] = time.monotonic()
    leadership.check(steps=False)
    with pytest.raises(NotOwnerError, match="lapsed"):
        leadership.check(steps=True)
    leadership.become("follower", THEIRS)
    with pytest.raises(NotOwnerError) as caught:
        leadership.check(steps=True)
    assert caught.value.details == {"address": "there:1"} and leadership.token == 0


def follower() -> Replica:
    replica = Replica(fussy_backend(), lambda lease: float("inf"))
    replica.follow(MINE)
    return replica


def test_follower_loads_state_keys_and_version_together() -> None:
    one, other = owning(7, "k"), follower()
    assert not other.may_lead  # it knows an owner, but has none of its state
    encoded = one.encode()
    assert encoded is not None and other.load(*encoded) and other.may_lead
    assert weights(one.backend) == weights(other.backend) and other.version == one.version == StateVersion(7, 1, 1)
    assert other.backend.idempotency.step_of("backward", "c", "k") == 1


@pytest.mark.parametrize("mini_batch", [None, "m"], ids=["backward", "commit"])
def test_replaced_owner_never_steps_even_for_accepted_tasks(mini_batch: str | None) -> None:
    replica = owning(7)
    backend, inputs = replica.backend, (rows(2, 0), rows(2, 1))
    future = backend.backward_pool.submit_task(*inputs, client="c", key="k", mini_batch=mini_batch)
    if mini_batch is not None:
        work(backend)
        future = backend.commit(mini_batch, client="c")
    before = weights(backend)
    replica.follow(THEIRS)
    work(backend)
    assert isinstance(future.exception(0), NotOwnerError) and weights(backend) == before and backend.steps == 0
    if mini_batch is None:
        assert backend.idempotency.step_of("backward", "c", "k") is None


def test_state_of_a_replaced_owner_is_rejected() -> None:
    encoded, other = owning(7, "k").encode(), follower()
    assert encoded is not None
    before = weights(other.backend)
    with pytest.raises(DamagedError):
        other.load(StateVersion(7, 1, 1), b"nonsense")
    for replaced in (lambda: other.follow(THEIRS), lambda: other.claimed(THEIRS, LEASED)):
        replaced()
        with pytest.raises(FencedError, match="token 7"):
            other.load(*encoded)
        assert weights(other.backend) == before and not other.state.is_broken
    assert other.load(*encoded, taking_over=True)


def test_state_keeps_its_token_until_it_is_led() -> None:
    replica, claim = owning(7, "k"), Ownership("fussy", "here:1", 12)
    before = replica.incarnation
    replica.follow(None)
    replica.claimed(claim, LEASED)
    assert replica.version == StateVersion(7, 1, 1)
    replica.lead(claim, LEASED)
    assert replica.version == StateVersion(12, 1, 1) and replica.incarnation != before
    assert StateVersion(7, 20) < StateVersion(7, 21) < StateVersion(12, 15)


def test_encoding_does_not_wait_for_a_hung_batch() -> None:
    replica = owning(7)
    with replica.backend.executor.lock:
        results: list[object] = [1]
        thread = threading.Thread(target=lambda: results.append(replica.state.encode(0.05)))
        thread.start()
        thread.join(5.0)
    assert results == [1, None]
