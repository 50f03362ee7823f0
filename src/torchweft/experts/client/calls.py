"""Calls: a call is a state machine, which answers and timers drive until it ends. No call has a thread of its own.

    start ── choose a server ── submit ──┬── answer ── accept ──────────────────────────> end: value
             ^                           ├── error ── allowed to retry? ── no ──────────> end: error
             |                           ├── no answer in time ──┤
             |                           └── a new owner ────────┤ yes
             '────────────────── pause ──────────────────────────'          until the deadline of the whole call

    steps       forward, backward, commit: a generator of the calls to make next
    CallLoop    drives calls in one thread: that of a blocking call (`run_steps`), or that of all futures (futures.py)

gRPC's own retries do not suffice: they cannot change the server, and do not know which calls are safe to repeat. Here a
call that was possibly executed is safe: a forward changes nothing, and a backward or commit has an idempotency key,
under which it steps once however often it is sent. `Retry.allows_retry` has the rule.

Transports complete their futures in threads of their own, which must not wait. They only queue the completion. So a
thread that waits for its calls also drives them, and no lock guards their state.
"""

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from torchweft.core.errors import UsageError, WeftError
from torchweft.core.rng import lock_released
from torchweft.experts import errors
from torchweft.experts.client.retry import Retry, not_executed
from torchweft.experts.client.transport import TICK, Transport, describe_call
from torchweft.experts.wire import Call, Received

LOOK = 0.1  # seconds between two checks of the directory's snapshot while a call waits; it is in memory
_GRACE = 4 * TICK  # transports end overdue calls themselves; this is for one that does not
_LONGEST_WAIT = 3600.0
T = TypeVar("T")


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


@dataclass(eq=False, slots=True)
class Attempts:
    """Outcomes of the attempts of one call."""

    # ``counted``: attempts that count against `Retry.attempts`. ``sent``: the current one was passed to the transport
    # to ``address``, when the expert's owner had the fencing token ``token``. ``last``: the last error. ``unsure``:
    # that of the last attempt that was possibly executed.
    begun: float = field(default_factory=time.monotonic)
    count: int = 0
    counted: int = 0
    sent: bool = False
    address: str = ""
    token: int = 0
    last: Exception | None = None
    unsure: Exception | None = None

    def submit(self, call: Call, seconds: float, resolver: FixedResolver) -> "Future[Received]":
        # The token is read before the address. If the owner changes in between, `new_owner_error` compares with the
        # older token and notices it. The other way round, a call to the replaced owner would wait until the deadline.
        self.token = resolver.owner_token()
        transport = resolver.select_transport(self.count, self.last)
        self.address = transport.address
        future = transport.submit(call, seconds)
        self.sent = True
        return future

    def new_owner_error(self, call: Call, resolver: FixedResolver) -> errors.LostError | None:
        """The error of the current attempt if the owner of the expert has changed since it was sent."""
        # An answer of the old owner would be rejected, because its token is smaller. If it has stepped, the new owner
        # either has that state with the key of this call, or has neither. So a retry there steps exactly once.
        owner = resolver.new_owner(self.address, self.token)
        if owner is None:
            return None
        text = f"had no answer from {self.address} before {owner} became the owner of its expert"
        return errors.LostError(f"{describe_call(call)} {text}", {"address": owner})

    def record_failure(self, error: Exception, retry: Retry, resolver: FixedResolver, end: float) -> float | None:
        """Note the error of an attempt. Returns the seconds until the next attempt, or None to stop."""
        self.count += 1
        taken_over = resolver.takeover_expected and isinstance(error, errors.NotOwnerError)
        self.counted = 1 if taken_over else self.counted + 1
        pause = retry.pause(self.count)
        if time.monotonic() + pause >= end or not retry.allows_retry(error, self.counted):
            return None
        self.last = error
        if not not_executed(error):
            self.unsure = self.last
        self.sent = False
        return pause

    def explain(self, error: Exception) -> Exception:
        """The error to raise: the last one with a note about earlier attempts, or an earlier one that says more."""
        last, earlier, seconds = self.last, self.unsure, time.monotonic() - self.begun
        self.last = self.unsure = None
        if self.sent and not not_executed(error):
            earlier = None
        elif not self.sent and isinstance(error, errors.DeadlineError):
            earlier = earlier or last
        if earlier is not None:
            over = f"attempt {self.count} in {seconds:.3g} s, the last, ended with {type(error).__name__}: {error}"
            earlier.add_note(over if self.sent else f"it was not sent again: {error}")
            return earlier
        if last is not None:
            same = type(last) is type(error) and str(last) == str(error)
            before = "in the same way" if same else f"with {type(last).__name__}: {last}"
            error.add_note(f"this was attempt {self.count} in {seconds:.3g} s; the one before it ended {before}")
        return error


@dataclass(eq=False)
class RetryingCaller:
    """The way to one expert with the rule for retries. Setting ``closed`` ends calls that are not sent. Thread-safe."""

    resolver: FixedResolver
    retry: Retry = field(default_factory=Retry)
    closed: threading.Event = field(default_factory=threading.Event)

    def call(self, call: Call, timeout: float) -> Received:
        """Send a call until it is answered. Releases the RNG lock while it waits."""
        return run_steps(_single_call(RemoteCall(call, self, time.monotonic() + timeout)))

    def send(self, call: Call, timeout: float) -> "Future[Received] | None":
        with suppress(WeftError):
            return self.resolver.select_transport(0, None).submit(call, timeout)
        return None


@dataclass(eq=False, slots=True)
class RemoteCall:
    """One call until its end. ``accept`` turns the answer into ``value``. It can raise for an invalid answer."""

    # ``complete_call``: with inputs, for a server that does not hold them any more. ``future``: of the current attempt,
    # which has the number ``number``.
    call: Call
    caller: RetryingCaller
    deadline: float
    accept: Callable[[Received], Any] | None = None
    complete_call: Call | None = None
    attempts: Attempts = field(default_factory=Attempts)
    future: "Future[Received] | None" = None
    number: int = 0
    on_end: Callable[["RemoteCall"], None] | None = None
    value: Any = None
    error: Exception | None = None

    def send(self) -> float:
        """Start the next attempt. Returns the time at which it is abandoned."""
        caller = self.caller
        if caller.closed.is_set():
            raise UsageError(f"{describe_call(self.call)} was not sent: its RemoteExpert is closed")
        now = time.monotonic()
        seconds = self.deadline - now
        if seconds <= 0:
            timeout = self.deadline - self.attempts.begun
            raise errors.DeadlineError(f"{describe_call(self.call)} was not sent again: its {timeout:.3g} s are over")
        if caller.retry.attempt_seconds is not None:
            seconds = min(seconds, caller.retry.attempt_seconds)
        self.number += 1
        self.future = self.attempts.submit(self.call, seconds, caller.resolver)
        return now + seconds + _GRACE

    def late_error(self) -> Exception | None:
        """The error of an attempt that is not waited for any longer because its time is over."""
        seconds = time.monotonic() - self.attempts.begun
        text = f"had no answer from {self.attempts.address} within {seconds:.3g} s"
        return errors.DeadlineError(f"{describe_call(self.call)} {text}")

    def read(self, future: "Future[Received]") -> Any:
        try:
            answer = future.result(0)
        except CancelledError:
            raise UsageError(f"{describe_call(self.call)} was cancelled while it waited") from None
        return answer if self.accept is None else self.accept(answer)

    def retry_pause(self, error: Exception) -> float | None:
        """Seconds until the next attempt after this error, or None at the end."""
        if isinstance(error, errors.InputsGoneError) and self.complete_call is not None:
            self.call, self.complete_call = self.complete_call, None
            return 0.0
        if not isinstance(error, WeftError):
            return None
        return self.attempts.record_failure(error, self.caller.retry, self.caller.resolver, self.deadline)

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        self.value = value
        if error is not None:
            # The traceback holds frames, and these hold this object and all tensors: a cycle.
            error.__traceback__ = None
            self.error = self.attempts.explain(error) if isinstance(error, WeftError) else error
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self)

    def drop(self) -> None:
        self.on_end = None
        future, self.future = self.future, None
        if future is not None:
            future.cancel()  # so that a call that is still queued is never sent


class CallLoop:
    """Drives calls by the completions of their attempts and by timers. Belongs to the thread that calls `drive`."""

    def __init__(self) -> None:
        # A call, and the number of its completed attempt or the error of submitting it. Or an action of another thread.
        # Not the future of the attempt: its callbacks hold this queue, which would be a cycle.
        self._events: SimpleQueue[tuple[RemoteCall | None, Any]] = SimpleQueue()
        self._waiting: dict[RemoteCall, float] = {}  # calls in flight: when to abandon the attempt
        self._paused: dict[RemoteCall, float] = {}  # calls between two attempts: when to send them again
        self._due = math.inf  # when to look after timers

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._paused and self._events.empty()

    def start(self, call: RemoteCall) -> None:
        try:
            give_up = call.send()
        except Exception as error:
            # As an event, so that `on_end` never runs within `start`.
            self._waiting[call] = math.inf
            self._events.put((call, error))
            return
        self._waiting[call] = give_up
        look = call.attempts.begun + LOOK if call.caller.resolver.takeover_expected else give_up
        self._due = min(self._due, look)
        assert call.future is not None
        call.future.add_done_callback(partial(_note_done, self._events, call, call.number))

    def cancel(self, call: RemoteCall) -> None:
        """Forget a call. Its ``on_end`` is not called."""
        self._waiting.pop(call, None)
        self._paused.pop(call, None)
        call.drop()

    def post(self, action: Callable[[], object]) -> None:
        """Run a function in the thread of this loop. For any thread."""
        self._events.put((None, action))

    def drive(self, until: float = math.inf) -> bool:
        """Handle one event or all due timers, or wait until a time. Returns False if nothing came until then."""
        now = time.monotonic()
        if now >= self._due:
            self._handle_timers(now)
        wait = min(until, self._due, now + _LONGEST_WAIT) - now
        try:
            call, outcome = self._events.get(timeout=wait) if wait > 0 else self._events.get_nowait()
        except Empty:
            return time.monotonic() < until
        if call is None:
            outcome()
        elif call in self._waiting:
            future = call.future
            # An attempt that was abandoned has been handled: the call has been sent again, or has ended.
            if future is None and isinstance(outcome, Exception):
                del self._waiting[call]
                self._fail(call, outcome)
            elif future is not None and outcome == call.number:
                del self._waiting[call]
                call.future = None
                self._read_answer(call, future)
        return True

    def _read_answer(self, call: RemoteCall, future: "Future[Received]") -> None:
        try:
            value = call.read(future)
        except Exception as error:
            self._fail(call, error)
        else:
            call.end(value)

    def _fail(self, call: RemoteCall, error: Exception) -> None:
        # The traceback holds this frame, and with it the call.
        error.__traceback__ = None
        pause = call.retry_pause(error)
        if pause is None:
            call.end(error=error)
            return
        now = time.monotonic()
        self._paused[call] = now + pause
        self._due = min(self._due, now + min(pause, LOOK))

    def _handle_timers(self, now: float) -> None:
        for call, at in list(self._paused.items()):
            # A closed expert ends the pause, and the next attempt then raises.
            if at <= now or call.caller.closed.is_set():
                del self._paused[call]
                self.start(call)
        for call, give_up in list(self._waiting.items()):
            if call.future is None or call.future.done():  # its event is queued
                continue
            error = call.attempts.new_owner_error(call.call, call.caller.resolver)
            if error is None and give_up <= now:
                error = call.late_error()
            if error is not None:
                future, call.future = call.future, None
                future.cancel()
                del self._waiting[call]
                self._fail(call, error)
        looks = [
            now + LOOK if call.caller.resolver.takeover_expected else give_up for call, give_up in self._waiting.items()
        ]
        self._due = min([*looks, *(min(at, now + LOOK) for at in self._paused.values())], default=math.inf)


def _note_done(events: "SimpleQueue[Any]", call: RemoteCall, number: int, _: object) -> None:
    # In a thread of the transport, which must not wait.
    events.put((call, number))


# The calls of one operation: a generator that yields the calls to make next, and is resumed when all have ended. If one
# fails, the others are cancelled, and its error is raised at the ``yield``.
Steps = Generator[Sequence[RemoteCall], None, T]


class StepsRun(Generic[T]):
    """A generator of steps under way in a loop. After its end it has a ``value`` or an ``error``."""

    def __init__(self, loop: CallLoop, steps: Steps[T], on_end: Callable[["StepsRun[T]"], None] | None = None) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None
        self.has_ended = False
        self._loop, self._steps, self._on_end = loop, steps, on_end
        self._calls: Sequence[RemoteCall] = ()
        self._left = 0

    def advance(self, error: BaseException | None = None) -> None:
        try:
            self._calls = next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration as stop:
            self._end(stop.value, None)
            return
        except BaseException as raised:
            self._end(None, raised)
            return
        self._left = len(self._calls)
        if not self._left:
            self.advance()
        for call in self._calls:
            call.on_end = self._call_ended
            self._loop.start(call)

    def take(self) -> T:
        """The value, or raise the error. The run forgets the error: its traceback holds the frames of its callers."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame: a cycle
        return self.value  # type: ignore[return-value]

    def cancel(self) -> None:
        if not self.has_ended:
            self.has_ended, self._on_end = True, None
            self._cancel_calls()
            self._steps.close()

    def _call_ended(self, call: RemoteCall) -> None:
        self._left -= 1
        if call.error is not None:
            self._cancel_calls()
            error, call.error = call.error, None
            self.advance(error)
        elif not self._left:
            self._calls = ()
            self.advance()

    def _cancel_calls(self) -> None:
        calls, self._calls = self._calls, ()
        for call in calls:
            if call.on_end is not None:
                self._loop.cancel(call)

    def _end(self, value: T | None, error: BaseException | None) -> None:
        self.value, self.error, self.has_ended = value, error, True
        if error is not None:
            error.__traceback__ = None
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)


def run_all(operations: Sequence[Steps[T]], *, settle: bool = False) -> list[StepsRun[T]]:
    """Run operations at once, in this thread. Releases the RNG lock while it waits.

    Stops at the first error, and cancels the others, unless ``settle``.
    """
    loop, failed, left = CallLoop(), False, len(operations)

    def ended(run: StepsRun[T]) -> None:
        nonlocal failed, left
        left -= 1
        failed = failed or run.error is not None

    runs = [StepsRun(loop, steps, ended) for steps in operations]
    try:
        with lock_released():
            for run in runs:
                run.advance()
            while left and (settle or not failed):
                loop.drive()
    finally:  # also after Ctrl-C: no call outlives this
        for run in runs:
            run.cancel()
    return runs


def run_steps(steps: Steps[T]) -> T:
    """`run_all` of one operation. Returns its result, or raises."""
    loop = CallLoop()
    run = StepsRun(loop, steps)
    try:
        with lock_released():
            run.advance()
            while not run.has_ended:
                loop.drive()
    finally:
        run.cancel()
    return run.take()


def _single_call(call: RemoteCall) -> Steps[Any]:
    yield [call]
    return call.value
