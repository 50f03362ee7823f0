"""Who serves which expert: what every directory can do, whoever implements it.

    server A   declare("ffn.0" "ffn.1", "a:1", ttl 5)  ──> lease 1 ── renew ── renew ── (silence) ──> gone after 5 s
    server B   declare("ffn.1", "b:1", ttl 5)          ──> lease 2         ffn.1 has two addresses: replicas
    server A   claim("ffn.1", lease 1)                 ──> token 7         it may step; B follows
                 ... lease 1 ends ...                                      left, left, released
    server B   claim("ffn.1", lease 2)                 ──> token 12        A's late writes bear 7 and are refused
    client     get("ffn.") ──> snapshot of revision 9, then watch("ffn.", after=9) ──> every event since, in order

Everything stands under a lease and goes with it, so a server that dies leaves nothing behind. A change raises the
revision; a snapshot and the events after it always add up to the next snapshot.

Leases are Gray and Cheriton's (SOSP 1989); tokens that only grow, to be compared by whoever is written to, are the
fencing of Kleppmann's "How to do distributed locking" (2016); revisions and watches are as in etcd, which fits
behind this protocol as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

from weft.experts.directory.snapshot import Ownership, Snapshot
from weft.experts.errors import AwayError

Each = TypeVar("Each", bound="Watch")
EventKind = Literal["joined", "left", "owned", "released"]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one server to be listed, for ``ttl`` seconds from each renewal on."""

    number: int
    uids: tuple[str, ...]
    address: str
    ttl: float


@dataclass(frozen=True, slots=True)
class Event:
    """One change: an address of an expert came or went, or its owner did (then with the owner's token)."""

    revision: int
    kind: EventKind
    uid: str
    address: str
    token: int = 0


@runtime_checkable
class Watch(Protocol):
    """The changes after some revision, each once and in order. A context manager; closing it wakes who waits.

    Implementations inherit what follows from `next` and `close`.
    """

    def next(self, timeout: float | None = None) -> Event | None:
        """The next event, or ``None`` if none came within ``timeout`` seconds (``None``: until closed).

        Raises ``WatchLostError`` if events were missed, ``AwayError`` if watch or directory are closed or away.
        """
        ...

    def close(self) -> None: ...

    def __iter__(self) -> Iterator[Event]:
        """Every event until the watch or the directory is closed."""
        while True:
            try:
                event = self.next()
            except AwayError:
                return
            if event is not None:
                yield event

    def __enter__(self: Each) -> Each:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@runtime_checkable
class Directory(Protocol):
    """Who serves which expert. Thread-safe. Every method raises ``AwayError`` if the directory does not answer."""

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

    def watch(self, prefix: str = "", after: int | None = None) -> Watch:
        """The changes of these experts after a revision (such as a snapshot's); ``None``: from now on."""
        ...

    def claim(self, uid: str, lease: Lease) -> Ownership:
        """Become the owner of an expert that was declared under ``lease``, if nobody else is. Compare and swap.

        The token is larger than every earlier one of this life of the directory; one that lost what it knew, or
        another one in its place, has another life. An own earlier claim, from the same address, is replaced.
        Raises ``OwnedError`` if another address owns it, ``LeaseLostError`` if the lease has ended, ``UsageError``
        if the expert was not declared under it.
        """
        ...

    def release(self, ownership: Ownership) -> None:
        """Let go. Again, or too late, is no error; a newer owner is left alone."""
        ...

    def close(self) -> None:
        """Free what the directory holds and wake every watch. Again is no error."""
        ...
