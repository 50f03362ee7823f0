"""Certificates and keys, given as PEM bytes or as the path of a file that holds them."""

from pathlib import Path

from weft.core.errors import UsageError

Pem = bytes | str | Path
"""PEM bytes, or the path of a file."""


def read_pem(source: Pem) -> bytes:
    """The bytes, or those of the file. Raises ``UsageError`` if it cannot be read or holds no PEM."""
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(f"the certificate or key {str(source)!r} cannot be read: {error}") from None
    if b"-----BEGIN" not in data:
        where = "these bytes hold" if isinstance(source, bytes) else f"the file {str(source)!r} holds"
        raise UsageError(f"{where} no PEM block (-----BEGIN ...), wanted a certificate or key in PEM form")
    return data
