"""Memory that the calls of a server may take together, however many clients there are.

    open     a stream          MESSAGE_BYTES, which gRPC may hold of it unseen    no room: the stream is turned away
    reserve  a frame in parts  its whole size, before its second part is read     no room: it is waited for, not long
    admit    a call            its tensors, before one is made                    no room: OverloadError to its author

Each stream has a bound of its own; a thousand streams within theirs would still fill any machine.
"""

import asyncio

from weft.experts.errors import OverloadError


class Budget:
    """Belongs to the thread of the network loop. All numbers are bytes: at ``most``, ``streams`` and ``held``."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self.streams = 0
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

    async def reserve(self, nbytes: int, seconds: float) -> None:
        """`admit`, as soon as there is room within ``seconds``."""
        end = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                return self.admit(nbytes)
            except OverloadError:
                self._freed.clear()
                try:
                    await asyncio.wait_for(self._freed.wait(), end - asyncio.get_running_loop().time())
                except TimeoutError:
                    pass
                else:
                    continue
                raise

    def admit(self, nbytes: int) -> None:
        """Hold so many more. Raises ``OverloadError``; one call alone is let in whatever its size, which has limits."""
        if self.held and nbytes and self.streams + self.held + nbytes > self.most:
            raise OverloadError(f"{self._taken}, and {nbytes} more were sent; come back later")
        self.held += nbytes

    def leave(self, nbytes: int) -> None:
        """Hold so many less."""
        self.held -= nbytes
        self._freed.set()

    @property
    def _taken(self) -> str:
        return f"streams and calls under way at this server take {self.streams + self.held} of {self.most} bytes"
