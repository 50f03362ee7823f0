"""One connection per server, shared by all experts that it serves.

with Connections(directory) as connections:
    experts = create_remote_experts(["ffn.0", "ffn.1"], connections)
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from weft.core.errors import UsageError, listed
from weft.experts.checks import kind_fault
from weft.experts.client.channel import GrpcTransport
from weft.experts.client.fixed import fixed, fixed_faults
from weft.experts.client.transport import Transport, TransportStatistics
from weft.experts.directory import Directory, Mirror, Snapshot
from weft.experts.fork_guard import finalizer
from weft.experts.tls import ClientTls, address_faults, directory_faults, way_faults
from weft.experts.wire import LIMITS, Limits

_WANTED = "one, such as EtcdDirectory(['host:2379']), or addresses by uid, such as {'ffn.0': 'host:31330'}"


class Connections:
    """Transports by address, and the directory's snapshot. Thread-safe. A context manager.

    Args:
        directory: where experts are looked up; it stays open. Raises ``AwayError`` if it does not answer at first;
            later its last snapshot serves while it is away. Or the address of every expert by its uid,
            ``{"ffn.0": "10.0.0.1:31330", ...}``, where these never change.
        tls, token, limits: see `GrpcTransport`.
        open_transport: makes the transport to an address, in place of `GrpcTransport`.

    An address of the directory that is not one of ``tls.servers``, or to which a token would go in plain text, is
    passed over.

    Raises ``UsageError`` for a directory that is none, for one of several machines with a ``tls`` that names no
    ``servers``, for certificates and tokens as `GrpcTransport` does, and for those that ``open_transport`` would not
    get.
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
        faults = way_faults(tls, token)
        if open_transport is not None and (tls is not None or token is not None):
            faults.append("tls= and token= are for GrpcTransport; what open_transport= makes has its own")
        if isinstance(directory, Mapping):
            faults += fixed_faults(cast("Mapping[Any, Any]", directory))
        else:
            faults += kind_fault("directory", directory, Directory, _WANTED, none=True)
            faults += [] if faults else directory_faults(directory, tls)
        if faults:
            raise UsageError(listed("there are no connections like this:", faults))
        self._refusal = partial(address_faults, tls=tls, token=token) if open_transport is None else _no_faults
        self._make = open_transport or partial(GrpcTransport, tls=tls, token=token, limits=limits)
        found = fixed(directory) if isinstance(directory, Mapping) else directory
        self.fixed = isinstance(directory, Mapping)
        """Whether addresses were given, so that what is not among them never will be."""
        self._mirror = None if found is None else Mirror(found)
        self._lock = threading.Lock()
        self._transports: dict[str, Transport] = {}
        self._closed = threading.Event()
        self._finalizer = finalizer(self, _close, self._closed, self._lock, self._transports, self._mirror)

    def to(self, address: str) -> Transport:
        """The transport to this address. Raises ``UsageError`` after `close`."""
        with self._lock:
            if self._closed.is_set():
                raise UsageError("these connections were closed; make new ones")
            if address not in self._transports:
                self._transports[address] = self._make(address)
            return self._transports[address]

    def refusal(self, address: str) -> str | None:
        """Why nobody is to be spoken to at an address that a directory or a server told; None: it is fine."""
        faults = self._refusal(address)
        return faults[0] if faults else None

    def snapshot(self) -> Snapshot:
        """The newest that is known of the directory. Raises ``UsageError`` without one."""
        if self._mirror is None:
            raise UsageError("these connections have no directory to look experts up in; give Connections(directory)")
        return self._mirror.snapshot()

    def statistics(self) -> dict[str, TransportStatistics]:
        """Of every transport, by address."""
        with self._lock:
            transports = dict(self._transports)
        return {address: transport.statistics() for address, transport in transports.items()}

    def close(self) -> None:
        """Close all transports; what waits fails with ``LostError``. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "Connections":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _no_faults(address: str) -> list[str]:
    return []


def _close(
    closed: threading.Event, lock: threading.Lock, transports: dict[str, Transport], mirror: Mirror | None
) -> None:
    with lock:
        closed.set()
        found = list(transports.values())
    for transport in found:
        transport.close()
    if mirror is not None:
        mirror.close()
