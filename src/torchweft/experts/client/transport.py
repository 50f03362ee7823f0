"""Transports: calls to servers and their answers, over gRPC or within the process; and all transports of one client.

    submit(call, timeout) ──> future of the answer, or of an error

    GrpcTransport    one channel, one stream at a time, reopened after its end, e.g. because the server has restarted
    LocalTransport   encode ── decode ──> handler ── encode ── decode ──> future; the same frames without a network
    Connections      one transport per server, shared by all its experts, and the directory's snapshot
    FixedResolver, DirectoryResolver    the server of one expert, for each attempt of a call

Every future completes: with an answer, with an error of the server, with `LostError` or `UnreachableError` if the
connection ends, with `DeadlineError` after the timeout, or at `close`. Retries belong to `weft.experts.client.calls`,
so that tests can replace the network by a transport of few lines. One protocol for real and fake transports is httpx's
idea.
"""

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import grpc

from torchweft.core.errors import UsageError, WeftError, escape, join_faults
from torchweft.core.validation import MAX_SECONDS, Validator, uid_fault
from torchweft.experts import errors
from torchweft.experts.address import address_fault, parse_address
from torchweft.experts.client.stream import PendingCalls, Stream
from torchweft.experts.discovery import Directory, LocalDirectory, Snapshot, Watch
from torchweft.experts.fork_guard import Closing, GrpcThreads, check_fork, finalizer
from torchweft.experts.tls import (
    ClientTls,
    address_faults,
    check_address,
    credential_faults,
    directory_faults,
    pair_faults,
    read_pem,
)
from torchweft.experts.wire import LIMITS, Call, Kind, Limits, Received, decode, encode, read_fault, service

_grpc = cast("Any", grpc)
_REFUSED = (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED)
# gRPC's messages for connections with missing or wrong certificates.
# The last one: the other end accepted the connection, but waited for TLS until gRPC's timeout.
_HANDSHAKE_ENDED = ("socket closed", "handshake", "connection reset", "before receiving settings frame")
# The last two are for a renewed authority, which has its old name and another key. BoringSSL takes it for the signer
# because of the name, and then reports an error of the signature algorithm instead of a failed verification.
_REJECTED = ("certificate_verify_failed", "hostname verification", "certificate signature failure", "bad_signature")
_NOT_LISTENING = ("connection refused", "no route to host", "timed out", "timeout")
_DIRECTORY_HINT = "one, such as EtcdDirectory(['host:2379']), or addresses by uid, such as {'ffn.0': 'host:31330'}"
_LISTED = 10  # most names in a message; there can be as many as experts
_PROBE = 1.0  # timeout of each message of the handshake in `_rejects_certificate`
# Receives a call and a function for its answer, such as ``server.handler()``.
Handler = Callable[[Received, Callable[[Call], None]], Any]


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


class _BaseTransport(Closing):
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


class GrpcTransport(_BaseTransport):
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


class LocalTransport(_BaseTransport):
    """A `Transport` to a handler of this process, for tests. A context manager.

    Example:
        >>> with weft.experts.client.LocalTransport(lambda received, answer: None) as transport:
        ...     transport.address
        'here'
    """

    def __init__(self, handler: Handler, *, name: str = "here", limits: Limits = LIMITS) -> None:
        super().__init__(name)
        self._handler, self._limits = handler, limits
        self._finalizer = finalizer(self, self._pending.close)

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        entry = self._pending.register(call, timeout)
        try:
            # Only bytes are exchanged, so that neither end can write into the other's tensors.
            header = call.header._replace(call_id=entry.number, deadline_ms=int(timeout * 1000))
            (received,) = decode(encode([call._replace(header=header)], self._limits), self._limits)
        except WeftError as error:
            self._pending.set_outcome(entry.number, error)
            return entry.future
        entry.begin_send()
        self._handler(received, partial(_deliver_answer, self._pending, self._limits, entry.number))
        return entry.future


class Connections(Closing):
    """Transports by address, and the directory's snapshot. Thread-safe. A context manager.

    Args:
        directory: where experts are looked up. It is not closed, and its last snapshot is used while it does not
            answer. Or fixed addresses of all experts by uid: ``{"ffn.0": "10.0.0.1:31330", ...}``.
        tls, token, limits: see `GrpcTransport`.
        open_transport: makes the transport to an address, instead of `GrpcTransport`.

    Does not connect to an address of the directory that is not one of ``tls.servers``, or to which a token would be
    sent in plain text. Raises ``DirectoryUnavailableError`` if the directory does not answer at first, and
    ``UsageError`` that lists all invalid arguments.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> with weft.Server([weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)]) as server:
        ...     with weft.Connections({"ffn.0": server.address}) as connections:
        ...         weft.RemoteExpert("ffn.0", connections)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    def __init__(
        self,
        directory: Directory | Mapping[str, str] | None = None,
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        limits: Limits = LIMITS,
        open_transport: Callable[[str], Transport] | None = None,
    ) -> None:
        with Validator("invalid connections") as check:
            check.add(*credential_faults(tls, token))
            is_unused = open_transport is not None and (tls is not None or token is not None)
            check.require(not is_unused, "tls= and token= are for GrpcTransport, and open_transport= is in use")
            if isinstance(directory, Mapping):
                check.add(*fixed_faults(cast("Mapping[Any, Any]", directory)))
            elif check.instance("directory", directory, Directory, _DIRECTORY_HINT, optional=True) and not check.faults:
                check.add(*([] if isinstance(directory, LocalDirectory | None) else directory_faults(tls)))
        self._credentials = None if open_transport is not None else (tls, token)
        self._open_transport = open_transport or partial(GrpcTransport, tls=tls, token=token, limits=limits)
        # Whether all addresses are known from the start, so that an unlisted expert will never be listed.
        self.fixed = isinstance(directory, Mapping)
        if isinstance(directory, Mapping):
            # A directory with leases that practically never end, so that lookups need no second code path.
            addresses, directory = directory, LocalDirectory()
            for uid, address in addresses.items():
                directory.declare(uid, address, ttl=MAX_SECONDS)
        self._watch = None if directory is None else directory.watch()
        self._lock = threading.Lock()
        self._transports: dict[str, Transport] = {}
        self._finalizer = finalizer(self, _close_connections, self._lock, self._transports, self._watch)

    def transport_to(self, address: str) -> Transport:
        with self._lock:
            if not self._finalizer.alive:
                raise UsageError("these connections were closed; make new ones")
            if address not in self._transports:
                self._transports[address] = self._open_transport(address)
            return self._transports[address]

    def refusal(self, address: str) -> str | None:
        """The reason not to connect to an address that a directory or a server names, or None."""
        faults = [] if self._credentials is None else address_faults(address, *self._credentials)
        return faults[0] if faults else None

    def snapshot(self) -> Snapshot:
        """The newest known snapshot of the directory. Raises ``UsageError`` without a directory."""
        if self._watch is None:
            raise UsageError("these connections have no directory to look up experts; use Connections(directory)")
        return self._watch.snapshot()

    def statistics(self) -> dict[str, TransportStatistics]:
        with self._lock:
            transports = dict(self._transports)
        return {address: transport.statistics() for address, transport in transports.items()}

    def close(self) -> None:
        self._finalizer()


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


def fixed_faults(addresses: Mapping[Any, Any]) -> list[str]:
    return [
        fault
        for uid, address in addresses.items()
        for fault in (*uid_fault(uid), *address_fault(f"the address of {uid!r}", address))
    ]


def open_channel(address: str, tls: ClientTls | None, limits: Limits) -> Any:
    check_fork(f"the transport to {address}")
    options = service.client_options(limits)
    if tls is None:
        return _grpc.insecure_channel(address, options)
    return _grpc.secure_channel(address, tls.credentials(), [*options, *tls.options()])


def _deliver_answer(pending: PendingCalls, limits: Limits, number: int, answer: Call) -> None:
    try:
        (received,) = decode(encode([answer], limits), limits)
        outcome = read_fault(received.header.data) if received.header.kind is Kind.ERROR else received
    except WeftError as error:
        outcome = error
    pending.set_outcome(number, outcome)


def _close_transport(pending: PendingCalls, streams: list[Stream], channel: Any, threads: GrpcThreads) -> None:
    pending.close()
    for stream in streams:
        stream.close()
    channel.close()
    threads.wait()


def _close_connections(lock: threading.Lock, transports: dict[str, Transport], watch: Watch | None) -> None:
    # The lock waits for a running `Connections.transport_to`, after which no other transport is opened.
    with lock:
        opened = list(transports.values())
    for transport in opened:
        transport.close()
    if watch is not None:
        watch.close()


def unreachable(
    address: str, tls: ClientTls | None, action: str, text: str, end: str = "this client", option: str = "tls="
) -> errors.UnreachableError:
    """The error of a failed connection: a `CertificateError` if the certificates are certainly the cause."""
    lower, rejected = text.lower(), False
    if tls is not None:
        ended = any(words in lower for words in _HANDSHAKE_ENDED)
        # The probe is a second connection, so it is made only where gRPC's message leaves the cause open.
        rejected = any(words in lower for words in _REJECTED) or (ended and _rejects_certificate(address, tls))
    kind = errors.CertificateError if rejected else errors.UnreachableError
    return kind(f"{address} {action}: {explain_failure(text, tls, end, option)}")


def explain_failure(text: str, tls: ClientTls | None, end: str = "this client", option: str = "tls=") -> str:
    """gRPC's message for a failed connection with advice. ``tls`` is the ``option`` of ``end``."""
    lower = text.lower()
    if "failed parsing http/2" in lower:
        return f"{text}; is that a torchweft server? Another program, such as an HTTP server, answers at this port"
    if "hostname verification" in lower:
        return f"{text} Call it by a name (subjectAltName) of its certificate, or pass that as server_name= ({option})"
    if not any(words in lower for words in _HANDSHAKE_ENDED):
        listens = not any(words in lower for words in _NOT_LISTENING)
        return text if listens else f"{text}; is `torchweft serve` running there?"
    if tls is None:
        return f"{text}; it was called without TLS: if it requires TLS, give {end} certificates ({option})"
    cause = "no certificate was sent, which it may require" if tls.certificate is None else "a certificate was sent"
    if any(words in lower for words in _REJECTED):
        cause = "the server's certificate is not signed by authority="
    return (
        f"{text}; {cause}; check the certificates of both ends ({option}): each must be signed by the other's "
        "authority=, with its present key if that was renewed, and neither may have expired"
    )


def _rejects_certificate(address: str, tls: ClientTls) -> bool:
    """Whether the server ends a complete handshake because of the client's certificate, or for lack of one."""
    # In TLS 1.3 a server can reject a client after the handshake without a message, and gRPC reports a closed
    # connection. A server that accepts the client sends first, because HTTP/2 demands it.
    host, port = parse_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # gRPC has verified the server before, and nothing is sent to it here
    context.set_alpn_protocols(["h2"])
    if tls.key is not None and tls.certificate is not None:
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        if pair_faults(context, read_pem(tls.key), read_pem(tls.certificate)):
            return False
    try:
        with (
            socket.create_connection((host, port), _PROBE) as plain,
            context.wrap_socket(plain, server_hostname=tls.server_name or host) as secured,
        ):
            return not secured.recv(1)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "") and "CERT" in (error.reason or "")
    except OSError:
        return False
