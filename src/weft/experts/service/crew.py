"""gRPC's own threads, to be waited for at the end of a channel.

channel.close() ── gRPC's threads still run for a moment ── the interpreter ends ── abort

A thread that is inside of gRPC when the interpreter ends is torn down there, which its C++ answers with ``terminate``:
of processes that ended just after they had closed a connection, one in five died with SIGABRT.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 5.0


class Crew:
    """The threads that work for the calls of one channel. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._threads: set[threading.Thread] = set()

    def joins(self) -> None:
        """The current thread is one of them."""
        with self._changed:
            self._threads = {each for each in self._threads if each.is_alive()} | {threading.current_thread()}

    def begin(self) -> Callable[..., None]:
        """A call begins; what is returned is to be its callback at the end, which gRPC makes in a thread of its own."""
        mine = threading.current_thread()
        with self._changed:
            self._calls += 1

        def ended(*_: object) -> None:
            if threading.current_thread() is not mine:  # else it had ended before it could be called back
                self.joins()
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

        return ended

    def stream(self, method: Any, requests: Iterator[Any], **options: Any) -> Any:
        """Begin a call of gRPC that sends what the iterator yields."""

        def sent() -> Iterator[Any]:
            self.joins()
            yield from requests

        ended = self.begin()
        try:
            call = method(sent(), **options)
        except BaseException:
            ended()
            raise
        if not call.add_callback(ended):
            ended()
        return call

    def wait(self, seconds: float = SECONDS) -> bool:
        """Wait until all calls and their threads have ended; whether they did. For after the end of the channel."""
        end = time.monotonic() + seconds
        with self._changed:
            over = self._changed.wait_for(lambda: not self._calls, seconds)
            threads = self._threads - {threading.current_thread()}
        for each in threads:
            each.join(max(0.0, end - time.monotonic()))
        return over and not any([each.is_alive() for each in threads])
