"""Transports: calls to a server and their answers, over a gRPC stream, from its opening to its end.

    submit ── queue ──> gRPC's sender: one frame of all queued calls ──> server
    callers <── futures <── reader thread: answers by number <──────────────┘

    opening ── the server sends its metadata ──> open ── ends ──> gone: calls that were sent are lost, the rest unsent

Calls are sent only after the server has answered with its metadata. A call that was certainly not executed can thus be
distinguished from one that may have been. gRPC's threads send, rather than an asyncio loop in a thread: a round trip
takes two thirds of the time, and a server in the same process does not share the loop.

A call ends with its answer, with its stream, at its deadline, or at `close`. The first of these events removes the
entry and completes the future, and the others find no entry. So no call waits forever. Retries belong to
`weft.experts.client.calls`, so that tests can replace the network by a transport of few lines. One protocol for real
and fake transports is httpx's idea.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Protocol, cast, runtime_checkable

import grpc

from torchweft.core.errors import UsageError, WeftError
from torchweft.core.validation import MAX_SECONDS, Validator
from torchweft.experts import errors
from torchweft.experts.address import address_fault
from torchweft.experts.fork_guard import ContextManager, GrpcThreads, check_fork, finalizer
from torchweft.experts.tls import ClientTls, check_address, credential_faults, unreachable
from torchweft.experts.wire import LIMITS, Call, Kind, Limits, Received, decode, encode_parts, read_fault, service

OPENING = 10.0  # Longest wait, in seconds, for a server's metadata. After it, calls are retried on another stream.
TICK = 0.05  # Longest delay, in seconds, until an exceeded deadline is noticed
_IDLE = 20  # ticks without calls after which the clock ends
_JOIN = 5.0
_grpc = cast("Any", grpc)
_REFUSED = (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED)
Start = Callable[[Iterator[bytes]], Any]  # Starts a gRPC call that sends the items of the iterator
# Builds the error of a failed connection from the failed action and gRPC's message.
Explain = Callable[[str, str], errors.UnreachableError]


@dataclass(frozen=True)
class TransportStatistics:
    """``calls`` so far, those ``waiting`` for answers, ``failed``: errors by class, ``streams``: opened connections.

    Example:
        >>> weft.GrpcTransport("10.0.0.7:7070").statistics().calls
        0
    """

    address: str
    calls: int
    answered: int
    waiting: int
    failed: Mapping[str, int]
    streams: int


@runtime_checkable
class Transport(Protocol):
    """A connection to one server. All methods can be called in any thread.

    Example:
        >>> transport: weft.experts.client.Transport = weft.GrpcTransport("10.0.0.7:7070")
        >>> transport.close()
    """

    @property
    def address(self) -> str: ...

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """Send a call without waiting. Its tensors must not be modified before the future is done.

        Callbacks of the future run in a thread of the transport and must not wait. Raises ``UsageError`` after `close`.
        """
        ...

    def close(self) -> None:
        """Fail calls in flight with ``LostError``, and end all threads. Can be called twice."""

    def statistics(self) -> TransportStatistics: ...


@dataclass(eq=False, slots=True)
class PendingCall:
    """One call in flight. ``sent``: the server may have it. ``stream``: the one that carries it."""

    number: int
    call: Call
    timeout: float
    deadline: float
    future: "Future[Received]"
    stream: object = None
    sent: bool = False

    def assign(self, stream: object) -> None:
        self.stream = stream

    def numbered_call(self) -> Call:
        left = max(0, int((self.deadline - time.monotonic()) * 1000))
        header, tensors, compressions = self.call
        return Call(header._replace(call_id=self.number, deadline_ms=left), tensors, compressions)

    def begin_send(self) -> bool:
        # Set before the bytes leave: if the connection fails in between, "may have been executed" is the safe answer.
        self.sent = not self.future.cancelled()
        return self.sent


class PendingCalls:
    """All calls in flight on one transport. Thread-safe."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False
        self._stop = threading.Event()  # of the clock
        self._numbers = count(1)
        self._entries: dict[int, PendingCall] = {}
        # Guards entries and counters only. Futures are completed outside of it, because they call user callbacks, which
        # can make another call on this transport.
        self._lock = threading.Lock()
        self._calls = self._answered = 0
        self._failed: Counter[str] = Counter()
        self._clock: threading.Thread | None = None

    def register(self, call: Call, timeout: float) -> PendingCall:
        """Add an entry. Raises ``UsageError`` after `close`, and for a timeout that no thread can wait for."""
        if not 0 < timeout <= MAX_SECONDS:  # at every call, so without a Validator
            raise UsageError(f"a call's timeout is {timeout!r}, wanted seconds, above 0 and at most {MAX_SECONDS:g}")
        entry = PendingCall(next(self._numbers), call, timeout, time.monotonic() + timeout, Future())
        with self._lock:
            if self.closed:
                raise UsageError(f"the transport to {self.address} was closed; make a new one")
            self._entries[entry.number] = entry
            self._calls += 1
            if self._clock is None:
                name = f"torchweft-clock-{self.address}"
                self._clock = threading.Thread(target=self._run_clock, name=name, daemon=True)
                self._clock.start()
        return entry

    def set_outcome(self, number: int, outcome: Received | Exception) -> None:
        # The call can have ended before, e.g. at its deadline. The thread that removes the entry completes the future.
        with self._lock:
            entry = self._entries.pop(number, None)
            if entry is None:
                return
            if not isinstance(outcome, Exception):
                self._answered += 1
        self._complete(entry, outcome)

    def fail_stream(self, stream: object, error: Callable[[bool], Exception]) -> None:
        """End every call of a stream. ``error`` builds the error from whether the call may have been sent."""
        for entry in self._remove_where(lambda entry: entry.stream is stream):
            self._complete(entry, error(entry.sent))

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._stop.set()
            clock = self._clock
        for entry in self._remove_where(lambda entry: True):
            kind = errors.LostError if entry.sent else errors.UnreachableError
            text = f"the transport to {self.address} was closed while {describe_call(entry.call)} waited"
            self._complete(entry, kind(text))
        if clock is not None and clock is not threading.current_thread():
            clock.join(_JOIN)

    def counts(self) -> tuple[int, int, int, dict[str, int]]:
        with self._lock:
            return self._calls, self._answered, len(self._entries), dict(self._failed)

    def _remove_where(self, condition: Callable[[PendingCall], bool]) -> list[PendingCall]:
        with self._lock:
            entries = [entry for entry in self._entries.values() if condition(entry)]
            for entry in entries:
                del self._entries[entry.number]
            return entries

    def _complete(self, entry: PendingCall, outcome: Received | Exception) -> None:
        if not entry.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            with self._lock:
                self._failed[type(outcome).__name__] += 1
            entry.future.set_exception(outcome)
        else:
            entry.future.set_result(outcome)

    def _run_clock(self) -> None:
        idle_ticks = 0
        while not self._stop.wait(TICK):
            now = time.monotonic()
            for entry in self._remove_where(lambda entry, now=now: entry.deadline <= now or entry.future.cancelled()):
                state = "whether it was executed is unknown" if entry.sent else "it was not sent"
                text = f"no answer from {self.address} within {entry.timeout:g} s; {state}"
                self._complete(entry, errors.DeadlineError(f"{describe_call(entry.call)} had {text}"))
            # Ending and `register` exclude each other by the lock, so that a new call always finds or starts a clock.
            with self._lock:
                idle_ticks = 0 if self._entries else idle_ticks + 1
                if idle_ticks > _IDLE:
                    self._clock = None
                    return


class Stream:
    """One gRPC stream for calls of ``pending``. If ``is_draining``, the server accepts no new work."""

    def __init__(self, start: Start, pending: PendingCalls, limits: Limits, explain: Explain) -> None:
        self.is_draining = self.is_gone = False
        self._pending, self._limits, self._explain = pending, limits, explain
        self._unreached: errors.UnreachableError | None = None
        self._queue: SimpleQueue[PendingCall | None] = SimpleQueue()
        self._lock = threading.Lock()  # between `enqueue` and the end of the stream
        self._opening_ended = threading.Event()
        self._is_open = self._is_late = False
        self._fault: WeftError | None = None
        self._call = start(self._generate_messages())
        name = f"torchweft-stream-{pending.address}"
        self._reader = threading.Thread(target=self._read_answers, name=name, daemon=True)
        self._reader.start()

    def enqueue(self, entry: PendingCall) -> bool:
        # Under the lock, so that `_finish` either sees this stream in the entry and fails it, or is seen here. Without
        # it, a call that is queued while the stream ends would wait until its deadline.
        with self._lock:
            if self.is_gone:
                return False
            entry.assign(self)
            self._queue.put(entry)
            return True

    def close(self) -> None:
        self._call.cancel()
        if threading.current_thread() is not self._reader:
            self._reader.join(_JOIN)

    # The sender, in a thread of gRPC.

    def _generate_messages(self) -> Iterator[bytes]:
        if not self._opening_ended.wait(OPENING):
            self._is_late = True
            self._call.cancel()
            return
        surplus: PendingCall | None = None
        while True:
            first = self._queue.get() if surplus is None else surplus
            if first is None or self.is_gone:
                return
            batch, surplus = self._collect_batch(first)
            batch = [entry for entry in batch if entry.begin_send()]
            if batch:
                yield from self._encode_batch(batch)

    def _collect_batch(self, first: PendingCall) -> tuple[list[PendingCall], PendingCall | None]:
        """The calls that share a frame with ``first``, and the first call of the next frame if it is known."""
        batch, total = [first], _count_bytes(first.call)
        while len(batch) < self._limits.calls:
            try:
                entry = self._queue.get_nowait()
            except Empty:
                break
            if entry is None:
                self._queue.put(None)  # the end mark, for `_generate_messages` after this batch
                break
            total += _count_bytes(entry.call)
            if total > service.COALESCED:
                return batch, entry
            batch.append(entry)
        return batch, None

    def _encode_batch(self, batch: list[PendingCall]) -> Iterator[bytes]:
        """The messages of one frame, or of one frame per call if they cannot be encoded together."""
        try:
            yield from encode_parts([entry.numbered_call() for entry in batch], self._limits)
        except Exception as error:  # from the encoder, before the first message, so that nothing is sent twice
            if len(batch) == 1:
                self._pending.set_outcome(batch[0].number, error)
                return
            for entry in batch:
                yield from self._encode_batch([entry])

    # The reader, in its own thread.

    def _read_answers(self) -> None:
        error: Any = None
        try:
            metadata = {str(key): value for key, value in self._call.initial_metadata() or ()}
            if service.FRAME_BYTES in metadata:
                most = min(self._limits.frame_bytes, int(metadata[service.FRAME_BYTES]))
                self._limits = replace(self._limits, frame_bytes=most)  # before the event: the sender reads it then
                self._is_open = True
                self._opening_ended.set()
            for message in self._call:
                self._handle_message(message)
        except (_grpc.RpcError, errors.WireError, ValueError) as caught:
            error = caught
        finally:
            self._finish(error)

    def _handle_message(self, message: bytes) -> None:
        for answer in decode(message, self._limits):
            header = answer.header
            if header.kind is Kind.GOAWAY:
                self.is_draining = True
            elif header.kind is not Kind.ERROR:
                self._pending.set_outcome(header.call_id, answer)
            elif header.call_id:
                self._pending.set_outcome(header.call_id, read_fault(header.data))
            else:
                self._fault = read_fault(header.data)

    def _finish(self, error: Any) -> None:
        # In this order: first no new calls, then the sender ends, and only then the calls fail. The other way round, a
        # caller could retry on this stream again.
        with self._lock:
            self.is_gone = True
        self._call.cancel()
        self._opening_ended.set()
        self._queue.put(None)
        self._pending.fail_stream(self, lambda sent: self._explain_end(error, sent))

    def _explain_end(self, error: Any, sent: bool) -> Exception:
        address = self._pending.address
        code = error.code() if isinstance(error, _grpc.RpcError) else None
        text = str(error.details() if code is not None else error or "the server closed the stream")
        if code in _REFUSED:
            return errors.ForbiddenError(f"{address} rejects this client: {text}")
        if not self._is_open and code is _grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.OverloadError(f"{address} accepts no more clients: {text}")
        if not self._is_open:
            if self._is_late:
                text = f"it did not answer the opening of a stream within {OPENING:g} s"
            if self._unreached is None:  # once for all calls, because it can involve a probe of the server
                self._unreached = self._explain("cannot be reached", text)
            return type(self._unreached)(str(self._unreached))  # a new error each: callers add notes to theirs
        if not sent:
            return errors.UnreachableError(f"{address} cannot be reached: {text}")
        why = text if self._fault is None else f"the server could not read a message: {self._fault}"
        return errors.LostError(f"the connection to {address} ended before the answer came: {why}")


class BaseTransport(ContextManager):
    def __init__(self, address: str) -> None:
        self._pending = PendingCalls(address)
        self._finalizer: Callable[[], object] = self._pending.close
        self._opened = 1

    @property
    def address(self) -> str:
        return self._pending.address

    def close(self) -> None:
        self._finalizer()

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(self.address, *self._pending.counts(), self._opened)


class GrpcTransport(BaseTransport):
    """A `Transport` to the server at ``address``. A context manager. The first call connects.

    Args:
        address: host:port, such as 10.0.0.7:7070 or [::1]:7070.
        tls: certificates. None: no encryption.
        token: authenticates this client if certificates do not.
        limits: of a frame; those of the server apply as well.
        trace: returns the traceparent of a call, such as ``current`` of a `weft.experts.telemetry.SpanObserver`.

    Raises ``UsageError`` for an invalid address or token, and for a token without TLS to another machine.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)
        >>> with weft.Server([expert]) as server, weft.GrpcTransport(server.address) as transport:
        ...     weft.RemoteExpert("ffn.0", transport)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    def __init__(
        self,
        address: str,
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        limits: Limits = LIMITS,
        trace: Callable[[], str | None] | None = None,
    ) -> None:
        with Validator("invalid transport options") as check:
            check.add(*address_fault("address", address), *credential_faults(tls, token))
        check_address(address, tls, token)
        super().__init__(address)
        self._limits = limits
        self._metadata = service.token_metadata(token)
        self._channel = open_channel(address, tls, limits)
        self._trace = trace
        self._process = os.getpid()
        self._explain = partial(unreachable, address, tls)
        self._name = f"the transport to {address}"
        self._lock = threading.Lock()
        # At most one stream. A list, because the finalizer shares it, and must not reference this object.
        self._streams: list[Stream] = []
        self._opened = 0
        self._threads = GrpcThreads()
        self._finalizer = finalizer(self, _close_transport, self._pending, self._streams, self._channel, self._threads)

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        if os.getpid() != self._process:
            check_fork(self._name)
        if self._trace is not None and (trace := self._trace()):
            call = call._replace(header=call.header._replace(trace=trace))
        entry = self._pending.register(call, timeout)
        # Repeats only if the stream ends between `_current_stream` and `enqueue`.
        while not self._pending.closed:
            try:
                stream = self._current_stream()
            except ValueError as error:  # gRPC's, of a channel that `close` has just closed
                self._pending.set_outcome(entry.number, errors.UnreachableError(f"{self._name} was closed: {error}"))
                break
            # A server that shuts down still applies commits that it has prepared, since other experts can have stepped.
            if stream.is_draining and call.header.kind not in (Kind.INFO, Kind.COMMIT):
                error = errors.DrainingError(f"{self.address} is shutting down and accepts no new work")
                self._pending.set_outcome(entry.number, error)
                break
            if stream.enqueue(entry):
                break
        return entry.future

    def status(self, timeout: float = 10.0) -> str:
        """The server's status, as JSON. Raises ``ForbiddenError``, ``UnreachableError`` or ``DeadlineError``."""
        return service.read_status(b"".join(self._ask(service.STATUS, b"", timeout, "did not report its status")))

    def operate(self, operation: service.Operation, timeout: float) -> tuple[dict[str, Any], bytes]:
        """Carry out an operation of an administrator. Returns its results, and the file of an export."""
        failed = f"did not answer the operation {operation.name!r}"
        answers = self._ask(service.OPERATE, operation.to_bytes(), timeout, failed)
        return service.read_operation_replies(answers)

    def _ask(self, method: str, message: bytes, timeout: float, failed: str) -> Iterator[bytes]:
        try:
            yield from self._channel.unary_stream(method)(message, timeout=timeout, metadata=self._metadata)
        except _grpc.RpcError as error:
            code, text = error.code(), str(error.details())
            if code in _REFUSED:
                raise errors.ForbiddenError(f"{self.address} rejects this client: {text}") from None
            if code is _grpc.StatusCode.DEADLINE_EXCEEDED:
                raise errors.DeadlineError(f"{self.address} {failed} within {timeout:g} s") from None
            if code is _grpc.StatusCode.UNIMPLEMENTED:
                text = f"{self.address} {failed}: its version of torchweft does not know it"
                raise errors.UnreachableError(text) from None
            raise self._explain(failed, text) from None

    def _current_stream(self) -> Stream:
        # Opening does not wait for the server, so the lock is held only briefly.
        with self._lock:
            if not self._streams or self._streams[0].is_gone:
                stream = self._channel.stream_stream(service.STREAM)
                start = partial(self._threads.stream, stream, metadata=self._metadata)
                self._streams[:] = [Stream(start, self._pending, self._limits, self._explain)]
                self._opened += 1
            return self._streams[0]


def open_channel(address: str, tls: ClientTls | None, limits: Limits) -> Any:
    check_fork(f"the transport to {address}")
    options = service.client_options(limits)
    if tls is None:
        return _grpc.insecure_channel(address, options)
    return _grpc.secure_channel(address, tls.credentials(), [*options, *tls.options()])


def _close_transport(pending: PendingCalls, streams: list[Stream], channel: Any, threads: GrpcThreads) -> None:
    pending.close()
    for stream in streams:
        stream.close()
    channel.close()
    threads.wait()


def describe_call(call: Call) -> str:
    return f"the {call.header.kind.name.lower()} of expert {call.header.uid!r}"


def _count_bytes(call: Call) -> int:
    return sum(tensor.nbytes for tensor in call.tensors)
