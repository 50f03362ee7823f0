"""A directory within this process, for one machine and for tests. It has no thread of its own.

Every call first ends the leases whose time is over, and a reader that waits in a watch sleeps at most until the next
lease ends: so the end of a lease is seen although nothing else happens.

    history   [ ... 7 joined, 8 joined, 9 left, 10 owned ]        one list for all watches; each is an index into it
                          ^ watch A           ^ watch B

A watch that falls more than the history behind is lost, instead of memory growing with the slowest reader.
"""

import threading
import time
from collections.abc import Callable, Sequence

from weft.core.errors import UsageError
from weft.experts.discovery.directory import Event, EventKind, Lease, Ownership, Snapshot, Watch, check_declaration
from weft.experts.discovery.fencing import new_epoch, token_of
from weft.experts.errors import AwayError, LeaseLostError, OwnedError, WatchLostError


class LocalDirectory:
    """The protocol `Directory`, in memory. ``clock`` gives seconds; ``history`` is how many events a watch may miss.

    Example:
        >>> from weft.experts.discovery import LocalDirectory
        >>> rows, directory = (weft.TensorSpec((None, 8), torch.float32),), LocalDirectory()
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)
        >>> with weft.Server([expert], directory=directory), weft.Connections(directory) as connections:
        ...     weft.RemoteExpert("ffn.0", connections)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
        >>> directory.close()
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, history: int = 65536) -> None:
        """Raises ``UsageError`` if ``history`` is not positive."""
        if history < 1:
            raise UsageError(f"history is {history}, wanted at least 1")
        self._clock = clock
        self._most = history
        self._changed = threading.Condition()
        self._leases: dict[int, Lease] = {}
        self._ends: dict[int, float] = {}
        self._entries: dict[tuple[str, str], int] = {}
        self._owners: dict[str, tuple[Ownership, int]] = {}  # with the number of the lease
        self._events: list[Event] = []
        self._revision = 0
        self._epoch = new_epoch()
        self._last_lease = 0
        self._closed = False

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        """See `Directory.declare`."""
        names = check_declaration(uids, address, ttl)
        with self._changed:
            self._expire()
            self._last_lease += 1
            lease = Lease(self._last_lease, names, address, ttl)
            self._leases[lease.number] = lease
            self._ends[lease.number] = self._clock() + ttl
            for uid in names:
                if (uid, address) not in self._entries:
                    self._record("joined", uid, address)
                self._entries[uid, address] = lease.number
            self._changed.notify_all()  # also if nothing joined: the next lease may end sooner now
            return lease

    def renew(self, lease: Lease) -> None:
        """See `Directory.renew`."""
        with self._changed:
            self._check_lease(lease)
            self._ends[lease.number] = self._clock() + lease.ttl

    def withdraw(self, lease: Lease) -> None:
        """See `Directory.withdraw`."""
        with self._changed:
            self._expire()
            self._end(lease.number)

    def get(self, prefix: str = "") -> Snapshot:
        """See `Directory.get`."""
        with self._changed:
            self._expire()
            experts: dict[str, list[str]] = {}
            for uid, address in self._entries:
                if uid.startswith(prefix):
                    experts.setdefault(uid, []).append(address)
            owners = {uid: owner for uid, (owner, _) in self._owners.items() if uid.startswith(prefix)}
            return Snapshot(self._revision, {uid: tuple(sorted(found)) for uid, found in experts.items()}, owners)

    def watch(self, prefix: str = "", after: int | None = None) -> "LocalWatch":
        """See `Directory.watch`."""
        with self._changed:
            self._expire()
            return LocalWatch(self, prefix, self._revision if after is None else after)

    def claim(self, uid: str, lease: Lease) -> Ownership:
        """See `Directory.claim`."""
        if uid not in lease.uids:
            raise UsageError(f"expert {uid!r} was not declared under the lease of {lease.address}: declare it first")
        with self._changed:
            self._check_lease(lease)
            owner, _ = self._owners.get(uid, (None, 0))
            if owner is not None and owner.address != lease.address:
                there = owner.address
                raise OwnedError(f"expert {uid!r} is owned by {there}, and {lease.address} cannot claim it", there)
            token = token_of(self._epoch, self._revision + 1)  # that of its event: it only grows
            ownership = Ownership(uid, lease.address, token)
            self._record("owned", uid, lease.address, ownership.token)
            self._owners[uid] = ownership, lease.number
            return ownership

    def release(self, ownership: Ownership) -> None:
        """See `Directory.release`."""
        with self._changed:
            self._expire()
            owner, _ = self._owners.get(ownership.uid, (None, 0))
            if owner == ownership:
                self._disown(ownership.uid)

    def close(self) -> None:
        """See `Directory.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check_lease(self, lease: Lease) -> None:
        self._expire()
        if lease.number not in self._leases:
            what = f"the lease {lease.number} of {lease.address} ended: it was not renewed within {lease.ttl:g} s"
            raise LeaseLostError(f"{what}, or was withdrawn. Declare again")

    def _expire(self) -> None:
        """Refuse if closed; end all leases that are over, in order of time. Called first, with the lock held."""
        if self._closed:
            raise AwayError("the directory is closed")
        now = self._clock()
        for _, number in sorted((ends, number) for number, ends in self._ends.items() if ends <= now):
            self._end(number)

    def _end(self, number: int) -> None:
        """A lease and all that still stands under it."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        del self._ends[number]
        for uid in lease.uids:
            if self._entries.get((uid, lease.address)) == number:
                del self._entries[uid, lease.address]
                self._record("left", uid, lease.address)
            if uid in self._owners and self._owners[uid][1] == number:
                self._disown(uid)

    def _disown(self, uid: str) -> None:
        gone, _ = self._owners.pop(uid)
        self._record("released", uid, gone.address, gone.token)

    def _record(self, kind: EventKind, uid: str, address: str, token: int = 0) -> None:
        self._revision += 1
        self._events.append(Event(self._revision, kind, uid, address, token))
        if len(self._events) >= 2 * self._most:  # amortized: constant time for each event
            del self._events[: -self._most]
        self._changed.notify_all()


class LocalWatch(Watch):
    """The protocol `Watch`: an index into the history of a `LocalDirectory`. Nothing grows while nobody reads."""

    def __init__(self, directory: LocalDirectory, prefix: str, after: int) -> None:
        self._directory = directory
        self._prefix = prefix
        self._after = after
        self._closed = False

    def next(self, timeout: float | None = None) -> Event | None:
        """See `Watch.next`."""
        directory, end = self._directory, None if timeout is None else time.monotonic() + timeout
        with directory._changed:
            while True:
                if self._closed:
                    raise AwayError("the watch is closed")
                directory._expire()
                if (event := self._found()) is not None:
                    return event
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                ends = min(directory._ends.values(), default=None)
                until = None if ends is None else max(0.0, ends - directory._clock())
                directory._changed.wait(min((x for x in (left, until) if x is not None), default=None))

    def close(self) -> None:
        """See `Watch.close`."""
        with self._directory._changed:
            self._closed = True
            self._directory._changed.notify_all()

    def _found(self) -> Event | None:
        """The next event of these experts; the index moves past it, and past those of others."""
        events, directory = self._directory._events, self._directory
        missed = directory._revision - self._after
        if missed > len(events):
            raise WatchLostError(
                f"the watch stopped at revision {self._after}, and the history begins after "
                f"{directory._revision - len(events)}: get a new snapshot and watch from there"
            )
        for event in events[len(events) - missed :] if missed > 0 else ():
            self._after = event.revision
            if event.uid.startswith(self._prefix):
                return event
        return None
