"""Discovery: the servers of every expert, listed under leases, so that a dead server is forgotten.

directory.py      the protocol of all directories, snapshots, and a directory within this process
fencing.py        tokens that reject replaced owners
etcd.py           a directory in etcd, for several machines; etcd.proto has etcd's messages
registration.py   the entry of a server, renewed until it ends, and the other servers in the directory
"""

from torchweft.experts.discovery.directory import Directory, Lease, LocalDirectory, Ownership, Snapshot, Watch
from torchweft.experts.discovery.fencing import Fence

__all__ = ["Directory", "Fence", "Lease", "LocalDirectory", "Ownership", "Snapshot", "Watch"]
