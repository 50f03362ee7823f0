"""Which server to ask for an expert: always the same, or the one that the directory names now.

    FixedRoute        one transport
    DirectoryRoute    snapshot ── owner, else any that serves it ──> address ──> transport of the shared connections

A dead address stays in the directory until its lease ends; so every further attempt takes the next address. Who
follows an expert says so (`NotOwnerError`): it lives, and takes over when that lease has ended.
"""

from typing import Protocol, runtime_checkable

from weft.core.errors import UsageError, escaped, listed
from weft.experts.client.connections import Connections
from weft.experts.client.transport import Transport
from weft.experts.wire import NotOwnerError, UnreachableError

_MOST = 10  # names that a message tells; there may be as many as experts


@runtime_checkable
class Route(Protocol):
    """How one expert is reached."""

    def transport(self, attempt: int, last: BaseException | None) -> Transport:
        """Where to send the attempt of this number (from 0), after the one before ended with ``last``.

        Raises ``UnreachableError`` if nobody serves the expert now, ``UsageError`` if nobody ever will.
        """
        ...

    def token(self) -> int:
        """The fencing token of the expert's owner, as far as is known; 0: none."""
        ...

    def hopeful(self, error: BaseException) -> bool:
        """Whether, after this error, somebody is sure to answer soon."""
        ...


class FixedRoute:
    """Always this transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def transport(self, attempt: int, last: BaseException | None) -> Transport:
        """See `Route.transport`."""
        return self._transport

    def token(self) -> int:
        """See `Route.token`."""
        return 0

    def hopeful(self, error: BaseException) -> bool:
        """See `Route.hopeful`."""
        return False


class DirectoryRoute:
    """Wherever the directory says that the expert is."""

    def __init__(self, uid: str, connections: Connections) -> None:
        self.connections = connections
        self._uid = uid

    def transport(self, attempt: int, last: BaseException | None) -> Transport:
        """See `Route.transport`."""
        told = last.details.get("address") if isinstance(last, NotOwnerError) else None
        if told and self.connections.refusal(told) is None:
            return self.connections.to(told)
        snapshot = self.connections.snapshot()
        owner, addresses = snapshot.owner(self._uid), list(snapshot.addresses(self._uid))
        if owner is not None and owner.address in addresses:
            addresses.remove(owner.address)
            addresses.insert(0, owner.address)
        if not addresses and self.connections.fixed:
            raise UsageError(
                f"there is no address of expert {self._uid!r} among those that these connections were given, which are "
                f"of {', '.join(sorted(snapshot.experts)[:_MOST]) or 'nobody'}"
            )
        if not addresses:
            raise UnreachableError(f"the directory knows no server of expert {self._uid!r} now")
        refusals = {address: self.connections.refusal(address) for address in addresses}
        trusted = [address for address, refusal in refusals.items() if refusal is None]
        if not trusted:
            raise UnreachableError(
                listed(
                    f"the directory knows no server of expert {self._uid!r} that may be spoken to:",
                    [escaped(each) for each in refusals.values()],
                )
            )
        return self.connections.to(trusted[attempt % len(trusted)])

    def token(self) -> int:
        """See `Route.token`."""
        owner = self.connections.snapshot().owner(self._uid)
        return 0 if owner is None else owner.token

    def hopeful(self, error: BaseException) -> bool:
        """See `Route.hopeful`."""
        return isinstance(error, NotOwnerError)
