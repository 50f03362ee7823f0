"""How a client shows itself over TLS."""

from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from weft.core.errors import UsageError
from weft.experts.service.pem import Pem, read_pem

_grpc = cast("Any", grpc)


@dataclass(frozen=True)
class ClientTls:
    """Certificates of a client, as PEM bytes or paths.

    Args:
        authority: who has signed the server's certificate; None: those that the system trusts.
        key, certificate: the client's own, for mutual TLS; both or neither.
        server_name: what the server's certificate says, where that is not the name in the address.
    """

    authority: Pem | None = field(default=None, repr=False)
    key: Pem | None = field(default=None, repr=False)
    certificate: Pem | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.key is None) != (self.certificate is None):
            raise UsageError("a client certificate takes both key= and certificate=; one of them is missing")

    def credentials(self) -> Any:
        """As gRPC wants them."""
        pems = [None if one is None else read_pem(one) for one in (self.authority, self.key, self.certificate)]
        return _grpc.ssl_channel_credentials(*pems)
