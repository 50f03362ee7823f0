"""The part of etcd's wire format that a directory needs, as tables from which protobuf makes the messages.

    Range        keys of a prefix, and the revision they are of      LeaseGrant, LeaseKeepAlive, LeaseRevoke
    Txn          compare and swap; puts and ranges of one moment     Watch    changes from a revision on

etcd's Python clients are not maintained, but its API is gRPC, and gRPC needs no client: names and numbers of fields
are enough. They are those of etcd's ``rpc.proto`` and ``kv.proto`` (v3, stable since 2016); fields that are not listed
here are passed over by protobuf, as it does with those of later versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = cast("Any", descriptor_pb2.FieldDescriptorProto)
_PLAIN = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "int64": _Field.TYPE_INT64,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,  # also for enums, which look the same on the wire
}
_MANY = "many "  # before the type of a repeated field
_PACKAGE = "etcdserverpb"

PUT, DELETE = 0, 1  # types of an Event
EQUAL = 0  # result of a Compare
CREATED, MODIFIED, VALUE = 1, 2, 3  # targets of a Compare

_HEADER = {"header": (1, "ResponseHeader")}
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "KeyValue": {
        "key": (1, "bytes"),
        "create_revision": (2, "int64"),
        "mod_revision": (3, "int64"),
        "value": (5, "bytes"),
        "lease": (6, "int64"),
    },
    "Event": {"type": (1, "int32"), "kv": (2, "KeyValue"), "prev_kv": (3, "KeyValue")},
    "ResponseHeader": {"revision": (3, "int64")},
    "RangeRequest": {"key": (1, "bytes"), "range_end": (2, "bytes")},
    "RangeResponse": {**_HEADER, "kvs": (2, _MANY + "KeyValue")},
    "PutRequest": {"key": (1, "bytes"), "value": (2, "bytes"), "lease": (3, "int64")},
    "PutResponse": _HEADER,
    "DeleteRangeRequest": {"key": (1, "bytes"), "range_end": (2, "bytes")},
    "DeleteRangeResponse": {**_HEADER, "deleted": (2, "int64")},
    "RequestOp": {
        "request_range": (1, "RangeRequest"),
        "request_put": (2, "PutRequest"),
        "request_delete_range": (3, "DeleteRangeRequest"),
    },
    "ResponseOp": {
        "response_range": (1, "RangeResponse"),
        "response_put": (2, "PutResponse"),
        "response_delete_range": (3, "DeleteRangeResponse"),
    },
    "Compare": {
        "result": (1, "int32"),
        "target": (2, "int32"),
        "key": (3, "bytes"),
        "create_revision": (5, "int64"),
        "mod_revision": (6, "int64"),
        "value": (7, "bytes"),
    },
    "TxnRequest": {
        "compare": (1, _MANY + "Compare"),
        "success": (2, _MANY + "RequestOp"),
        "failure": (3, _MANY + "RequestOp"),
    },
    "TxnResponse": {**_HEADER, "succeeded": (2, "bool"), "responses": (3, _MANY + "ResponseOp")},
    "LeaseGrantRequest": {"TTL": (1, "int64"), "ID": (2, "int64")},
    "LeaseGrantResponse": {**_HEADER, "ID": (2, "int64"), "TTL": (3, "int64"), "error": (4, "string")},
    "LeaseRevokeRequest": {"ID": (1, "int64")},
    "LeaseRevokeResponse": _HEADER,
    "LeaseKeepAliveRequest": {"ID": (1, "int64")},
    "LeaseKeepAliveResponse": {**_HEADER, "ID": (2, "int64"), "TTL": (3, "int64")},
    "WatchCreateRequest": {
        "key": (1, "bytes"),
        "range_end": (2, "bytes"),
        "start_revision": (3, "int64"),
        "progress_notify": (4, "bool"),
        "prev_kv": (6, "bool"),
    },
    "WatchRequest": {"create_request": (1, "WatchCreateRequest")},
    "WatchResponse": {
        **_HEADER,
        "created": (3, "bool"),
        "canceled": (4, "bool"),
        "compact_revision": (5, "int64"),
        "cancel_reason": (6, "string"),
        "events": (11, _MANY + "Event"),
    },
}
_ONE_OF = {"RequestOp": "request", "ResponseOp": "response", "Compare": "target_union", "WatchRequest": "request_union"}
_IN_NO_UNION = {"result", "target", "key"}


def _described() -> Any:
    file: Any = cast("Any", descriptor_pb2.FileDescriptorProto)(
        name="weft/etcd.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _ONE_OF:
            message.oneof_decl.add(name=_ONE_OF[name])
        for field, (number, kind) in fields.items():
            plain = kind.removeprefix(_MANY)
            many = _Field.LABEL_REPEATED if kind != plain else _Field.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=many, type=_PLAIN.get(plain, _Field.TYPE_MESSAGE))
            if plain not in _PLAIN:
                made.type_name = f".{_PACKAGE}.{plain}"
            if name in _ONE_OF and field not in _IN_NO_UNION:
                made.oneof_index = 0
    return file


_pool: Any = cast("Any", descriptor_pool.DescriptorPool)()  # its own, so that another etcd client may live beside it
_pool.Add(_described())


def message(name: str) -> Any:
    """The class of a message, by its name in etcd's ``rpc.proto``."""
    return cast("Any", message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")))


@dataclass(frozen=True)
class Method:
    """A method of etcd's API: its path, and the classes of its messages."""

    path: str
    request: Any
    response: Any


def _method(service: str, name: str) -> Method:
    return Method(f"/{_PACKAGE}.{service}/{name}", message(f"{name}Request"), message(f"{name}Response"))


RANGE = _method("KV", "Range")
TXN = _method("KV", "Txn")
LEASE_GRANT = _method("Lease", "LeaseGrant")
LEASE_REVOKE = _method("Lease", "LeaseRevoke")
LEASE_KEEP_ALIVE = _method("Lease", "LeaseKeepAlive")
WATCH = _method("Watch", "Watch")
