"""Retries: the choice of a server, the rule for repeated calls, and the loop that sends them within one deadline.

    call ── resolve ── submit ── wait ──┬── answer
             ^                          └── error ── retry? ── pause ──┐
             '─────────────────────────────────────────────────────────┘      until the deadline of the whole call

    overloaded, draining, no connection, another owner     certainly not executed      retry
    a follower answers, and there is a directory           an owner takes over soon    retry; not counted
    expired in the server's queue                          certainly not executed      retry
    connection lost, no answer in time                     possibly executed           retry
    the expert has a new owner, and there is no answer     possibly executed           retry there, at once
    a certificate that one end rejects                     would fail again            raise
    any other error                                        would fail again            raise

gRPC's own retries do not suffice: they cannot change the server, and do not know which calls are safe to repeat. Here a
call that was possibly executed is safe: a forward changes nothing, and a backward or commit has an idempotency key,
under which it steps once however often it is sent.

A dead address stays in the directory until its lease ends, so every attempt takes the next address. A hung server does
not answer at all, so a waiting call checks the directory's snapshot from time to time.
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

from torchweft.core.errors import UsageError, WeftError, escape, join_faults
from torchweft.core.rng import lock_released
from torchweft.core.validation import Validator
from torchweft.experts import errors
from torchweft.experts.client.stream import TICK, describe_call
from torchweft.experts.client.transport import Connections, Transport
from torchweft.experts.wire import RETRYABLE, Call, Received

_MAX_EXPONENT = 60.0  # far beyond any pause, and far from overflow
_GRACE = 10 * TICK  # transports end overdue calls themselves; this is for one that does not
LOOK = 0.1  # seconds between two checks of the snapshot while a call waits; it is in memory
_LISTED = 10  # most names in a message; there can be as many as experts
_random = random.Random()  # a generator of its own, so that the user's seeds give the same numbers as without torchweft


class FixedResolver:
    """The way to one expert: always the same transport."""

    takeover_expected = False  # Whether a follower of the expert will certainly take it over soon

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def select_transport(self, attempt: int, last: BaseException | None) -> Transport:
        """The transport for an attempt (counted from 0), after the previous one ended with ``last``."""
        return self._transport

    def owner_token(self) -> int:
        """The fencing token of the expert's owner. 0: unknown."""
        return 0

    def new_owner(self, address: str, token: int) -> str | None:
        """The owner's address if the owner has changed since ``token`` and is not at ``address``."""
        return None


class DirectoryResolver(FixedResolver):
    """The way to one expert: the server that the directory names."""

    takeover_expected = True

    def __init__(self, uid: str, connections: Connections) -> None:
        self.connections, self._uid = connections, uid

    def select_transport(self, attempt: int, last: BaseException | None) -> Transport:
        """The owner that ``last`` names; otherwise the owner first, then the other servers in turn."""
        transport_to, refusal = self.connections.transport_to, self.connections.refusal
        named = last.details.get("address") if isinstance(last, errors.NotOwnerError | errors.LostError) else None
        # A server can name any address, so the name must pass the same check as an address of the directory.
        if named and refusal(named) is None:
            return transport_to(named)
        snapshot = self.connections.snapshot()
        # A follower would only reject the call, so the owner comes first.
        owner, addresses = snapshot.owner(self._uid), list(snapshot.addresses(self._uid))
        if owner is not None:
            addresses.sort(key=lambda address: address != owner.address)
        if not addresses and self.connections.fixed:
            known = ", ".join(sorted(snapshot.experts)[:_LISTED]) or "no expert"
            raise UsageError(f"these connections have no address of expert {self._uid!r}, but addresses of {known}")
        if not addresses:
            raise errors.UnreachableError(f"the directory knows no server of expert {self._uid!r} now")
        refusals = {address: refusal(address) for address in addresses}
        trusted = [address for address in addresses if refusals[address] is None]
        if not trusted:
            head = f"refusing to connect to any server of expert {self._uid!r} that the directory knows:"
            raise errors.UnreachableError(join_faults(head, [escape(refusal) for refusal in refusals.values()]))
        return transport_to(trusted[attempt % len(trusted)])

    def owner_token(self) -> int:
        owner = self.connections.snapshot().owner(self._uid)
        return 0 if owner is None else owner.token

    def new_owner(self, address: str, token: int) -> str | None:
        owner = self.connections.snapshot().owner(self._uid)
        if owner is None or owner.token == token or owner.address == address:
            return None
        return owner.address if self.connections.refusal(owner.address) is None else None


@dataclass(frozen=True)
class Retry:
    """Rule for retries of calls.

    Args:
        attempts: most times that a call is sent. 1: no retries. None: until its deadline.
        first, growth, longest: seconds of the first pause, its growth factor, and the bound of all pauses.
        attempt_seconds: longest wait for an answer before the call is sent again. None: until the deadline. For
            networks that drop messages although the connection seems intact.

    The timeout of the call bounds attempts and pauses together. Raises ``UsageError`` that lists all invalid numbers.

    Example:
        >>> from torchweft.experts.client import NEVER, Retry
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
            check.require(fits, f"first is {self.first}, wanted at most longest, which is {self.longest}")
            check.seconds("attempt_seconds", self.attempt_seconds, optional=True)

    def allows_retry(self, error: BaseException, attempt: int) -> bool:
        if isinstance(error, errors.CertificateError) or (self.attempts is not None and attempt >= self.attempts):
            return False
        return not_executed(error) or isinstance(error, errors.LostError | errors.DeadlineError)

    def pause(self, attempt: int) -> float:
        # `growth ** attempt` would raise OverflowError after some thousand attempts.
        factor = math.exp(min(_MAX_EXPONENT, (attempt - 1) * math.log(self.growth)))
        # Random from zero ("full jitter", Brooker, AWS Architecture Blog 2015), so that clients that failed together do
        # not return together.
        return _random.uniform(0.0, min(self.longest, self.first * factor))


def not_executed(error: BaseException) -> bool:
    """Whether a call that ended with this error was certainly not executed, and can succeed later."""
    return isinstance(error, (*RETRYABLE, errors.ExpiredError))


NEVER = Retry(attempts=1)  # The rule without retries


@dataclass(eq=False)
class RetryingCaller:
    """Blocking calls of one expert. Thread-safe: any number of calls at a time."""

    resolver: FixedResolver
    retry: Retry = field(default_factory=Retry)
    closed: threading.Event = field(default_factory=threading.Event)

    def call(self, call: Call, timeout: float, accept: Callable[[Received], None] | None = None) -> Received:
        """Send a call until it is answered. Releases the RNG lock while it waits."""
        # ``accept`` can raise for an answer that must not be used. That error counts as the answer. If only an earlier
        # attempt was possibly executed, its error is raised: the last one would say that nothing has happened.
        attempts, start = RetryState(), time.monotonic()
        end = start + timeout
        with lock_released():
            while True:
                try:
                    answer = self._attempt(call, timeout, end, attempts)
                    if accept is not None:
                        accept(answer)
                    return answer
                except WeftError as error:
                    pause = attempts.record_failure(error, self.retry, self.resolver, end)
                    if pause is None:
                        attempts.explain(error, time.monotonic() - start)
                        raise
                # Not `sleep`: closing the expert ends the pause.
                self.closed.wait(pause)

    def send(self, call: Call, timeout: float) -> "Future[Received] | None":
        with suppress(WeftError):
            return self.resolver.select_transport(0, None).submit(call, timeout)
        return None

    def _attempt(self, call: Call, timeout: float, end: float, attempts: "RetryState") -> Received:
        if self.closed.is_set():
            raise UsageError(f"{describe_call(call)} was not sent: its RemoteExpert is closed")
        seconds = end - time.monotonic()
        if seconds <= 0:
            raise errors.DeadlineError(f"{describe_call(call)} was not sent again: its {timeout:g} s are over")
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
                    # `DeadlineError` is a TimeoutError too. As the outcome of the future it is not a pause in waiting.
                    if isinstance(error, WeftError):
                        raise
                attempts.check_owner(call, self.resolver)
            text = f"had no answer from {attempts.address} within {seconds:g} s"
            raise errors.DeadlineError(f"{describe_call(call)} {text}")
        except CancelledError:
            raise UsageError(f"{describe_call(call)} was cancelled while it waited") from None
        except BaseException:  # e.g. a new owner, or Ctrl-C
            future.cancel()  # so that a call that is still queued is never sent
            raise
        finally:
            # The future holds an error, and its traceback this frame. The cycle would keep the tensors of the call
            # alive until the garbage collector runs.
            del future


@dataclass(eq=False, slots=True)
class RetryState:
    """Outcomes of the attempts of one call."""

    # ``counted``: attempts that count against `Retry.attempts`. ``sent``: the current one was passed to the transport
    # to ``address``, when the expert's owner had the fencing token ``token``. ``last``: the last error. ``unsure``:
    # that of the last attempt that was possibly executed.
    count: int = 0
    counted: int = 0
    sent: bool = False
    address: str = ""
    token: int = 0
    last: Exception | None = None
    unsure: Exception | None = None

    def submit(self, call: Call, seconds: float, resolver: FixedResolver) -> "Future[Received]":
        # The token is read before the address. If the owner changes in between, `check_owner` compares with the older
        # token and notices it. The other way round, a call to the replaced owner would wait until the deadline.
        self.token = resolver.owner_token()
        transport = resolver.select_transport(self.count, self.last)
        self.address = transport.address
        future = transport.submit(call, seconds)
        self.sent = True
        return future

    def check_owner(self, call: Call, resolver: FixedResolver) -> None:
        """Raise ``LostError`` if the owner of the expert has changed since the current attempt was sent."""
        # An answer of the old owner would be rejected, because its token is smaller. If it has stepped, the new owner
        # either has that state with the key of this call, or has neither. So a retry there steps exactly once.
        owner = resolver.new_owner(self.address, self.token)
        if owner is not None:
            text = f"had no answer from {self.address} before {owner} became the owner of its expert"
            raise errors.LostError(f"{describe_call(call)} {text}", {"address": owner})

    def record_failure(self, error: Exception, retry: Retry, resolver: FixedResolver, end: float) -> float | None:
        """Note the error of an attempt. Returns the seconds until the next attempt, or None to stop."""
        self.count += 1
        taken_over = resolver.takeover_expected and isinstance(error, errors.NotOwnerError)
        self.counted = 1 if taken_over else self.counted + 1
        pause = retry.pause(self.count)
        if time.monotonic() + pause >= end or not retry.allows_retry(error, self.counted):
            return None
        # The traceback holds the frame of the call, and the frame holds this object: a cycle.
        self.last = error.with_traceback(None)
        if not not_executed(error):
            self.unsure = self.last
        self.sent = False
        return pause

    def explain(self, error: WeftError, seconds: float) -> None:
        """Add a note about earlier attempts to the last error, or raise an earlier error that says more."""
        last, earlier = self.last, self.unsure
        self.last = self.unsure = None
        if self.sent and not not_executed(error):
            earlier = None
        elif not self.sent and isinstance(error, errors.DeadlineError):
            earlier = earlier or last
        if earlier is not None:
            over = f"attempt {self.count} in {seconds:.3g} s, the last, ended with {type(error).__name__}: {error}"
            earlier.add_note(over if self.sent else f"it was not sent again: {error}")
            try:
                raise earlier from None
            finally:
                del earlier, last, error  # each holds this frame by its traceback: a cycle
        if last is not None:
            same = type(last) is type(error) and str(last) == str(error)
            before = "in the same way" if same else f"with {type(last).__name__}: {last}"
            error.add_note(f"this was attempt {self.count} in {seconds:.3g} s; the one before it ended {before}")
