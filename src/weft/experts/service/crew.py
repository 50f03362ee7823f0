"""gRPC's own threads, to be waited for at the end of a channel.

channel.close() ── gRPC's threads still run for a moment ── the interpreter ends ── abort

A thread that is inside of gRPC when the interpreter ends is torn down there, which its C++ answers with ``terminate``:
of processes that ended just after they had closed a connection, one in five died with SIGABRT.

gRPC hands them out nowhere, and tells of a call's end in one of them only if it is asked before that end. But it starts
them while a call begins, in the thread that begins it: they are those that are there afterwards and were not before.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

SECONDS = 5.0

Begun = TypeVar("Begun")
_TARGET = "(_run)"  # how the name of a thread of gRPC's ends: Thread-7 (_run)
_one_by_one = threading.RLock()  # else one crew would wait for what another began. Again: a finalizer may begin a call


class Crew:
    """The threads that work for the calls of one channel. Thread-safe."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def begin(self, call: Callable[[], Begun]) -> Begun:
        """Begin a call of gRPC, which must not wait for its answer."""
        with _one_by_one:
            before = set(threading.enumerate())
            try:
                return call()
            finally:
                new = {each for each in set(threading.enumerate()) - before if each.name.endswith(_TARGET)}
                self._threads = {each for each in self._threads if each.is_alive()} | new

    def stream(self, method: Any, requests: Iterator[Any], **options: Any) -> Any:
        """Begin a call of gRPC that sends what the iterator yields."""
        return self.begin(lambda: method(requests, **options))

    def wait(self, seconds: float = SECONDS) -> bool:
        """Wait until all of them have ended; whether they have. For after the end of the channel."""
        end = time.monotonic() + seconds
        with _one_by_one:
            threads = self._threads - {threading.current_thread()}
        for each in threads:
            each.join(max(0.0, end - time.monotonic()))
        return not any([each.is_alive() for each in threads])
