"""Discovery: which server serves which expert, under leases, so that a dead server is forgotten.

directory.py   what every directory can do, and its snapshots     fencing.py   tokens that refuse replaced owners
local.py       a directory within this process                    cache.py     a snapshot that follows a directory
etcd.py        a directory in etcd, for several machines          etcd_client.py, etcd.proto   etcd's API over gRPC
registration.py   a server's entry in the directory, renewed, and the other servers there
"""

from weft.experts.discovery.cache import DirectoryCache
from weft.experts.discovery.directory import Directory, Event, Lease, Ownership, Snapshot, Watch
from weft.experts.discovery.fencing import Fence
from weft.experts.discovery.local import LocalDirectory
from weft.experts.errors import (
    AwayError,
    DeclaredError,
    DirectoryError,
    FencedError,
    LeaseLostError,
    OwnedError,
    WatchLostError,
)

__all__ = [
    "AwayError",
    "DeclaredError",
    "Directory",
    "DirectoryCache",
    "DirectoryError",
    "Event",
    "Fence",
    "FencedError",
    "Lease",
    "LeaseLostError",
    "LocalDirectory",
    "OwnedError",
    "Ownership",
    "Snapshot",
    "Watch",
    "WatchLostError",
]
