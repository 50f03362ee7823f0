"""Connections: one transport per server, shared by all its experts, and the directory's snapshot.

with Connections(directory) as connections:
    experts = create_remote_experts(["ffn.0", "ffn.1"], connections)
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from weft.core.errors import UsageError
from weft.core.validation import LONGEST, Validator, uid_fault
from weft.experts.address import address_fault
from weft.experts.client.transport import GrpcTransport, Transport, TransportStatistics
from weft.experts.discovery import Directory, LocalDirectory, Snapshot, Watch
from weft.experts.fork_guard import finalizer
from weft.experts.tls import ClientTls, address_faults, credential_faults, directory_faults
from weft.experts.wire import LIMITS, Limits

_WANTED = "one, such as EtcdDirectory(['host:2379']), or addresses by uid, such as {'ffn.0': 'host:31330'}"


class Connections:
    """Transports by address, and the directory's snapshot. Thread-safe. A context manager.

    Args:
        directory: where experts are looked up; it stays open, and its last snapshot serves while it is away. Or the
            address of every expert by its uid, ``{"ffn.0": "10.0.0.1:31330", ...}``, where these never change.
        tls, token, limits: see `GrpcTransport`.
        open_transport: makes the transport to an address, in place of `GrpcTransport`.

    An address of the directory that is not one of ``tls.servers``, or to which a token would go in plain text, is
    not connected to. Raises ``AwayError`` if the directory does not answer at first, and ``UsageError`` that lists all
    invalid arguments, among them a directory of several machines with a ``tls`` that names no ``servers``.

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
            own = open_transport is not None and (tls is not None or token is not None)
            check.that(not own, "tls= and token= are for GrpcTransport; what open_transport= makes has its own")
            if isinstance(directory, Mapping):
                check.add(*fixed_faults(cast("Mapping[Any, Any]", directory)))
            elif check.instance("directory", directory, Directory, _WANTED, optional=True) and not check.faults:
                check.add(*([] if isinstance(directory, LocalDirectory | None) else directory_faults(tls)))
        self._credentials = None if open_transport is not None else (tls, token)
        self._make = open_transport or partial(GrpcTransport, tls=tls, token=token, limits=limits)
        self.fixed = isinstance(directory, Mapping)
        """Whether addresses were given, so that an expert which is not among them never will be."""
        if isinstance(directory, Mapping):
            found: Directory | None = LocalDirectory()
            for uid, address in directory.items():
                found.declare(uid, address, ttl=LONGEST)
        else:
            found = directory
        self._watch = None if found is None else found.watch()
        self._lock = threading.Lock()
        self._transports: dict[str, Transport] = {}
        self._closed = threading.Event()
        self._finalizer = finalizer(self, _close, self._closed, self._lock, self._transports, self._watch)

    def to(self, address: str) -> Transport:
        """The transport to this address. Raises ``UsageError`` after `close`."""
        with self._lock:
            if self._closed.is_set():
                raise UsageError("these connections were closed; make new ones")
            if address not in self._transports:
                self._transports[address] = self._make(address)
            return self._transports[address]

    def refusal(self, address: str) -> str | None:
        """Why an address from a directory or a server must not be connected to; None: it may be."""
        faults = [] if self._credentials is None else address_faults(address, *self._credentials)
        return faults[0] if faults else None

    def snapshot(self) -> Snapshot:
        """The newest known snapshot of the directory. Raises ``UsageError`` without a directory."""
        if self._watch is None:
            raise UsageError("these connections have no directory to look experts up in; give Connections(directory)")
        return self._watch.snapshot()

    def statistics(self) -> dict[str, TransportStatistics]:
        """Of every transport, by address."""
        with self._lock:
            transports = dict(self._transports)
        return {address: transport.statistics() for address, transport in transports.items()}

    def close(self) -> None:
        """Close all transports; calls in flight fail with ``LostError``. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "Connections":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def fixed_faults(addresses: Mapping[Any, Any]) -> list[str]:
    """What is wrong with addresses by uid."""
    pairs = addresses.items()
    return [fault for uid, one in pairs for fault in (*uid_fault(uid), *address_fault(f"the address of {uid!r}", one))]


def _close(
    closed: threading.Event, lock: threading.Lock, transports: dict[str, Transport], watch: Watch | None
) -> None:
    with lock:
        closed.set()
        found = list(transports.values())
    for transport in found:
        transport.close()
    if watch is not None:
        watch.close()
