"""Threads of a server: a task every few seconds, and an asyncio loop.

    PeriodicTask   wait ── act ── wait ── act ── ... ── stop: wakes the wait, and returns when the thread has ended
    LoopThread     caller ── run(coroutine) ──> the loop's thread ──> result or error

What a task raises is kept, and its next turn comes anyway: a full disk or a directory that is away now may be fine in a
while. The first failure of several is logged, and their end.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from weft.core.errors import UsageError, escaped

_LOG = logging.getLogger("weft.experts.server")


class PeriodicTask:
    """Calls ``act`` every ``seconds`` from `start` to `stop`.

    ``urgent``: they count from the beginning of a turn, and one that failed is tried again after a tenth of them.
    """

    def __init__(self, name: str, seconds: float, act: Callable[[], object], *, urgent: bool = False) -> None:
        self._urgent = urgent
        self.last_failure: Exception | None = None
        self._name, self._seconds = name, seconds
        self._act = act
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weft-{name}", daemon=True)

    def start(self) -> None:
        """Begin to wait for the first turn."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """No more turns; whether the one under way has ended within ``timeout`` seconds. Again does not wait."""
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


Result = TypeVar("Result")


class LoopThread:
    """Runs from the constructor to `close`."""

    def __init__(self, name: str) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._until_closed(started),), name=f"weft-{name}", daemon=True
        )
        self._thread.start()
        self.loop = started.result()

    async def _until_closed(self, started: "Future[asyncio.AbstractEventLoop]") -> None:
        self._closed = asyncio.Event()
        started.set_result(asyncio.get_running_loop())
        await self._closed.wait()

    def run(self, what: Coroutine[Any, Any, Result], timeout: float) -> Result:
        """What the coroutine returns or raises. Raises ``TimeoutError`` if it takes longer, and cancels it then."""
        if threading.current_thread() is self._thread:
            what.close()
            raise UsageError("a server cannot be started or ended from within its own network thread")
        future = asyncio.run_coroutine_threadsafe(what, self.loop)
        try:
            return future.result(timeout)
        except FutureTimeout:
            future.cancel()
            raise

    def close(self, timeout: float) -> bool:
        """Cancel all tasks and end the thread; whether it ended in time. May be called twice."""
        if self._thread.is_alive() and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()
