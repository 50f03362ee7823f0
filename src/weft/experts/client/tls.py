"""How a client shows itself: over TLS, and by a token; and which servers it shows itself to.

gRPC checks that a server's certificate is for the host of its address (or for ``server_name``). Which host that is, a
directory tells, and whoever can write there. So the host has to be one of ``servers`` as well: then the certificate is
that of a server, and not that of any client which the same authority has signed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from weft.core.errors import UsageError, listed
from weft.experts.checks import kind_fault, token_fault
from weft.experts.directory import Directory, LocalDirectory
from weft.experts.service.address import address_fault, is_loopback, split
from weft.experts.service.certificates import Certificates


@dataclass(frozen=True)
class ClientTls(Certificates):
    """Certificates of a client of experts, as PEM bytes or paths; with ``key`` and ``certificate``, mutual TLS.

    ``servers``: patterns (``*``, ``?``, ``[ab]``) of the names that servers have in their certificates, such as
    ``["weft-*.weft"]``; a server at another name is not spoken to. Empty: any name that the authority has signed, which
    is refused where a directory says where servers are.
    """

    servers: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        patterns: Any = self.servers
        if isinstance(patterns, str) or not all(isinstance(each, str) and each for each in patterns):
            raise UsageError(f"servers is {patterns!r}, wanted a list of patterns such as ['weft-*.weft']")


def way_faults(tls: Any, token: Any) -> list[str]:
    """Of how a client shows itself."""
    return [*kind_fault("tls", tls, ClientTls, "a ClientTls", none=True), *token_fault(token)]


def address_faults(address: str, tls: ClientTls | None, token: str | None) -> list[str]:
    """Why nobody is to be spoken to at this address."""
    if faults := address_fault("the address of a server", address):
        return faults
    host = split(address)[0]
    if tls is None:
        if token is None or is_loopback(host):
            return []
        return [f"a token would go to {address} in plain text; give tls= (only to this machine it goes without)"]
    name = tls.server_name or host
    if not tls.servers or any(fnmatchcase(name.lower(), each.lower()) for each in tls.servers):
        return []
    return [f"{address} is not spoken to: {name!r} is none of servers={list(tls.servers)!r}"]


def check_address(address: str, tls: ClientTls | None, token: str | None) -> None:
    """Raise ``UsageError`` if nobody is to be spoken to at this address."""
    if faults := address_faults(address, tls, token):
        raise UsageError(listed("there is no way to a server like this:", faults))


def directory_faults(directory: Directory | None, tls: ClientTls | None) -> list[str]:
    """Of certificates for servers that a directory names. One in this process is nobody else's to write."""
    told_elsewhere = directory is not None and not isinstance(directory, LocalDirectory)
    if not told_elsewhere or tls is None or tls.servers or tls.server_name:
        return []
    return [
        "tls= names no servers=, so that whoever can write to the directory could stand for one with any certificate "
        "of the authority; say which names servers have in theirs, such as servers=['weft-*.weft']"
    ]
