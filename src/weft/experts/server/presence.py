"""A server's entry in the directory: declared under a lease, renewed, declared again when it was lost.

declare ── renew ── renew ── (directory away) ── renew: LeaseLostError ──> declare ── ... ── withdraw

While the directory is away the server serves on: clients that know it need no directory.
"""

import threading
from collections.abc import Callable, Sequence

from weft.experts.directory import AwayError, Directory, Lease, LeaseLostError


class Presence:
    """Lists experts at an address. Thread-safe.

    ``uids`` is asked at every turn: experts may be added and removed while the server runs.
    """

    def __init__(self, directory: Directory, uids: Callable[[], Sequence[str]], address: str, ttl: float) -> None:
        self._directory = directory
        self._uids = uids
        self._address = address
        self._ttl = ttl
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._ended = False

    @property
    def listed(self) -> tuple[str, ...]:
        """What the last declaration listed; empty before it, and after `withdraw`."""
        lease = self._lease
        return () if lease is None else lease.uids

    def turn(self) -> None:
        """Declare or renew, whichever is due. Raises ``AwayError`` if the directory does not answer."""
        with self._lock:
            if self._ended:
                return
            uids = tuple(self._uids())
            if self._lease is not None and set(self._lease.uids) == set(uids):
                try:
                    self._directory.renew(self._lease)
                    return
                except LeaseLostError:
                    self._lease = None
            # What is listed twice for a moment is found; what is not listed for a moment is not.
            before, self._lease = self._lease, self._directory.declare(uids, self._address, self._ttl) if uids else None
            if before is not None:
                self._directory.withdraw(before)

    def withdraw(self) -> None:
        """Be listed no more, for good. A directory that is away forgets by itself when the lease ends."""
        with self._lock:
            self._ended = True
            lease, self._lease = self._lease, None
            if lease is not None:
                try:
                    self._directory.withdraw(lease)
                except AwayError:
                    return
