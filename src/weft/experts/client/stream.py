"""Calls in flight, and the gRPC stream that carries them, from its opening to its end.

    callers ── send ──> queue ──> gRPC's sender: one frame of all that is queued ──> server
    callers <── futures <── reader thread: answers by number <───────────────────────┘

    opening ── the server sends its metadata ──> open ── ends ──> gone: what was sent is lost, the rest never left

Nothing is sent before the server has answered with its metadata; so a call that was surely not executed can be told
from one that may have been. gRPC's own threads send: a round trip takes them two thirds of the time that it takes an
asyncio loop in a thread, and no loop is shared with a server in the same process.

A call ends by its answer, with its stream, by the clock at its deadline, or at `close`: whichever comes first takes the
entry out and ends the future, and the others find nothing. So no call waits for ever.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, cast

import grpc

from weft.core.errors import UsageError, WeftError
from weft.core.validation import LONGEST
from weft.experts.errors import DeadlineError, ForbiddenError, LostError, OverloadError, UnreachableError, WireError
from weft.experts.wire import Call, Kind, Limits, Received, decode, encode_parts, read_fault
from weft.experts.wire.service import COALESCED, FRAME_BYTES

OPENING = 10.0
"""Seconds in which a server has to answer the opening of a stream; a call is then tried again on another one."""
TICK = 0.02
"""Seconds by which a deadline may be noticed late."""
_IDLE = 50  # ticks without a call before the clock ends
_JOIN = 5.0
_grpc = cast("Any", grpc)
Start = Callable[[Iterator[bytes]], Any]
"""Starts a gRPC call that sends what the iterator yields."""
Explain = Callable[[str, str], UnreachableError]
"""The error of a connection that failed: what could not be done, and gRPC's words."""


@dataclass(eq=False, slots=True)
class PendingCall:
    """One call in flight. ``sent``: it may have left. ``stream``: what carries it."""

    number: int
    call: Call
    timeout: float
    deadline: float
    future: "Future[Received]"
    stream: object = None
    sent: bool = False


class PendingCalls:
    """All calls in flight on one transport. Thread-safe. ``address`` is for errors; ``closed``: `close` was called."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False
        self._stop = threading.Event()  # of the clock
        self._numbers = count(1)
        self._entries: dict[int, PendingCall] = {}
        self._lock = threading.Lock()
        self._calls = self._answered = 0
        self._failed: Counter[str] = Counter()
        self._clock: threading.Thread | None = None

    def open(self, call: Call, timeout: float) -> PendingCall:
        """A new entry. Raises ``UsageError`` after `close`, and for a timeout that no thread can wait for."""
        if not 0 < timeout <= LONGEST:  # checked at every call, so without a Validator
            raise UsageError(f"a call's timeout is {timeout!r}, wanted seconds, above 0 and at most {LONGEST:g}")
        entry = PendingCall(next(self._numbers), call, timeout, time.monotonic() + timeout, Future())
        with self._lock:
            if self.closed:
                raise UsageError(f"the transport to {self.address} was closed; make a new one")
            self._entries[entry.number] = entry
            self._calls += 1
            if self._clock is None:
                self._clock = threading.Thread(target=self._run, name=f"weft-clock-{self.address}", daemon=True)
                self._clock.start()
        return entry

    def settle(self, number: int, outcome: Received | Exception) -> None:
        """End a call with its answer or error. One that nobody waits for any more is ignored."""
        with self._lock:
            entry = self._entries.pop(number, None)
        if entry is not None:
            self._end(entry, outcome)

    def fail(self, stream: object, error: Callable[[bool], Exception]) -> None:
        """End every call of a stream; ``error`` is given whether the call may have been sent."""
        for entry in self._removed(lambda entry: entry.stream is stream):
            self._end(entry, error(entry.sent))

    def close(self) -> None:
        """End all calls, and the clock."""
        with self._lock:
            self.closed = True
            self._stop.set()
            clock = self._clock
        for entry in self._removed(lambda entry: True):
            kind = LostError if entry.sent else UnreachableError
            self._end(entry, kind(f"the transport to {self.address} was closed while {named(entry.call)} waited"))
        if clock is not None and clock is not threading.current_thread():
            clock.join(_JOIN)

    def counts(self) -> tuple[int, int, int, dict[str, int]]:
        """Calls so far, answers so far, calls in flight, errors by class."""
        with self._lock:
            return self._calls, self._answered, len(self._entries), dict(self._failed)

    def _removed(self, which: Callable[[PendingCall], bool]) -> list[PendingCall]:
        with self._lock:
            entries = [entry for entry in self._entries.values() if which(entry)]
            for entry in entries:
                del self._entries[entry.number]
            return entries

    def _end(self, entry: PendingCall, outcome: Received | Exception) -> None:
        if not entry.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            with self._lock:
                self._failed[type(outcome).__name__] += 1
            entry.future.set_exception(outcome)
        else:
            with self._lock:
                self._answered += 1
            entry.future.set_result(outcome)

    def _run(self) -> None:
        """The clock. It ends when nothing has been in flight for a while; the next call starts another."""
        quiet = 0
        while not self._stop.wait(TICK):
            for entry in self._removed(lambda entry: entry.deadline <= time.monotonic() or entry.future.cancelled()):
                state = "whether it was executed is unknown" if entry.sent else "it was not sent"
                text = f"{named(entry.call)} had no answer from {self.address} within {entry.timeout:g} s; {state}"
                self._end(entry, DeadlineError(text))
            with self._lock:
                quiet = 0 if self._entries else quiet + 1
                if quiet > _IDLE:
                    self._clock = None
                    return


class Stream:
    """One gRPC stream, for calls of ``pending``. ``draining``: the server takes no new work. ``gone``: it has ended."""

    def __init__(self, start: Start, pending: PendingCalls, limits: Limits, explain: Explain) -> None:
        self.draining = self.gone = False
        self._pending, self._limits, self._explain = pending, limits, explain
        self._unreached: UnreachableError | None = None
        self._queue: SimpleQueue[PendingCall | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._open = self._late = False
        self._fault: WeftError | None = None
        self._call = start(self._frames())
        self._reader = threading.Thread(target=self._read, name=f"weft-stream-{pending.address}", daemon=True)
        self._reader.start()

    def send(self, entry: PendingCall) -> bool:
        """Queue a call; False if the stream is gone."""
        with self._lock:
            if self.gone:
                return False
            entry.stream = self
            self._queue.put(entry)
            return True

    def close(self) -> None:
        self._call.cancel()
        if threading.current_thread() is not self._reader:
            self._reader.join(_JOIN)

    # The sender, in a thread of gRPC's.

    def _frames(self) -> Iterator[bytes]:
        if not self._decided.wait(OPENING):
            self._late = True
            self._call.cancel()
            return
        kept: PendingCall | None = None
        while True:
            first = self._queue.get() if kept is None else kept
            if first is None or self.gone:
                return
            batch, kept = self._batch(first)
            batch = [entry for entry in batch if not entry.future.cancelled()]
            for entry in batch:
                entry.sent = True
            if batch:
                yield from self._encoded(batch)

    def _batch(self, first: PendingCall) -> tuple[list[PendingCall], PendingCall | None]:
        """The calls that share a frame with this one, and the one that was taken too many."""
        batch, total = [first], _size(first.call)
        while len(batch) < self._limits.calls:
            try:
                entry = self._queue.get_nowait()
            except Empty:
                break
            if entry is None:
                self._queue.put(None)
                break
            total += _size(entry.call)
            if total > COALESCED:
                return batch, entry
            batch.append(entry)
        return batch, None

    def _encoded(self, batch: list[PendingCall]) -> Iterator[bytes]:
        """One frame, or, if something in it cannot be sent so, one for each call that can."""
        try:
            yield from encode_parts([_addressed(entry) for entry in batch], self._limits)
        except Exception as error:  # of the encoder, before the first message
            if len(batch) == 1:
                self._pending.settle(batch[0].number, error)
                return
            for entry in batch:
                yield from self._encoded([entry])

    # The reader, in its own thread.

    def _read(self) -> None:
        error: Any = None
        try:
            metadata = {str(key): value for key, value in self._call.initial_metadata() or ()}
            if FRAME_BYTES in metadata:
                most = min(self._limits.frame_bytes, int(metadata[FRAME_BYTES]))
                self._limits = replace(self._limits, frame_bytes=most)
                self._open = True
                self._decided.set()
            for message in self._call:
                self._received(message)
        except (_grpc.RpcError, WireError, ValueError) as caught:
            error = caught
        finally:
            self._end(error)

    def _received(self, message: bytes) -> None:
        for answer in decode(message, self._limits):
            header = answer.header
            if header.kind is Kind.GOAWAY:
                self.draining = True
            elif header.kind is not Kind.ERROR:
                self._pending.settle(header.call_id, answer)
            elif header.call_id:
                self._pending.settle(header.call_id, read_fault(header.data))
            else:
                self._fault = read_fault(header.data)

    def _end(self, error: Any) -> None:
        with self._lock:
            self.gone = True
        self._call.cancel()
        self._decided.set()
        self._queue.put(None)
        self._pending.fail(self, lambda sent: self._reason(error, sent))

    def _reason(self, error: Any, sent: bool) -> Exception:
        """Why a call has no answer."""
        address = self._pending.address
        code = error.code() if isinstance(error, _grpc.RpcError) else None
        text = str(error.details() if code is not None else error or "the server closed the stream")
        if code in (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED):
            return ForbiddenError(f"{address} refuses this client: {text}")
        if not self._open and code is _grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadError(f"{address} takes no more clients: {text}")
        if not self._open:
            if self._late:
                text = f"it did not answer the opening of a stream within {OPENING:g} s"
            if self._unreached is None:  # once for all calls: it may have to probe the server
                self._unreached = self._explain("cannot be reached", text)
            return type(self._unreached)(str(self._unreached))
        if not sent:
            return UnreachableError(f"{address} cannot be reached: {text}")
        why = text if self._fault is None else f"the server could not read what it was sent: {self._fault}"
        return LostError(f"the connection to {address} ended before the answer came: {why}")


def named(call: Call) -> str:
    """A call in words."""
    return f"the {call.header.kind.name.lower()} of expert {call.header.uid!r}"


def _addressed(entry: PendingCall) -> Call:
    """The call with its number, and what is left of its time now."""
    left = max(0, int((entry.deadline - time.monotonic()) * 1000))
    call = entry.call
    return call._replace(header=call.header._replace(call_id=entry.number, deadline_ms=left))


def _size(call: Call) -> int:
    return sum(tensor.nbytes for tensor in call.tensors)
