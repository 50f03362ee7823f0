"""Retries: which server to call, which calls are sent again, and the loop that sends them within one deadline.

    call ── resolve ── submit ── wait ──┬── answer
             ^                          └── error ── retry? ── pause ──┐
             '─────────────────────────────────────────────────────────┘      until the deadline of the whole call

    overloaded, draining, no connection, another owner     surely not executed         retry
    a follower answers, where there is a directory         an owner takes over soon    retry; not counted
    expired in the server's queue                          surely not executed         retry
    connection lost, no answer in time                     may have been executed      retry
    the expert has a new owner, and there is no answer     may have been executed      retry there, at once
    a certificate that one end rejects                     would fail again            raise
    any other error                                        would fail again            raise

A dead address stays in the directory until its lease ends; so every further attempt takes the next address. A server
that only follows an expert says so (`NotOwnerError`): it is alive, and takes over when the owner's lease has ended.
A server that hangs says nothing, so a waiting call looks at the directory's snapshot from time to time.

A call that may have been executed can be retried because a forward changes nothing, and a backward or commit bears its
idempotency key: under the same key it steps once, however often it is sent.

Pauses grow, and are drawn at random between zero and their bound ("full jitter", Brooker, AWS Architecture Blog 2015),
so that clients that failed together do not come back together.
"""

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field

from weft.core.errors import UsageError, WeftError, escaped, listed
from weft.core.rng import waiting
from weft.core.validation import Validator
from weft.experts.client.stream import TICK, named
from weft.experts.client.transport import Connections, Transport
from weft.experts.errors import (
    CertificateError,
    DeadlineError,
    ExpiredError,
    LostError,
    NotOwnerError,
    UnreachableError,
)
from weft.experts.wire import RETRYABLE, Call, Received

_MAX_EXPONENT = 60.0  # far beyond any pause, and far from overflow
_GRACE = 10 * TICK  # a transport ends late calls itself; this is for one that does not
LOOK = 0.1  # seconds between two looks at the directory while a call waits, which are reads of memory
_LISTED = 10  # names that a message lists; there may be as many as experts
_random = random.Random()  # its own: the user's generators are not touched


class FixedResolver:
    """How one expert is reached: always by the same transport."""

    takeover_expected = False
    """Whether a server that only follows the expert is sure to take it over soon."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def transport(self, attempt: int, last: BaseException | None) -> Transport:
        """Where to send the attempt of this number (from 0), after the one before ended with ``last``."""
        return self._transport

    def token(self) -> int:
        """The fencing token of the expert's owner, as far as it is known; 0: none."""
        return 0

    def new_owner(self, address: str, token: int) -> str | None:
        """The address of the owner, if that changed since it had ``token`` and is not ``address``; else None."""
        return None


class DirectoryResolver(FixedResolver):
    """How one expert is reached: by the server that the directory names."""

    takeover_expected = True

    def __init__(self, uid: str, connections: Connections) -> None:
        self.connections, self._uid = connections, uid

    def transport(self, attempt: int, last: BaseException | None) -> Transport:
        """The owner first, then the other servers in turn; but the owner that ``last`` names, if it does."""
        to, refusal = self.connections.to, self.connections.refusal
        named = last.details.get("address") if isinstance(last, NotOwnerError | LostError) else None
        if named and refusal(named) is None:
            return to(named)
        snapshot = self.connections.snapshot()
        owner, addresses = snapshot.owner(self._uid), list(snapshot.addresses(self._uid))
        if owner is not None:
            addresses.sort(key=lambda address: address != owner.address)
        if not addresses and self.connections.fixed:
            known = ", ".join(sorted(snapshot.experts)[:_LISTED]) or "no expert"
            raise UsageError(f"these connections have no address of expert {self._uid!r}, but addresses of {known}")
        if not addresses:
            raise UnreachableError(f"the directory knows no server of expert {self._uid!r} now")
        refusals = {address: refusal(address) for address in addresses}
        trusted = [address for address in addresses if refusals[address] is None]
        if not trusted:
            head = f"the directory knows no server of expert {self._uid!r} that may be connected to:"
            raise UnreachableError(listed(head, [escaped(each) for each in refusals.values()]))
        return to(trusted[attempt % len(trusted)])

    def token(self) -> int:
        owner = self.connections.snapshot().owner(self._uid)
        return 0 if owner is None else owner.token

    def new_owner(self, address: str, token: int) -> str | None:
        owner = self.connections.snapshot().owner(self._uid)
        if owner is None or owner.token == token or owner.address == address:
            return None
        return owner.address if self.connections.refusal(owner.address) is None else None


@dataclass(frozen=True)
class Retry:
    """Rule by which calls are retried.

    Args:
        attempts: how often a call is sent at most; 1: once; None: until its deadline.
        first, growth, longest: seconds of the first pause, its factor each time, and the bound of all pauses.
        attempt_seconds: how long one attempt waits for its answer before the call is sent again; None: until the
            deadline. For networks that drop messages while the connection seems fine.

    The timeout of the call bounds attempts and pauses together. Raises ``UsageError`` that lists all invalid numbers.

    Example:
        >>> from weft.experts.client import NEVER, Retry
        >>> remote = weft.RemoteExpert("ffn.0", "10.0.0.7:7070", retry=Retry(attempts=3, attempt_seconds=2.0))
    """

    attempts: int | None = None
    first: float = 0.05
    growth: float = 2.0
    longest: float = 2.0
    attempt_seconds: float | None = None

    def __post_init__(self) -> None:
        with Validator("invalid retry rule") as check:
            valid = check.count("attempts", self.attempts, optional=True)
            valid &= check.number("growth", self.growth, least=1.0, most=1e9)
            valid &= check.seconds("first", self.first, zero=True)
            valid &= check.seconds("longest", self.longest, zero=True)
            fits = not valid or self.first <= self.longest
            check.that(fits, f"first is {self.first}, wanted at most longest, which is {self.longest}")
            check.seconds("attempt_seconds", self.attempt_seconds, optional=True)

    def again(self, error: BaseException, attempt: int) -> bool:
        """Whether to send a call again, after ``attempt`` attempts of which the last ended with this error."""
        if self.attempts is not None and attempt >= self.attempts:
            return False
        if isinstance(error, CertificateError):
            return False
        return not_executed(error) or isinstance(error, LostError | DeadlineError)

    def pause(self, attempt: int) -> float:
        """Seconds to wait after so many attempts."""
        factor = math.exp(min(_MAX_EXPONENT, (attempt - 1) * math.log(self.growth)))
        return _random.uniform(0.0, min(self.longest, self.first * factor))


def not_executed(error: BaseException) -> bool:
    """Whether a call that ended with this error was surely not executed, and may be next time."""
    return isinstance(error, (*RETRYABLE, ExpiredError))


NEVER = Retry(attempts=1)
"""No call is sent twice."""


@dataclass(eq=False)
class RetryingCaller:
    """Calls of one expert, which wait for their answer. Thread-safe: any number of calls at a time."""

    resolver: FixedResolver
    retry: Retry = field(default_factory=Retry)
    closed: threading.Event = field(default_factory=threading.Event)

    def call(self, call: Call, timeout: float, accept: Callable[[Received], None] | None = None) -> Received:
        """The answer; the RNG lock is released meanwhile.

        ``accept`` may raise for an answer that must not be used, which counts as if that error had been the answer. The
        last error is raised, with a note about the attempts before it; but where the last attempt was surely not
        executed and an earlier one may have been, that one's. ``UsageError`` once this is closed.
        """
        attempts, start = RetryState(), time.monotonic()
        end = start + timeout
        with waiting():
            while True:
                try:
                    answer = self._attempt(call, timeout, end, attempts)
                    if accept is not None:
                        accept(answer)
                    return answer
                except WeftError as error:
                    pause = attempts.failed(error, self.retry, self.resolver, end)
                    if pause is None:
                        attempts.end(error, time.monotonic() - start)
                        raise
                self.closed.wait(pause)

    def send(self, call: Call, timeout: float) -> "Future[Received] | None":
        """Send a hint once, without waiting: the future of the answer, or None if it could not be sent."""
        with suppress(WeftError):
            return self.resolver.transport(0, None).submit(call, timeout)
        return None

    def _attempt(self, call: Call, timeout: float, end: float, attempts: "RetryState") -> Received:
        attempts.sent = False
        if self.closed.is_set():
            raise UsageError(f"{named(call)} was not sent: its RemoteExpert is closed")
        seconds = end - time.monotonic()
        if seconds <= 0:
            raise DeadlineError(f"{named(call)} was not sent again: no time is left of its {timeout:g} s")
        if self.retry.attempt_seconds is not None:
            seconds = min(seconds, self.retry.attempt_seconds)
        look = LOOK if self.resolver.takeover_expected else seconds + _GRACE
        give_up = time.monotonic() + seconds + _GRACE
        future = attempts.submit(call, seconds, self.resolver)
        try:
            while (left := give_up - time.monotonic()) > 0:
                try:
                    return future.result(min(look, left))
                except FutureTimeout as error:
                    if isinstance(error, WeftError):  # an error that was answered, and is a TimeoutError as well
                        raise
                attempts.check_owner(call, self.resolver)
            raise DeadlineError(f"{named(call)} had no answer from {attempts.address} within {seconds:g} s")
        except CancelledError:
            raise UsageError(f"{named(call)} was cancelled while it waited") from None
        except BaseException:  # such as another owner, or Ctrl-C: what is still queued is not sent any more
            future.cancel()
            raise
        finally:
            del future  # it holds an error which holds this frame, and with it the tensors of the call


@dataclass(eq=False, slots=True)
class RetryState:
    """What became of the attempts of one call.

    ``counted``: those that count against `Retry.attempts`. ``sent``: the current one was given to its transport, that
    to ``address``, when the expert's owner had the fencing token ``token``. ``unsure``: the error of the last that may
    have been executed.
    """

    count: int = 0
    counted: int = 0
    sent: bool = False
    address: str = ""
    token: int = 0
    last: Exception | None = None
    unsure: Exception | None = None

    def submit(self, call: Call, seconds: float, resolver: FixedResolver) -> "Future[Received]":
        """Send the next attempt."""
        # The token is read before the address. If the owner changes in between, `check_owner` compares with the
        # older one and sees it; the other way round, a call to the replaced owner would wait for it until the deadline.
        self.token = resolver.token()
        transport = resolver.transport(self.count, self.last)
        self.address = transport.address
        future = transport.submit(call, seconds)
        self.sent = True
        return future

    def check_owner(self, call: Call, resolver: FixedResolver) -> None:
        """Raise ``LostError`` if the expert has had another owner since the current attempt was sent.

        The answer would not be used: that owner's token is the smaller one. Its step, if there was one, counts if the
        new owner has its state, and then the key of the call is part of that.
        """
        owner = resolver.new_owner(self.address, self.token)
        if owner is not None:
            text = f"{named(call)} had no answer from {self.address} before {owner} became the owner of its expert"
            raise LostError(text, {"address": owner})

    def failed(self, error: Exception, retry: Retry, resolver: FixedResolver, end: float) -> float | None:
        """Seconds until the call, of which one more attempt ended so, is sent again; None: it is not."""
        self.count += 1
        taken_over = resolver.takeover_expected and isinstance(error, NotOwnerError)
        self.counted = 1 if taken_over else self.counted + 1
        pause = retry.pause(self.count)
        if time.monotonic() + pause >= end or not retry.again(error, self.counted):
            return None
        self.last = error.with_traceback(None)  # which holds a frame, and so would keep itself alive
        if not not_executed(error):
            self.unsure = self.last
        return pause

    def end(self, error: WeftError, seconds: float) -> None:
        """Add a note about earlier attempts to the last error, or raise the earlier error if it says more."""
        last, earlier = self.last, self.unsure
        self.last = self.unsure = None
        if self.sent and not not_executed(error):
            earlier = None
        elif not self.sent and isinstance(error, DeadlineError):
            earlier = earlier or last
        if earlier is not None:
            over = f"attempt {self.count} in {seconds:.3g} s, the last, ended with {type(error).__name__}"
            earlier.add_note(f"{over if self.sent else 'it was not sent again'}: {error}")
            try:
                raise earlier from None
            finally:
                del earlier, last, error  # for the same reason
        if last is not None:
            before = f"the one before it ended with {type(last).__name__}: {last}"
            error.add_note(f"this was attempt {self.count} in {seconds:.3g} s; {before}")
