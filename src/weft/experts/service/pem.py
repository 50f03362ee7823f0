"""Certificates and keys, given as PEM bytes or as the path of a file that holds them."""

from os import PathLike
from pathlib import Path
from typing import Any, cast

from weft.core.errors import UsageError

Pem = bytes | str | Path
"""PEM bytes, or the path of a file."""


_BEGIN = "-----BEGIN"


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
