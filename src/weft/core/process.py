"""What a process has started is ended by that process, and by none that was forked from it.

    parent   threads, connections ──────────────────────────────────────> ends them
                       └── fork ──> child: the objects alone, with locks that no thread is there to open

A `DataLoader` forks its workers; a child that ends or frees what it inherited would wait for ever, or end the parent's.
"""

import os
import weakref
from collections.abc import Callable

_left: list[object] = []
"""Of a child: what it inherited and would have ended. Destructors would wait as well, so nothing of it is freed."""


class Home:
    """The process in which it was made."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process, and not a fork of it."""
        return os.getpid() == self._process


def finalizer(owner: object, end: Callable[..., object], *held: object) -> "weakref.finalize[..., object]":
    """As `weakref.finalize`: ``end(*held)`` once, when it is called or the owner is gone, but only in this process."""
    return weakref.finalize(owner, _end, Home(), end, held)


def _end(home: Home, end: Callable[..., object], held: tuple[object, ...]) -> None:
    if home.here:
        end(*held)
    else:
        _left.append(held)
