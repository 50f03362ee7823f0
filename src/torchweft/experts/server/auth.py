"""Authentication, authorization, and an audit log of refusals, all before the first tensor of a call is made.

    TLS certificate, common name "trainer-7"  ──┐   verified by gRPC; it takes precedence over a token
    metadata "authorization: Bearer s3cret"   ──┼──> client name ── grants ──> role for an expert
    neither                                   ──┘        ""

    Grant("trainer-*", "ffn.*", TRAIN)     the best matching grant counts; without one the call is refused

A connection is rejected as a whole if its token is unknown, or if its client has no grant at all.
"""

import hmac
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from ipaddress import IPv6Network
from typing import Any
from urllib.parse import unquote

from torchweft.core.errors import escape
from torchweft.core.validation import Validator, token_fault
from torchweft.experts.errors import ForbiddenError
from torchweft.experts.task import CallerStream
from torchweft.experts.wire.service import AUTHORIZATION, BEARER

_LOG = logging.getLogger("torchweft.experts.audit")
_AUDITED = 256  # remembered refusals
_NAME, _WHY = 128, 320  # longest name and reason in the log, in characters
_BURST, _PER_SECOND = 20, 2.0  # lines of the log: at once, and afterwards
_CACHED_ROLES = 4096
UNPROVEN, _PEER = "unproven:", "peer:"  # prefixes that proven names must not have
ANONYMOUS = "anonymous"  # Stands for the client of a call without a name


class Role(IntEnum):
    """Permissions of a client. Each role includes the previous ones. FORWARD also permits ``info``, ADMIN the status.

    Example:
        >>> weft.experts.server.Role.FORWARD < weft.experts.server.Role.TRAIN < weft.experts.server.Role.ADMIN
        True
    """

    NONE = 0
    FORWARD = 1
    TRAIN = 2
    ADMIN = 3


@dataclass(frozen=True)
class Grant:
    """A role for clients and experts with names that match shell patterns (``*``, ``?``, ``[ab]``).

    A client without a proven name has an empty one: ``"*"`` matches it, the default ``"?*"`` does not.

    Example:
        >>> weft.experts.server.Grant("reader", role=weft.experts.server.Role.FORWARD).expert
        '*'
    """

    client: str = "?*"
    expert: str = "*"
    role: Role = Role.TRAIN


OPEN = (Grant("*", role=Role.ADMIN),)


@dataclass(frozen=True)
class Caller:
    """The client of a connection: a proven ``name`` (empty without proof), and ``peer``, an address."""

    name: str
    peer: str
    stream: CallerStream = field(default_factory=CallerStream, repr=False, compare=False)

    @cached_property  # read several times for each call
    def principal(self) -> str:
        # Quotas count by it: the proven name, or else the host, because anybody can claim a name.
        return self.name or f"{_PEER}{_host_of(self.peer)}"

    @property
    def described(self) -> str:
        return f"client {self.name!r}" if self.name else f"a client without certificate or token ({self.peer})"


@dataclass(frozen=True)
class Access:
    """Grants and tokens of a server.

    Args:
    grants: by default every client that can connect can do everything.
    tokens: secret -> client name. Other tokens are rejected.

    Raises ``UsageError`` for invalid tokens, and for tokens without grants, which clients could simply leave out.

    Example:
        >>> from torchweft.experts.server import Access, Grant, Role
        >>> access = Access([Grant("trainer-*", "ffn.*", Role.TRAIN)], tokens={"s3cret": "trainer-7"})
        >>> server = weft.Server(access=access)
    """

    grants: Sequence[Grant] = OPEN
    tokens: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    def __post_init__(self) -> None:
        with Validator("invalid tokens") as check:
            for token, name in self.tokens.items():
                empty = [] if token and name else ["the token or the name is empty"]
                faults = empty or [*token_fault(token), _reserved_name_fault(name)]
                check.add(*(f"of client {name!r}: {fault}" for fault in faults if fault))
            closed = not self.tokens or self.grants is not OPEN
            check.require(closed, "there are tokens and no grants, so every client can do everything; give both")
        object.__setattr__(self, "grants", tuple(self.grants))  # a copy, because roles are cached

    def find_client(self, token: str) -> str | None:
        client = None
        for known, name in self.tokens.items():  # no early exit, which would reveal the position by its timing
            if hmac.compare_digest(known.encode(), token.encode("utf-8", "surrogatepass")):
                client = name
        return client

    @cached_property
    def role(self) -> Callable[[str, str], Role]:
        @lru_cache(_CACHED_ROLES)  # bounded, because clients choose the names
        def best_role(client: str, expert: str) -> Role:
            matching = [g for g in self.grants if fnmatchcase(client, g.client) and fnmatchcase(expert, g.expert)]
            return max((grant.role for grant in matching), default=Role.NONE)

        return best_role

    def admits(self, client: str, wanted: Role = Role.FORWARD) -> bool:
        return any(grant.role >= wanted and fnmatchcase(client, grant.client) for grant in self.grants)

    def refusal(self, caller: Caller, expert: str, wanted: Role, what: str) -> ForbiddenError:
        seen, place = self.role(caller.name, expert), repr(expert) if expert else "the whole server"
        return ForbiddenError(
            f"{caller.described} has role {seen.name} for {place} and asked for {what}, which takes role "
            f"{wanted.name}; ask the administrator of the server for a grant"
        )


@dataclass(frozen=True)
class Refusal:
    """One refused request. ``time``: seconds since the epoch."""

    time: float
    client: str
    peer: str
    expert: str
    what: str
    why: str


class Audit:
    """Writes refusals to the logger ``weft.experts.audit`` and remembers the last ones. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Refused clients control names and rate. Therefore names are escaped and shortened, and beyond a few lines per
        # second the log only gets a number.
        self._clock = clock
        self._tokens, self._filled = float(_BURST), clock()  # token bucket that limits the lines of the log
        self._unwritten = 0
        self._lock = threading.Lock()
        self._last: deque[Refusal] = deque(maxlen=_AUDITED)
        self._counts: Counter[str] = Counter()

    def refused(self, caller: Caller, expert: str, what: str, why: str) -> None:
        client, peer, uid = [escape(name, _NAME) for name in (caller.name, caller.peer, expert)]
        refusal = Refusal(time.time(), client, peer, uid, what, escape(why, _WHY))
        with self._lock:
            self._last.append(refusal)
            self._counts[what] += 1
            # The bucket is refilled here instead of by a timer: no refusal, no work.
            now = self._clock()
            self._tokens = min(float(_BURST), self._tokens + (now - self._filled) * _PER_SECOND)
            self._filled = now
            if self._tokens < 1:
                self._unwritten += 1
                return
            self._tokens -= 1
            unwritten, self._unwritten = self._unwritten, 0
        if unwritten:
            _LOG.warning("refused: %d more, too many to log each", unwritten)
        _LOG.warning("refused: client='%s' peer='%s' expert='%s' what=%s: %s", client, peer, uid, what, refusal.why)

    def last(self) -> list[Refusal]:
        with self._lock:
            return list(self._last)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


def _reserved_name_fault(name: str) -> str:
    # Such a name could be mistaken for an unproven one.
    unproven = f"it begins with {UNPROVEN!r} or {_PEER!r}, which are reserved for clients without a proven name"
    return unproven if name.startswith((UNPROVEN, _PEER)) else ""


def _host_of(peer: str) -> str:
    # For IPv6 the /64 network, because one host owns all addresses of it.
    host = peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
    with suppress(ValueError):
        if host.startswith("ipv6:"):
            return str(IPv6Network((unquote(host[5:]).strip("[]").partition("%")[0], 64), strict=False))
    return host


def authenticate(
    access: Access, tls: Mapping[Any, Any], metadata: Iterable[tuple[Any, Any]] | None, peer: str
) -> Caller:
    """The caller of a connection, from the authentication data of gRPC. Raises ``ForbiddenError``."""
    fields = dict(metadata or ())
    # gRPC lists the common name only of a client certificate that it has verified.
    names = tls.get("x509_common_name") or tls.get(b"x509_common_name") or ()
    name = next((name.decode("utf-8", "replace") for name in names), "")
    authorization = fields.get(AUTHORIZATION)
    if not name and authorization is not None:
        word = authorization.decode("utf-8", "replace") if isinstance(authorization, bytes) else str(authorization)
        name = access.find_client(word.removeprefix(BEARER)) if word.startswith(BEARER) else None
        if name is None:
            raise ForbiddenError(f"the token in the metadata {AUTHORIZATION!r} is not known here")
    caller = Caller(name, peer)
    if fault := _reserved_name_fault(caller.name):
        raise ForbiddenError(f"the name in the certificate of client {caller.name!r} cannot be used here: {fault}")
    if not access.admits(caller.name):
        raise ForbiddenError(f"nothing is granted to {caller.described}; ask the administrator for a grant")
    return caller
