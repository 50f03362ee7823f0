"""etcd's API: the messages of `etcd.proto`, and the methods that take them.

    Range        keys of a prefix, and the revision they are of      LeaseGrant, LeaseKeepAlive, LeaseRevoke
    Txn          compare and swap; puts and ranges of one moment     Watch    changes from a revision on

etcd's Python clients are not maintained, but its API is gRPC, and gRPC needs no client.
"""

from dataclasses import dataclass
from typing import Any

from weft.experts.protobuf import load_messages

PUT, DELETE = 0, 1  # types of an Event
EQUAL = 0  # result of a Compare
CREATED, MODIFIED, VALUE = 1, 2, 3  # targets of a Compare

_messages = load_messages(__package__ or "", "etcd")


def message(name: str) -> Any:
    """The class of a message, by its name in etcd's ``rpc.proto``."""
    return _messages[name]


@dataclass(frozen=True)
class Method:
    """A method of etcd's API: its path, and the classes of its messages."""

    path: str
    request: Any
    response: Any


def _method(service: str, name: str) -> Method:
    return Method(f"/etcdserverpb.{service}/{name}", message(f"{name}Request"), message(f"{name}Response"))


RANGE = _method("KV", "Range")
TXN = _method("KV", "Txn")
LEASE_GRANT = _method("Lease", "LeaseGrant")
LEASE_REVOKE = _method("Lease", "LeaseRevoke")
LEASE_KEEP_ALIVE = _method("Lease", "LeaseKeepAlive")
WATCH = _method("Watch", "Watch")
