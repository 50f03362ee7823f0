"""Directory protocol: experts, the addresses that serve them, and their owners.

    server A   declare("ffn.0" "ffn.1", "a:1", ttl 5)  ──> lease 1 ── renew ── renew ── (silence) ──> gone after 5 s
    server B   declare("ffn.1", "b:1", ttl 5)          ──> lease 2         ffn.1 has two addresses: replicas
    server A   claim("ffn.1", lease 1)                 ──> token 7         it may step; B follows
                 ... lease 1 ends ...                                      left, left, released
    server B   claim("ffn.1", lease 2)                 ──> token 12        A's late writes bear 7 and are refused
    client     get("ffn.") ──> snapshot of revision 9, then watch("ffn.", after=9) ──> every event since, in order

Every entry stands under a lease and ends with it, so a dead server leaves nothing behind. A change raises the revision;
a snapshot and the events after it always add up to the next snapshot:

    snapshot of revision 9  + joined 10 + left 11 + owned 12  =  snapshot of revision 12

Leases: Gray and Cheriton (SOSP 1989). Fencing tokens: Kleppmann, "How to do distributed locking" (2016). Revisions and
watches are those of etcd, which fits behind this protocol as it is.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Literal, Protocol, runtime_checkable

from weft.core.validation import Validator
from weft.experts.errors import AwayError

EventKind = Literal["joined", "left", "owned", "released"]


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


@dataclass(frozen=True, slots=True)
class Event:
    """One change: an address of an expert came or went, or its owner did (then with the owner's token).

    Example:
        >>> from weft.experts.discovery import Event
        >>> Event(revision=7, kind="joined", uid="ffn.0", address="10.0.0.7:7070").kind
        'joined'
    """

    revision: int
    kind: EventKind
    uid: str
    address: str
    token: int = 0


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

    def after(self, events: Iterable[Event]) -> "Snapshot":
        """The snapshot that results from these events. Older ones are skipped.

        Events of its own revision are applied: several may share one, and to repeat one changes nothing.
        """
        experts, owners, revision = dict(self.experts), dict(self.owners), self.revision
        for event in events:
            if event.revision < self.revision:
                continue
            revision, uid = event.revision, event.uid
            if event.kind in ("joined", "left"):
                others = {address for address in experts.get(uid, ()) if address != event.address}
                now = {*others, event.address} if event.kind == "joined" else others
                experts[uid] = tuple(sorted(now))
                if not now:
                    del experts[uid]
            elif event.kind == "owned":
                owners[uid] = Ownership(uid, event.address, event.token)
            else:
                owners.pop(uid, None)
        return Snapshot(revision, experts, owners)


@runtime_checkable
class Watch(Protocol):
    """The changes after some revision, each once and in order. A context manager; closing it wakes its readers.

    Implementations inherit what follows from `next` and `close`.

    Example:
        >>> from weft.experts.discovery import LocalDirectory
        >>> directory = LocalDirectory()
        >>> watch = directory.watch("ffn.")
        >>> lease = directory.declare(["ffn.0"], "10.0.0.7:7070", ttl=5.0)
        >>> watch.next(timeout=1.0).kind
        'joined'
        >>> directory.close()
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

    def watch(self, prefix: str = "", after: int | None = None) -> Watch:
        """The changes of these experts after a revision (such as a snapshot's); ``None``: from now on."""
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
