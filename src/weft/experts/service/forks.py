"""gRPC does not outlive a fork: a child of a process that has used it would wait for ever, or abort.

parent   connections, servers ── fork ──> child, such as a worker of a `DataLoader`: is told where it uses one
"""

from weft.core.errors import UsageError
from weft.core.process import Home

_first: list[Home] = []
"""The process that was the first to use gRPC, of this one and those that it was forked from."""


def use_grpc(what: str) -> None:
    """To be called before gRPC is. Raises ``UsageError`` in a fork of a process that has used it."""
    if not _first:
        _first.append(Home())
    if not _first[0].here:
        raise UsageError(
            f"{what} cannot be used here: this process was forked from one that uses gRPC, which does not outlive a "
            "fork. Start processes with 'spawn', or before the first connection, and open one there"
        )
