"""TLS and tokens: how each end of a connection proves itself, and which peers it trusts.

    Certificates   of a client: of experts (`ClientTls`) or of etcd; checked when its channel is made
    ServerTls      of a server: checked before it listens, and reloaded when its files have changed

    start       read ── check ── listen            gRPC itself only reports that it cannot listen
    handshake   changed? ── read ── check ── used from now on         open connections are not affected
                                      '── a fault: logged, and the old ones stay (perhaps only one file is new)

gRPC checks that a server's certificate is for the host of its address (or for ``server_name``). This is not enough if
the address comes from a directory, because every writer of the directory chooses the host. A client could list its own
host there, with the certificate that the same authority signed for it. Therefore the host must also match ``servers``.
"""

import logging
import os
import socket
import ssl
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

import grpc

from torchweft.core.errors import UsageError
from torchweft.core.validation import Validator, token_fault
from torchweft.experts.address import address_fault, is_loopback, parse_address
from torchweft.experts.errors import CertificateError, UnreachableError

_LOG = logging.getLogger("torchweft.experts.tls")
_grpc = cast("Any", grpc)
_BEGIN = "-----BEGIN"
# gRPC's messages for connections with missing or wrong certificates.
# The last one: the other end accepted the connection, but waited for TLS until gRPC's timeout.
_HANDSHAKE_ENDED = ("socket closed", "handshake", "connection reset", "before receiving settings frame")
# The last two are for a renewed authority, which has its old name and another key. BoringSSL takes it for the signer
# because of the name, and then reports an error of the signature algorithm instead of a failed verification.
_REJECTED = ("certificate_verify_failed", "hostname verification", "certificate signature failure", "bad_signature")
_NOT_LISTENING = ("connection refused", "no route to host", "timed out", "timeout")
_PROBE = 1.0  # timeout of each message of the handshake in `_rejects_certificate`
_DATES = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED

Pem = bytes | str | Path  # PEM bytes, or the path of a PEM file


@dataclass(frozen=True)
class Certificates:
    """Certificates of a client, as PEM bytes or paths.

    ``authority``: signer of the server's certificate. None: the authorities that the system trusts. ``server_name``:
    the name in the server's certificate, if it differs from the host in the address.
    """

    authority: Pem | None = field(default=None, repr=False)
    key: Pem | None = field(default=None, repr=False)
    certificate: Pem | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.key is None) != (self.certificate is None):
            raise UsageError("a key goes with its certificate: give both key= and certificate=, or neither")

    def credentials(self) -> Any:
        """gRPC's credentials. Raises ``UsageError`` that lists every fault of the files."""
        # gRPC would accept invalid files, and later only report that the server is unavailable.
        sources = (self.authority, self.key, self.certificate)
        pems = [None if source is None else read_pem(source) for source in sources]
        _check_pems(*pems)
        return _grpc.ssl_channel_credentials(*pems)

    def options(self) -> list[tuple[str, str]]:
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]


@dataclass(frozen=True)
class ClientTls(Certificates):
    """Certificates of a client of experts. With ``key`` and ``certificate``: mutual TLS.

    ``servers``: patterns for the names in the servers' certificates. Other servers are rejected. Empty: any name that
    the authority has signed, which is not allowed with a directory.

    Example:
        >>> from torchweft.experts.client import ClientTls
        >>> tls = ClientTls(authority="/tls/ca.crt", servers=["experts-*.lab"])  # weft.RemoteExpert(..., tls=tls)
    """

    servers: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        patterns: Any = self.servers
        if isinstance(patterns, str) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise UsageError(f"servers is {patterns!r}, wanted a list of patterns such as ['torchweft-*.torchweft']")


@dataclass(frozen=True)
class ServerTls:
    """Certificates of a server. Files are reloaded when they have changed.

    With ``authority``, clients must show a certificate that it has signed (mutual TLS). Its common name is the client's
    name. ``allow_expired``: accept a certificate that has expired or is not valid yet, although clients reject it.
    """

    key: Pem = field(repr=False)
    certificate: Pem = field(repr=False)
    authority: Pem | None = field(default=None, repr=False)
    allow_expired: bool = False

    def credentials(self) -> Any:
        stamps, first = self._file_stamps(), self._load()

        # gRPC calls this in its own threads for every new connection. None keeps the present certificates.
        def reload() -> Any:
            nonlocal stamps
            seen = self._file_stamps()
            if seen == stamps:
                return None
            stamps = seen
            try:
                return self._load()
            except UsageError as error:
                _LOG.warning("new certificates are not used, the old ones stay: %s", error)
                return None

        return _grpc.dynamic_ssl_server_credentials(first, reload, self.authority is not None)

    def _file_stamps(self) -> list[tuple[int, ...]]:
        stamps: list[tuple[int, ...]] = []
        for source in (self.key, self.certificate, self.authority):
            if isinstance(source, str | Path):
                with suppress(OSError, ValueError):  # `_load` raises a better error
                    stat = Path(source).stat()
                    stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return stamps

    def _load(self) -> Any:
        key, certificate = read_pem(self.key), read_pem(self.certificate)
        authority = None if self.authority is None else read_pem(self.authority)
        _check_pems(authority, key, certificate, allow_expired=self.allow_expired)
        return _grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def _check_pems(
    authority: bytes | None, key: bytes | None, certificate: bytes | None, *, allow_expired: bool = False
) -> None:
    # A server context for clients, too: only a handshake with a server reveals whether a date is wrong.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # gRPC decides about the length of keys
    with Validator("these certificates (tls=) cannot be used") as check:
        if key is not None and certificate is not None:
            check.add(*pair_faults(context, key, certificate))
            if not check.faults and (why := _date_fault(context, certificate)):
                advice = "renew it, or let a server use it with allow_expired=True"
                fault = f"the other end will reject the certificate: {why}; {advice}"
                if check.require(allow_expired, fault):
                    _LOG.warning(fault)
        if authority is not None:
            check.add(*_authority_faults(context, authority))


# Servers that a client can call.


def credential_faults(tls: Any, token: Any) -> list[str]:
    check = Validator("invalid credentials")
    check.instance("tls", tls, ClientTls, "a ClientTls", optional=True)
    return [*check.faults, *token_fault(token)]


def address_faults(address: str, tls: ClientTls | None, token: str | None) -> list[str]:
    if faults := address_fault("the address of a server", address):
        return faults
    host = parse_address(address)[0]
    if tls is None:
        if token is None or is_loopback(host):
            return []
        return [f"a token would be sent to {address} in plain text; give tls= (not needed for this machine itself)"]
    name = tls.server_name or host
    if not tls.servers or any(fnmatchcase(name.lower(), pattern.lower()) for pattern in tls.servers):
        return []
    return [f"refusing to connect to {address}: {name!r} does not match servers={list(tls.servers)!r}"]


def check_address(address: str, tls: ClientTls | None, token: str | None) -> None:
    with Validator("invalid transport options") as check:
        check.add(*address_faults(address, tls, token))


def directory_faults(tls: ClientTls | None) -> list[str]:
    # A directory that others can write to chooses the addresses.
    if tls is None or tls.servers or tls.server_name:
        return []
    return [
        "tls= has no servers=, so every writer of the directory could impersonate a server with any certificate of "
        "the authority; give the names in the servers' certificates, such as servers=['torchweft-*.torchweft']"
    ]


# Failed connections.


def unreachable(
    address: str, tls: ClientTls | None, action: str, text: str, end: str = "this client", option: str = "tls="
) -> UnreachableError:
    """The error of a failed connection: a `CertificateError` if the certificates are certainly the cause."""
    lower, rejected = text.lower(), False
    if tls is not None:
        ended = any(words in lower for words in _HANDSHAKE_ENDED)
        # The probe is a second connection, so it is made only where gRPC's message leaves the cause open.
        rejected = any(words in lower for words in _REJECTED) or (ended and _rejects_certificate(address, tls))
    kind = CertificateError if rejected else UnreachableError
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


# PEM blocks.


def read_pem(source: Any) -> bytes:
    """The bytes of a `Pem`. Raises ``UsageError``, which never quotes data, because it could be a key."""
    if isinstance(source, PathLike):
        source = Path(cast("PathLike[str]", source))
    if not isinstance(source, bytes | str | Path) or (not isinstance(source, bytes) and _BEGIN in str(source)):
        wanted = "the bytes of a PEM (encode() its text), or a path"
        raise UsageError(f"a certificate or key is of type {type(source).__name__}, wanted {wanted}")
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: e.g. a path with a zero byte
        raise UsageError(f"the certificate or key {str(source)!r} cannot be read: {error}") from None
    if _BEGIN.encode() not in data:
        where = "these bytes hold" if isinstance(source, bytes) else f"the file {str(source)!r} holds"
        raise UsageError(f"{where} no PEM block (-----BEGIN ...), wanted a certificate or key in PEM form")
    return data


def pair_faults(context: ssl.SSLContext, key: bytes, certificate: bytes) -> list[str]:
    """Faults of a key and its certificate. Without faults, they are loaded into the context."""
    asked: list[bool] = []

    def password() -> str:  # without this callback, OpenSSL would prompt on the terminal
        asked.append(True)
        return ""

    with _as_file(key) as key_file, _as_file(certificate) as certificate_file:
        try:
            context.load_cert_chain(certificate_file, key_file, password)
        except ssl.SSLError as error:
            if asked:
                return ["the key is encrypted with a password, wanted one without"]
            if error.reason == "KEY_VALUES_MISMATCH":
                return ["the key is that of another certificate"]
            return [f"the key or the certificate cannot be read: {error.reason or error}"]
    return []


def _authority_faults(context: ssl.SSLContext, authority: bytes) -> list[str]:
    try:
        context.load_verify_locations(cadata=authority.decode("ascii", "replace"))
    except ssl.SSLError as error:
        return [f"the authority cannot be read: {error.reason or error}"]
    return []


def _date_fault(server: ssl.SSLContext, certificate: bytes) -> str:
    """The reason why a peer rejects the dates of this certificate; "" if it accepts them."""
    # `ssl` parses dates only during verification. Therefore this runs a handshake in memory, between a client that
    # trusts only this certificate and a server with its key.
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if _authority_faults(client, certificate):
        return ""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    # Client hello, server hello, verification: two rounds bring the client to the certificate.
    for end in [*ends, *ends]:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message if error.verify_code in _DATES else ""
        except ssl.SSLError:
            return ""
    return ""


@contextmanager
def _as_file(data: bytes) -> Generator[str]:
    """A temporary file with these bytes, because `ssl` only loads files. In memory if possible: it can be a key."""
    with NamedTemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        file.write(data)
        file.flush()
        yield file.name
