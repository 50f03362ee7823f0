"""Connections: all transports of one client, the directory's snapshot, and the way to each expert.

Connections          one transport per server, shared by all its experts
DirectoryResolver    the server of one expert, for each attempt of a call
LocalTransport       encode ── decode ──> handler ── encode ── decode ──> future; the frames without a network
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

from torchweft.core.errors import UsageError, WeftError, escape, join_faults
from torchweft.core.validation import MAX_SECONDS, Validator, uid_fault
from torchweft.experts import errors
from torchweft.experts.address import address_fault
from torchweft.experts.client.calls import FixedResolver
from torchweft.experts.client.transport import (
    BaseTransport,
    GrpcTransport,
    PendingCalls,
    Transport,
    TransportStatistics,
)
from torchweft.experts.discovery import Directory, LocalDirectory, Snapshot, Watch
from torchweft.experts.fork_guard import ContextManager, finalizer
from torchweft.experts.tls import ClientTls, address_faults, credential_faults, directory_faults
from torchweft.experts.wire import LIMITS, Call, Kind, Limits, Received, decode, encode, read_fault

_DIRECTORY_HINT = "one, such as EtcdDirectory(['host:2379']), or addresses by uid, such as {'ffn.0': 'host:31330'}"
_LISTED = 10  # most names in a message; there can be as many as experts
# Receives a call and a function for its answer, such as ``server.handler()``.
Handler = Callable[[Received, Callable[[Call], None]], Any]


class Connections(ContextManager):
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


class LocalTransport(BaseTransport):
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


def fixed_faults(addresses: Mapping[Any, Any]) -> list[str]:
    return [
        fault
        for uid, address in addresses.items()
        for fault in (*uid_fault(uid), *address_fault(f"the address of {uid!r}", address))
    ]


def _deliver_answer(pending: PendingCalls, limits: Limits, number: int, answer: Call) -> None:
    try:
        (received,) = decode(encode([answer], limits), limits)
        outcome = read_fault(received.header.data) if received.header.kind is Kind.ERROR else received
    except WeftError as error:
        outcome = error
    pending.set_outcome(number, outcome)


def _close_connections(lock: threading.Lock, transports: dict[str, Transport], watch: Watch | None) -> None:
    # The lock waits for a running `Connections.transport_to`, after which no other transport is opened.
    with lock:
        opened = list(transports.values())
    for transport in opened:
        transport.close()
    if watch is not None:
        watch.close()
