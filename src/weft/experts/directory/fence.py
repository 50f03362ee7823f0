"""Refuses the writes of an owner that was replaced.

    A owns with token 7 ... A stalls, its lease ends ... B owns with token 12, writes ... A wakes up and writes: 7 < 12

Only who is written to can tell: A itself still believes that it is the owner. So a follower, a store, or a server
that takes state over keeps the largest token it has seen for each expert.

A write never changes which life of the directory counts; see token.py. Only what the directory itself says does.
"""

import threading

from weft.experts.directory.token import later, life_of, number_of, replaced
from weft.experts.errors import FencedError


class Fence:
    """The largest token seen, per expert. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._largest: dict[str, int] = {}

    def admit(self, uid: str, token: int) -> None:
        """Let a write of the owner with ``token`` pass. Raises ``FencedError`` if a newer owner wrote before."""
        with self._lock:
            largest = self._largest.get(uid, token)
            if replaced(token, largest):
                one, other = number_of(token), number_of(largest)
                why = f"is old: an owner with token {other} wrote since"
                if life_of(token) != life_of(largest):
                    why = f"is of another life of the directory than the owner's that is known here, {other}"
                raise FencedError(
                    f"token {one} for expert {uid!r} {why}. Stop stepping it; claim it again if it is free"
                )
            self._largest[uid] = token

    def named(self, uid: str, token: int, *, granted: bool = False) -> bool:
        """The directory names the owner with ``token``; whether it has begun anew since it named the one before.

        Then that one's token counts no more. ``granted``: it was granted just now, so that even a smaller one is the
        later one. Otherwise what it says may be old news, and a smaller one of the same life changes nothing.
        """
        with self._lock:
            largest = self._largest.get(uid)
            anew = largest is not None and (
                life_of(token) != life_of(largest) or (granted and not later(token, largest))
            )
            if largest is None or anew or later(token, largest):
                self._largest[uid] = token
            return anew

    def largest(self, uid: str) -> int | None:
        """The token of the latest owner seen for this expert."""
        with self._lock:
            return self._largest.get(uid)
