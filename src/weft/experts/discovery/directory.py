"""Directory protocol: experts, the addresses that serve them, and their owners.

    server A   declare("ffn.0" "ffn.1", "a:1", ttl 5)  ──> lease 1 ── renew ── renew ── (silence) ──> gone after 5 s
    server B   declare("ffn.1", "b:1", ttl 5)          ──> lease 2         ffn.1 has two addresses: replicas
    server A   claim("ffn.1", lease 1)                 ──> token 7         it may step; B follows
                 ... lease 1 ends ...
    server B   claim("ffn.1", lease 2)                 ──> token 12        A's late writes bear 7 and are refused
    client     watch("ffn.") ── snapshot() ──> what is there now, as far as is known; also while the directory is away

Every entry stands under a lease and ends with it, so a dead server leaves nothing behind. A change raises the revision.

Leases: Gray and Cheriton (SOSP 1989). Fencing tokens: Kleppmann, "How to do distributed locking" (2016). Revisions and
watches are those of etcd, which fits behind this protocol as it is.
"""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Protocol, runtime_checkable

from weft.core.errors import UsageError
from weft.core.validation import Validator
from weft.experts.errors import LeaseLostError, OwnedError


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one server to be listed, for ``ttl`` seconds from each renewal on.

    Example:
        >>> from weft.experts.discovery import LocalDirectory
        >>> directory = LocalDirectory()
        >>> lease = directory.declare(["ffn.0"], "10.0.0.7:7070", ttl=5.0)
        >>> directory.renew(lease)  # every 5/3 s, as a `weft.Server` does
        >>> directory.close()
    """

    number: int
    uids: tuple[str, ...]
    address: str
    ttl: float


@dataclass(frozen=True, slots=True)
class Ownership:
    """The right of one server to step an expert. Later owners of it have a larger ``token``; see `fencing`.

    Example:
        >>> from weft.experts.discovery import LocalDirectory
        >>> directory = LocalDirectory()
        >>> lease = directory.declare(["ffn.0"], "10.0.0.7:7070", ttl=5.0)
        >>> directory.claim("ffn.0", lease).address
        '10.0.0.7:7070'
        >>> directory.close()
    """

    uid: str
    address: str
    token: int


@dataclass(frozen=True)
class Snapshot:
    """Experts with the addresses that serve them (sorted), and their owners, as of ``revision``. It never changes.

    Example:
        >>> from weft.experts.discovery import Snapshot
        >>> Snapshot(7, {"ffn.0": ("10.0.0.7:7070",)}).addresses("ffn.0")
        ('10.0.0.7:7070',)
    """

    revision: int = 0
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    owners: Mapping[str, Ownership] = field(default_factory=dict[str, Ownership])

    def __len__(self) -> int:
        return len(self.experts)

    def __contains__(self, uid: object) -> bool:
        return uid in self.experts

    @cached_property
    def uids(self) -> tuple[str, ...]:
        """All experts, sorted."""
        return tuple(sorted(self.experts))

    def search(self, prefix: str) -> list[str]:
        """The experts whose name starts with ``prefix``, sorted; in logarithmic time and that of the answer."""
        start = bisect_left(self.uids, prefix)
        return list(takewhile(lambda uid: uid.startswith(prefix), (self.uids[i] for i in range(start, len(self)))))

    def addresses(self, uid: str) -> tuple[str, ...]:
        """The servers of this expert; empty if there is none."""
        return self.experts.get(uid, ())

    def owner(self, uid: str) -> Ownership | None:
        """The owner of this expert."""
        return self.owners.get(uid)


@runtime_checkable
class Watch(Protocol):
    """The experts with one prefix, as the directory last listed them. Thread-safe. A context manager.

    An address in its snapshot may be dead: its callers learn that soonest, and try another one.

    Example:
        >>> from weft.experts.discovery import LocalDirectory
        >>> directory = LocalDirectory()
        >>> with directory.watch("ffn.") as watch:
        ...     watch.snapshot().experts
        {}
        >>> directory.close()
    """

    _away_since: float | None = None

    @property
    def away_seconds(self) -> float:
        """For how long the directory has been away, as of the last look; 0 if it is there."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def snapshot(self) -> Snapshot:
        """The newest that is known, without waiting for a network. The last one still serves after `close`."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@runtime_checkable
class Directory(Protocol):
    """A registry of experts. Thread-safe. Every method raises ``AwayError`` if the directory does not answer.

    Example:
        >>> from weft.experts.discovery import Directory, LocalDirectory
        >>> directory: Directory = LocalDirectory()
        >>> lease = directory.declare(["ffn.0"], "10.0.0.7:7070", ttl=5.0)
        >>> directory.get("ffn.").experts
        {'ffn.0': ('10.0.0.7:7070',)}
        >>> directory.close()
    """

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        """List experts under one new lease. The same expert at the same address moves to the new lease.

        Raises ``UsageError`` for no expert, an empty name or address, or a ``ttl`` that is not positive.
        """
        ...

    def renew(self, lease: Lease) -> None:
        """Let the lease last for its ``ttl`` from now. Raises ``LeaseLostError`` if it has ended."""
        ...

    def withdraw(self, lease: Lease) -> None:
        """End the lease now, and with it all that stands under it. Again, or too late, is no error."""
        ...

    def get(self, prefix: str = "") -> Snapshot:
        """All experts whose name starts with ``prefix``, as of one moment."""
        ...

    def watch(self, prefix: str = "") -> Watch:
        """A snapshot of these experts that follows every change, and stays while the directory is away."""
        ...

    def claim(self, uid: str, lease: Lease) -> Ownership:
        """Become the owner of an expert that was declared under ``lease``, if nobody else is. Compare and swap.

        The token is larger than every earlier one of this epoch of the directory; one that lost its data, or another
        one in its place, has another epoch. An own earlier claim, from the same address, is replaced.
        Raises ``OwnedError`` if another address owns it, ``LeaseLostError`` if the lease has ended, ``UsageError``
        if the expert was not declared under it.
        """
        ...

    def release(self, ownership: Ownership) -> None:
        """Give up an ownership. Again, or too late, is no error; a newer owner is left alone."""
        ...

    def close(self) -> None:
        """Free the directory's resources and wake every watch. Again is no error."""
        ...


def check_declaration(uids: str | Sequence[str], address: str, ttl: float) -> tuple[str, ...]:
    """The names of the experts, each once. Raises ``UsageError`` for arguments that no directory can list."""
    names = (uids,) if isinstance(uids, str) else tuple(dict.fromkeys(uids))
    with Validator("cannot declare experts") as check:
        check.that(bool(names), "there is no expert, wanted at least one")
        check.that(all(names), "an expert's name is empty")
        for uid in names:
            check.that("\0" not in uid, f"the name {uid!r} holds the character 0")
        check.that(bool(address), "the address is empty")
        check.seconds("ttl", ttl)
    return names


def check_claim(uid: str, lease: Lease) -> None:
    """Raise ``UsageError`` for an expert that was not declared under this lease."""
    if uid not in lease.uids:
        raise UsageError(f"expert {uid!r} was not declared under the lease of {lease.address}: declare it first")


def owned_error(uid: str, there: str, lease: Lease) -> OwnedError:
    """The error of a claim while another address owns the expert."""
    return OwnedError(f"expert {uid!r} is owned by {there}, and {lease.address} cannot claim it", there)


def lease_lost_error(lease: Lease) -> LeaseLostError:
    """The error of a lease that has ended."""
    return LeaseLostError(
        f"the lease {lease.number} of {lease.address} ended: it was not renewed within {lease.ttl:g} s, or was "
        "withdrawn. Declare again"
    )
