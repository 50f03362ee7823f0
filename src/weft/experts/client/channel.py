"""The way to a server over gRPC: one channel, and one stream at a time, made again when it is gone.

    submit ──> Stream, if it is there; else a new one: the server may have been started again meanwhile
    info   ──> a unary call

No threads but the stream's reader and the clock of `Pending`, both of which end with `close`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import grpc

from weft.core.errors import UsageError, WeftError, listed
from weft.experts.address import address_fault
from weft.experts.client.pending import Entry, Pending
from weft.experts.client.refusal import unreachable
from weft.experts.client.stream import Explain, Stream
from weft.experts.client.transport import TransportStatistics
from weft.experts.fork_guard import GrpcThreads, check_fork, finalizer
from weft.experts.tls import ClientTls, check_address, way_faults
from weft.experts.wire import (
    LIMITS,
    Call,
    DeadlineError,
    DrainingError,
    ForbiddenError,
    Header,
    Kind,
    Limits,
    Received,
    UnreachableError,
    decode,
    encode,
    read_fault,
)
from weft.experts.wire.service import AUTHORIZATION, BEARER, INFO, STATUS, STREAM, TRACEPARENT, client_options

_grpc = cast("Any", grpc)
_REFUSED = (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED)


class GrpcTransport:
    """A `Transport` to the server at ``address`` (host:port). A context manager.

    Args:
        address: host:port, such as 10.0.0.7:7070 or [::1]:7070; nothing is connected before the first call.
        tls: certificates; None: nothing is encrypted.
        token: who this client is, where certificates do not say it.
        limits: of a frame; the server's are kept to as well.
        trace: asked for a traceparent, in the thread of the caller, whenever a stream is opened; its calls belong to
            that trace. Such as ``current`` of a `weft.experts.telemetry.Observer`.

    Raises ``UsageError`` for an address that is none or not one of ``tls.servers``, a token that no header can carry,
    and a token without TLS to another machine.
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
        faults = [*address_fault("address", address), *way_faults(tls, token)]
        if faults:
            raise UsageError(listed("there is no way to a server like this:", faults))
        check_address(address, tls, token)
        self._limits = limits
        self._metadata = () if token is None else ((AUTHORIZATION, f"{BEARER}{token}"),)
        self._channel = open_channel(address, tls, limits)
        self._trace = trace
        self._explain = partial(unreachable, address, tls)
        self._way = f"the way to {address}"
        self._pending = Pending(address)
        self._lock = threading.Lock()
        self._streams: list[Stream] = []  # at most one; shared with the finalizer, which must not hold this object
        self._opened = 0
        self._crew = GrpcThreads()
        self._finalizer = finalizer(self, _shut, self._pending, self._streams, self._channel, self._crew)

    @property
    def address(self) -> str:
        """The server's."""
        return self._pending.address

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """See `Transport.submit`."""
        check_fork(self._way)
        entry = self._pending.open(call, timeout)
        if call.header.kind is Kind.INFO:
            self._ask(entry)
            return entry.future
        while not self._pending.closed:
            try:
                stream = self._stream()
            except ValueError as error:  # closed just now, and so all that waits was told
                self._pending.settle(entry.number, UnreachableError(f"the way to {self.address} was closed: {error}"))
                break
            if stream.draining:
                self._pending.settle(entry.number, DrainingError(f"{self.address} is going away and takes no new work"))
                break
            if stream.send(entry):
                break
        return entry.future

    def status(self, timeout: float = 10.0) -> bytes:
        """The server's status, as JSON. Raises ``ForbiddenError``, ``UnreachableError`` or ``DeadlineError``."""
        try:
            return self._channel.unary_unary(STATUS)(b"", timeout=timeout, metadata=self._metadata)
        except _grpc.RpcError as error:
            raise _failure(error, self.address, "status", self._explain) from None

    def close(self) -> None:
        """See `Transport.close`."""
        self._finalizer()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`."""
        calls, answered, waiting, failed = self._pending.numbers()
        return TransportStatistics(self.address, calls, answered, waiting, failed, self._opened)

    def __enter__(self) -> "GrpcTransport":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stream(self) -> Stream:
        with self._lock:
            if not self._streams or self._streams[0].gone:
                trace = None if self._trace is None else self._trace()
                metadata = self._metadata if trace is None else (*self._metadata, (TRACEPARENT, trace))
                start = partial(self._crew.stream, self._channel.stream_stream(STREAM), metadata=metadata)
                self._streams[:] = [Stream(start, self._pending, self._limits, self._explain)]
                self._opened += 1
            return self._streams[0]

    def _ask(self, entry: Entry) -> None:
        """A unary call for what an expert takes."""
        header = Header(kind=Kind.INFO, call_id=entry.number, uid=entry.call.header.uid)
        try:
            message = b"".join(encode([Call(header)], self._limits))
            ask = self._channel.unary_unary(INFO).future
            future = self._crew.begin(lambda: ask(message, timeout=entry.timeout, metadata=self._metadata))
        except (WeftError, ValueError) as error:
            self._pending.settle(entry.number, error)
            return
        entry.sent = True
        future.add_done_callback(partial(_told, self._pending, self._limits, entry.number, self._explain))


def _told(pending: Pending, limits: Limits, number: int, explain: Explain, done: Any) -> None:
    try:
        (answer,) = decode(done.result(), limits)
        outcome = read_fault(answer.header.data) if answer.header.kind is Kind.ERROR else answer
    except _grpc.RpcError as error:
        outcome = _failure(error, pending.address, "info", explain)
    except (WeftError, ValueError) as error:
        outcome = error
    except _grpc.FutureCancelledError:
        outcome = UnreachableError(f"the way to {pending.address} was closed")
    pending.settle(number, outcome)


def _failure(error: Any, address: str, what: str, explain: Explain) -> WeftError:
    code, text = error.code(), str(error.details())
    if code in _REFUSED:
        return ForbiddenError(f"{address} refuses this client: {text}")
    if code is _grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{address} did not answer a call for its {what} in time")
    return explain(f"cannot be asked for its {what}", text)


def open_channel(address: str, tls: ClientTls | None, limits: Limits) -> Any:
    """A channel of gRPC to a server of experts. Raises ``UsageError`` in a fork; see `weft.experts.fork_guard`."""
    check_fork(f"the way to {address}")
    options = client_options(limits)
    if tls is None:
        return _grpc.insecure_channel(address, options)
    return _grpc.secure_channel(address, tls.credentials(), [*options, *tls.options()])


def _shut(pending: Pending, streams: list[Stream], channel: Any, crew: GrpcThreads) -> None:
    pending.close()
    for stream in streams:
        stream.close()
    channel.close()
    crew.wait()
