"""Who else serves, as the directory last told: for the status, which must not wait for a directory that is away.

its thread ── look ──> Mirror ──> snapshot        status ── statistics() ──> by address: experts, and how many it owns
"""

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from weft.experts.directory import AwayError, Directory, Mirror, Snapshot


@dataclass(frozen=True)
class NeighbourStatistics:
    """One server: how many experts the directory lists at it, and how many of them it owns."""

    experts: int
    owns: int


@dataclass(frozen=True)
class DirectoryStatistics:
    """``servers`` whose leases last, by address; ``here`` is the address of the one that tells.

    ``away_seconds``: since when the directory has not answered; 0 while it does.
    """

    here: str
    away_seconds: float
    servers: Mapping[str, NeighbourStatistics]


class Neighbours:
    """Looks when it is told to, and tells what it saw. `statistics` may be called in any thread."""

    def __init__(self, directory: Directory, here: str) -> None:
        self._directory = directory
        self._here = here
        self._lock = threading.Lock()
        self._closed = False
        self._mirror: Mirror | None = None
        self._snapshot = Snapshot()

    def look(self) -> None:
        """See who else is there; where the directory does not answer, the renewal of the own lease tells."""
        with suppress(AwayError):
            self._look()

    def _look(self) -> None:
        with self._lock:
            if self._closed:
                return
            if self._mirror is None:
                self._mirror = Mirror(self._directory)
            self._snapshot = self._mirror.snapshot()

    def statistics(self) -> DirectoryStatistics:
        """As of the last look."""
        snapshot, mirror = self._snapshot, self._mirror
        experts: dict[str, int] = {}
        owns: dict[str, int] = {}
        for addresses in snapshot.experts.values():
            for address in addresses:
                experts[address] = experts.get(address, 0) + 1
        for owner in snapshot.owners.values():
            owns[owner.address] = owns.get(owner.address, 0) + 1
        servers = {address: NeighbourStatistics(count, owns.get(address, 0)) for address, count in experts.items()}
        return DirectoryStatistics(self._here, 0.0 if mirror is None else mirror.away_seconds, servers)

    def close(self) -> None:
        """Look no more."""
        with self._lock:
            self._closed = True
            if self._mirror is not None:
                self._mirror.close()
