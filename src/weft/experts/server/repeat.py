"""Something to be done every few seconds, in a thread that ends when it is told to.

enter ── wait ── act ── wait ── act ── ... ── leave: wakes the wait, and returns when the thread has ended

What the act raises is kept and counted, and the next turn comes anyway: a full disk or a directory that is away
now may be fine in a while, and the server goes on serving meanwhile. The log hears of the first failure of several,
and of their end.
"""

import logging
import threading
import time
from collections.abc import Callable

from weft.core.errors import escaped

_LOG = logging.getLogger("weft.experts.server")


class Repeat:
    """Calls ``act`` every ``seconds`` from `start` to `stop`.

    ``urgent``: the seconds count from the beginning of a turn, not from its end, and one that failed is tried again
    after a tenth of them.
    """

    def __init__(self, name: str, seconds: float, act: Callable[[], object], *, urgent: bool = False) -> None:
        self._urgent = urgent
        self.failures = 0
        self.last_failure: Exception | None = None
        self._name, self._seconds = name, seconds
        self._act = act
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weft-{name}", daemon=True)

    def start(self) -> None:
        """Begin to wait for the first turn."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """No more turns; whether the one under way has ended within ``timeout`` seconds.

        May be called twice; the second time does not wait.
        """
        waited = self._stop.is_set()
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(0.0 if waited else max(0.0, timeout))
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause, again = self._seconds, self._seconds / 10 if self._urgent else self._seconds
        while not self._stop.wait(pause):
            start, pause = time.monotonic(), self._seconds
            try:
                self._act()
            except Exception as error:
                self.failures += 1
                pause = again
                if self.last_failure is None:
                    _LOG.warning("%s: %s; tried again every %g s", self._name, escaped(error), again)
                self.last_failure = error
            else:
                if self.last_failure is not None:
                    _LOG.warning("%s: works again", self._name)
                self.last_failure = None
            if self._urgent:
                pause = max(0.0, start + pause - time.monotonic())


class Repeats(dict[str, Repeat]):
    """What one server repeats, by name."""

    def begin(self, name: str, seconds: float, act: Callable[[], object], *, urgent: bool = False) -> None:
        """One more, and start it."""
        self[name] = Repeat(name, seconds, act, urgent=urgent)
        self[name].start()

    def stop(self, name: str, timeout: float) -> None:
        """See `Repeat.stop`; one that is not there is none."""
        if name in self:
            self[name].stop(timeout)
