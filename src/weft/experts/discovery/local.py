"""A directory within this process, for one machine and for tests. It has no thread of its own.

Every call first ends the leases whose time is over. A watch asks the directory each time that it is asked itself.
"""

import threading
import time
from collections.abc import Callable, Sequence

from weft.experts.discovery.directory import (
    Lease,
    Ownership,
    Snapshot,
    Watch,
    check_claim,
    check_declaration,
    lease_lost_error,
    owned_error,
)
from weft.experts.discovery.fencing import new_epoch, token_of
from weft.experts.errors import AwayError


class LocalDirectory:
    """The protocol `Directory`, in memory. ``clock`` gives seconds.

    Example:
        >>> from weft.experts.discovery import LocalDirectory
        >>> rows, directory = (weft.TensorSpec((None, 8), torch.float32),), LocalDirectory()
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)
        >>> with weft.Server([expert], directory=directory), weft.Connections(directory) as connections:
        ...     weft.RemoteExpert("ffn.0", connections)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
        >>> directory.close()
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._ends: dict[int, float] = {}
        self._soonest = float("inf")  # no lease ends before
        self._entries: dict[tuple[str, str], int] = {}
        self._owners: dict[str, tuple[Ownership, int]] = {}  # with the number of the lease
        self._snapshots: dict[str, Snapshot] = {}  # of this revision, by prefix
        self._revision = 0
        self._epoch = new_epoch()
        self._last_lease = 0
        self._closed = False

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        """See `Directory.declare`."""
        names = check_declaration(uids, address, ttl)
        with self._lock:
            self._expire()
            self._last_lease += 1
            lease = Lease(self._last_lease, names, address, ttl)
            self._leases[lease.number] = lease
            self._ends[lease.number] = self._clock() + ttl
            self._soonest = min(self._soonest, self._ends[lease.number])
            for uid in names:
                if (uid, address) not in self._entries:
                    self._change()
                self._entries[uid, address] = lease.number
            return lease

    def renew(self, lease: Lease) -> None:
        """See `Directory.renew`."""
        with self._lock:
            self._check_lease(lease)
            self._ends[lease.number] = self._clock() + lease.ttl

    def withdraw(self, lease: Lease) -> None:
        """See `Directory.withdraw`."""
        with self._lock:
            self._expire()
            self._end(lease.number)

    def get(self, prefix: str = "") -> Snapshot:
        """See `Directory.get`."""
        with self._lock:
            self._expire()
            if prefix not in self._snapshots:
                experts: dict[str, list[str]] = {}
                for uid, address in sorted(self._entries):
                    if uid.startswith(prefix):
                        experts.setdefault(uid, []).append(address)
                owners = {uid: owner for uid, (owner, _) in self._owners.items() if uid.startswith(prefix)}
                found = Snapshot(self._revision, {uid: tuple(found) for uid, found in experts.items()}, owners)
                self._snapshots[prefix] = found
            return self._snapshots[prefix]

    def watch(self, prefix: str = "") -> "LocalWatch":
        """See `Directory.watch`."""
        return LocalWatch(self, prefix)

    def claim(self, uid: str, lease: Lease) -> Ownership:
        """See `Directory.claim`."""
        check_claim(uid, lease)
        with self._lock:
            self._check_lease(lease)
            owner, _ = self._owners.get(uid, (None, 0))
            if owner is not None and owner.address != lease.address:
                raise owned_error(uid, owner.address, lease)
            self._change()
            ownership = Ownership(uid, lease.address, token_of(self._epoch, self._revision))
            self._owners[uid] = ownership, lease.number
            return ownership

    def release(self, ownership: Ownership) -> None:
        """See `Directory.release`."""
        with self._lock:
            self._expire()
            owner, _ = self._owners.get(ownership.uid, (None, 0))
            if owner == ownership:
                del self._owners[ownership.uid]
                self._change()

    def close(self) -> None:
        """See `Directory.close`."""
        self._closed = True

    def _check_lease(self, lease: Lease) -> None:
        self._expire()
        if lease.number not in self._leases:
            raise lease_lost_error(lease)

    def _expire(self) -> None:
        """Refuse if closed; end all leases that are over. Called first, with the lock held."""
        if self._closed:
            raise AwayError("the directory is closed")
        now = self._clock()
        if now >= self._soonest:
            for number in [number for number, ends in self._ends.items() if ends <= now]:
                self._end(number)
            self._soonest = min(self._ends.values(), default=float("inf"))

    def _end(self, number: int) -> None:
        """A lease and all that still stands under it."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        del self._ends[number]
        for uid in lease.uids:
            if self._entries.get((uid, lease.address)) == number:
                del self._entries[uid, lease.address]
            if uid in self._owners and self._owners[uid][1] == number:
                del self._owners[uid]
        self._change()

    def _change(self) -> None:
        self._revision += 1
        self._snapshots.clear()


class LocalWatch(Watch):
    """The protocol `Watch`, of a `LocalDirectory`."""

    def __init__(self, directory: LocalDirectory, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix
        self._snapshot = directory.get(prefix)
        self._closed = False

    def snapshot(self) -> Snapshot:
        """See `Watch.snapshot`."""
        try:
            if not self._closed:
                self._snapshot = self._directory.get(self._prefix)
                self._away_since = None
        except AwayError:
            self._away_since = self._away_since or time.monotonic()
        return self._snapshot

    def close(self) -> None:
        """See `Watch.close`."""
        self._closed = True
