"""Who a connection belongs to, out of what gRPC knows of it.

    TLS with a client certificate   its common name; gRPC has verified the certificate
    "authorization: Bearer TOKEN"   the client whose token it is; a certificate goes before
    neither                         nobody

A connection is refused as a whole if its token is unknown, or if nothing is granted to whoever it is.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from weft.experts.errors import ForbiddenError
from weft.experts.server.access import Access, Caller, name_fault
from weft.experts.service.names import AUTHORIZATION, BEARER, TRACEPARENT

_FORM = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def identify(access: Access, tls: Mapping[Any, Any], metadata: Iterable[tuple[Any, Any]] | None, peer: str) -> Caller:
    """The caller. Raises ``ForbiddenError`` for an unknown token, and for whom no grant is meant."""
    found = tuple(metadata or ())
    caller = Caller(_certified(tls) or _by_token(access, found), peer, _trace(found))
    for fault in name_fault(caller.name):
        raise ForbiddenError(f"the name in the certificate of client {caller.name!r} cannot be used here: {fault}")
    if not access.admits(caller.name):
        who = f"client {caller.name!r}" if caller.name else "a client without certificate or token"
        raise ForbiddenError(f"nothing is granted to {who}; ask whoever runs the server for a grant")
    return caller


def _trace(metadata: Iterable[tuple[Any, Any]]) -> str:
    """The traceparent; empty if there is none, or what is no traceparent."""
    words = [str(value) for key, value in metadata if key == TRACEPARENT]
    return words[-1] if words and _FORM.fullmatch(words[-1]) else ""


def _certified(tls: Mapping[Any, Any]) -> str:
    """The common name of the client's certificate; empty without one."""
    names = tls.get("x509_common_name") or tls.get(b"x509_common_name") or ()
    return next((name.decode("utf-8", "replace") for name in names), "")


def _by_token(access: Access, metadata: Iterable[tuple[Any, Any]] | None) -> str:
    words = [value for key, value in metadata or () if key == AUTHORIZATION]
    if not words:
        return ""
    word = words[-1].decode("utf-8", "replace") if isinstance(words[-1], bytes) else str(words[-1])
    name = access.named(word.removeprefix(BEARER)) if word.startswith(BEARER) else None
    if name is None:
        raise ForbiddenError(f"the token in the metadata {AUTHORIZATION!r} is not known here")
    return name
