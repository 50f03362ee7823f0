"""A server's certificates: checked before it listens, and read again when their files have changed.

start       read ── check ── listen            a fault is told as what it is: gRPC only says that it cannot listen
handshake   changed? ── read ── check ── from now on these        connections that are open stay as they are
                                  '── a fault: logged, and the old ones stay (half of the files may be new)
"""

import logging
import ssl
from pathlib import Path
from typing import Any, cast

import grpc

from weft.core.errors import UsageError, listed
from weft.experts.server.options import ServerTls
from weft.experts.service.pem import date_fault, pair_faults, trust_faults

_LOG = logging.getLogger("weft.experts.tls")
_grpc = cast("Any", grpc)
_Pems = tuple[bytes, bytes, bytes | None]


def server_credentials(tls: ServerTls) -> Any:
    """As gRPC wants them. Raises ``UsageError`` that lists what is wrong with the files."""
    source = _Source(tls)
    return _grpc.dynamic_ssl_server_credentials(source.first, source.changed, tls.authority is not None)


class _Source:
    """The files, as of the last look. `changed` is called by gRPC for each new connection, in threads of its own."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._files = [Path(one) for one in (tls.key, tls.certificate, tls.authority) if isinstance(one, str | Path)]
        self._stamps = self._seen()
        self.first = _configuration(_read(tls))

    def changed(self) -> Any:
        """What holds from now on; None: what held before."""
        stamps = self._seen()
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        try:
            return _configuration(_read(self._tls))
        except UsageError as error:
            _LOG.warning("new certificates are not used, the old ones stay: %s", error)
            return None

    def _seen(self) -> list[tuple[int, ...]]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except (OSError, ValueError):  # what is wrong with it, who reads it tells
        return ()
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _configuration(pems: _Pems) -> Any:
    key, certificate, authority = pems
    return _grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def _read(tls: ServerTls) -> _Pems:
    """What the files hold. Raises ``UsageError`` if it is of no use; a wrong date is logged if it is allowed."""
    key, certificate, authority = tls.read()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    faults = pair_faults(context, key, certificate)
    if authority is not None:
        faults += trust_faults(context, authority)
    if faults:
        raise UsageError(listed("the server cannot use these certificates (tls=):", faults))
    if why := date_fault(context, certificate):
        if not tls.allow_expired:
            raise UsageError(
                f"clients will refuse the certificate of this server (tls=): {why}; renew it, or serve with it all the "
                "same by allow_expired=True"
            )
        _LOG.warning("clients will refuse the certificate of this server: %s", why)
    return key, certificate, authority
