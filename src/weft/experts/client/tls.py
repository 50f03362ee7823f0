"""How a client shows itself: over TLS, and by a token."""

from typing import Any

from weft.experts.checks import kind_fault, token_fault
from weft.experts.service.certificates import Certificates


class ClientTls(Certificates):
    """Certificates of a client of experts, as PEM bytes or paths; with ``key`` and ``certificate``, mutual TLS."""


def way_faults(tls: Any, token: Any) -> list[str]:
    """Of how a client shows itself."""
    return [*kind_fault("tls", tls, ClientTls, "a ClientTls", none=True), *token_fault(token)]
