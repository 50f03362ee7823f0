"""Protection of threads and of gRPC against forks and against the end of the interpreter.

    parent   threads, connections ──────────────────────────────────────> ends them
                       └── fork ──> child: only the objects, with locks whose holders do not exist here

A `DataLoader` forks its workers. If a child ended or freed the inherited objects, it would wait forever, or end those
of the parent. `os.register_at_fork` could reset them, but not gRPC's own, which does not survive a fork. So a child
keeps all inherited objects alive, and using gRPC in it raises an error.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

from torchweft.core.errors import UsageError

SECONDS = 5.0
_SUFFIX = "(_run)"  # of the names of gRPC's threads: Thread-7 (_run)
# In a child: the objects that it must not end. Their destructors would wait as well, so they are never freed.
_inherited: list[object] = []


class ContextManager:
    """A context manager that closes itself at the end of its block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ForkGuard:
    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        return os.getpid() == self._process


_grpc_process: list[ForkGuard] = []  # the first process to use gRPC, among this one and its ancestors


def finalizer(owner: object, end: Callable[..., object], *held: object) -> "weakref.finalize[..., object]":
    """`weakref.finalize` for this process only: ``end(*held)`` once, when it is called or the owner is gone."""
    # The guard is made with the owner, so a fork of this process inherits it and sees that it is another one.
    guard = ForkGuard()
    return weakref.finalize(owner, lambda: end(*held) if guard.here else _inherited.append(held))


def check_fork(what: str) -> None:
    """Must be called before gRPC is used. Raises ``UsageError`` in a fork of a process that has used it."""
    if not _grpc_process:
        _grpc_process.append(ForkGuard())
    if not _grpc_process[0].here:
        raise UsageError(
            f"{what} cannot be used here: this process was forked from one that uses gRPC, which does not survive a "
            "fork. Start processes with 'spawn', or before the first connection, and open one there"
        )


class GrpcThreads:
    """The threads that gRPC starts for the calls of one channel, to be joined after it is closed. Thread-safe.

    A thread that is inside gRPC when the interpreter exits is torn down there, and gRPC's C++ calls ``terminate``: of
    processes that exited right after closing a connection, one in five died with SIGABRT.

    gRPC offers no access to these threads, but starts them while a call begins, in the calling thread. So they are the
    difference of the threads before and after.
    """

    # For all channels, or a channel would also join the threads of another's call. Reentrant, because a finalizer can
    # run at any time and begin a call.
    _beginning = threading.RLock()

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def stream(self, method: Callable[..., Any], requests: Iterator[Any], **options: Any) -> Any:
        # The call must not wait for its answer, because this holds the lock of all channels.
        with self._beginning:
            before = set(threading.enumerate())
            try:
                return method(requests, **options)
            finally:
                new = {thread for thread in set(threading.enumerate()) - before if thread.name.endswith(_SUFFIX)}
                self._threads = {thread for thread in self._threads if thread.is_alive()} | new

    def wait(self, seconds: float = SECONDS) -> bool:
        end = time.monotonic() + seconds
        with self._beginning:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any([thread.is_alive() for thread in threads])
