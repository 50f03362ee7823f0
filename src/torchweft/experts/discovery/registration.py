"""Registration of a server in the directory under a lease, and the other servers that the directory lists.

    declare ── renew ── renew ── (no answer) ── renew: LeaseLostError ──> declare ── ... ── withdraw
       '── another server lists one of the experts, which is not a replica: AlreadyDeclaredError, and no declaration

A server continues while the directory does not answer, because clients that know its address do not need the directory.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from torchweft.core.errors import join_faults
from torchweft.experts.discovery import Directory, Lease, Snapshot, Watch
from torchweft.experts.errors import AlreadyDeclaredError, DirectoryError, DirectoryUnavailableError, LeaseLostError
from torchweft.experts.statistics import DirectoryStatistics, LeaseStatistics

_MARGIN = 0.1  # part of a lease: its owner stops stepping so long before the lease ends
# Longest wait, in seconds, of a closing server for the directory, which usually answers within milliseconds.
PATIENCE = 0.5


class LeaseHeartbeat:
    """Lists experts at an address, and watches the directory. Thread-safe."""

    # ``replicated``: whether several servers can list an expert. ``watch``: of all experts; None until `look` has
    # reached the directory.
    def __init__(
        self,
        directory: Directory,
        uids: Callable[[], Sequence[str]],
        address: str,
        ttl: float,
        replicated: Callable[[str], bool] = lambda uid: False,
    ) -> None:
        self.address = address
        self.lease: Lease | None = None
        self.watch: Watch | None = None
        self._directory, self._uids, self._ttl = directory, uids, ttl
        self._replicated = replicated
        self._until = self._due = float("-inf")
        self._late = self._latest = 0.0
        self._lock = threading.Lock()  # held during calls of the directory; `until` must not need it
        self._ended = False

    @property
    def listed(self) -> tuple[str, ...]:
        lease = self.lease
        return () if lease is None else lease.uids

    def until(self, lease: Lease) -> float:
        """The time (`time.monotonic`) up to which this lease certainly lasts. Minus infinity if it was replaced."""
        present, until = self.lease, self._until
        return until if present is not None and present.number == lease.number else float("-inf")

    def statistics(self) -> LeaseStatistics | None:
        lease = self.lease
        if lease is None:
            return None
        return LeaseStatistics(lease.ttl, self._until - time.monotonic(), self._late, self._latest)

    def directory_statistics(self) -> DirectoryStatistics:
        snapshot, away = (self.watch.snapshot(), self.watch.away_seconds) if self.watch else (Snapshot(), 0.0)
        experts = Counter(address for addresses in snapshot.experts.values() for address in addresses)
        owns = Counter(owner.address for owner in snapshot.owners.values())
        servers = {address: {"experts": count, "owns": owns[address]} for address, count in experts.items()}
        return DirectoryStatistics(self.address, away, servers)

    def look(self) -> None:
        if self.watch is None and not self._ended:
            with suppress(DirectoryUnavailableError):
                self.watch = self._directory.watch()

    def turn(self) -> None:
        """Declare or renew, whichever is due. Raises ``DirectoryUnavailableError`` and ``AlreadyDeclaredError``."""
        with self._lock:
            if self._ended:
                return
            # Read at every turn, because experts can be added and removed while the server runs.
            uids, start, before = tuple(self._uids()), time.monotonic(), self.lease
            if before is not None and set(before.uids) == set(uids):
                try:
                    self._directory.renew(before)
                    return self._record_renewal(start, before)
                except LeaseLostError:
                    self.lease = before = None
            try:
                self._check_elsewhere(uids)
            except AlreadyDeclaredError:
                if before is not None:
                    self._directory.renew(before)
                    self._record_renewal(start, before)
                raise
            # The new lease begins before the old one ends, so that clients find the experts at every moment.
            lease = self._directory.declare(uids, self.address, self._ttl) if uids else None
            # Two servers can both have checked before either declared. Now each sees the other, and both withdraw.
            try:
                self._check_elsewhere(uids)
            except AlreadyDeclaredError:
                self.lease = None
                for listed_lease in filter(None, (lease, before)):  # all entries have moved to the new lease
                    self._directory.withdraw(listed_lease)
                raise
            self.lease = lease
            if lease is not None:
                self._record_renewal(start, lease)
            else:
                self._due = float("-inf")
            if before is not None:
                self._directory.withdraw(before)

    def withdraw(self, patience: float = PATIENCE) -> None:
        """End the registration for good, after at most ``patience`` seconds. Can be called twice."""
        if self._ended:
            return
        self._ended = True
        # In a thread: a directory that hangs must not delay the end of the server. The entry then ends with the lease.
        thread = threading.Thread(target=self._withdraw_lease, name="torchweft-withdraw", daemon=True)
        thread.start()
        thread.join(patience)

    def close(self) -> None:
        self._ended = True
        if self.watch is not None:
            self.watch.close()

    def _check_elsewhere(self, uids: Sequence[str]) -> None:
        single = [uid for uid in uids if not self._replicated(uid)]
        known = self._directory.get() if single else Snapshot()
        others = {uid: sorted({*known.addresses(uid)} - {self.address}) for uid in single}
        if faults := [f"{uid!r} at {', '.join(addresses)}" for uid, addresses in others.items() if addresses]:
            raise AlreadyDeclaredError(
                join_faults(
                    f"the server at {self.address} cannot list experts that other servers list: clients might move "
                    "between different weights. Give them other names, or set replicas= at every server that has them:",
                    faults,
                )
            )

    def _record_renewal(self, start: float, lease: Lease) -> None:
        # Counted from the start of the call, because the directory cannot have renewed the lease earlier. The margin is
        # for a step that has just begun: it ends before another server can own the expert.
        self._late = max(0.0, time.monotonic() - self._due) if self._due > float("-inf") else 0.0
        self._latest = max(self._late, self._latest)
        self._until, self._due = start + lease.ttl * (1 - _MARGIN), start + lease.ttl / 3

    def _withdraw_lease(self) -> None:
        with self._lock:  # waits for a running `turn`, whose declaration is then withdrawn as well
            lease, self.lease = self.lease, None
        if lease is not None:
            with suppress(DirectoryError):
                self._directory.withdraw(lease)
