"""Discovery: which server serves which expert, under leases, so that a dead server is forgotten.

directory.py   what every directory can do, its snapshots, and a directory within this process
fencing.py     tokens that refuse replaced owners
etcd.py        a directory in etcd, for several machines; etcd.proto has etcd's messages
registration.py   a server's entry in the directory, renewed, and the other servers there
"""

from weft.experts.discovery.directory import Directory, Lease, LocalDirectory, Ownership, Snapshot, Watch
from weft.experts.discovery.fencing import Fence

__all__ = ["Directory", "Fence", "Lease", "LocalDirectory", "Ownership", "Snapshot", "Watch"]
