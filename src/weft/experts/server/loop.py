"""An asyncio loop in a thread of its own, so that a server runs inside of a program that is not asynchronous.

caller ── run(coroutine) ──> the loop's thread ──> result or error       close: cancels what is left, ends the thread
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from weft.core.errors import UsageError

Result = TypeVar("Result")


class LoopThread:
    """Runs from the constructor to `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"weft-{name}", daemon=True)
        self._thread.start()

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
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
