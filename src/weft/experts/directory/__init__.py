"""Who serves which expert, with leases, so that whoever dies is forgotten.

protocol.py   what every directory can do      local.py      one in this process
snapshot.py   the directory of one moment      mirror.py     a snapshot that follows the directory
fence.py      refuses replaced owners          token.py      what the fence compares
etcd.py       one for several machines, in an etcd cluster (with etcd_*.py)
"""

from weft.experts.directory.fence import Fence
from weft.experts.directory.local import LocalDirectory
from weft.experts.directory.mirror import Mirror
from weft.experts.directory.protocol import Directory, Event, Lease, Watch
from weft.experts.directory.snapshot import Ownership, Snapshot
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
    "DirectoryError",
    "Event",
    "Fence",
    "FencedError",
    "Lease",
    "LeaseLostError",
    "LocalDirectory",
    "Mirror",
    "OwnedError",
    "Ownership",
    "Snapshot",
    "Watch",
    "WatchLostError",
]
