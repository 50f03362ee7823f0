"""The gRPC service: methods, metadata, options of both ends; receipts, descriptions and faults, the data of answers.

    /weft.Experts/Stream    stream of frames <-> stream of frames    calls and their answers, in any order
    /weft.Experts/Info      one frame of INFO calls -> one frame     a `Description` of each expert, as JSON
    /weft.Experts/Status    nothing -> JSON                          the server's statistics
    /weft.Experts/State     stream of frames <-> stream of frames    states of experts, for servers that follow

gRPC hands on frames as bytes, on both ends. A description has an expert's schemas, nested as they are, without naming
any class: tuples, lists, dicts with text or number keys, named tuples (new ones of the same fields on the other side),
and constants among the tensors, which are None, booleans, numbers and texts.

    (TensorSpec((None, 4), float32), {"mask": None})
    {"tuple": [{"spec": [[null, 4], "float32", true]}, {"dict": [["mask", null]]}]}

A class of errors without a number travels as its nearest base that has one, and what weft did not raise as
`ExpertFailedError` with the name of its class: nothing of the other side is imported or run to build an error.
"""

import json
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from google.protobuf.message import DecodeError

from weft.core import errors as core_errors
from weft.core.errors import UsageError, WeftError, listed
from weft.core.spec import TensorSpec
from weft.experts import errors
from weft.experts.errors import ExpertFailedError, LimitError, MalformedError, RemoteError, WireError
from weft.experts.protobuf import load_messages
from weft.experts.wire.frame import CODES, MESSAGE_BYTES, Limits

_MESSAGES = load_messages("weft.experts.wire", "experts")
PROTO: bytes = _MESSAGES["Frame"].DESCRIPTOR.file.serialized_pb
"""experts.proto as a descriptor, for reflection."""
SERVICE = "weft.Experts"
STREAM = f"/{SERVICE}/Stream"
INFO = f"/{SERVICE}/Info"
STATUS = f"/{SERVICE}/Status"
STATE = f"/{SERVICE}/State"

FRAME_BYTES = "weft-frame-bytes"
"""Metadata that opens a stream: the largest frame that the server takes. When it is there, the server listens."""
AUTHORIZATION = "authorization"
"""Metadata of a client: ``Bearer TOKEN``."""
BEARER = "Bearer "
TRACEPARENT = "traceparent"
"""Metadata of a client's stream, as W3C's Trace Context has it: the trace that its calls belong to."""

COALESCED = 1 << 17
"""Calls share a frame up to about so many bytes: beyond that, waiting for the neighbours costs more than a frame."""

Options = list[tuple[str, int | str]]

_ROOM = 1 << 16  # gRPC's own framing is no concern of our limits


def client_options(limits: Limits) -> Options:
    """A connection of its own, that comes back soon after a restart.

    One that swallows everything is given up 20 s after the last that came over it, sooner than a call's usual 30 s.
    gRPC asks nothing while another ping of its own is under way, hence a time for that as well.
    """
    return [
        ("grpc.max_receive_message_length", limits.frame_bytes + _ROOM),  # checked before gRPC allocates
        ("grpc.max_send_message_length", limits.frame_bytes + _ROOM),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 250),  # a server that is back is found within 0.3 s
        ("grpc.min_reconnect_backoff_ms", 5_000),  # what one attempt may take: slow networks need several round trips
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(limits: Limits, connections: int, metadata_bytes: int = 16 << 10) -> Options:
    """The port belongs to one process, messages and metadata are capped, and silent peers are dropped."""
    return [
        ("grpc.max_receive_message_length", min(MESSAGE_BYTES, limits.frame_bytes) + _ROOM),
        ("grpc.max_send_message_length", limits.frame_bytes + _ROOM),
        ("grpc.max_concurrent_streams", 128),  # of one connection
        ("grpc.http2.bdp_probe", 0),  # else the window of a stream that nobody reads grows to several MB
        ("grpc.http2.lookahead_bytes", MESSAGE_BYTES),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", 5_000),  # of TLS, and of HTTP/2's first words
        ("grpc.max_connection_idle_ms", 10_000),  # without a stream
        ("grpc.so_reuseport", 0),
        ("grpc.max_metadata_size", metadata_bytes),
        ("grpc.absolute_max_metadata_size", metadata_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def write_status(json_text: str) -> bytes:
    """The answer to a call for the server's status."""
    return _MESSAGES["StatusReply"](json=json_text).SerializeToString()


def read_status(data: bytes) -> str:
    """The JSON of it. Raises ``MalformedError`` for other bytes."""
    return _read_message("StatusReply", data).json


def _read_message(name: str, data: bytes) -> Any:
    try:
        return _MESSAGES[name].FromString(data)
    except DecodeError as error:
        raise MalformedError(f"this is no {name} of experts.proto: {error}", reason=name.lower()) from None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a result says beside its tensors: how far the expert is, and how far of that is safe.

    durable      a crash of the server loses at most the steps after it; None: it keeps no checkpoints
    incarnation  another number after every start of the server, and when it takes a replica over
    token        the fencing token of the expert's owner, 0: it has no replicas; in a call the largest that is known
    """

    durable: int | None
    incarnation: int
    token: int = 0

    @lru_cache(256)  # noqa: B019 - every answer has one, and most say what the one before said
    def to_bytes(self) -> bytes:
        """A Receipt of experts.proto, the data of a result."""
        fields = {"durable": self.durable, "incarnation": self.incarnation, "token": self.token}
        return _MESSAGES["Receipt"](**fields).SerializeToString()


@lru_cache(256)
def read_receipt(data: bytes) -> Receipt:
    """The inverse. Raises ``MalformedError`` for other bytes, and for none."""
    if not data:
        raise MalformedError("an answer without a receipt", reason="receipt")
    read = _read_message("Receipt", data)
    return Receipt(read.durable if read.HasField("durable") else None, read.incarnation, read.token)


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_MOST_DEPTH = 64


@dataclass(frozen=True)
class Description:
    """An expert as its clients see it. ``args``, ``kwargs`` and ``outputs`` have TensorSpec as leaves.

    ``trained``: whether a backward steps. ``max_batch_size``: rows of the largest call. ``steps`` of the optimizer; the
    rest as in `Receipt`.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    trained: bool
    max_batch_size: int
    steps: int
    durable: int | None
    incarnation: int


def describe(info: Mapping[str, Any], durable: int | None, incarnation: int) -> bytes:
    """What `ExpertBackend.get_info` says, as JSON. Raises ``UsageError`` that lists what cannot be told."""
    faults: list[str] = []
    args, kwargs = info["forward_schema"]
    fields = {name: info[name] for name in ("name", "trained", "max_batch_size", "steps")}
    fields |= {"durable": durable, "incarnation": incarnation}
    for name, tree in (("args", tuple(args)), ("kwargs", dict(kwargs)), ("outputs", info["outputs_schema"])):
        fields[name] = _written(tree, name, faults)
    if faults:
        raise UsageError(listed(f"clients cannot be told what expert {info['name']!r} takes:", faults))
    return json.dumps(fields).encode()


_NUMBERS = dict.fromkeys(("max_batch_size", "steps", "incarnation"), int)
_KINDS = {"name": str, "args": tuple, "kwargs": dict, "trained": bool, "durable": int | None, **_NUMBERS}


def read_description(data: bytes) -> Description:
    """The inverse. Raises ``MalformedError`` for bytes that `describe` did not write."""
    try:
        fields: dict[str, Any] = json.loads(data)
        trees = {name: _read(fields.pop(name)) for name in ("args", "kwargs", "outputs")}
        found = Description(**trees, **fields)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        text = f"this does not describe an expert: {type(error).__name__}: {error}"
        raise MalformedError(text, reason="description") from None
    wrong = [name for name, kind in _KINDS.items() if not isinstance(getattr(found, name), kind)]
    if wrong:
        raise MalformedError(f"this does not describe an expert: {', '.join(wrong)} have a wrong type", reason="type")
    return found


def _written(tree: object, path: str, faults: list[str], depth: int = 0) -> Any:
    value: Any = tree
    if isinstance(value, TensorSpec):
        return {"spec": [list(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad]}
    kind, fields = cast("Any", type(value)), getattr(value, "_fields", None)
    if value is None or kind in (bool, int, float, str):
        return value
    if depth < _MOST_DEPTH:
        if kind in (tuple, list):
            items = [_written(one, f"{path}[{i}]", faults, depth + 1) for i, one in enumerate(value)]
            return {kind.__name__: items}
        if kind in (dict, OrderedDict):
            pairs = list(value.items())
            faults += [f"{path} has the key {key!r}" for key, _ in pairs if type(key) not in (str, int)]
            return {"dict": [[key, _written(one, f"{path}[{key!r}]", faults, depth + 1)] for key, one in pairs]}
        if fields is not None and issubclass(kind, tuple):
            names: list[str] = list(fields)
            rest = [_written(one, f"{path}.{name}", faults, depth + 1) for name, one in zip(names, value, strict=True)]
            return {"named": [kind.__name__, names, rest]}
    faults.append(f"{path} is {value!r} of type {kind.__qualname__}")
    return None


def _read(node: Any) -> Any:
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise MalformedError("a list outside of a container", reason="description")
        return node
    ((kind, inner),) = cast("dict[str, Any]", node).items()
    if kind == "spec":
        shape, dtype, requires_grad = inner
        if not all(size is None or (type(size) is int and size >= 0) for size in shape):
            raise MalformedError(f"a shape {shape!r}", reason="description")
        return TensorSpec(tuple(shape), _DTYPES[dtype], bool(requires_grad))
    if kind in ("tuple", "list"):
        items = [_read(one) for one in inner]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: _read(one) for key, one in inner}
    if kind == "named":
        name, names, rest = inner
        made: Any = namedtuple(name, names)  # pyright: ignore[reportUntypedNamedTuple]
        return made(*[_read(one) for one in rest])
    raise MalformedError(f"a container of kind {kind!r} is not known", reason="description")


FAULTS: dict[int, type[WeftError]] = {
    each.number: (vars(core_errors) | vars(errors))[each.name]
    for each in _MESSAGES["Fault"].DESCRIPTOR.fields_by_name["code"].enum_type.values
    if each.number
}
"""Classes by number: those of experts.proto, and what was registered."""
RETRYABLE = (
    errors.OverloadError,
    errors.QuotaError,
    errors.ClosedError,
    errors.UnreachableError,
    errors.DrainingError,
    errors.NotOwnerError,
)
"""The request was surely not carried out, and may succeed later or elsewhere. Anything else that changes weights
may be sent again only with its idempotency key."""
MOST_TEXT = 4096
"""Bytes of a message or of one detail; what is longer is cut."""
MOST_DETAILS = 32


def register_fault(code: int, kind: type[WeftError]) -> None:
    """Give a class of errors, made from a message alone, a number, so that it arrives as itself."""
    if not 0 < code < 1 << 16:
        raise UsageError(f"a fault code is from 1 to 65535, and {code} is not")
    if FAULTS.setdefault(code, kind) is not kind:
        raise UsageError(f"fault code {code} stands for {FAULTS[code].__name__}; take another for {kind.__name__}")


def write_fault(error: BaseException) -> bytes:
    """``error`` as bytes. Never raises, whatever the error is: texts that are too long are cut."""
    kind, own = type(error), isinstance(error, WeftError)
    numbers = {cls: code for code, cls in FAULTS.items()}
    base = next((each for each in kind.__mro__ if each in numbers), RemoteError if own else ExpertFailedError)
    if isinstance(error, WireError):
        details = {"reason": error.reason}
    else:
        details = dict(error.details) if isinstance(error, RemoteError) else {}
        if kind is not base:
            details.setdefault("type", kind.__qualname__)
    try:
        text = str(error)
    except Exception:  # a stranger's __str__ may do anything
        text = "(its message cannot be shown)"
    cut = {_cut(name): _cut(word) for name, word in list(details.items())[:MOST_DETAILS]}
    message = _cut(text if own else f"{kind.__qualname__}: {text}")
    return _MESSAGES["Fault"](code=numbers[base], message=message, details=cut).SerializeToString()


def read_fault(data: bytes) -> WeftError:
    """The exception that `write_fault` wrote, to be raised by the caller. Raises ``WireError`` for other bytes."""
    fault = _read_message("Fault", data)
    code, message, details = int(fault.code), str(fault.message), dict[str, str](fault.details)
    if len(details) > MOST_DETAILS or len(message) > MOST_TEXT:
        text = f"an error of {len(message)} signs with {len(details)} details"
        raise LimitError(f"{text}; at most {MOST_TEXT} and {MOST_DETAILS}", reason="fault")
    kind = FAULTS.get(code)
    if kind is None:  # from a newer peer
        return RemoteError(message, {**details, "code": str(code)})
    if issubclass(kind, WireError):
        return kind(message, reason=details.get("reason", "unspecified"))
    if issubclass(kind, RemoteError):
        return kind(message, details)
    error = kind(message)
    for name, word in details.items():
        error.add_note(f"{name}: {word}")
    return error


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:MOST_TEXT].decode("utf-8", "ignore")  # a cut may split a sign
