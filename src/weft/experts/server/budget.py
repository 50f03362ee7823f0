"""Memory that the calls of a server may take together, however many clients there are.

    open     a stream          MESSAGE_BYTES, which gRPC may hold of it unseen    no room: the stream is turned away
    reserve  a frame in parts  its whole size, before its second part is read     no room: it is waited for, not long
    admit    a call            its tensors, before one is made                    no room: OverloadError to its author,
                                                                                  QuotaError for its client's share

Each stream has a bound of its own; a thousand streams within theirs would still fill any machine.
"""

import asyncio
from collections import Counter

from weft.experts.errors import OverloadError, QuotaError


class Budget:
    """Belongs to the thread of the network loop. All numbers are bytes: at ``most``, ``streams`` and ``held``."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self.streams = 0
        self._clients: Counter[str] = Counter()
        self._freed = asyncio.Event()

    def open(self, nbytes: int) -> None:
        """One more stream. Raises ``OverloadError``; one stream alone is let in."""
        if self.streams and self.streams + self.held + nbytes > self.most:
            raise OverloadError(f"{self._taken}; no more clients are let in now, come back later")
        self.streams += nbytes

    def close(self, nbytes: int) -> None:
        """One stream less."""
        self.streams -= nbytes
        self._freed.set()

    async def reserve(self, nbytes: int, client: str, seconds: float) -> None:
        """`admit`, as soon as there is room within ``seconds``."""
        end = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                return self.admit(nbytes, client)
            except (OverloadError, QuotaError):
                self._freed.clear()
                try:
                    await asyncio.wait_for(self._freed.wait(), end - asyncio.get_running_loop().time())
                except TimeoutError:
                    pass
                else:
                    continue
                raise

    def admit(self, nbytes: int, client: str = "") -> None:
        """Hold so many more, for a client that may have three quarters of all; without a name it is not counted.

        Raises ``OverloadError`` or ``QuotaError``; one call alone is let in whatever its size, which has limits.
        """
        share = self.most * 3 // 4
        if client and nbytes and self._clients[client] and self._clients[client] + nbytes > share:
            raise QuotaError(
                f"calls under way of client {client!r} take {self._clients[client]} of the {share} bytes that one "
                f"client may take at this server, and {nbytes} more were sent; wait for answers before sending more"
            )
        if self.held and nbytes and self.streams + self.held + nbytes > self.most:
            raise OverloadError(f"{self._taken}, and {nbytes} more were sent; come back later")
        self.held += nbytes
        if client and nbytes:
            self._clients[client] += nbytes

    def leave(self, nbytes: int, client: str = "") -> None:
        """Hold so many less."""
        self.held -= nbytes
        if client and nbytes:
            self._clients[client] -= nbytes
            if not self._clients[client]:
                del self._clients[client]
        self._freed.set()

    @property
    def _taken(self) -> str:
        return f"streams and calls under way at this server take {self.streams + self.held} of {self.most} bytes"
