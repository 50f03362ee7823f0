"""What to do when the other end closes the door, which in TLS 1.3 happens without a word.

it ended the handshake    gRPC says "Socket closed", no more     what was shown to it, and what to look for
it has another name       gRPC says "Hostname Verification"      by which name to call it
all else                  "Connection refused", and the like     gRPC's words are enough
"""

from weft.experts.client.tls import ClientTls

_AT_THE_DOOR = ("socket closed", "handshake", "connection reset")
"""How connections end where certificates are missing or wrong."""


def explained(text: str, tls: ClientTls | None, who: str = "this client", where: str = "tls=") -> str:
    """What gRPC says of a connection that was not made, to a server to which ``tls`` was shown, and what to do.

    ``who`` has shown it, and was given it as ``where``.
    """
    if "hostname verification" in text.lower():
        return (
            f"{text} Its certificate is for other names than that in the address: call it by one of those "
            f"(subjectAltName), or say which one it has by server_name= ({where})"
        )
    closed = any(words in text.lower() for words in _AT_THE_DOOR)
    return f"{text}; {_shown(tls, who, where)}" if closed else text


def _shown(tls: ClientTls | None, who: str, where: str) -> str:
    if tls is None:
        return f"it was spoken to without TLS: if it wants TLS, give {who} certificates ({where})"
    if tls.certificate is None:
        return (
            f"it was shown no certificate: if it asks for one, give key= and certificate= ({where}); and check that "
            f"authority= ({where}) has signed the server's"
        )
    return (
        f"check both ends' certificates: that of {who}, which the other's authority must have signed, and authority= "
        f"({where}), which must have signed the other's; and that neither has expired"
    )
