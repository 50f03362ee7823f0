"""Where a server listens, and where the directory says that it is.

address = "0.0.0.0:7070"   advertise = "10.0.0.7:7070"
          every address of this machine         the one by which others reach it
"""

from weft.core.errors import UsageError, listed
from weft.experts.service.address import address_fault, is_wildcard, split


def place_faults(address: object, advertise: object, listed_there: bool) -> list[str]:
    """What is wrong with these addresses; ``listed_there``: whether a directory lists them."""
    faults = address_fault("address", address, free=True)
    if advertise is not None:
        faults += address_fault("advertise", advertise)
        if not listed_there:
            faults.append("there is advertise= and no directory, which would list it")
        elif not faults and is_wildcard(split(str(advertise))[0]):
            faults.append(f"advertise is {advertise!r}, which is no address that others could call")
    elif listed_there and not faults and is_wildcard(split(str(address))[0]):
        faults.append(
            f"address is {address!r}, which is no address that others could call, but the directory would list it; "
            'say by which one they reach this machine, such as advertise = "10.0.0.7:7070"'
        )
    return faults


class Place:
    """Args:
    wanted: host and port to listen at; port 0: a free one.
    advertise: what the directory lists; None: where it listens.
    listed_there: whether a directory lists it.

    Raises ``UsageError`` for what is no address, and for one that would be listed and cannot be called.
    """

    def __init__(self, wanted: str, advertise: str | None, listed_there: bool) -> None:
        if faults := place_faults(wanted, advertise, listed_there):
            raise UsageError(listed("a server cannot be there:", faults))
        self.wanted = wanted
        self.port = 0
        self._advertise = advertise

    @property
    def address(self) -> str:
        """Where it listens. Raises ``UsageError`` before the start."""
        if not self.port:
            raise UsageError("the server has no address before it is started; use it in a with block, or call start()")
        return f"{self.wanted.rpartition(':')[0]}:{self.port}"

    @property
    def known(self) -> str:
        """The same, or, before the start, where it is to listen."""
        return self.address if self.port else self.wanted

    @property
    def listed(self) -> str:
        """What the directory lists."""
        return self._advertise or self.address
