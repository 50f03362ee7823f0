"""Addresses as users write them: ``host:port``, with brackets around an IPv6 address.

gRPC does not validate: it reads port 70000 as 4464, -1 as 65535, and a missing port as 443.
"""

import errno
import ipaddress
import socket
from typing import Any

from torchweft.core.errors import UsageError

_LARGEST_PORT = 65535
_BIND_FAULTS = {
    errno.EADDRINUSE: "another process listens there: end it, or choose another port (0 takes a free one)",
    errno.EADDRNOTAVAIL: "this machine does not have that address: listen at one of its own, or at 0.0.0.0",
    errno.EACCES: "this user must not listen there: choose a port above 1023",
}
_INVALID = frozenset("/\\@,?#%&=\"'<>[]")


def parse_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises ``UsageError``."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not (port.isascii() and port.isdecimal() and int(port) <= _LARGEST_PORT and _is_host(host, bracketed)):
        raise UsageError(f"an address is {address!r}, wanted host:port, such as 127.0.0.1:7070, or [::1]:7070 for IPv6")
    return host, int(port)


def address_fault(name: str, address: Any, *, free: bool = False) -> list[str]:
    """The fault of an address, in words. ``free``: whether port 0 is allowed, which takes a free one."""
    try:
        port = parse_address(address)[1] if isinstance(address, str) else -1
    except UsageError:
        port = -1
    if port > 0 or (free and not port):
        return []
    least = "0" if free else "1"
    wanted = f"wanted host:port, such as 10.0.0.1:7070, with a port from {least} to {_LARGEST_PORT}"
    return [f"{name} is {address!r}, {wanted}"]


def probe_address(address: str) -> None:
    """Raise ``UsageError`` with the reason if a server cannot listen at this address now. Leaves no port open."""
    host, port = parse_address(address)
    faults: set[str] = set()
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"the server cannot listen at {address!r}: {error}; is {host!r} this machine?") from None
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # gRPC sets this too. Without it, closed connections of an earlier server block the port for a minute.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
            return
        except OSError as error:
            # Other errors, such as a missing IPv6, are left to gRPC, which then tries IPv4.
            if error.errno not in _BIND_FAULTS:
                return
            faults.add(_BIND_FAULTS[error.errno])
    raise UsageError(f"the server cannot listen at {address!r}: {'; '.join(sorted(faults))}")


def is_wildcard(host: str) -> bool:
    """Whether this stands for all addresses of a machine, such as 0.0.0.0, where servers only listen."""
    try:
        # Systems read "0" as 0.0.0.0, but `ipaddress` does not.
        number = ipaddress.ip_address("0.0.0.0" if host.isdecimal() and not int(host) else host)
    except ValueError:
        return False
    mapped = getattr(number, "ipv4_mapped", None)
    return number.is_unspecified or (mapped is not None and mapped.is_unspecified)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_host(host: str, bracketed: bool) -> bool:
    if bracketed:
        try:
            return bool(ipaddress.IPv6Address(host))
        except ValueError:
            return False
    return bool(host) and ":" not in host and host.isprintable() and " " not in host and not _INVALID & set(host)
