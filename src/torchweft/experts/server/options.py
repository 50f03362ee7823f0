"""Options of a server: quotas of its clients, intervals, addresses, and the memory of its process."""

import ctypes
import os
from dataclasses import dataclass, field, fields

import torch

from torchweft.core.validation import Validator
from torchweft.experts.address import address_fault, is_wildcard, parse_address
from torchweft.experts.wire.frame import Limits

# Parameter numbers of mallopt (malloc.h), values, and the environment variables for the same settings.
_UNLIMITED = (1 << 31) - 1
_SETTINGS = (
    (-1, _UNLIMITED, "MALLOC_TRIM_THRESHOLD_"),  # keep free memory at the end of the heap
    (-3, _UNLIMITED, "MALLOC_MMAP_THRESHOLD_"),  # put large blocks on the heap, too
    (-8, 1, "MALLOC_ARENA_MAX"),  # one heap for all threads, because glibc always trims the others
)
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by PyTorch


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server. Every resource that an unknown client could exhaust is bounded.

    Args:
        limits: of one frame. A longer one is rejected before its second part is read.
        connections: streams at a time; a further one is rejected. One client, identified by its proven name or else its
            host, can have half of them, but at least 64.
        connection_calls, connection_bytes: requests and unsent answers of one stream. At the bound the server stops
            reading this stream until answers have left.
        total_bytes: memory of all streams: 512 KiB for each, incomplete frames, and tensors of requests whose answers
            have not left. A call beyond it gets ``OverloadError`` before it is decoded, and a stream beyond it is
            rejected. Calls of one client can take three quarters, and get ``QuotaError`` beyond that.
        connection_age_seconds: how long a connection can last before its client must connect again, and its certificate
            is checked again. Calls under way then have 30 s more.
        longest_seconds: the largest deadline of a call, and the deadline of a call without one.
        lease_seconds: how long the directory lists a server that does not renew. It renews three times as often.
        checkpoint_seconds: between two rounds of saving the experts that have stepped.
        drain_seconds: how long accepted work can take when the server ends. After that it fails.
        lossy_restore: load a checkpoint into a module of a dtype with fewer digits, such as float32 into bfloat16.

    Example:
        >>> from torchweft.experts.server import ServerOptions
        >>> server = weft.Server(options=ServerOptions(checkpoint_seconds=10.0))
    """

    limits: Limits = field(default_factory=Limits)
    connections: int = 4096
    connection_calls: int = 1024
    connection_bytes: int = 256 << 20
    total_bytes: int = 4 << 30
    connection_age_seconds: float = 3600.0
    longest_seconds: float = 600.0
    lease_seconds: float = 5.0
    checkpoint_seconds: float = 30.0
    drain_seconds: float = 2.5
    lossy_restore: bool = False

    def __post_init__(self) -> None:
        with Validator("invalid server options") as check:
            check.boolean("lossy_restore", self.lossy_restore)
            for name in [field.name for field in fields(self) if field.name not in ("limits", "lossy_restore")]:
                (check.seconds if name.endswith("_seconds") else check.count)(name, getattr(self, name))

    @property
    def client_connections(self) -> int:
        return max(64, self.connections // 2)


def listen_faults(address: object, advertise: object, listed_there: bool) -> list[str]:
    faults = address_fault("address", address, free=True)
    if advertise is not None:
        faults += address_fault("advertise", advertise)
        if not listed_there:
            faults.append("there is advertise= and no directory, which would list it")
        elif not faults and is_wildcard(parse_address(str(advertise))[0]):
            faults.append(f"advertise is {advertise!r}, which others cannot call")
    elif listed_there and not faults and is_wildcard(parse_address(str(address))[0]):
        faults.append(
            f"address is {address!r}, which others cannot call, but the directory would list it; "
            'give the address by which they reach this machine, such as advertise = "10.0.0.7:7070"'
        )
    return faults


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory, before threads are started. Returns whether the C library has accepted that."""
    try:
        # Otherwise every batch returns 34 MB to the system at its end, and the next one takes 9000 page faults.
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = [(number, value) for number, value, name in _SETTINGS if name not in os.environ]
    return all([mallopt(number, value) for number, value in settings])


def use_large_pages() -> None:
    """Make PyTorch request large pages (2 MB) for large tensors on the CPU."""
    # Before the first tensor is made, because PyTorch decides it once. A setting in the environment is respected.
    if _LARGE_PAGES in os.environ:
        return
    os.environ[_LARGE_PAGES] = "1"
    try:
        torch.empty(1, device="cpu")  # PyTorch reads the variable here; child processes must not inherit it
    finally:
        del os.environ[_LARGE_PAGES]
