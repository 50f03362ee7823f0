"""Where values and gradients wait until a worker takes them.

A mailbox belongs to one worker and one walk. Everyone may put; only its worker takes, so what has arrived lies
on a private shelf and needs no lock. Closing a mailbox wakes its worker: nobody waits for a sender that failed.
"""

from queue import SimpleQueue
from typing import Any

from weft.core.route import Address


class Closed(Exception):
    """The walk was given up while a worker waited; the reason is kept by the walk, not by this exception."""


class Shelf:
    """What waits for the only worker of a serial walk: a dictionary, since nobody else can put meanwhile."""

    def __init__(self) -> None:
        self._waiting: dict[Address, Any] = {}

    def put(self, address: Address, value: Any) -> None:
        self._waiting[address] = value

    def take(self, address: Address) -> Any:
        return self._waiting.pop(address)

    def close(self) -> None:
        self._waiting.clear()


class Mailbox:
    """What waits for one worker of a threaded walk. `take` waits for the sender, `close` ends the waiting."""

    def __init__(self) -> None:
        self._arriving: SimpleQueue[tuple[Address | None, Any]] = SimpleQueue()
        self._shelf: dict[Address, Any] = {}

    def put(self, address: Address, value: Any) -> None:
        self._arriving.put((address, value))

    def take(self, address: Address) -> Any:
        """The value at `address`, as soon as it is there. Raises Closed when the walk is given up first."""
        shelf = self._shelf
        while address not in shelf:
            arrived, value = self._arriving.get()
            if arrived is None:
                self._arriving.put((None, None))  # stays closed for whoever asks again
                raise Closed
            shelf[arrived] = value
        return shelf.pop(address)

    def close(self) -> None:
        self._arriving.put((None, None))
