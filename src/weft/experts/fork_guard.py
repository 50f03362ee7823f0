"""Protection of threads and of gRPC against forks and against the end of the interpreter.

    parent   threads, connections ──────────────────────────────────────> ends them
                       └── fork ──> child: the objects alone, with locks that no thread is there to open

A `DataLoader` forks its workers. A child that ended or freed what it inherited would wait for ever, or end the
parent's. gRPC does not outlive a fork either: where a child uses it, it is refused.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from weft.core.errors import UsageError

SECONDS = 5.0
_SUFFIX = "(_run)"  # of the names of gRPC's threads: Thread-7 (_run)
_inherited: list[object] = []
"""In a child, what it would have ended. Destructors would wait as well, so nothing of it is freed."""


class ForkGuard:
    """The process in which it was made; ``here``: whether this is that process, and not a fork of it."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        return os.getpid() == self._process


_grpc_process: list[ForkGuard] = []  # the first process to use gRPC, of this one and those that it was forked from


def finalizer(owner: object, end: Callable[..., object], *held: object) -> "weakref.finalize[..., object]":
    """As `weakref.finalize`: ``end(*held)`` once, when it is called or the owner is gone, but only in this process."""
    guard = ForkGuard()
    return weakref.finalize(owner, lambda: end(*held) if guard.here else _inherited.append(held))


def check_fork(what: str) -> None:
    """Call this before using gRPC. Raises ``UsageError`` in a fork of a process that has used it."""
    if not _grpc_process:
        _grpc_process.append(ForkGuard())
    if not _grpc_process[0].here:
        raise UsageError(
            f"{what} cannot be used here: this process was forked from one that uses gRPC, which does not outlive a "
            "fork. Start processes with 'spawn', or before the first connection, and open one there"
        )


class GrpcThreads:
    """The threads that work for the calls of one channel, to be waited for after it is closed. Thread-safe.

    A thread that is inside of gRPC when the interpreter ends is torn down there, which its C++ answers with
    ``terminate``: of processes that ended just after they had closed a connection, one in five died with SIGABRT.

    gRPC hands them out nowhere, but starts them while a call begins, in the thread that begins it: they are those that
    are there afterwards and were not before. Calls begin one at a time, else a channel would wait for those of another.
    """

    _beginning = threading.RLock()  # reentrant: a finalizer may begin a call

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def stream(self, method: Callable[..., Any], requests: Iterator[Any], **options: Any) -> Any:
        """Begin a call of gRPC that sends what the iterator yields. It must not wait for its answer."""
        with self._beginning:
            before = set(threading.enumerate())
            try:
                return method(requests, **options)
            finally:
                new = {each for each in set(threading.enumerate()) - before if each.name.endswith(_SUFFIX)}
                self._threads = {each for each in self._threads if each.is_alive()} | new

    def wait(self, seconds: float = SECONDS) -> bool:
        """Wait until all of them have ended; whether they have. For after the end of the channel."""
        end = time.monotonic() + seconds
        with self._beginning:
            threads = self._threads - {threading.current_thread()}
        for each in threads:
            each.join(max(0.0, end - time.monotonic()))
        return not any([each.is_alive() for each in threads])
