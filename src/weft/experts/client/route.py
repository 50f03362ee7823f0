"""Which server to ask for an expert: always the same, or the one that the directory names now.

    FixedRoute        one transport
    DirectoryRoute    snapshot ── owner, else any that serves it ──> address ──> transport of the shared connections

A dead address stays in the directory until its lease ends; so every further attempt takes the next address.
"""

from typing import Protocol, runtime_checkable

from weft.experts.client.connections import Connections
from weft.experts.client.transport import Transport
from weft.experts.wire import NotOwnerError, UnreachableError


@runtime_checkable
class Route(Protocol):
    """How one expert is reached."""

    def transport(self, attempt: int, last: BaseException | None) -> Transport:
        """Where to send the attempt of this number (from 0), after the one before ended with ``last``.

        Raises ``UnreachableError`` if nobody serves the expert now.
        """
        ...


class FixedRoute:
    """Always this transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def transport(self, attempt: int, last: BaseException | None) -> Transport:
        """See `Route.transport`."""
        return self._transport


class DirectoryRoute:
    """Wherever the directory says that the expert is."""

    def __init__(self, uid: str, connections: Connections) -> None:
        self.connections = connections
        self._uid = uid

    def transport(self, attempt: int, last: BaseException | None) -> Transport:
        """See `Route.transport`."""
        if isinstance(last, NotOwnerError) and last.details.get("address"):
            return self.connections.to(last.details["address"])
        snapshot = self.connections.snapshot()
        owner, addresses = snapshot.owner(self._uid), list(snapshot.addresses(self._uid))
        if owner is not None and owner.address in addresses:
            addresses.remove(owner.address)
            addresses.insert(0, owner.address)
        if not addresses:
            raise UnreachableError(f"the directory knows no server of expert {self._uid!r} now")
        return self.connections.to(addresses[attempt % len(addresses)])
