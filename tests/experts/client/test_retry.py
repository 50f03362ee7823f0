"""Retry policy, and the caller that keeps all attempts of a call within one deadline."""

import re
import signal
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.concurrency import wait_until
from torchweft.core.errors import SpecError, UsageError
from torchweft.experts.client.calls import FixedResolver, RetryingCaller
from torchweft.experts.client.retry import NEVER, Retry
from torchweft.experts.client.transport import TransportStatistics
from torchweft.experts.errors import (
    DeadlineError,
    DrainingError,
    ExpiredError,
    ForbiddenError,
    GradientError,
    LostError,
    OverloadError,
    ResultEvictedError,
    UnreachableError,
)
from torchweft.experts.wire import Call, Header, Kind, Received, decode, encode

CALL = Call(Header(kind=Kind.PING, call_id=1))
(ANSWER,) = decode(encode([CALL]))


class Scripted:
    """Transport with scripted outcomes: an exception, "good", or "never" for no answer."""

    def __init__(self, *fates: Exception | str, address: str = "script") -> None:
        self.fates = list(fates)
        self.address, self.calls = address, 0

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        self.calls += 1
        future: Future[Received] = Future()
        fate = self.fates.pop(0) if self.fates else "good"
        if isinstance(fate, Exception):
            future.set_exception(fate)
        elif fate == "good":
            future.set_result(ANSWER)
        return future

    def close(self) -> None: ...

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(self.address, self.calls, 0, 0, {}, 0)


def make_caller(transport: Scripted, **options: float | int | None) -> RetryingCaller:
    return RetryingCaller(FixedResolver(transport), Retry(**{"first": 0.001, "longest": 0.002, **options}))  # type: ignore[arg-type]


SURE = [OverloadError("x"), DrainingError("x"), UnreachableError("x"), ExpiredError("x")]
UNSURE = [LostError("x"), DeadlineError("x")]
FINAL = [SpecError("x"), GradientError("x"), ResultEvictedError("x"), ForbiddenError("x")]


@pytest.mark.parametrize("error", FINAL, ids=lambda e: type(e).__name__)
def test_permanent_errors_are_not_retried(error: Exception) -> None:
    transport = Scripted(error)
    with pytest.raises(type(error)):
        make_caller(transport).call(CALL, 5.0)
    assert transport.calls == 1


def test_all_attempts_end_with_the_deadline() -> None:
    transport, start = Scripted(*[UnreachableError("x") for _ in range(1000)]), time.monotonic()
    with pytest.raises(UnreachableError):
        make_caller(transport, attempts=1000, first=0.05, longest=0.05).call(CALL, 0.3)
    assert time.monotonic() - start < 20.0 and 0 < transport.calls < 100


@pytest.mark.parametrize("error", [*SURE, *UNSURE], ids=lambda e: type(e).__name__)
def test_retries_end_at_the_deadline_or_the_attempt_limit(error: Exception) -> None:
    transport = Scripted(*[error for _ in range(100)])
    assert make_caller(transport, first=0.0, longest=0.0).call(CALL, 15.0) is ANSWER and transport.calls == 101
    transport = Scripted(*[type(error)("x") for _ in range(9)])
    with pytest.raises(type(error)) as caught:
        make_caller(transport, attempts=4).call(CALL, 15.0)
    assert transport.calls == 4 and not NEVER.allows_retry(error, 1)
    assert re.search(r"this was attempt 4 in [\d.]+ s; the one before it ended", caught.value.__notes__[0])


class SlowPauses(threading.Event):
    """Event that advances its own clock by one second whenever it is read before an attempt, except the first."""

    now = -1.0

    def is_set(self) -> bool:
        self.now += 1.0
        return False


@pytest.mark.parametrize("error", [*SURE, *UNSURE], ids=lambda e: type(e).__name__)
def test_pause_beyond_the_deadline_keeps_the_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPauses()
    monkeypatch.setattr("torchweft.experts.client.calls.time", SimpleNamespace(monotonic=lambda: max(0.0, slow.now)))
    caller = RetryingCaller(FixedResolver(Scripted(type(error)("x"))), Retry(first=0.0, longest=0.0), slow)
    with pytest.raises(type(error), match="x") as caught:
        caller.call(CALL, 0.5)
    assert "are over" in caught.value.__notes__[0]


class ClosedAfter(Scripted):
    def __init__(self, close: bool, *fates: Exception | str) -> None:
        super().__init__(*fates)
        self._close, self.caller = close, RetryingCaller(FixedResolver(self), Retry(first=0.0, longest=0.0))

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        if not self.fates:
            raise UsageError("the transport was closed")
        future = super().submit(call, timeout)
        if not self.fates and self._close:
            self.caller.closed.set()
        return future


@pytest.mark.parametrize("close", [True, False], ids=["who calls", "the way"])
@given(st.lists(st.sampled_from([*SURE, *UNSURE]), min_size=1, max_size=5))
def test_possibly_executed_call_is_not_reported_as_unsent(close: bool, errors: list[Exception]) -> None:
    fates = [type(error)("x") for error in errors]
    unsure = [fate for fate in fates if isinstance(fate, LostError | DeadlineError)]
    with pytest.raises((UsageError, LostError, DeadlineError)) as caught:
        ClosedAfter(close, *fates).caller.call(CALL, 15.0)
    if unsure:
        assert caught.value is unsure[-1] and "closed" in caught.value.__notes__[0]
    else:
        assert type(caught.value) is UsageError and "closed" in str(caught.value)


@pytest.mark.parametrize("sure", SURE, ids=lambda e: type(e).__name__)
def test_possibly_executed_attempt_is_not_hidden(sure: Exception) -> None:
    transport = Scripted(LostError("first"), *[sure for _ in range(3)])
    with pytest.raises(LostError, match="first") as caught:
        make_caller(transport, attempts=4).call(CALL, 5.0)
    (note,) = caught.value.__notes__
    assert transport.calls == 4 and note.startswith("attempt 4 in ") and f"{type(sure).__name__}: x" in note
    with pytest.raises(SpecError):  # the server's final answer takes precedence
        make_caller(Scripted(LostError("first"), SpecError("y"))).call(CALL, 5.0)


def test_interrupt_cancels_the_call() -> None:
    future: Future[Received] = Future()
    transport = Scripted()
    transport.submit = lambda call, timeout: future  # type: ignore[method-assign]
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        make_caller(transport).call(CALL, 60.0)
    timer.join()
    assert future.cancelled()


def test_hung_transport_is_abandoned_at_the_deadline() -> None:
    with pytest.raises(DeadlineError, match="script"):
        make_caller(Scripted("never")).call(CALL, 0.1)
    transport = Scripted("never", "never")
    assert make_caller(transport, attempt_seconds=0.05).call(CALL, 60.0) is ANSWER and transport.calls == 3


def test_close_wakes_a_paused_caller() -> None:
    transport = Scripted(*[OverloadError("x") for _ in range(100)])
    caller = RetryingCaller(FixedResolver(transport), Retry(first=600.0, longest=600.0))
    closing = threading.Thread(target=lambda: wait_until(lambda: transport.calls) or caller.closed.set())
    closing.start()
    with pytest.raises((UsageError, OverloadError)):
        caller.call(CALL, 900.0)
    closing.join()


@given(st.integers(1, 100), st.floats(0, 1), st.floats(1, 4), st.floats(1, 3))
def test_pauses_are_within_their_bound(attempt: int, first: float, growth: float, longest: float) -> None:
    pause = Retry(first=first, growth=growth, longest=longest).pause(attempt)
    assert 0 <= pause <= min(longest, first * growth ** (attempt - 1) * (1 + 1e-9))
