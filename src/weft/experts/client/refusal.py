"""What to do when the other end closes the door, which in TLS 1.3 happens without a word.

it ended the handshake    gRPC says "Socket closed", no more     it is asked once more, by hand; what was shown to it
it is not believed here   gRPC says "CERTIFICATE_VERIFY_FAILED"  what to look for
it has another name       gRPC says "Hostname Verification"      by which name to call it
all else                  "Connection refused", and the like     gRPC's words are enough
"""

import socket
import ssl

from weft.experts.address import split
from weft.experts.tls import ClientTls, pair_faults, read_pem
from weft.experts.wire import CertificateError, UnreachableError

_AT_THE_DOOR = ("socket closed", "handshake", "connection reset")
"""How connections end where certificates are missing or wrong."""
_NOT_BELIEVED = ("certificate_verify_failed", "hostname verification")
_PROBE = 1.0  # seconds for each word of a handshake by hand


def unreachable(
    address: str, tls: ClientTls | None, what: str, text: str, who: str = "this client", where: str = "tls="
) -> UnreachableError:
    """The error of a connection to ``address`` that was not made; ``what`` follows the address, gRPC says ``text``.

    A `CertificateError` where the certificates are at fault for sure.
    """
    lower = text.lower()
    refused = tls is not None and any(words in lower for words in _NOT_BELIEVED)
    if not refused and tls is not None and any(words in lower for words in _AT_THE_DOOR):
        refused = _hangs_up(address, tls)
    kind = CertificateError if refused else UnreachableError
    return kind(f"{address} {what}: {explained(text, tls, who, where)}")


def _hangs_up(address: str, tls: ClientTls) -> bool:
    """Whether the server ends a handshake that is complete, which it does for the certificate that it was shown, or for
    want of one. By itself a server of HTTP/2 speaks first.
    """
    host, port = split(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # whether it is believed here, gRPC has said; nothing is sent to it
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
