"""The small parts of a client: who waits, what is remembered, which mini-batch is open, where an expert is."""

import threading
from collections.abc import Iterator

import pytest

from tests.experts.client.test_retry import ANSWER, CALL, Scripted
from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import rows
from weft.core.errors import UsageError
from weft.experts.client import Connections, create_remote_experts
from weft.experts.client.autograd import RecomputeCache
from weft.experts.client.retry import DirectoryResolver, FixedResolver, RetryingCaller
from weft.experts.client.stream import PendingCalls
from weft.experts.client.stub import CallOptions, ExpertStub, OpenMiniBatch
from weft.experts.discovery import LocalDirectory
from weft.experts.errors import CommitError
from weft.experts.wire import DeadlineError, LostError, NotOwnerError, UnreachableError

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def pending() -> Iterator[PendingCalls]:
    pending = PendingCalls("there")
    yield pending
    pending.close()


def test_a_call_ends_once_whoever_comes_first(pending: PendingCalls) -> None:
    entry = pending.open(CALL, 5.0)
    pending.settle(entry.number, ANSWER)
    pending.settle(entry.number, LostError("late"))
    assert entry.future.result(0) is ANSWER and pending.counts() == (1, 1, 0, {})


def test_the_clock_ends_what_is_late_and_nothing_else(pending: PendingCalls) -> None:
    late, early = pending.open(CALL, 0.05), pending.open(CALL, 10.0)
    assert isinstance(late.future.exception(2.0), DeadlineError) and not early.future.done()


def test_the_clock_ends_and_is_started_again(pending: PendingCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.experts.client.stream._IDLE", 1)
    for _ in range(2):
        assert isinstance(pending.open(CALL, 0.03).future.exception(2.0), DeadlineError)
        wait_until(lambda: pending._clock is None)


def test_a_cancelled_call_is_forgotten(pending: PendingCalls) -> None:
    pending.open(CALL, 10.0).future.cancel()
    wait_until(lambda: pending.counts()[2] == 0)


def test_only_the_calls_of_an_owner_fail_with_it(pending: PendingCalls) -> None:
    mine, other = pending.open(CALL, 5.0), pending.open(CALL, 5.0)
    mine.stream, other.stream, mine.sent = "a", "b", True
    pending.fail("a", lambda sent: LostError("x") if sent else UnreachableError("x"))
    assert isinstance(mine.future.exception(0), LostError) and not other.future.done()


def test_close_tells_who_was_sent_from_who_was_not(pending: PendingCalls) -> None:
    sent, unsent = pending.open(CALL, 5.0), pending.open(CALL, 5.0)
    sent.sent = True
    pending.close()
    assert isinstance(sent.future.exception(0), LostError) and isinstance(unsent.future.exception(0), UnreachableError)
    with pytest.raises(UsageError, match="closed"):
        pending.open(CALL, 5.0)


def test_a_timeout_that_is_none_is_misuse(pending: PendingCalls) -> None:
    for timeout in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="timeout"):
            pending.open(CALL, timeout)


def test_a_result_is_cached_for_equal_inputs_and_taken_once_in_order() -> None:
    cache = RecomputeCache[int](most=3)
    cache.put([rows(2, 0)], 10)
    cache.put([rows(2, 0)], 11)
    cache.put([rows(3, 0)], 12)
    assert cache.take([rows(2, 5)]) is None
    assert [cache.take([rows(2, 0)]) for _ in range(3)] == [10, 11, None] and len(cache) == 1


def test_cached_inputs_are_copies_and_bounded() -> None:
    cache, x = RecomputeCache[int](most=2), rows(2, 0)
    cache.put([x], 1)
    x.zero_()
    assert cache.take([rows(2, 0)]) == 1
    for seed in range(5):
        cache.put([rows(2, seed)], seed)
    assert len(cache) == 2


def test_a_mini_batch_of_one_incarnation_can_be_committed() -> None:
    open_ = OpenMiniBatch("x")
    assert open_.ready() is None and not open_.begun
    open_.added(1)
    open_.added(1)
    assert open_.ready() == 1 and open_.begun


def test_a_mini_batch_that_is_not_whole_cannot_be_committed() -> None:
    for spoil in (lambda o: o.added(2), lambda o: o.failed(ValueError("why"))):
        open_ = OpenMiniBatch("x")
        open_.added(1)
        spoil(open_)
        with pytest.raises(CommitError, match="not whole"):
            open_.ready()


def test_what_belongs_to_an_older_mini_batch_does_not_touch_the_next() -> None:
    stub = ExpertStub("x", RetryingCaller(FixedResolver(Scripted())), CallOptions(accumulate=True))
    old = stub.mini_batch
    stub.discard()
    old.failed(ValueError("late"))
    stub.discard(mini_batch=old)  # late as well
    next_ = stub.mini_batch
    assert next_ is not old and next_.name != old.name and not stub.commit() and stub.mini_batch is next_


@pytest.fixture
def directory() -> Iterator[LocalDirectory]:
    with_experts = LocalDirectory()
    yield with_experts
    with_experts.close()


def routed(directory: LocalDirectory) -> tuple[Connections, DirectoryResolver]:
    connections = Connections(directory, open_transport=Named)
    return connections, DirectoryResolver("x", connections)


class Named(Scripted):
    def __init__(self, address: str) -> None:
        super().__init__()
        self._named = address

    @property
    def address(self) -> str:
        return self._named


def test_the_owner_is_asked_first_and_then_the_others(directory: LocalDirectory) -> None:
    for address in ("a:1", "b:1", "c:1"):
        lease = directory.declare("x", address, 60.0)
        if address == "b:1":
            directory.claim("x", lease)
    _, route = routed(directory)
    assert [route.transport(attempt, None).address for attempt in range(4)] == ["b:1", "a:1", "c:1", "b:1"]
    elsewhere = NotOwnerError("x", {"address": "d:1"})
    assert route.transport(1, elsewhere).address == "d:1"


def test_an_expert_that_nobody_serves_is_unreachable_until_somebody_does(directory: LocalDirectory) -> None:
    _, route = routed(directory)
    with pytest.raises(UnreachableError, match="'x'"):
        route.transport(0, None)
    directory.declare("x", "a:1", 60.0)
    assert route.transport(0, None).address == "a:1"


def test_one_transport_per_address_for_all_threads(directory: LocalDirectory) -> None:
    connections, _ = routed(directory)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(connections.to("a:1"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1 and list(connections.statistics()) == ["a:1"]


def test_connections_take_no_token_that_nobody_would_show() -> None:
    with pytest.raises(UsageError, match="open_transport= makes has its own"):
        Connections(open_transport=Named, token="secret")


def test_closed_connections_say_so(directory: LocalDirectory) -> None:
    with Connections(directory, open_transport=Named) as connections:
        connections.to("a:1")
    with pytest.raises(UsageError, match="closed"):
        connections.to("a:1")


def test_connections_without_a_directory_cannot_look_up() -> None:
    with Connections() as connections, pytest.raises(UsageError, match="directory"):
        connections.snapshot()


def test_a_single_text_is_no_list_of_names(directory: LocalDirectory) -> None:
    with pytest.raises(UsageError, match="list of names"):
        create_remote_experts("x", directory)
