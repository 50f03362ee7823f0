"""Directory protocol: experts, the addresses that serve them, and their owners; and a directory of one process.

    server A   declare("ffn.0" "ffn.1", "a:1", ttl 5)  ──> lease 1 ── renew ── renew ── (silence) ──> gone after 5 s
    server B   declare("ffn.1", "b:1", ttl 5)          ──> lease 2         ffn.1 has two addresses: replicas
    server A   claim("ffn.1", lease 1)                 ──> token 7         it may step; B follows
                 ... lease 1 ends ...
    server B   claim("ffn.1", lease 2)                 ──> token 12        A's stale writes have 7 and are rejected
    client     watch("ffn.") ── snapshot() ──> the last known entries, even while the directory does not answer

Every entry belongs to a lease and ends with it. Without leases, the entries of a crashed server would stay forever.
Leases: Gray and Cheriton (SOSP 1989). Fencing tokens: Kleppmann, "How to do distributed locking" (2016). Revisions and
watches are those of etcd.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Protocol, runtime_checkable

from torchweft.core.errors import UsageError
from torchweft.core.validation import Validator
from torchweft.experts.discovery.fencing import new_epoch, token_of
from torchweft.experts.errors import DirectoryUnavailableError, ExpertOwnedError, LeaseLostError


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one server to be listed, for ``ttl`` seconds after each renewal.

    Example:
        >>> directory = weft.experts.discovery.LocalDirectory()
        >>> lease = directory.declare(["ffn.0"], "10.0.0.7:7070", ttl=5.0)
        >>> directory.renew(lease)  # every 5/3 s, as a `weft.Server` does
    """

    number: int
    uids: tuple[str, ...]
    address: str
    ttl: float


@dataclass(frozen=True, slots=True)
class Ownership:
    """The right of one server to step an expert. Later owners of it have a larger ``token`` (see `fencing`).

    Example:
        >>> directory = weft.experts.discovery.LocalDirectory()
        >>> directory.claim("ffn.0", directory.declare("ffn.0", "10.0.0.7:7070", ttl=5.0)).address
        '10.0.0.7:7070'
    """

    uid: str
    address: str
    token: int


@dataclass(frozen=True)
class Snapshot:
    """Experts with their servers' addresses (sorted), and their owners, at ``revision``. Immutable.

    Example:
        >>> weft.experts.discovery.Snapshot(7, {"ffn.0": ("10.0.0.7:7070",)}).addresses("ffn.0")
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
        return tuple(sorted(self.experts))

    def search(self, prefix: str) -> list[str]:
        # A client looks grids up at every call, so this must not take time for the experts of other prefixes.
        start = bisect_left(self.uids, prefix)
        return list(takewhile(lambda uid: uid.startswith(prefix), (self.uids[i] for i in range(start, len(self)))))

    def addresses(self, uid: str) -> tuple[str, ...]:
        return self.experts.get(uid, ())

    def owner(self, uid: str) -> Ownership | None:
        return self.owners.get(uid)


@runtime_checkable
class Watch(Protocol):
    """The experts with one prefix, as the directory last listed them. Thread-safe. A context manager.

    Example:
        >>> weft.experts.discovery.LocalDirectory().watch("ffn.").snapshot().experts
        {}
    """

    # An address in the snapshot can be dead. Callers notice that first, and try another address.
    _away_since: float | None = None

    @property
    def away_seconds(self) -> float:
        """Seconds since the directory stopped answering, or 0 if it answers."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def snapshot(self) -> Snapshot:
        """The newest known snapshot, without waiting for a network. After `close`, the last one."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@runtime_checkable
class Directory(Protocol):
    """A registry of experts. Thread-safe. All methods raise ``DirectoryUnavailableError`` if it does not answer.

    Example:
        >>> directory: weft.experts.discovery.Directory = weft.experts.discovery.LocalDirectory()
        >>> lease = directory.declare(["ffn.0"], "10.0.0.7:7070", ttl=5.0)
        >>> directory.get("ffn.").experts
        {'ffn.0': ('10.0.0.7:7070',)}
    """

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        """List experts under a new lease. The same expert at the same address moves to it. Raises ``UsageError``."""
        ...

    def renew(self, lease: Lease) -> None:
        """Extend the lease to its ``ttl`` from now. Raises ``LeaseLostError`` if it has ended."""

    def withdraw(self, lease: Lease) -> None:
        """End the lease now with all its entries. Does nothing if it has ended."""

    def get(self, prefix: str = "") -> Snapshot:
        """All experts with this prefix, at one moment."""
        ...

    def watch(self, prefix: str = "") -> Watch:
        """A snapshot of these experts that follows all changes, and remains while the directory does not answer."""
        ...

    def claim(self, uid: str, lease: Lease) -> Ownership:
        """Become the owner of an expert that was declared under ``lease``, if it has no other owner. Compare and swap.

        The token is larger than all earlier ones of this epoch of the directory. An earlier claim from the same address
        is replaced. Raises ``ExpertOwnedError`` if another address owns it, ``LeaseLostError`` if the lease has ended,
        and ``UsageError`` if the expert was not declared under the lease.
        """
        ...

    def release(self, ownership: Ownership) -> None:
        """End an ownership. Does nothing if it has ended, even if there is a newer owner."""

    def close(self) -> None:
        """Free the directory's resources and wake every watch. Can be called twice."""


def check_declaration(uids: str | Sequence[str], address: str, ttl: float) -> tuple[str, ...]:
    names = (uids,) if isinstance(uids, str) else tuple(dict.fromkeys(uids))
    with Validator("cannot declare experts") as check:
        check.require(bool(names), "the list of experts is empty, wanted at least one")
        check.require(all(names), "an expert's name is empty")
        for uid in names:
            check.require("\0" not in uid, f"the name {uid!r} contains the character 0")
        check.require(bool(address), "the address is empty")
        check.seconds("ttl", ttl)
    return names


def check_claim(uid: str, lease: Lease) -> None:
    if uid not in lease.uids:
        raise UsageError(f"expert {uid!r} was not declared under the lease of {lease.address}: declare it first")


Entry = tuple[str, str | Ownership]  # An expert, and one of its servers' addresses or its owner


def make_snapshot(revision: int, entries: Iterable[Entry]) -> Snapshot:
    experts: dict[str, list[str]] = {}
    owners: dict[str, Ownership] = {}
    for uid, value in entries:
        if isinstance(value, Ownership):
            owners[uid] = value
        else:
            experts.setdefault(uid, []).append(value)
    return Snapshot(revision, {uid: tuple(sorted(addresses)) for uid, addresses in experts.items()}, owners)


def owned_error(uid: str, owner: str, lease: Lease) -> ExpertOwnedError:
    return ExpertOwnedError(f"expert {uid!r} is owned by {owner}, and {lease.address} cannot claim it", owner)


def lease_lost_error(lease: Lease) -> LeaseLostError:
    return LeaseLostError(
        f"the lease {lease.number} of {lease.address} ended: it was not renewed within {lease.ttl:g} s, or was "
        "withdrawn. Declare again"
    )


class LocalDirectory(Directory):
    """The protocol `Directory`, in the memory of this process, without a thread. ``clock`` returns seconds.

    Example:
        >>> directory = weft.experts.discovery.LocalDirectory()
        >>> server = weft.Server(directory=directory)  # and the clients: weft.Connections(directory)
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}  # of the leases, by number
        self._entries: dict[tuple[str, str], int] = {}  # expert and address: number of the lease
        self._owners: dict[str, tuple[Ownership, int]] = {}  # with the number of the lease
        self._snapshots: dict[str, Snapshot] = {}  # of this revision, by prefix
        self._revision = 0
        self._epoch = new_epoch()
        self._last_lease = 0
        self._closed = False

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        names = check_declaration(uids, address, ttl)
        with self._lock:
            self._expire()
            self._last_lease += 1
            lease = Lease(self._last_lease, names, address, ttl)
            self._ends[lease.number] = self._clock() + ttl
            entries = dict.fromkeys([(uid, address) for uid in names], lease.number)
            # A declaration that only moves entries to a new lease is no change that watchers must see.
            is_listed = entries.keys() <= self._entries.keys()
            self._entries |= entries
            if not is_listed:
                self._change()
            return lease

    def renew(self, lease: Lease) -> None:
        with self._lock:
            self._check_lease(lease)
            self._ends[lease.number] = self._clock() + lease.ttl

    def withdraw(self, lease: Lease) -> None:
        with self._lock:
            self._expire()
            self._end_lease(lease.number)

    def get(self, prefix: str = "") -> Snapshot:
        with self._lock:
            self._expire()
            # One object for each revision, because clients recognise a change by the identity of the snapshot.
            if prefix not in self._snapshots:
                entries: list[Entry] = [*self._entries, *((uid, owner) for uid, (owner, _) in self._owners.items())]
                matching = (entry for entry in entries if entry[0].startswith(prefix))
                self._snapshots[prefix] = make_snapshot(self._revision, matching)
            return self._snapshots[prefix]

    def watch(self, prefix: str = "") -> "LocalWatch":
        return LocalWatch(self, prefix)

    def claim(self, uid: str, lease: Lease) -> Ownership:
        check_claim(uid, lease)
        with self._lock:
            self._check_lease(lease)
            owner, _ = self._owners.get(uid, (None, 0))
            if owner is not None and owner.address != lease.address:
                raise owned_error(uid, owner.address, lease)
            self._change()  # before the token is made, so that every claim has a larger one
            ownership = Ownership(uid, lease.address, token_of(self._epoch, self._revision))
            self._owners[uid] = ownership, lease.number
            return ownership

    def release(self, ownership: Ownership) -> None:
        with self._lock:
            self._expire()
            owner, _ = self._owners.get(ownership.uid, (None, 0))
            if owner == ownership:
                del self._owners[ownership.uid]
                self._change()

    def close(self) -> None:
        self._closed = True

    def _check_lease(self, lease: Lease) -> None:
        self._expire()
        if lease.number not in self._ends:
            raise lease_lost_error(lease)

    def _expire(self) -> None:
        # The caller holds the lock.
        # Expired leases end here and not in a thread: every call comes through here before it reads an entry.
        if self._closed:
            raise DirectoryUnavailableError("the directory is closed")
        now = self._clock()
        for number in [number for number, end in self._ends.items() if end <= now]:
            self._end_lease(number)

    def _end_lease(self, number: int) -> None:
        if self._ends.pop(number, None) is not None:
            self._entries = {entry: lease for entry, lease in self._entries.items() if lease != number}
            self._owners = {uid: owned for uid, owned in self._owners.items() if owned[1] != number}
            self._change()

    def _change(self) -> None:
        self._revision += 1
        self._snapshots.clear()


class LocalWatch(Watch):
    # Reads the directory at every call, so that no thread is needed.
    def __init__(self, directory: LocalDirectory, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix
        self._snapshot = directory.get(prefix)
        self._closed = False

    def snapshot(self) -> Snapshot:
        try:
            if not self._closed:
                self._snapshot = self._directory.get(self._prefix)
                self._away_since = None
        except DirectoryUnavailableError:
            self._away_since = self._away_since or time.monotonic()
        return self._snapshot

    def close(self) -> None:
        self._closed = True
