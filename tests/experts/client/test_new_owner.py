"""A call that waits for a server follows the expert to its new owner, with the same key."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.experts.client.test_retry import ANSWER, Scripted
from tests.experts.concurrency import wait_until
from torchweft.experts.client import NEVER, Connections, Retry
from torchweft.experts.client.calls import RetryingCaller
from torchweft.experts.client.connections import DirectoryResolver
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import DeadlineError, LostError
from torchweft.experts.wire import Call, Header, Kind, Received

CALL = Call(Header(kind=Kind.BACKWARD, uid="x", key="once"))


class Recorded(Scripted):
    """Records the calls that were sent, and their futures."""

    def __init__(self, *fates: Exception | str, address: str) -> None:
        super().__init__(*fates, address=address)
        self.sent: list[Call] = []
        self.futures: list[Future[Received]] = []

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        future = super().submit(call, timeout)
        self.futures.append(future)
        self.sent.append(call)
        return future


class Moving:
    """Expert that "a:1" owns, which never answers, and that "b:1" serves too."""

    def __init__(self, retry: Retry) -> None:
        self.directory = LocalDirectory()
        self.first, self.second = (self.directory.declare("x", address, 60.0) for address in ("a:1", "b:1"))
        self.directory.claim("x", self.first)
        self.hung, self.good = Recorded(*["never"] * 9, address="a:1"), Recorded(address="b:1")
        transports = {"a:1": self.hung, "b:1": self.good}
        self.connections = Connections(self.directory, open_transport=transports.__getitem__)
        self.caller = RetryingCaller(DirectoryResolver("x", self.connections), retry)

    def take_over(self) -> None:
        self.directory.withdraw(self.first)
        self.directory.claim("x", self.second)

    def claim_again(self) -> None:
        self.directory.claim("x", self.first)

    def lapse(self) -> None:
        self.directory.withdraw(self.first)

    def call_during(self, change: Callable[[], None], timeout: float) -> Received:
        """Change the directory while a call waits, and return the answer to the call."""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.caller.call, CALL, timeout)
            wait_until(lambda: self.hung.sent)
            change()
            return answer.result()


def test_a_waiting_call_goes_to_the_new_owner() -> None:
    """The call does not wait for its deadline. The new owner receives it unchanged, with the same key."""
    moving, start = Moving(Retry()), time.monotonic()
    assert moving.call_during(moving.take_over, 600.0) is ANSWER
    assert time.monotonic() - start < 60.0
    assert moving.hung.sent == moving.good.sent == [CALL]
    assert moving.hung.futures[0].cancelled()


def test_a_call_that_is_sent_once_fails_when_the_owner_changes() -> None:
    """The first owner could have executed the call, so it raises LostError, which names the new owner."""
    moving = Moving(NEVER)
    with pytest.raises(LostError, match="no answer from a:1 before b:1 became the owner") as caught:
        moving.call_during(moving.take_over, 600.0)
    assert caught.value.details == {"address": "b:1"} and not moving.good.sent


@pytest.mark.parametrize("change", ["claim_again", "lapse"])
def test_a_call_waits_while_there_is_no_other_owner(change: str) -> None:
    """Neither a new lease of the same owner nor the end of its lease redirects the call."""
    moving = Moving(NEVER)
    with pytest.raises(DeadlineError):
        moving.call_during(getattr(moving, change), 0.5)
    assert moving.hung.sent == [CALL] and not moving.good.sent


def test_a_call_does_not_follow_to_an_untrusted_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting call ignores a new owner if connections to its address are refused."""
    moving = Moving(NEVER)
    monkeypatch.setattr(moving.connections, "refusal", lambda address: "no" if address == "b:1" else None)
    with pytest.raises(DeadlineError):
        moving.call_during(moving.take_over, 0.5)


def test_an_owner_that_changes_while_a_call_is_sent_is_seen() -> None:
    """The directory changes after the lookup of the owner and before the call waits."""
    moving, moved = Moving(Retry()), threading.Event()
    submit = moving.hung.submit

    def late(call: Call, timeout: float) -> "Future[Received]":
        if not moved.is_set():
            moved.set()
            moving.take_over()
        return submit(call, timeout)

    moving.hung.submit = late  # type: ignore[method-assign]
    assert moving.caller.call(CALL, 600.0) is ANSWER
    assert moving.good.sent == [CALL]
