"""Calls of one expert that wait for their answer: with a deadline, and sent again where the rule says so.

ask ── route ── submit ── wait ──┬── answer
        ^                        └── error ── again? ── pause ──┐
        '───────────────────────────────────────────────────────┘      until the deadline of the whole
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field

from weft.core.errors import UsageError, WeftError
from weft.experts.client.pending import TICK, named
from weft.experts.client.retry import Retry, surely_not_done
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
        ``UnreachableError``, each with a note that tells of attempts before it; ``UsageError`` once it is closed. Where
        the last attempt was surely not carried out but an earlier one may have been, the error is that one's.
        """
        tries = _Tries(time.monotonic())
        end = tries.start + timeout
        while True:
            try:
                answer = self._attempt(call, timeout, end, tries)
                if accept is not None:
                    accept(answer)
                return answer
            except WeftError as error:
                tries.count += 1
                tries.counted = 1 if self.route.hopeful(error) else tries.counted + 1
                pause = self.retry.pause(tries.count)
                over = time.monotonic() + pause >= end
                if over or not self.retry.again(error, tries.counted, repeatable=repeatable):
                    tries.end(error)
                    raise
                tries.failed(error)
            self.closed.wait(pause)

    def _attempt(self, call: Call, timeout: float, end: float, tries: "_Tries") -> Received:
        tries.sent = False
        if self.closed.is_set():
            raise UsageError(f"{named(call)} was not sent: its RemoteExpert was closed")
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"{named(call)} found no time to be sent again within {timeout:g} s")
        seconds = left if self.retry.attempt_seconds is None else min(left, self.retry.attempt_seconds)
        return _answer(self.route.transport(tries.count, tries.last), call, seconds, tries)

    def tell(self, call: Call, timeout: float) -> "Future[Received] | None":
        """Send it once and wait for nothing: a hint, which may be lost. Raises nothing that a server may cause.

        Returns what will have the answer; None if it could not be sent.
        """
        with suppress(WeftError):
            return self.route.transport(0, None).submit(call, timeout)
        return None


@dataclass(eq=False, slots=True)
class _Tries:
    """What became of the attempts of one call. ``sent``: the one under way was handed to its transport.

    ``unsure``: how the last one ended that may have been carried out.
    """

    start: float
    count: int = 0
    counted: int = 0
    sent: bool = False
    last: WeftError | None = None
    unsure: WeftError | None = None

    def failed(self, error: WeftError) -> None:
        """It will be tried again."""
        self.last = error.with_traceback(None)  # which holds a frame, and so would keep itself alive
        if not surely_not_done(error):
            self.unsure = self.last

    def end(self, error: WeftError) -> None:
        """It will not be tried again: tell of what was before this error, or raise that if it says more."""
        last, earlier, seconds = self.last, self.unsure, time.monotonic() - self.start
        self.last = self.unsure = None
        if self.sent and not surely_not_done(error):
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
            error.add_note(
                f"this was attempt {self.count} in {seconds:.3g} s; the one before it ended with "
                f"{type(last).__name__}: {last}"
            )


def _answer(transport: Transport, call: Call, seconds: float, tries: _Tries) -> Received:
    future = transport.submit(call, seconds)
    tries.sent = True
    try:
        return future.result(seconds + _GRACE)
    except FutureTimeout as error:
        if isinstance(error, WeftError):  # an error that was answered, and is a TimeoutError as well
            raise
        future.cancel()
        raise DeadlineError(f"{named(call)} had no answer from {transport.address} within {seconds:g} s") from None
    except CancelledError:
        raise UsageError(f"{named(call)} was cancelled while it waited") from None
    except BaseException:  # Ctrl-C, for instance: what has not left yet is not sent any more
        future.cancel()
        raise
    finally:
        del future  # it holds an error which holds this frame, and with it the tensors of the call
