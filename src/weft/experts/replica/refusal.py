"""Why another server cannot be followed, out of what gRPC says of it.

the server has answered   who it is may not do this           ForbiddenError, in the server's words
it ended the handshake    gRPC says "Socket closed", no more  UnreachableError, with what was shown to it
it is not there           "Connection refused", and the like  UnreachableError
"""

from typing import Any, cast

import grpc

from weft.core.errors import WeftError
from weft.experts.client.channel import ClientTls
from weft.experts.wire import ForbiddenError, UnreachableError

_grpc = cast("Any", grpc)
_REFUSED = (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED)
_AT_THE_DOOR = ("socket closed", "handshake")
"""How connections end where certificates are missing or wrong: in TLS 1.3 the client is not told why."""


def refusal(error: Any, address: str, tls: ClientTls | None) -> WeftError:
    """What a server at ``address`` failed with, to which ``tls`` was shown. ``error`` is an ``RpcError``."""
    code, text = error.code(), str(error.details())
    if code in _REFUSED:
        return ForbiddenError(f"{address} refuses this server: {text}")
    closed = any(words in text.lower() for words in _AT_THE_DOOR)
    return UnreachableError(f"{address} cannot be followed: {text}" + (f"; {_shown(tls)}" if closed else ""))


def _shown(tls: ClientTls | None) -> str:
    if tls is None:
        return "it was spoken to without TLS: if it wants TLS, give this server certificates (tls= of ReplicaOptions)"
    if tls.certificate is None:
        return "it was shown no certificate: if it asks for one, give key= and certificate= (tls= of ReplicaOptions)"
    return (
        "check both ends' certificates: this server's, which the other's authority must have signed, and authority= "
        "(tls= of ReplicaOptions), which must have signed the other's; and that neither has expired"
    )
