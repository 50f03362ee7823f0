"""Certificates and keys, given as PEM bytes or as the path of a file that holds them."""

import os
import ssl
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

from weft.core.errors import UsageError

Pem = bytes | str | Path
"""PEM bytes, or the path of a file."""


_BEGIN = "-----BEGIN"
_DATES = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


def read_pem(source: Any) -> bytes:
    """The bytes of a `Pem`, or those of the file. Raises ``UsageError`` if it cannot be read or holds no PEM.

    No error prints what may be a key, as a PEM that was given for a path.
    """
    if isinstance(source, PathLike):
        source = Path(cast("PathLike[str]", source))
    if not isinstance(source, bytes | str | Path):
        raise UsageError(f"a certificate or key is of type {type(source).__name__}, wanted PEM bytes, or a path")
    if not isinstance(source, bytes) and _BEGIN in str(source):
        raise UsageError("a certificate or key is the text of a PEM, wanted its bytes (encode() it), or a path")
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path that no system has
        raise UsageError(f"the certificate or key {str(source)!r} cannot be read: {error}") from None
    if _BEGIN.encode() not in data:
        where = "these bytes hold" if isinstance(source, bytes) else f"the file {str(source)!r} holds"
        raise UsageError(f"{where} no PEM block (-----BEGIN ...), wanted a certificate or key in PEM form")
    return data


def pair_faults(context: ssl.SSLContext, key: bytes, certificate: bytes) -> list[str]:
    """What is wrong with a key and its certificate; if nothing is, the context has them."""
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


def trust_faults(context: ssl.SSLContext, authority: bytes) -> list[str]:
    """What is wrong with the certificate of who is to be believed; if nothing is, the context does."""
    try:
        context.load_verify_locations(cadata=authority.decode("ascii", "replace"))
    except ssl.SSLError as error:
        return [f"the authority cannot be read: {error.reason or error}"]
    return []


def date_fault(server: ssl.SSLContext, certificate: bytes) -> str:
    """Why whoever trusts just this certificate refuses it for its dates, such as that it has expired; empty if not so.

    ``server`` is a context that has the certificate and its key, as `pair_faults` leaves it.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if trust_faults(client, certificate):
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
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        handle = os.memfd_create("weft")
        name = f"/proc/self/fd/{handle}"
    else:
        handle, name = tempfile.mkstemp()
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            yield name
    finally:
        if not name.startswith("/proc/"):
            Path(name).unlink()
