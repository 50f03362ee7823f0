"""Units of the client: pending calls, recomputation cache, open mini-batches, resolver and connections."""

from collections.abc import Iterator, Mapping

import pytest
from torch import nn

from tests.experts.client.test_retry import ANSWER, CALL, Scripted
from tests.experts.concurrency import in_threads, wait_until
from tests.experts.expert_cases import rows
from torchweft.core.errors import UsageError
from torchweft.experts.client import Connections, commit, discard
from torchweft.experts.client.calls import FixedResolver, RetryingCaller, run_steps
from torchweft.experts.client.connections import DirectoryResolver
from torchweft.experts.client.layer import RecomputeCache, RemoteLayer
from torchweft.experts.client.stub import CallOptions, ExpertStub, PendingCommit
from torchweft.experts.client.transport import PendingCalls
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import CommitError, DeadlineError, LostError, NotOwnerError, UnreachableError


@pytest.fixture
def pending() -> Iterator[PendingCalls]:
    pending = PendingCalls("there")
    yield pending
    pending.close()


def test_first_outcome_of_a_call_counts(pending: PendingCalls) -> None:
    entry = pending.register(CALL, 5.0)
    pending.set_outcome(entry.number, ANSWER)
    pending.set_outcome(entry.number, LostError("late"))
    assert entry.future.result(0) is ANSWER and pending.counts() == (1, 1, 0, {})


def test_only_overdue_calls_time_out(pending: PendingCalls) -> None:
    late, early = pending.register(CALL, 0.05), pending.register(CALL, 10.0)
    assert isinstance(late.future.exception(60.0), DeadlineError) and not early.future.done()


def test_clock_thread_ends_when_idle_and_restarts(pending: PendingCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.experts.client.transport._IDLE", 1)
    for _ in range(2):
        assert isinstance(pending.register(CALL, 0.03).future.exception(60.0), DeadlineError)
        wait_until(lambda: pending._clock is None)


def test_a_cancelled_call_is_forgotten(pending: PendingCalls) -> None:
    pending.register(CALL, 10.0).future.cancel()
    wait_until(lambda: pending.counts()[2] == 0)


def test_only_calls_of_the_failed_stream_fail(pending: PendingCalls) -> None:
    mine, other = pending.register(CALL, 5.0), pending.register(CALL, 5.0)
    mine.stream, other.stream, mine.sent = "a", "b", True
    pending.fail_stream("a", lambda sent: LostError("x") if sent else UnreachableError("x"))
    assert isinstance(mine.future.exception(0), LostError) and not other.future.done()


def test_close_distinguishes_sent_from_unsent_calls(pending: PendingCalls) -> None:
    sent, unsent = pending.register(CALL, 5.0), pending.register(CALL, 5.0)
    sent.sent = True
    pending.close()
    assert isinstance(sent.future.exception(0), LostError) and isinstance(unsent.future.exception(0), UnreachableError)
    for timeout in (5.0, 0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="closed" if timeout == 5.0 else "timeout"):
            pending.register(CALL, timeout)


def test_cached_result_is_popped_once_in_order() -> None:
    cache, x = RecomputeCache[int](most=3), rows(2, 0)
    cache.store([x], 10)
    x.zero_()  # cached inputs are copies
    cache.store([rows(2, 0)], 11)
    cache.store([rows(3, 0)], 12)
    assert cache.pop_match([rows(2, 5)]) is None
    assert [cache.pop_match([rows(2, 0)]) for _ in range(3)] == [10, 11, None] and len(cache) == 1
    for seed in range(5):
        cache.store([rows(2, seed)], seed)
    assert len(cache) == 3


def test_only_a_complete_mini_batch_can_be_committed() -> None:
    for spoil in (None, lambda o: o.record_gradient(2), lambda o: o.record_failure(ValueError("why"))):
        pending = PendingCommit("x")
        assert pending.commit_incarnation() is None and not pending.has_begun
        pending.record_gradient(1)
        pending.record_gradient(1)
        assert pending.commit_incarnation() == 1 and pending.has_begun
        if spoil is not None:
            spoil(pending)
            with pytest.raises(CommitError, match="incomplete"):
                pending.commit_incarnation()


def test_late_gradient_does_not_reach_the_next_mini_batch() -> None:
    stub = ExpertStub("x", RetryingCaller(FixedResolver(Scripted())), CallOptions(accumulate=True))
    old = stub.mini_batch
    stub.discard()
    old.record_failure(ValueError("late"))
    stub.discard(mini_batch=old)  # stale too
    next_ = stub.mini_batch
    assert next_ is not old and next_.name != old.name and not run_steps(stub.commit()) and stub.mini_batch is next_


@pytest.fixture
def directory() -> Iterator[LocalDirectory]:
    local = LocalDirectory()
    yield local
    local.close()


def make_resolver(directory: LocalDirectory) -> tuple[Connections, DirectoryResolver]:
    connections = Connections(directory, open_transport=lambda address: Scripted(address=address))
    return connections, DirectoryResolver("x", connections)


def test_the_owner_is_asked_first_and_then_the_others(directory: LocalDirectory) -> None:
    for address in ("a:1", "b:1", "c:1"):
        lease = directory.declare("x", address, 60.0)
        if address == "b:1":
            directory.claim("x", lease)
    _, resolver = make_resolver(directory)
    assert [resolver.select_transport(attempt, None).address for attempt in range(4)] == ["b:1", "a:1", "c:1", "b:1"]
    elsewhere = NotOwnerError("x", {"address": "d:1"})
    assert resolver.select_transport(1, elsewhere).address == "d:1"


def test_unlisted_expert_is_unreachable_until_listed(directory: LocalDirectory) -> None:
    _, resolver = make_resolver(directory)
    with pytest.raises(UnreachableError, match="'x'"):
        resolver.select_transport(0, None)
    directory.declare("x", "a:1", 60.0)
    assert resolver.select_transport(0, None).address == "a:1"


def test_connections_open_one_transport_per_address(directory: LocalDirectory) -> None:
    connections, _ = make_resolver(directory)
    assert len(set(map(id, in_threads(connections.transport_to, ["a:1"] * 8)))) == 1
    assert list(connections.statistics()) == ["a:1"]
    connections.close()
    with pytest.raises(UsageError, match="closed"):
        connections.transport_to("a:1")
    with Connections() as without, pytest.raises(UsageError, match="directory"):
        without.snapshot()
    with pytest.raises(UsageError, match="open_transport= is in use"):
        Connections(open_transport=Scripted, token="secret")


class FakeLayer(RemoteLayer):
    accumulates = False

    def __init__(self, accumulates: bool = True, **stepped: bool) -> None:
        super().__init__()
        self.accumulates, self.asked, self._stepped = accumulates, 0, stepped

    def commit(self) -> Mapping[str, bool]:
        self.asked += 1
        return self._stepped

    def discard(self) -> None:
        self.asked -= 1


def test_commit_asks_each_accumulating_layer_once() -> None:
    one, other, idle = FakeLayer(a=True, b=False, c=True), FakeLayer(b=True, c=False, d=False), FakeLayer(False, e=True)
    model = nn.Sequential(one, nn.Linear(1, 1), nn.Sequential(other, idle, one))
    assert commit(model) == {"a": True, "b": True, "c": True, "d": False}
    assert (one.asked, other.asked, idle.asked) == (1, 1, 0)
    discard(model)
    assert (one.asked, other.asked, idle.asked) == (0, 0, 0) and commit(nn.Linear(1, 1)) == {}
