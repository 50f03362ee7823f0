"""Authentication, authorization, and an audit log of refusals. All of it happens before a tensor of the call is made.

    TLS certificate, common name "trainer-7"  ──┐   gRPC has verified it; it goes before a token
    metadata "authorization: Bearer s3cret"   ──┼──> client name ── grants ──> role for an expert
    neither                                   ──┘        ""

    Grant("trainer-*", "ffn.*", TRAIN)     the best grant that fits counts; none: refused

A connection is refused as a whole if its token is unknown, or if nothing is granted to its client.
"""

import hmac
import logging
import re
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

from weft.core.errors import escaped
from weft.core.validation import Validator, token_fault
from weft.experts.errors import ForbiddenError
from weft.experts.task import CallerStream
from weft.experts.wire.service import AUTHORIZATION, BEARER, TRACEPARENT

_LOG = logging.getLogger("weft.experts.audit")
_AUDITED = 256  # refusals that are remembered
_NAME, _WHY = 128, 320  # characters of a name, and of a reason, in the log
_BURST, _PER_SECOND = 20, 2.0  # lines of the log: so many at once, and from then on
_CACHED_ROLES = 4096
_UNPROVEN, _PEER = "unproven:", "peer:"  # how no proven name begins
_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
ANONYMOUS = "anonymous"
"""The client of calls that name none."""


class Role(IntEnum):
    """What a client may do; each includes those before it. FORWARD also allows ``info``, ADMIN the server's status.

    Example:
        >>> from weft.experts.server import Role
        >>> Role.FORWARD < Role.TRAIN < Role.ADMIN
        True
    """

    NONE = 0
    FORWARD = 1
    TRAIN = 2
    ADMIN = 3


@dataclass(frozen=True)
class Grant:
    """Clients and experts by shell patterns (``*``, ``?``, ``[ab]``).

    A client that proved no name has the empty one: ``"*"`` means it too, the default ``"?*"`` only those with a name.

    Example:
        >>> from weft.experts.server import Grant, Role
        >>> Grant("reader", role=Role.FORWARD).expert
        '*'
    """

    client: str = "?*"
    expert: str = "*"
    role: Role = Role.TRAIN


OPEN = (Grant("*", role=Role.ADMIN),)


@dataclass(frozen=True)
class Caller:
    """The client of a connection: a proven ``name`` (empty without proof), and ``peer``, an address.

    ``trace``: the W3C traceparent that its connection came with; empty without one. ``stream``: by which it calls.
    """

    name: str
    peer: str
    trace: str = ""
    stream: CallerStream = field(default_factory=CallerStream, repr=False, compare=False)

    @cached_property  # asked several times for each call
    def principal(self) -> str:
        """The name under which quotas and shares count its calls: the proven one, else the host of the address."""
        return self.name or f"{_PEER}{_host(self.peer)}"

    @property
    def described(self) -> str:
        """The client, in an error."""
        return f"client {self.name!r}" if self.name else f"a client without certificate or token ({self.peer})"

    def owner(self, client: str, mini_batch: str | None) -> tuple[str, str | None]:
        """Owner of the keys and mini-batches of a call that claims to be from ``client``.

        Proven names and others never meet. Several processes may share a proven name: within it, the name that the
        call says keeps their mini-batches apart. Unproven names do not go by the address, which a client may change
        before it sends a call again.
        """
        if self.name:
            return self.name, None if mini_batch is None else f"{client}/{mini_batch}"
        return f"{_UNPROVEN}{client or ANONYMOUS}", mini_batch


@dataclass(frozen=True)
class Access:
    """Grants and tokens of a server.

    Args:
    grants: what is allowed; by default everything, to every client that can connect.
    tokens: secret -> client name. A token that is not in it is refused.

    Raises ``UsageError`` for an empty token or name, for a token that no client can show, and for tokens without
    grants: everybody could go without.

    Example:
        >>> from weft.experts.server import Access, Grant, Role
        >>> access = Access([Grant("trainer-*", "ffn.*", Role.TRAIN)], tokens={"s3cret": "trainer-7"})
        >>> server = weft.Server(access=access)
    """

    grants: Sequence[Grant] = OPEN
    tokens: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    def __post_init__(self) -> None:
        with Validator("invalid tokens") as check:
            for token, name in self.tokens.items():
                empty = [] if token and name else ["the token or the name is empty"]
                faults = empty or [*token_fault(token), _name_fault(name)]
                check.add(*(f"of client {name!r}: {fault}" for fault in faults if fault))
            closed = not self.tokens or self.grants is not OPEN
            check.that(closed, "there are tokens and no grants, so that everybody may do everything; give both")
        object.__setattr__(self, "grants", tuple(self.grants))  # roles are cached, so grants must not change later

    def named(self, token: str) -> str | None:
        """The client whose token this is. Takes the same time whichever it is."""
        found = None
        for known, name in self.tokens.items():
            if hmac.compare_digest(known.encode(), token.encode("utf-8", "surrogatepass")):
                found = name
        return found

    @cached_property
    def role(self) -> Callable[[str, str], Role]:
        """The largest role that a grant gives a client for an expert."""

        @lru_cache(_CACHED_ROLES)  # names are whatever clients make up
        def role(client: str, expert: str) -> Role:
            fits = [g for g in self.grants if fnmatchcase(client, g.client) and fnmatchcase(expert, g.expert)]
            return max((grant.role for grant in fits), default=Role.NONE)

        return role

    def admits(self, client: str, wanted: Role = Role.FORWARD) -> bool:
        """Whether this client has such a role for any expert."""
        return any(grant.role >= wanted and fnmatchcase(client, grant.client) for grant in self.grants)

    def check(self, caller: Caller, expert: str, wanted: Role, what: str) -> None:
        """Raise ``ForbiddenError`` if the caller may not do this."""
        seen = self.role(caller.name, expert)
        if seen < wanted:
            raise ForbiddenError(
                f"{caller.described} has role {seen.name} for {expert!r} and asked for {what}, which takes role "
                f"{wanted.name}; ask whoever runs the server for a grant"
            )


@dataclass(frozen=True)
class Refusal:
    """One refusal: seconds since the epoch, the client, the expert, what was asked for, and why it was refused."""

    time: float
    client: str
    peer: str
    expert: str
    what: str
    why: str


class Audit:
    """Writes refusals to the logger ``weft.experts.audit`` and remembers the last ones. Thread-safe.

    Refused clients choose names and pace: names are escaped and cut, and of more than a few lines a second only the
    number is written. ``counts`` has them all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens, self._filled = float(_BURST), clock()  # token bucket of the log's lines
        self._unwritten = 0
        self._lock = threading.Lock()
        self._last: deque[Refusal] = deque(maxlen=_AUDITED)
        self._counts: Counter[str] = Counter()

    def refused(self, caller: Caller, expert: str, what: str, why: str) -> None:
        """Note a refusal."""
        client, peer, uid = [escaped(each, _NAME) for each in (caller.name, caller.peer, expert)]
        one = Refusal(time.time(), client, peer, uid, what, escaped(why, _WHY))
        with self._lock:
            self._last.append(one)
            self._counts[what] += 1
            now = self._clock()
            self._tokens = min(float(_BURST), self._tokens + (now - self._filled) * _PER_SECOND)
            self._filled = now
            if self._tokens < 1:
                self._unwritten += 1
                return
            self._tokens -= 1
            unwritten, self._unwritten = self._unwritten, 0
        if unwritten:
            _LOG.warning("refused: %d more, which came too fast to be written here", unwritten)
        _LOG.warning("refused: client='%s' peer='%s' expert='%s' what=%s: %s", client, peer, uid, what, one.why)

    def last(self) -> list[Refusal]:
        """The last refusals, oldest first."""
        with self._lock:
            return list(self._last)

    def counts(self) -> dict[str, int]:
        """How many refusals there were of each kind of call."""
        with self._lock:
            return dict(self._counts)


def _name_fault(name: str) -> str:
    """What is wrong with the proven name of a client; empty if nothing is."""
    unproven = f"it begins with {_UNPROVEN!r} or {_PEER!r}, as clients that have proved no name are called"
    return unproven if name.startswith((_UNPROVEN, _PEER)) else ""


def _host(peer: str) -> str:
    """The host of an address as gRPC writes it; the network of a host that has a whole network of addresses."""
    host = peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
    with suppress(ValueError):
        if host.startswith("ipv6:"):
            return str(IPv6Network((unquote(host[5:]).strip("[]").partition("%")[0], 64), strict=False))
    return host


def authenticate(
    access: Access, tls: Mapping[Any, Any], metadata: Iterable[tuple[Any, Any]] | None, peer: str
) -> Caller:
    """The caller, out of what gRPC knows of a connection. Raises ``ForbiddenError`` for an unknown token, and for a
    client without any grant."""
    found = dict(metadata or ())
    trace = str(found.get(TRACEPARENT, ""))
    trace = trace if _TRACEPARENT.fullmatch(trace) else ""
    names = tls.get("x509_common_name") or tls.get(b"x509_common_name") or ()  # of the client's certificate
    certified = next((name.decode("utf-8", "replace") for name in names), "")
    name, shown = certified, found.get(AUTHORIZATION)
    if not name and shown is not None:
        word = shown.decode("utf-8", "replace") if isinstance(shown, bytes) else str(shown)
        name = access.named(word.removeprefix(BEARER)) if word.startswith(BEARER) else None
        if name is None:
            raise ForbiddenError(f"the token in the metadata {AUTHORIZATION!r} is not known here")
    caller = Caller(name, peer, trace)
    if fault := _name_fault(caller.name):
        raise ForbiddenError(f"the name in the certificate of client {caller.name!r} cannot be used here: {fault}")
    if not access.admits(caller.name):
        raise ForbiddenError(f"nothing is granted to {caller.described}; ask whoever runs the server for a grant")
    return caller
