"""Registration of a server in the directory under a lease, and the other servers that the directory lists.

    declare ── renew ── renew ── (directory away) ── renew: LeaseLostError ──> declare ── ... ── withdraw
       '── another server lists one of the experts, which is no replica: AlreadyDeclaredError, and it is not declared

While the directory is away the server serves on: clients that know it need no directory. The status tells what its
watch saw last.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.core.errors import listed
from weft.experts.discovery import Directory, Lease, Snapshot, Watch
from weft.experts.errors import AlreadyDeclaredError, DirectoryError, DirectoryUnavailableError, LeaseLostError

_MARGIN = 0.1  # of a lease, by which its owner stops to step before it ends
PATIENCE = 0.5
"""Seconds that a server which ends waits for a directory; one that is there answers within milliseconds."""


@dataclass(frozen=True)
class LeaseStatistics:
    """``seconds`` that a lease lasts, ``left`` of them for steps, counted by this server's clock.

    ``late``: seconds by which the last renewal was answered after it was due, at a third of the lease; ``latest``: the
    worst of all.
    """

    seconds: float
    left: float
    late: float
    latest: float


class LeaseHeartbeat:
    """Lists experts at an address, and watches the directory. Thread-safe.

    ``uids`` is called at every turn: experts may be added and removed while the server runs. ``replicated``: whether
    several servers may list an expert. ``lease``: under which it is listed now, as far as is known. ``watch``: of the
    whole directory; None until `look` has found it there.
    """

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
        self._lock = threading.Lock()
        self._ended = False

    @property
    def listed(self) -> tuple[str, ...]:
        """What the last declaration listed; empty before it, and after `withdraw`."""
        lease = self.lease
        return () if lease is None else lease.uids

    def until(self, lease: Lease) -> float:
        """Until when (`time.monotonic`) this lease surely lasts; minus infinity if it is not the one of now.

        Counted from before the directory was asked to renew it, so that the directory cannot have ended it sooner; and
        a little less, so that a step which is about to be taken then is over before another server may own the expert.
        """
        now, until = self.lease, self._until
        return until if now is not None and now.number == lease.number else float("-inf")

    def statistics(self) -> LeaseStatistics | None:
        """How the renewals keep up; None where nothing is listed."""
        lease = self.lease
        if lease is None:
            return None
        return LeaseStatistics(lease.ttl, self._until - time.monotonic(), self._late, self._latest)

    def directory_statistics(self) -> dict[str, Any]:
        """``servers`` whose leases last, by address, with how many experts each lists and owns; ``here``: this one."""
        snapshot, away = (self.watch.snapshot(), self.watch.away_seconds) if self.watch else (Snapshot(), 0.0)
        experts = Counter(address for addresses in snapshot.experts.values() for address in addresses)
        owns = Counter(owner.address for owner in snapshot.owners.values())
        servers = {address: {"experts": count, "owns": owns[address]} for address, count in experts.items()}
        return {"here": self.address, "away_seconds": away, "servers": servers}

    def look(self) -> None:
        """Begin to watch the directory; where it does not answer, the renewal of the lease reports it."""
        if self.watch is None and not self._ended:
            with suppress(DirectoryUnavailableError):
                self.watch = self._directory.watch()

    def turn(self) -> None:
        """Declare or renew, whichever is due.

        Raises ``DirectoryUnavailableError`` if the directory does not answer, ``AlreadyDeclaredError`` for experts that
        are listed elsewhere; then what was listed before still is.
        """
        with self._lock:
            if self._ended:
                return
            uids, start, before = tuple(self._uids()), time.monotonic(), self.lease
            if before is not None and set(before.uids) == set(uids):
                try:
                    return self._renew(start, before)
                except LeaseLostError:
                    self.lease = before = None
            try:
                self._check_elsewhere(uids)
            except AlreadyDeclaredError:
                if before is not None:
                    self._renew(start, before)
                raise
            # What is listed twice for a moment is found; what is not listed for a moment is not.
            lease = self._directory.declare(uids, self.address, self._ttl) if uids else None
            try:  # two servers may have looked before either declared: now both see the other, and both step back
                self._check_elsewhere(uids)
            except AlreadyDeclaredError:
                self.lease = None
                for each in filter(None, (lease, before)):  # all entries have moved to the new lease
                    self._directory.withdraw(each)
                raise
            self.lease = lease
            if lease is not None:
                self._renewed(start, lease)
            else:
                self._due = float("-inf")
            if before is not None:
                self._directory.withdraw(before)

    def withdraw(self, patience: float = PATIENCE) -> None:
        """Be listed no more, for good. May be called twice; the second time does not wait.

        A directory that is away forgets by itself when the lease ends: it is waited for ``patience`` seconds at most,
        and asked in a thread of its own, which ends with that call.
        """
        if self._ended:
            return
        self._ended = True
        thread = threading.Thread(target=self._withdraw, name="weft-withdraw", daemon=True)
        thread.start()
        thread.join(patience)

    def close(self) -> None:
        """Watch no more."""
        self._ended = True
        if self.watch is not None:
            self.watch.close()

    def _check_elsewhere(self, uids: Sequence[str]) -> None:
        """Raise ``AlreadyDeclaredError`` if another server lists one of these experts that is no replica."""
        alone = [uid for uid in uids if not self._replicated(uid)]
        known = self._directory.get() if alone else Snapshot()
        others = {uid: sorted({*known.addresses(uid)} - {self.address}) for uid in alone}
        if faults := [f"{uid!r} at {', '.join(found)}" for uid, found in others.items() if found]:
            raise AlreadyDeclaredError(
                listed(
                    f"the server at {self.address} cannot list experts that other servers list: clients might move "
                    "between different weights. Give them other names, or say replicas= at every server that has them:",
                    faults,
                )
            )

    def _renew(self, start: float, lease: Lease) -> None:
        self._directory.renew(lease)
        self._renewed(start, lease)

    def _renewed(self, start: float, lease: Lease) -> None:
        """The directory has answered a call that began at ``start``."""
        self._late = max(0.0, time.monotonic() - self._due) if self._due > float("-inf") else 0.0
        self._latest = max(self._late, self._latest)
        self._until, self._due = start + lease.ttl * (1 - _MARGIN), start + lease.ttl / 3

    def _withdraw(self) -> None:
        with self._lock:  # whatever is declared meanwhile is withdrawn as well
            lease, self.lease = self.lease, None
        if lease is not None:
            with suppress(DirectoryError):
                self._directory.withdraw(lease)
