"""Refuses the writes of an owner that was replaced.

    A owns with token 7 ... A stalls, its lease ends ... B owns with token 12, writes ... A wakes up and writes: 7 < 12

Only who is written to can tell: A itself still believes that it is the owner. So a follower, a store, or a server
that takes state over keeps the largest token it has seen for each expert.
"""

import threading

from weft.experts.directory.errors import FencedError


class Fence:
    """The largest token seen, per expert. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._largest: dict[str, int] = {}

    def admit(self, uid: str, token: int) -> None:
        """Let a write of the owner with ``token`` pass. Raises ``FencedError`` if a newer owner wrote before."""
        with self._lock:
            largest = self._largest.get(uid, token)
            if token < largest:
                raise FencedError(
                    f"token {token} for expert {uid!r} is old: an owner with token {largest} wrote since. "
                    "Stop stepping it; claim it again if it is free"
                )
            self._largest[uid] = token

    def largest(self, uid: str) -> int | None:
        """The largest token seen for this expert."""
        with self._lock:
            return self._largest.get(uid)
