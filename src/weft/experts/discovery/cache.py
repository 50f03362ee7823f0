"""A cached directory: one snapshot that follows its events, and stays while the directory is away.

    snapshot() ── apply the events that came ──> the snapshot of now
                       |
                       directory away: the last one, and a new try after a while;  events missed: a new one

A call of a directory that is away may take seconds. So each try has a thread of its own, which ends with it; the
caller that began it waits for a moment, the others not at all. While the directory answers, there is no thread.

An address in the snapshot may be dead: its callers learn that soonest, and try another one.
"""

import threading
import time
from collections.abc import Callable

from weft.experts.discovery.directory import Directory, Event, Snapshot, Watch
from weft.experts.errors import AwayError, WatchLostError

_JOIN = 0.2  # seconds that `close` waits for a try; it ends with its call of the directory, at the latest


class DirectoryCache:
    """The experts with one prefix, as the directory last listed them. Thread-safe. A context manager.

    ``retry`` is how many seconds pass between two tries to reach a directory that is away; ``max_wait`` how many
    `snapshot` waits at most for the try that it begins.

    Example:
        >>> from weft.experts.discovery import DirectoryCache, LocalDirectory
        >>> directory = LocalDirectory()
        >>> with DirectoryCache(directory, "ffn.") as cache:
        ...     cache.snapshot().experts
        {}
        >>> directory.close()
    """

    def __init__(
        self,
        directory: Directory,
        prefix: str = "",
        *,
        retry: float = 0.5,
        max_wait: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``AwayError`` if the directory cannot be reached: there is nothing to go on with yet."""
        self._directory = directory
        self._prefix = prefix
        self._retry = retry
        self._max_wait = max_wait
        self._clock = clock
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._next_try = 0.0
        self._closed = False
        self._trying: threading.Thread | None = None
        self._fault: Exception | None = None
        self._snapshot = Snapshot()
        self._watch: Watch | None = None
        self._snapshot, self._watch = self._look()

    @property
    def away_seconds(self) -> float:
        """For how long the directory has been away as of the last look; 0 if it is there."""
        since = self._away_since
        return 0.0 if since is None else self._clock() - since

    def snapshot(self) -> Snapshot:
        """The newest that is known. Never waits longer than ``max_wait`` seconds; never raises `AwayError`."""
        with self._lock:
            if self._watch is not None:
                self._catch_up(self._watch)
            begun = self._begin()
        if begun is not None:
            begun.join(self._max_wait)
        with self._lock:
            fault, self._fault = self._fault, None
            if fault is not None:
                raise fault
            return self._snapshot

    def close(self) -> None:
        """Watch no more. The last snapshot still serves."""
        with self._lock:
            self._closed = True
            self._unwatch()
            trying = self._trying
        if trying is not None and trying is not threading.current_thread():
            trying.join(_JOIN)

    def __enter__(self) -> "DirectoryCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look(self) -> tuple[Snapshot, Watch]:
        snapshot = self._directory.get(self._prefix)
        return snapshot, self._directory.watch(self._prefix, after=snapshot.revision)

    # Under the lock.

    def _catch_up(self, watch: Watch) -> None:
        events: list[Event] = []
        try:
            while (event := watch.next(timeout=0.0)) is not None:
                events.append(event)
        except WatchLostError:  # the directory is there, and is asked anew at once
            self._unwatch()
            self._next_try = self._clock()
        except AwayError:
            self._unwatch()
            self._away()
        finally:  # what was read is gone from the watch, whatever came after it
            if events:
                self._snapshot = self._snapshot.after(events)

    def _begin(self) -> threading.Thread | None:
        """A new try, if one is due."""
        if self._closed or self._watch is not None or self._trying is not None or self._clock() < self._next_try:
            return None
        self._trying = threading.Thread(target=self._try, name="weft-directory-cache", daemon=True)
        self._trying.start()
        return self._trying

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _away(self) -> None:
        now = self._clock()
        self._away_since = now if self._away_since is None else self._away_since
        self._next_try = now + self._retry

    # In the thread of a try.

    def _try(self) -> None:
        found, fault = None, None
        try:
            found = self._look()
        except Exception as error:
            fault = error
        with self._lock:
            self._trying = None
            if found is None:
                self._away()
                self._fault = None if isinstance(fault, AwayError) else fault  # a caller is to hear of it
            elif self._closed:
                found[1].close()
            else:
                self._snapshot, self._watch = found
                self._away_since = None
