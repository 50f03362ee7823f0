"""How many bytes all calls of a server may take together, however many clients there are.

    take ── room? ── yes: held ──> queue, module, answer ── sent, or its client is gone: given back
              └───── no: OverloadError, before a tensor is made; its author may come back later

Each stream has a bound of its own; a thousand streams within theirs would still fill any machine.
"""

from weft.experts.errors import OverloadError


class Budget:
    """Belongs to the thread of the network loop. ``most`` and ``held`` are bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def admit(self, nbytes: int) -> None:
        """Hold so many more. Raises ``OverloadError``; one call alone is let in whatever its size, which has limits."""
        if self.held and nbytes and self.held + nbytes > self.most:
            raise OverloadError(
                f"the calls under way at this server take {self.held} of {self.most} bytes, and {nbytes} more were "
                "sent; come back later"
            )
        self.held += nbytes

    def leave(self, nbytes: int) -> None:
        """Hold so many less."""
        self.held -= nbytes
