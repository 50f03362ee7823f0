"""The gRPC service: methods, metadata, options of both ends; receipts, descriptions and faults, the data of answers.

    /torchweft.Experts/Stream    stream of frames <-> stream of frames    calls and their answers, in any order
    /torchweft.Experts/Info      one frame of INFO calls -> one frame     a `Description` of each expert, as JSON
    /torchweft.Experts/Status    nothing -> JSON                          the server's statistics
    /torchweft.Experts/Operate   request -> stream of replies             operations on experts, for administrators
    /torchweft.Experts/State     stream of frames <-> stream of frames    states of experts, for servers that follow

gRPC passes frames as bytes at both ends. A description has an expert's schemas with their nesting, without naming any
class: tuples, lists, dicts with string or int keys, named tuples (rebuilt with the same fields by the receiver), and
constants among the tensors, which are None, booleans, numbers and strings.

    (TensorSpec((None, 4), float32), {"mask": None})
    {"tuple": [{"spec": [[null, 4], "float32", true]}, {"dict": [["mask", null]]}]}

An error class without a number is sent as its nearest base that has one. An error that is not torchweft's is sent as
`ExpertFailedError` with the name of its class, because importing classes that a peer names would run its code.
"""

import json
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from google.protobuf.message import DecodeError

from torchweft.core import errors as core_errors
from torchweft.core.errors import UsageError, WeftError, join_faults
from torchweft.core.spec import TensorSpec
from torchweft.experts import errors
from torchweft.experts.errors import ExpertFailedError, LimitError, MalformedError, RemoteError, WireError
from torchweft.experts.protobuf import load_messages
from torchweft.experts.wire.frame import CODES, MESSAGE_BYTES, Limits

_MESSAGES = load_messages("torchweft.experts.wire", "experts")
PROTO: bytes = _MESSAGES["Frame"].DESCRIPTOR.file.serialized_pb  # experts.proto as a descriptor, for reflection.
SERVICE = "torchweft.Experts"
STREAM = f"/{SERVICE}/Stream"
INFO = f"/{SERVICE}/Info"
STATUS = f"/{SERVICE}/Status"
OPERATE = f"/{SERVICE}/Operate"
STATE = f"/{SERVICE}/State"

# The server's first metadata on a stream: the largest frame that it accepts. The stream is open from then on.
FRAME_BYTES = "torchweft-frame-bytes"
AUTHORIZATION, BEARER = "authorization", "Bearer "  # Metadata of a client: ``Bearer TOKEN``

# Approximate size up to which calls share a frame. In a larger frame, the wait for the others costs more than it saves.
COALESCED = 1 << 17

Options = list[tuple[str, int | str]]

_AGE_GRACE = 30.0  # seconds
_ROOM = 1 << 16  # for gRPC's own framing, which our limits do not count


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else ((AUTHORIZATION, f"{BEARER}{token}"),)


def client_options(limits: Limits) -> Options:
    """Options of a client's channel: a connection of its own, which reconnects soon after a restart."""
    return [
        ("grpc.max_receive_message_length", limits.frame_bytes + _ROOM),  # checked before gRPC allocates
        ("grpc.max_send_message_length", limits.frame_bytes + _ROOM),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 250),  # so that a restarted server is reached within 0.3 s
        ("grpc.min_reconnect_backoff_ms", 5_000),  # timeout of one attempt: slow networks need several round trips
        # A connection that drops all data is abandoned after 20 s of silence, before the usual 30 s of a call. gRPC
        # sends no keepalive while another of its pings is pending, so that ping has a timeout as well.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def age_options(seconds: float) -> Options:
    """Options of a server that ends every connection at this age."""
    # Certificates are checked when a connection is made, so an old connection must end. Its client makes a new one, and
    # calls that are under way have some time to end. After it, they are sent again under their keys.
    return [
        ("grpc.max_connection_age_ms", int(1000 * seconds)),
        ("grpc.max_connection_age_grace_ms", int(1000 * min(_AGE_GRACE, seconds))),
    ]


def server_options(limits: Limits, connections: int, metadata_bytes: int = 16 << 10) -> Options:
    return [
        ("grpc.max_receive_message_length", min(MESSAGE_BYTES, limits.frame_bytes) + _ROOM),
        ("grpc.max_send_message_length", limits.frame_bytes + _ROOM),
        ("grpc.max_concurrent_streams", 128),  # of one connection
        ("grpc.http2.bdp_probe", 0),  # otherwise the window of a stream that is not read grows to several MB
        ("grpc.http2.lookahead_bytes", MESSAGE_BYTES),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", 5_000),  # of TLS and the HTTP/2 preface
        ("grpc.max_connection_idle_ms", 10_000),  # without a stream
        # A second server at the same port would get half of the connections, and miss the experts of the first.
        ("grpc.so_reuseport", 0),
        ("grpc.max_metadata_size", metadata_bytes),
        ("grpc.absolute_max_metadata_size", metadata_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def write_status(json_text: str) -> bytes:
    return _MESSAGES["StatusReply"](json=json_text).SerializeToString()


def read_status(data: bytes) -> str:
    return _read_message("StatusReply", data).json


@dataclass(frozen=True)
class Operation:
    """An administrator's request: ``set``, ``export``, ``rollback``, ``load`` or ``unload``, see experts.proto."""

    name: str
    uid: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_bytes(self) -> bytes:
        fields = {"operation": self.name, "uid": self.uid, "arguments": json.dumps(dict(self.arguments))}
        return _MESSAGES["OperateRequest"](**fields).SerializeToString()


def read_operation(data: bytes) -> Operation:
    message = _read_message("OperateRequest", data)
    try:
        arguments = json.loads(message.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the arguments of an operation are not JSON: {error}", reason="operation") from None
    if not isinstance(arguments, dict):
        raise MalformedError("the arguments of an operation are not a JSON object", reason="operation")
    return Operation(message.operation, message.uid, cast("dict[str, Any]", arguments))


def write_operation_reply(*, error: BaseException | None = None, results: object = None, data: Any = b"") -> bytes:
    fault = b"" if error is None else write_fault(error)
    text = "" if results is None else json.dumps(results)
    return _MESSAGES["OperateReply"](fault=fault, json=text, data=bytes(data)).SerializeToString()


def read_operation_replies(messages: Iterable[bytes]) -> tuple[dict[str, Any], bytes]:
    """Results and data of an operation. Raises its error."""
    results: dict[str, Any] = {}
    data = list[bytes]()
    for message in messages:
        reply = _read_message("OperateReply", message)
        if reply.fault:
            raise read_fault(reply.fault)
        if reply.json:
            results = json.loads(reply.json)
        data.append(reply.data)
    return results, b"".join(data)


def _read_message(name: str, data: bytes) -> Any:
    try:
        return _MESSAGES[name].FromString(data)
    except DecodeError as error:
        raise MalformedError(f"this is not a {name} of experts.proto: {error}", reason=name.lower()) from None


@dataclass(frozen=True, slots=True)
class StepReceipt:
    """The state of an expert and its server, in the data of every result.

    durable      step up to which a crash of the server loses nothing. None: it keeps no checkpoints
    incarnation  a new number after every start of the server, and after it has taken over a replica
    token        fencing token of the expert's owner, 0: it has no replicas; in a call, the largest known one
    """

    durable: int | None
    incarnation: int
    token: int = 0

    @lru_cache(256)  # noqa: B019 - every answer has a receipt, and most are equal to the one before
    def to_bytes(self) -> bytes:
        fields = {"durable": self.durable, "incarnation": self.incarnation, "token": self.token}
        return _MESSAGES["StepReceipt"](**fields).SerializeToString()


@lru_cache(256)
def read_receipt(data: bytes) -> StepReceipt:
    if not data:
        raise MalformedError("an answer without a receipt", reason="receipt")
    message = _read_message("StepReceipt", data)
    return StepReceipt(message.durable if message.HasField("durable") else None, message.incarnation, message.token)


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_MOST_DEPTH = 64


@dataclass(frozen=True)
class Description:
    """An expert from the view of its clients. ``args``, ``kwargs`` and ``outputs`` have TensorSpec as leaves."""

    # ``trained``: whether a backward steps. ``max_batch_size``: rows of the largest call. ``steps``: of the optimizer.
    # For ``durable`` and ``incarnation`` see `StepReceipt`.
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
    """The result of `ExpertBackend.get_info` as JSON. Raises ``UsageError`` that lists all values JSON cannot hold."""
    faults: list[str] = []
    args, kwargs = info["forward_schema"]
    fields = {name: info[name] for name in ("name", "trained", "max_batch_size", "steps")}
    fields |= {"durable": durable, "incarnation": incarnation}
    for name, tree in (("args", tuple(args)), ("kwargs", dict(kwargs)), ("outputs", info["outputs_schema"])):
        fields[name] = _write_tree(tree, name, faults)
    if faults:
        raise UsageError(join_faults(f"the schema of expert {info['name']!r} cannot be sent to clients:", faults))
    return json.dumps(fields).encode()


_NUMBERS = dict.fromkeys(("max_batch_size", "steps", "incarnation"), int)
_KINDS = {"name": str, "args": tuple, "kwargs": dict, "trained": bool, "durable": int | None, **_NUMBERS}


def read_description(data: bytes) -> Description:
    try:
        fields: dict[str, Any] = json.loads(data)
        trees = {name: _read_tree(fields.pop(name)) for name in ("args", "kwargs", "outputs")}
        description = Description(**trees, **fields)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        text = f"this does not describe an expert: {type(error).__name__}: {error}"
        raise MalformedError(text, reason="description") from None
    wrong = [name for name, kind in _KINDS.items() if not isinstance(getattr(description, name), kind)]
    if wrong:
        raise MalformedError(f"this does not describe an expert: {', '.join(wrong)} have a wrong type", reason="type")
    return description


def _write_tree(tree: object, path: str, faults: list[str], depth: int = 0) -> Any:
    value: Any = tree
    if isinstance(value, TensorSpec):
        return {"spec": [list(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad]}
    kind, fields = cast("Any", type(value)), getattr(value, "_fields", None)
    if value is None or kind in (bool, int, float, str):
        return value
    if depth < _MOST_DEPTH:
        if kind in (tuple, list):
            items = [_write_tree(item, f"{path}[{i}]", faults, depth + 1) for i, item in enumerate(value)]
            return {kind.__name__: items}
        if kind in (dict, OrderedDict):
            pairs = list(value.items())
            faults += [f"{path} has the key {key!r}" for key, _ in pairs if type(key) not in (str, int)]
            return {"dict": [[key, _write_tree(item, f"{path}[{key!r}]", faults, depth + 1)] for key, item in pairs]}
        if fields is not None and issubclass(kind, tuple):
            names: list[str] = list(fields)
            named = zip(names, value, strict=True)
            items = [_write_tree(item, f"{path}.{name}", faults, depth + 1) for name, item in named]
            return {"named": [kind.__name__, names, items]}
    faults.append(f"{path} is {value!r} of type {kind.__qualname__}")
    return None


def _read_tree(node: Any) -> Any:
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
        items = [_read_tree(item) for item in inner]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: _read_tree(item) for key, item in inner}
    if kind == "named":
        name, names, items = inner
        # Safe with names of a peer: `namedtuple` accepts only identifiers that are not keywords.
        container: Any = namedtuple(name, names)  # pyright: ignore[reportUntypedNamedTuple]
        return container(*[_read_tree(item) for item in items])
    raise MalformedError(f"a container of kind {kind!r} is not known", reason="description")


def _known_faults() -> dict[int, type[WeftError]]:
    numbers = {one.name: one.number for one in _MESSAGES["Fault"].DESCRIPTOR.fields_by_name["code"].enum_type.values}
    classes = vars(core_errors) | vars(errors)
    if unknown := [name for name, number in numbers.items() if number and name not in classes]:
        raise ImportError(
            f"FaultCode of experts.proto has {', '.join(unknown)}, wanted names of classes in "
            "torchweft.experts.errors: add the class there, or correct the name and run tools/protos.py"
        )
    return {number: classes[name] for name, number in numbers.items() if number}


FAULTS = _known_faults()  # Error classes by number: those of experts.proto, and registered ones.
# Errors of requests that were certainly not executed, and can succeed later or at another server. After any other
# error, a request that changes weights can be sent again only with its idempotency key.
RETRYABLE = (
    errors.OverloadError,
    errors.QuotaError,
    errors.ClosedError,
    errors.UnreachableError,
    errors.DrainingError,
    errors.NotOwnerError,
)
MOST_TEXT = 4096  # Bytes of a message or of one detail. A longer one is truncated.
MOST_DETAILS = 32


def register_fault(code: int, kind: type[WeftError]) -> None:
    """Number an error class with a constructor that takes a message alone, so that clients receive that class."""
    if not 0 < code < 1 << 16:
        raise UsageError(f"a fault code is from 1 to 65535, got {code}")
    if FAULTS.setdefault(code, kind) is not kind:
        raise UsageError(f"fault code {code} stands for {FAULTS[code].__name__}; use another for {kind.__name__}")


def write_fault(error: BaseException) -> bytes:
    kind, is_ours = type(error), isinstance(error, WeftError)
    # Never raises: this is the way by which every other error reaches its sender.
    numbers = {cls: code for code, cls in FAULTS.items()}
    base = next((cls for cls in kind.__mro__ if cls in numbers), RemoteError if is_ours else ExpertFailedError)
    if isinstance(error, WireError):
        details = {"reason": error.reason}
    else:
        details = dict(error.details) if isinstance(error, RemoteError) else {}
        if kind is not base:
            details.setdefault("type", kind.__qualname__)
    try:
        text = str(error)
    except Exception:  # a user's __str__ can raise anything
        text = "(its message cannot be shown)"
    shortened = {_truncate(name): _truncate(value) for name, value in list(details.items())[:MOST_DETAILS]}
    message = _truncate(text if is_ours else f"{kind.__qualname__}: {text}")
    return _MESSAGES["Fault"](code=numbers[base], message=message, details=shortened).SerializeToString()


def read_fault(data: bytes) -> WeftError:
    fault = _read_message("Fault", data)
    code, message, details = int(fault.code), str(fault.message), dict[str, str](fault.details)
    if len(details) > MOST_DETAILS or len(message) > MOST_TEXT:
        text = f"an error of {len(message)} characters with {len(details)} details"
        raise LimitError(f"{text}; at most {MOST_TEXT} and {MOST_DETAILS} are allowed", reason="fault")
    kind = FAULTS.get(code)
    if kind is None:  # from a newer peer
        return RemoteError(message, {**details, "code": str(code)})
    if issubclass(kind, WireError):
        return kind(message, reason=details.get("reason", "unspecified"))
    if issubclass(kind, RemoteError):
        return kind(message, details)
    error = kind(message)
    for name, value in details.items():
        error.add_note(f"{name}: {value}")
    return error


def _truncate(text: str) -> str:
    return text.encode("utf-8", "replace")[:MOST_TEXT].decode("utf-8", "ignore")  # drops a character that is split
