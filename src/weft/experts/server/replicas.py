"""What a server does about its replicas, whether it has any or not; see `weft.experts.replica`.

options given ──> each covered expert becomes a `Replica`; one `Keeper` for all; a `Feed` for who follows
none given    ──> nothing: every method does nothing
"""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase

from weft.core.errors import UsageError, listed
from weft.experts.checkpoint import CheckpointStore
from weft.experts.discovery import Directory, Lease, LocalDirectory
from weft.experts.expert import ExpertBackend
from weft.experts.replica import Feed, Keeper, ReplicaOptions, ReplicaStatistics
from weft.experts.server.hosted_expert import HostedExpert
from weft.experts.server.registration import LeaseHeartbeat
from weft.experts.tls import directory_faults
from weft.experts.wire import Limits

_LOG = logging.getLogger("weft.experts.server")
_LEAST = 0.5  # seconds that followers have for the last state, also if the work took all of its time


class Replicas:
    """Of one server. Raises ``UsageError`` for options without a directory: it says who owns what."""

    def __init__(self, options: ReplicaOptions | None, directory: Directory | None, limits: Limits) -> None:
        self._options = options
        self._limits = limits
        self._heartbeat: LeaseHeartbeat | None = None
        self._keeper: Keeper | None = None
        self._failure: Exception | None = None
        self._started = False
        self._names: set[str] = set()
        if options is not None:
            if directory is None:
                raise UsageError("replicas= wants directory= as well: the directory says which server owns an expert")
            if not isinstance(directory, LocalDirectory) and (faults := directory_faults(options.tls)):
                raise UsageError(listed("replicas cannot be kept like this:", faults))
            self._keeper = Keeper(directory, self._here, self._lease, options, limits)

    @property
    def feed(self) -> Feed | None:
        """What answers those who follow."""
        return None if self._keeper is None else self._keeper.feed

    def served(self, backend: ExpertBackend, store: CheckpointStore | None, incarnation: int) -> HostedExpert:
        """An expert as its server keeps it; a replica, if it is one."""
        self._names.add(backend.name)
        until = self._until if self.covers(backend.name) else None
        served = HostedExpert(backend, store, incarnation, until, self._limits)
        if self._keeper is not None and served.replica is not None:
            self._keeper.add(served.replica)
        return served

    def covers(self, uid: str) -> bool:
        """Whether other servers may have this expert too."""
        return self._options is not None and self._options.covers(uid)

    def moved(self, before: Lease, lease: Lease) -> None:
        """See `Keeper.moved`."""
        if self._keeper is not None:
            self._keeper.moved(before, lease)

    def start(self, heartbeat: LeaseHeartbeat) -> None:
        """Claim and follow, and wait for the first states; see `ReplicaOptions.first_seconds`."""
        self._heartbeat = heartbeat
        if self._keeper is not None:
            self._tell()
            self._started = True
            self._keeper.start()

    def wait(self) -> None:
        """After one more expert was added: as in `start`."""
        if self._keeper is not None and self._started:
            self._keeper.wait()

    def remove(self, uid: str, timeout: float, finished: bool) -> None:
        """Hand one expert over. ``finished``: its module runs no more. `raise_failure` raises what saving raised."""
        if self._keeper is not None and uid in self._keeper.replicas:
            with self._kept():
                self._keeper.remove(uid, timeout, save=finished)

    def retire(self) -> bool:
        """Claim nothing more; whether there are replicas, which are listed until `hand_over`."""
        if self._keeper is not None:
            self._keeper.retire()
        return self._keeper is not None

    def hand_over(self, end: float, finished: bool) -> None:
        """Nothing steps any more: let followers have the last states, until ``end`` (`time.monotonic`), and let go.

        ``finished``: no module runs any more.
        """
        if self._keeper is not None:
            with self._kept():
                seconds = max(_LEAST, end - time.monotonic())
                self._keeper.hand_over(list(self._keeper.replicas), seconds, save=finished)

    def raise_failure(self) -> None:
        """Raise what saving raised while experts were handed over, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """End its threads. May be called twice."""
        if self._keeper is not None:
            self._keeper.stop()

    def statistics(self) -> dict[str, ReplicaStatistics]:
        """How every replica stands."""
        return {} if self._keeper is None else self._keeper.statistics()

    @contextmanager
    def _kept(self) -> Generator[None]:
        """What saving raises is told later: the rest of an end goes on."""
        try:
            yield
        except Exception as error:
            self._failure = error

    def _tell(self) -> None:
        """No fault: a pattern may be for experts of other servers, or that come later. But it may be mistyped, too."""
        names = sorted(self._names)
        for pattern in self._options.experts if self._options is not None and names else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                _LOG.warning("replicas: pattern %r fits none of the experts here, such as %r", pattern, names[0])

    def _here(self) -> str:
        return "" if self._heartbeat is None else self._heartbeat.address

    def _lease(self) -> Lease | None:
        return None if self._heartbeat is None else self._heartbeat.lease

    def _until(self, lease: Lease) -> float:
        return float("-inf") if self._heartbeat is None else self._heartbeat.until(lease)
