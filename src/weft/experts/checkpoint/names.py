"""The name of an expert as the name of a folder, whatever the expert is called.

    ffn.3.14      ffn.3.14             letters a-z, digits, "-", "_" and "." stand for themselves
    Ffn           %46fn                not all file systems tell large from small letters
    ../../etc     %2E.%2F..%2Fetc      no name leads out of the root, and none starts with a dot
    ä             %C3%A4
    (too long)    %~ and a hash        file systems end at 255 bytes

Two experts never share a folder: the encoding can be undone, and the hash is a cryptographic one.
"""

from hashlib import blake2b

from weft.core.errors import UsageError

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_.")
LONGEST = 200
"""Bytes of a folder's name; what would be longer is a hash."""


def folder_name(uid: str) -> str:
    """A safe folder name for this uid. Raises ``UsageError`` for an empty one."""
    if not uid:
        raise UsageError("an expert's uid is empty; wanted at least one character")
    data = uid.encode("utf-8", "surrogatepass")
    signs = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in data]
    if signs[0] == ".":
        signs[0] = "%2E"
    name = "".join(signs)
    return name if len(name) <= LONGEST else f"%~{blake2b(data, digest_size=32).hexdigest()}"
