"""A snapshot that keeps itself up to date, and goes on serving while the directory is away. It has no thread.

    snapshot() ── read the events that came ──> the snapshot of now
                       |
                       directory away: the last one, and a new try after a while;  events missed: a new one

An address in it may be dead: whoever calls it learns that soonest, and tries another one.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType

from weft.experts.directory.errors import AwayError, WatchLostError
from weft.experts.directory.protocol import Directory, Event, Watch
from weft.experts.directory.snapshot import Snapshot


class Mirror:
    """The experts with one prefix, as the directory last told. Thread-safe. A context manager.

    ``retry`` is how many seconds pass between two tries to reach a directory that is away.
    """

    def __init__(
        self,
        directory: Directory,
        prefix: str = "",
        *,
        retry: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``AwayError`` if the directory cannot be reached: there is nothing to go on with yet."""
        self._directory = directory
        self._prefix = prefix
        self._retry = retry
        self._clock = clock
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._next_try = 0.0
        self._watch: Watch | None = None
        self._closed = False
        self._snapshot = Snapshot()
        self._start()

    @property
    def away_seconds(self) -> float:
        """For how long the directory has been away as of the last look; 0 if it is there."""
        since = self._away_since
        return 0.0 if since is None else self._clock() - since

    def snapshot(self) -> Snapshot:
        """The newest that is known. Never waits for a directory that is in this process; never raises `AwayError`."""
        with self._lock:
            if self._closed:
                return self._snapshot
            try:
                self._catch_up()
            except AwayError:
                self._lose()
            return self._snapshot

    def close(self) -> None:
        """Watch no more. The last snapshot still serves."""
        with self._lock:
            self._closed = True
            if self._watch is not None:
                self._watch.close()
                self._watch = None

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._snapshot = self._directory.get(self._prefix)
        self._watch = self._directory.watch(self._prefix, after=self._snapshot.revision)
        self._away_since = None

    def _catch_up(self) -> None:
        if self._watch is None:
            if self._clock() < self._next_try:
                return
            self._start()
            return
        events: list[Event] = []
        try:
            while (event := self._watch.next(timeout=0.0)) is not None:
                events.append(event)
        except WatchLostError:
            self._watch.close()
            self._start()
        finally:  # what was read is gone from the watch, whatever came after it
            if events:
                self._snapshot = self._snapshot.after(events)

    def _lose(self) -> None:
        now = self._clock()
        self._away_since = now if self._away_since is None else self._away_since
        self._next_try = now + self._retry
        if self._watch is not None:
            self._watch.close()
            self._watch = None
