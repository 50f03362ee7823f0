"""Options of a server: quotas of its clients, how often it saves, how it ends, and where it listens; and of its memory.

Everything that an unknown client could fill is bounded: connections, calls and bytes of one connection, frames.
"""

import ctypes
import os
from dataclasses import dataclass, field, fields

import torch

from weft.core.validation import Validator
from weft.experts.address import address_fault, is_wildcard, parse_address
from weft.experts.wire.frame import Limits

# mallopt's numbers, as in malloc.h; and by which variable a user may have set the same
_MORE = (1 << 31) - 1
_SETTINGS = (
    (-1, _MORE, "MALLOC_TRIM_THRESHOLD_"),  # never give back what is free at the end of the heap
    (-3, _MORE, "MALLOC_MMAP_THRESHOLD_"),  # large blocks lie there too
    (-8, 1, "MALLOC_ARENA_MAX"),  # and those of all threads: other heaps are at most 64 MB, and always given back
)
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # PyTorch's


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server, with bounds for its clients.

    Args:
    limits: of one frame; a longer one is refused before its second part is read.
    connections: streams at a time; one more is turned away. One client, by its proven name or else its host, may have
        half of them, or 64 where that is more.
    connection_calls, connection_bytes: what one stream may have under way, requests and answers. Beyond it the server
        reads no more from it until answers have left, and HTTP/2's flow control slows that client down, nobody else.
    total_bytes: what all streams together may have under way: 512 KiB for each stream, frames that are half here, and
        tensors of requests whose answers have not left. A call beyond it is refused with ``OverloadError`` before it
        is decoded, a stream beyond it is turned away. Calls of one client may take three quarters, beyond which they
        are refused with ``QuotaError``.
    longest_seconds: the deadline of a call that names none, or a later one.
    lease_seconds: how long the directory lists a server that does not renew; it renews three times as often.
    checkpoint_seconds: between two looks for experts that have stepped since they were saved.
    drain_seconds: how long accepted work may take when the server ends; then it is failed.

    Example:
        >>> from weft.experts.server import ServerOptions
        >>> server = weft.Server(options=ServerOptions(checkpoint_seconds=10.0))
    """

    limits: Limits = field(default_factory=Limits)
    connections: int = 4096
    connection_calls: int = 1024
    connection_bytes: int = 256 << 20
    total_bytes: int = 4 << 30
    longest_seconds: float = 600.0
    lease_seconds: float = 5.0
    checkpoint_seconds: float = 30.0
    drain_seconds: float = 2.5

    def __post_init__(self) -> None:
        with Validator("invalid server options") as check:
            for name in [each.name for each in fields(self) if each.name != "limits"]:
                (check.seconds if name.endswith("_seconds") else check.count)(name, getattr(self, name))

    @property
    def client_connections(self) -> int:
        """The streams that one client may have."""
        return max(64, self.connections // 2)


def listen_faults(address: object, advertise: object, listed_there: bool) -> list[str]:
    """What is wrong with these addresses; ``listed_there``: whether a directory lists them."""
    faults = address_fault("address", address, free=True)
    if advertise is not None:
        faults += address_fault("advertise", advertise)
        if not listed_there:
            faults.append("there is advertise= and no directory, which would list it")
        elif not faults and is_wildcard(parse_address(str(advertise))[0]):
            faults.append(f"advertise is {advertise!r}, which is no address that others could call")
    elif listed_there and not faults and is_wildcard(parse_address(str(address))[0]):
        faults.append(
            f"address is {address!r}, which is no address that others could call, but the directory would list it; "
            'say by which one they reach this machine, such as advertise = "10.0.0.7:7070"'
        )
    return faults


def keep_freed_memory() -> bool:
    """Have glibc keep what this process frees, from now on; its size is then that of its peak. `weft serve` calls it.

    Else a batch that ends gives 34 MB back to the system, and the next one has 9000 page faults. To be called before
    threads are started. What the environment says of the same (``MALLOC_...``, see mallopt(3)) is left alone. Returns
    whether the C library could be told.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    wanted = [(number, value) for number, value, name in _SETTINGS if name not in os.environ]
    return all([mallopt(number, value) for number, value in wanted])


def use_large_pages() -> None:
    """Have PyTorch ask Linux for large pages (2 MB) for its large tensors on the CPU; `weft serve` calls it.

    To be called before the first tensor is made, for PyTorch decides it once. What the environment says
    (``THP_MEM_ALLOC_ENABLE``) is left alone.
    """
    if _LARGE_PAGES in os.environ:
        return
    os.environ[_LARGE_PAGES] = "1"
    try:
        torch.empty(1, device="cpu")  # here it is decided; what is started from here is not to hear of it
    finally:
        del os.environ[_LARGE_PAGES]
