"""How one end of a connection shows itself over TLS, and whom it believes."""

import ssl
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from weft.core.errors import UsageError, listed
from weft.experts.service.pem import Pem, date_fault, pair_faults, read_pem, trust_faults

_grpc = cast("Any", grpc)


@dataclass(frozen=True)
class Certificates:
    """As PEM bytes or paths.

    Args:
        authority: who has signed the other end's certificate; None: those that the system trusts.
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
        """As gRPC wants them. Raises ``UsageError`` that lists what is wrong with the files: gRPC would say nothing
        before the first call, and then only that there is no connection."""
        pems = [None if one is None else read_pem(one) for one in (self.authority, self.key, self.certificate)]
        authority, key, certificate = pems
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # how long a key must be is for gRPC to say
        faults: list[str] = []
        if key is not None and certificate is not None:
            faults = pair_faults(context, key, certificate) or _date_faults(key, certificate)
        faults += [] if authority is None else trust_faults(context, authority)
        if faults:
            raise UsageError(listed("these certificates (tls=) cannot be used:", faults))
        return _grpc.ssl_channel_credentials(*pems)

    def options(self) -> list[tuple[str, str]]:
        """What a channel is to be told besides."""
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]


def _date_faults(key: bytes, certificate: bytes) -> list[str]:
    """What is wrong with the dates of one's own certificate, which the other end would refuse without a word."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    pair_faults(context, key, certificate)
    why = date_fault(context, certificate)
    return [f"the other end will refuse the certificate: {why}"] if why else []
