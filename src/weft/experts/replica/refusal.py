"""Why another server cannot be followed, out of what gRPC says of it.

the server has answered   who it is may not do this           ForbiddenError, in the server's words
it ended the handshake    gRPC says "Socket closed", no more  UnreachableError, with what was shown to it
it is not there           "Connection refused", and the like  UnreachableError
"""

from typing import Any, cast

import grpc

from weft.core.errors import WeftError
from weft.experts.client.transport import unreachable
from weft.experts.tls import ClientTls
from weft.experts.wire import ForbiddenError

_grpc = cast("Any", grpc)
_REFUSED = (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED)


def refusal(error: Any, address: str, tls: ClientTls | None) -> WeftError:
    """What a server at ``address`` failed with, to which ``tls`` was shown. ``error`` is an ``RpcError``."""
    code, text = error.code(), str(error.details())
    if code in _REFUSED:
        return ForbiddenError(f"{address} refuses this server: {text}")
    return unreachable(address, tls, "cannot be followed", text, "this server", "tls= of ReplicaOptions")
