"""TLS and tokens: how each end of a connection proves itself, and which peers it trusts.

    Certificates   of a client: of experts (`ClientTls`) or of etcd; checked when its channel is made
    ServerTls      of a server: checked before it listens, and read again when its files have changed

    start       read ── check ── listen            gRPC itself only says that it cannot listen
    handshake   changed? ── read ── check ── used from now on         open connections stay as they are
                                      '── a fault: logged, and the old ones stay (half of the files may be new)

gRPC checks that a server's certificate is for the host of its address (or for ``server_name``). That host comes from a
directory, and so from everyone who can write there. Hence the host has to be one of ``servers`` as well: then the
certificate is that of a server, and not that of any client which the same authority has signed.
"""

import logging
import os
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

from weft.core.errors import UsageError
from weft.core.validation import Validator, token_fault
from weft.experts.address import address_fault, is_loopback, parse_address

_LOG = logging.getLogger("weft.experts.tls")
_grpc = cast("Any", grpc)
_BEGIN = "-----BEGIN"
_DATES = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED

Pem = bytes | str | Path
"""PEM bytes, or the path of a file."""


@dataclass(frozen=True)
class Certificates:
    """Certificates of a client, as PEM bytes or paths.

    Args:
        authority: signer of the other end's certificate; None: those that the system trusts.
        key, certificate: one's own, if the other end asks for it; both or neither.
        server_name: what the other end's certificate says, where that is not the name in the address.
    """

    authority: Pem | None = field(default=None, repr=False)
    key: Pem | None = field(default=None, repr=False)
    certificate: Pem | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.key is None) != (self.certificate is None):
            raise UsageError("a key goes with its certificate: give both key= and certificate=, or neither")

    def credentials(self) -> Any:
        """gRPC's credentials. Raises ``UsageError`` that lists what is wrong with the files: gRPC would say nothing
        before the first call, and then only that there is no connection."""
        pems = [None if one is None else read_pem(one) for one in (self.authority, self.key, self.certificate)]
        _check(*pems)
        return _grpc.ssl_channel_credentials(*pems)

    def options(self) -> list[tuple[str, str]]:
        """Options of a channel with these certificates."""
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]


@dataclass(frozen=True)
class ClientTls(Certificates):
    """Certificates of a client of experts, as PEM bytes or paths; with ``key`` and ``certificate``, mutual TLS.

    ``servers``: patterns (``*``, ``?``, ``[ab]``) of the names that servers have in their certificates; a server at
    another name is refused. Empty: any name that the authority has signed; refused with a directory.

    Example:
        >>> from weft.experts.client import ClientTls
        >>> tls = ClientTls(authority="/tls/ca.crt", servers=["weft-*.weft"])  # weft.RemoteExpert(..., tls=tls)
    """

    servers: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        patterns: Any = self.servers
        if isinstance(patterns, str) or not all(isinstance(each, str) and each for each in patterns):
            raise UsageError(f"servers is {patterns!r}, wanted a list of patterns such as ['weft-*.weft']")


@dataclass(frozen=True)
class ServerTls:
    """Certificates of a server, as PEM: bytes, or the path of a file.

    With ``authority``, clients must show a certificate that it has signed (mutual TLS); its common name is their
    name. Files are read again when they have changed. ``allow_expired``: serve with one that has expired or is not
    valid yet, though clients would refuse it. Raises ``UsageError`` for files that cannot be read.
    """

    key: Pem = field(repr=False)
    certificate: Pem = field(repr=False)
    authority: Pem | None = field(default=None, repr=False)
    allow_expired: bool = False

    def credentials(self) -> Any:
        """gRPC's credentials, which follow the files. Raises ``UsageError`` that lists what is wrong with them."""
        stamps, first = self._stamps(), self._read()

        def changed() -> Any:  # called by gRPC for each new connection, in threads of its own; None: as before
            nonlocal stamps
            seen = self._stamps()
            if seen == stamps:
                return None
            stamps = seen
            try:
                return self._read()
            except UsageError as error:
                _LOG.warning("new certificates are not used, the old ones stay: %s", error)
                return None

        return _grpc.dynamic_ssl_server_credentials(first, changed, self.authority is not None)

    def _stamps(self) -> list[tuple[int, ...]]:
        stamps: list[tuple[int, ...]] = []
        for one in (self.key, self.certificate, self.authority):
            if isinstance(one, str | Path):
                with suppress(OSError, ValueError):  # reading it says what is wrong
                    found = Path(one).stat()
                    stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        return stamps

    def _read(self) -> Any:
        key, certificate = read_pem(self.key), read_pem(self.certificate)
        authority = None if self.authority is None else read_pem(self.authority)
        _check(authority, key, certificate, allow_expired=self.allow_expired)
        return _grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def _check(
    authority: bytes | None, key: bytes | None, certificate: bytes | None, *, allow_expired: bool = False
) -> None:
    """Raise ``UsageError`` that lists why these are of no use; a wrong date is logged where it is allowed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # also for a client's own: a server can be asked for its dates
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # how long a key must be is for gRPC to say
    with Validator("these certificates (tls=) cannot be used") as check:
        if key is not None and certificate is not None:
            check.add(*pair_faults(context, key, certificate))
            if not check.faults and (why := _date_fault(context, certificate)):
                mend = "renew it, or have a server use it by allow_expired=True"
                fault = f"the other end will refuse the certificate: {why}; {mend}"
                if check.that(allow_expired, fault):
                    _LOG.warning(fault)
        if authority is not None:
            check.add(*_authority_faults(context, authority))


# Servers that a client may call.


def credential_faults(tls: Any, token: Any) -> list[str]:
    """What is wrong with the arguments by which a client proves itself."""
    check = Validator("invalid credentials")
    check.instance("tls", tls, ClientTls, "a ClientTls", optional=True)
    return [*check.faults, *token_fault(token)]


def address_faults(address: str, tls: ClientTls | None, token: str | None) -> list[str]:
    """Why a client must not speak to a server at this address."""
    if faults := address_fault("the address of a server", address):
        return faults
    host = parse_address(address)[0]
    if tls is None:
        if token is None or is_loopback(host):
            return []
        return [f"a token would go to {address} in plain text; give tls= (only to this machine it goes without)"]
    name = tls.server_name or host
    if not tls.servers or any(fnmatchcase(name.lower(), each.lower()) for each in tls.servers):
        return []
    return [f"{address} is not spoken to: {name!r} is none of servers={list(tls.servers)!r}"]


def check_address(address: str, tls: ClientTls | None, token: str | None) -> None:
    """Raise ``UsageError`` for an address that a client must not speak to."""
    with Validator("invalid transport options") as check:
        check.add(*address_faults(address, tls, token))


def directory_faults(tls: ClientTls | None) -> list[str]:
    """Faults of certificates for servers that are listed by a directory which others can write to."""
    if tls is None or tls.servers or tls.server_name:
        return []
    return [
        "tls= names no servers=, so that whoever can write to the directory could stand for one with any certificate "
        "of the authority; say which names servers have in theirs, such as servers=['weft-*.weft']"
    ]


# PEM blocks.


def read_pem(source: Any) -> bytes:
    """The bytes of a `Pem`, or those of the file. Raises ``UsageError``, which never prints what may be a key."""
    if isinstance(source, PathLike):
        source = Path(cast("PathLike[str]", source))
    if not isinstance(source, bytes | str | Path) or (not isinstance(source, bytes) and _BEGIN in str(source)):
        wanted = "the bytes of a PEM (encode() its text), or a path"
        raise UsageError(f"a certificate or key is of type {type(source).__name__}, wanted {wanted}")
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path that no system has
        raise UsageError(f"the certificate or key {str(source)!r} cannot be read: {error}") from None
    if _BEGIN.encode() not in data:
        where = "these bytes hold" if isinstance(source, bytes) else f"the file {str(source)!r} holds"
        raise UsageError(f"{where} no PEM block (-----BEGIN ...), wanted a certificate or key in PEM form")
    return data


def pair_faults(context: ssl.SSLContext, key: bytes, certificate: bytes) -> list[str]:
    """What is wrong with a key and its certificate; if nothing is, they are loaded into the context."""
    asked: list[bool] = []

    def password() -> str:  # without it, a terminal would be asked
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
    """What is wrong with the certificate of an authority; if nothing is, the context trusts it."""
    try:
        context.load_verify_locations(cadata=authority.decode("ascii", "replace"))
    except ssl.SSLError as error:
        return [f"the authority cannot be read: {error.reason or error}"]
    return []


def _date_fault(server: ssl.SSLContext, certificate: bytes) -> str:
    """Why a peer that trusts just this certificate refuses it for its dates, such as that it has expired; else "".

    `ssl` parses no dates of what it does not verify, so this is a handshake in memory with a context that has its key.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if _authority_faults(client, certificate):
        return ""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
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
    """A file of these bytes, which `ssl` wants; in memory where that is possible, as it may be a key."""
    with NamedTemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        file.write(data)
        file.flush()
        yield file.name
