"""How a server behaves: how much one client may ask of it, how often it saves, and how it ends.

Everything that a stranger could fill is bounded here: connections, what one connection may have under way, frames.
"""

from dataclasses import dataclass, field, fields

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault, seconds_fault
from weft.experts.service.pem import Pem, read_pem
from weft.experts.wire.limits import Limits


@dataclass(frozen=True)
class ServerOptions:
    """Args:
    limits: of one frame; a longer one is refused before its second part is read.
    connections: streams at a time; one more is turned away. One client, by its proven name or else its host, may have
        half of them, or 64 where that is more.
    connection_calls, connection_bytes: what one stream may have under way, requests and answers. Beyond it the server
        reads no more from it until answers have left, and HTTP/2's flow control slows that client down, nobody else.
    total_bytes: what all streams together may have under way: 512 KiB for each stream, frames that are half here, and
        tensors of requests whose answers have not left. A call beyond it is refused with ``OverloadError`` before it
        is decoded, a stream beyond it is turned away. Calls of one client may take three quarters, beyond which they
        are refused with ``QuotaError``.
    longest_seconds: the deadline of a call that names none, or a later one.
    lease_seconds: how long the directory lists a server that does not renew; it renews three times as often.
    checkpoint_seconds: between two looks for experts that have stepped since they were saved.
    drain_seconds: how long accepted work may take when the server ends; then it is failed.
    """

    limits: Limits = field(default_factory=Limits)
    connections: int = 4096
    connection_calls: int = 1024
    connection_bytes: int = 256 << 20
    total_bytes: int = 4 << 30
    longest_seconds: float = 600.0
    lease_seconds: float = 5.0
    checkpoint_seconds: float = 30.0
    drain_seconds: float = 2.5

    def __post_init__(self) -> None:
        faults: list[str] = []
        for name in [each.name for each in fields(self) if each.name != "limits"]:
            check = seconds_fault if name.endswith("_seconds") else count_fault
            faults += check(name, getattr(self, name))
        if faults:
            raise UsageError(listed("these options of a server do not make sense:", faults))

    @property
    def client_connections(self) -> int:
        """The streams that one client may have."""
        return max(64, self.connections // 2)


@dataclass(frozen=True)
class ServerTls:
    """Certificates of a server, as PEM: bytes, or the path of a file.

    With ``authority``, clients must show a certificate that it has signed (mutual TLS); its common name is who they
    are. Files are read again when they have changed. One that has expired, or is not valid yet, is refused, since
    clients would refuse it; ``allow_expired`` serves with it all the same. Raises ``UsageError`` for files that cannot
    be read.
    """

    key: Pem = field(repr=False)
    certificate: Pem = field(repr=False)
    authority: Pem | None = field(default=None, repr=False)
    allow_expired: bool = False

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Key, certificate and authority as bytes."""
        authority = None if self.authority is None else read_pem(self.authority)
        return read_pem(self.key), read_pem(self.certificate), authority
