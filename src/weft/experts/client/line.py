"""Calls of one expert that wait for their answer: with a deadline, and sent again where the rule says so.

ask ── route ── submit ── wait ──┬── answer
        ^                        └── error ── again? ── pause ──┐
        '───────────────────────────────────────────────────────┘      until the deadline of the whole
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field

from weft.core.errors import UsageError, WeftError
from weft.experts.client.pending import TICK, named
from weft.experts.client.retry import Retry
from weft.experts.client.route import Route
from weft.experts.client.transport import Transport
from weft.experts.wire import Call, DeadlineError, Received

_GRACE = 10 * TICK  # the transport's clock speaks first; this is for a transport that has none


@dataclass(eq=False)
class Line:
    """How calls get to one expert. Thread-safe: any number of calls at a time."""

    route: Route
    retry: Retry = field(default_factory=Retry)
    closed: threading.Event = field(default_factory=threading.Event)

    def ask(
        self,
        call: Call,
        timeout: float,
        *,
        repeatable: bool,
        accept: Callable[[Received], None] | None = None,
    ) -> Received:
        """The answer. ``repeatable``: it may be sent again although it may have been carried out.

        ``accept`` may raise for an answer that is not to be taken, which counts as if that had been the answer.
        Raises what the server answered, ``DeadlineError`` after ``timeout`` seconds, ``LostError``,
        ``UnreachableError``, each with a note that tells of attempts before it; ``UsageError`` once it is closed.
        """
        end, attempt, counted = time.monotonic() + timeout, 0, 0
        last: WeftError | None = None
        while True:
            left = end - time.monotonic()
            try:
                if self.closed.is_set():
                    raise UsageError(f"{named(call)} was not sent: its RemoteExpert was closed")
                if left <= 0:
                    raise DeadlineError(f"{named(call)} found no time to be sent again within {timeout:g} s")
                seconds = left if self.retry.attempt_seconds is None else min(left, self.retry.attempt_seconds)
                answer = _answer(self.route.transport(attempt, last), call, seconds)
                if accept is not None:
                    accept(answer)
                return answer
            except WeftError as error:
                attempt += 1
                counted = 1 if self.route.hopeful(error) else counted + 1
                pause = self.retry.pause(attempt)
                over = time.monotonic() + pause >= end
                if over or not self.retry.again(error, counted, repeatable=repeatable):
                    _tell(error, last, attempt)
                    raise
                last = error.with_traceback(None)  # which holds this frame, and so would keep itself alive
            self.closed.wait(pause)

    def tell(self, call: Call, timeout: float) -> None:
        """Send it once and wait for nothing: a hint, which may be lost. Raises nothing that a server may cause."""
        with suppress(WeftError):
            self.route.transport(0, None).submit(call, timeout)


def _answer(transport: Transport, call: Call, seconds: float) -> Received:
    future = transport.submit(call, seconds)
    try:
        return future.result(seconds + _GRACE)
    except FutureTimeout as error:
        if isinstance(error, WeftError):  # an error that was answered, and is a TimeoutError as well
            raise
        future.cancel()
        raise DeadlineError(f"{named(call)} had no answer from {transport.address} within {seconds:g} s") from None
    except CancelledError:
        raise UsageError(f"{named(call)} was cancelled while it waited") from None
    finally:
        del future  # it holds an error which holds this frame, and with it the tensors of the call


def _tell(error: WeftError, last: WeftError | None, attempts: int) -> None:
    if last is not None:
        error.add_note(f"this was attempt {attempts}; the one before it ended with {type(last).__name__}: {last}")
