"""Frames: calls of one client, packed into one message and unpacked at the other end; and the limits of a frame.

    Call(Header(FORWARD, 7, "ffn.3"), [x])  ─┐                                    ┌─ Received(header, descriptors)
    Call(Header(BACKWARD, 8, ...), [x, g])  ─┴─ encode ──> message ── decode ─────┴─ Received   .tensors()

    | call 7, x | call 8, x, g | padding |  bytes of x .. | bytes of x .. | bytes of g .. |
    |<----- Header of experts.proto ---->|<------------- body, 16-aligned --------------->|     a Frame of experts.proto

Protobuf encodes all but the tensors, which follow as raw bytes. Pickle and eval are not used. All sizes in a header are
checked against the limits before memory is allocated for tensors. A malformed frame is rejected as a whole, because
nothing after the error can be trusted. All its calls come from one client, so no other client is affected.

The two fields of a `Frame` are separated by hand, because protobuf's parser copies a bytes field, twice in Python: 6 ms
for a body of 4 MB, instead of 2 us for finding its place.

A contiguous CPU tensor is sent from its own memory. A decoded tensor is a view of the message, and keeps it alive. A
received message has no other user, so a module can work in place on its inputs. Bytes and tensors are converted by
numpy where it knows the dtype: nearly every operation of torch releases the interpreter lock, and threads that send
small tensors then queue for it again.

gRPC allocates a message before the server sees a byte of it, so a server accepts `MESSAGE_BYTES` at most. A larger
frame continues in messages with a body only (`Frame.append`), whose total size the server knows from the first.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from torchweft.core.errors import UsageError
from torchweft.core.validation import Validator
from torchweft.experts.compression import Compression, compress, expand, packed_bytes
from torchweft.experts.errors import LimitError, MalformedError, TruncatedError, WireError
from torchweft.experts.protobuf import load_messages

ALIGNMENT = 16  # Every tensor begins at a multiple of this
# The largest header. A parsed header takes up to 80 times as much memory, while `decode` runs.
HEADER_BYTES = 256 << 10
MESSAGE_BYTES = 512 << 10  # The largest message that a server accepts: a frame or a part of one
MOST_FRAME_BYTES = 0x7FFF_FFFF - (1 << 16)  # gRPC counts a message's bytes, including its own, in 31 bits
_PART = 128 << 10  # least bytes of the body in every part of a frame except the last
_HEADER_TAG, _BODY_TAG, _PADDING_TAG = 0x0A, 0x12, 0x12  # number << 3 | 2; the last one is a field of `Header`
_MOST_AXES = 64  # torch's own limit
_MOST_DEADLINE = (1 << 32) - 1
_TENSOR = load_messages("torchweft.experts.wire", "experts")["Tensor"]

# Not supported: dtypes that torch cannot store as whole bytes (`uint1` ... `int7`, `float4_e2m1fn_x2`), quantized ones,
# which have a scale outside of their bytes and crash when made from a buffer, and `complex32`, which torch calls
# experimental and warns about at every allocation.
DTYPES: dict[int, torch.dtype] = {
    value.number: getattr(torch, value.name.removesuffix("_"))
    for value in _TENSOR.DESCRIPTOR.fields_by_name["dtype"].enum_type.values
    if value.number
}  # The supported dtypes, by their numbers in experts.proto.
CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}
DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


class Kind(IntEnum):
    FORWARD = 1
    BACKWARD = 2
    COMMIT = 3
    RESULT = 4
    ERROR = 5
    INFO = 6
    PING = 7
    GOAWAY = 8
    STATE = 9
    DISCARD = 10
    PREPARE = 11


WITH_TENSORS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.RESULT})


class Header(NamedTuple):  # one is made for every call, three times as fast as a frozen dataclass
    """All of a call except its tensors. See experts.proto for the meaning of each field."""

    # ``call_id`` is set by the transport. A ``+`` and a number at the end of ``key`` distinguish several backwards of
    # one forward. ``deadline_ms``: the caller's remaining time when the frame is sent. ``data`` is opaque here.
    kind: Kind
    call_id: int = 0
    uid: str = ""
    key: str = ""
    client: str = ""
    mini_batch: str = ""
    deadline_ms: int | None = None
    keep: bool = False
    evaluation: bool = False
    reply: Compression = Compression.NONE
    step: int = 0
    data: bytes = b""
    trace: str = ""


class Descriptor(NamedTuple):
    """One tensor of a call. Its ``nbytes`` bytes begin at ``offset`` in the body."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    compression: Compression
    nbytes: int
    offset: int
    decoded_bytes: int


class Call(NamedTuple):
    """One call to send: header, tensors in flat order, and a compression for each tensor (empty: none)."""

    header: Header
    tensors: Sequence[Tensor] = ()
    compressions: Sequence[Compression] = ()


@dataclass(frozen=True)
class Limits:
    """The limits of one frame, all inclusive, checked before memory is allocated for its tensors.

    ``frame_bytes`` and ``header_bytes`` count bytes on the wire, ``decoded_bytes`` those of all tensors together.
    ``elements`` applies to each tensor, ``name_bytes`` to each name, ``data_bytes`` to the opaque data of a call.
    """

    frame_bytes: int = 64 << 20
    header_bytes: int = HEADER_BYTES
    data_bytes: int = 128 << 10
    decoded_bytes: int = 256 << 20
    calls: int = 256
    tensors: int = 256
    axes: int = 16
    elements: int = 1 << 28
    name_bytes: int = 1024

    def __post_init__(self) -> None:
        caps = {"axes": _MOST_AXES, "header_bytes": HEADER_BYTES, "frame_bytes": MOST_FRAME_BYTES}
        with Validator("invalid limits") as check:
            for name in (field.name for field in fields(self)):
                value, cap = getattr(self, name), caps.get(name)
                if check.count(name, value) and cap is not None:
                    check.require(value <= cap, f"{name} is {value}, the format allows at most {cap}")


LIMITS = Limits()  # The default limits

# The variant of the format in which tensors stay bytes: most are like those of earlier calls, and found in a cache.
_HEADER = load_messages("torchweft.experts.wire", "experts", "Call.tensors")["Header"]
_CACHED_TENSOR_BYTES = 1024  # the largest encoded tensor that is cached: its size is the sender's choice
_KINDS = {int(kind): kind for kind in Kind}
_FIELDS = Header._fields
_READ_FIELDS: Callable[[Any], tuple[Any, ...]] = attrgetter(*_FIELDS, "tensors")
_COMPRESSIONS = {int(compression): compression for compression in Compression}
Bytes = bytes | bytearray | memoryview
Body = np.ndarray[Any, np.dtype[np.uint8]]  # The body of a frame, flat and at an aligned address
_NUMPY: dict[torch.dtype, "np.dtype[np.generic]"] = {
    dtype: np.dtype(str(dtype).removeprefix("torch.").replace("bool", "bool_"))
    for dtype in CODES
    if (dtype.itemsize > 1 and dtype is not torch.bfloat16) or not dtype.is_floating_point
}


class Received(NamedTuple):
    """A received call. Its tensors are made from ``body`` only on request."""

    header: Header
    descriptors: tuple[Descriptor, ...]
    body: Body

    def tensors(self) -> list[Tensor]:
        """The tensors on the CPU, views of the message if uncompressed. Raises ``MalformedError``."""
        return [
            to_tensor(self.body[offset : offset + nbytes], dtype, shape, compression)
            for dtype, shape, compression, nbytes, offset, _ in self.descriptors
        ]


def encode(calls: Sequence[Call], limits: Limits = LIMITS) -> bytes:
    return b"".join(_encode_buffers(calls, limits)[0])


def encode_parts(calls: Sequence[Call], limits: Limits = LIMITS) -> Iterator[bytes]:
    """Encode ``calls`` as messages that a server accepts. Raises as `encode`, before the first message."""
    buffers, body_bytes = _encode_buffers(calls, limits)
    message = b"".join(buffers)
    if len(message) <= MESSAGE_BYTES:
        yield message
        return
    body = memoryview(message)[len(message) - body_bytes :]
    head = buffers[0]
    while len(body):
        part = body[: MESSAGE_BYTES - len(head) - len(_field_prefix(_BODY_TAG, MESSAGE_BYTES))]
        yield b"".join([head, _field_prefix(_BODY_TAG, len(part)), part])
        head, body = b"", body[len(part) :]


def _encode_buffers(calls: Sequence[Call], limits: Limits) -> tuple[list[bytes | memoryview], int]:
    if not calls:
        raise UsageError("a frame holds at least one call, got none")
    _check_limit(limits, "calls", len(calls))
    header = _HEADER()
    body: list[bytes | memoryview] = []
    body_bytes = decoded = 0
    for call in calls:
        compressions = call.compressions or [Compression.NONE] * len(call.tensors)
        if len(compressions) != len(call.tensors):
            raise UsageError(f"{len(call.tensors)} tensors, and compressions for {len(compressions)}")
        tensors: list[bytes] = []
        for tensor, compression in zip(call.tensors, compressions, strict=True):
            applied, buffers = to_bytes(tensor, compression)
            tensors.append(_write_tensor(tensor.dtype, tensor.shape, applied, limits.axes, limits.elements))
            body += buffers
            nbytes = sum(map(len, buffers))
            if padding := -nbytes % ALIGNMENT:
                body.append(bytes(padding))
            body_bytes += nbytes + padding
            decoded += tensor.nbytes
        _write_call(header.calls, call.header, tensors)
        _check_call(call.header, len(tensors), limits)
    head: bytes = header.SerializeToString()
    prefix = _field_prefix(_BODY_TAG, body_bytes) if body_bytes else b""
    if body_bytes:
        # Pad the header so that the body is aligned within the message. The receiver then needs no copy of the body.
        # Two bytes are the padding's own tag and length. `size + ALIGNMENT` bounds the length of the final header: a
        # prefix that is one byte shorter than assumed only costs the receiver that copy.
        size = len(head) + 2
        padding = -(len(_field_prefix(_HEADER_TAG, size + ALIGNMENT)) + size + len(prefix)) % ALIGNMENT
        head = b"".join([head, _field_prefix(_PADDING_TAG, padding), bytes(padding)])
    start = _field_prefix(_HEADER_TAG, len(head)) + head
    frame = len(start) + len(prefix) + body_bytes
    if frame > limits.frame_bytes or decoded > limits.decoded_bytes or len(head) > limits.header_bytes:
        raise _too_large(calls, {"header_bytes": len(head), "frame_bytes": frame, "decoded_bytes": decoded}, limits)
    return [start, prefix, *body], body_bytes


def _write_call(calls: Any, header: Header, tensors: list[bytes]) -> None:
    if tensors and header.kind not in WITH_TENSORS:
        raise UsageError(f"a call of kind {header.kind.name} carries no tensors, got {len(tensors)}")
    message = calls.add()
    try:
        for name, value in zip(_FIELDS, header, strict=True):
            if value and name != "deadline_ms":
                setattr(message, name, value)
        if header.deadline_ms is not None:
            message.deadline_ms = min(max(0, header.deadline_ms), _MOST_DEADLINE)
        message.tensors.extend(tensors)
    except (ValueError, TypeError) as error:
        raise UsageError(f"a call of kind {header.kind.name} cannot be sent: {error}") from None


@lru_cache(4096)
def _write_tensor(dtype: torch.dtype, shape: torch.Size, compression: Compression, axes: int, elements: int) -> bytes:
    _check_shape(shape, axes, elements)
    return _TENSOR(dtype=CODES[dtype], shape=shape, compression=compression).SerializeToString()


def _check_shape(shape: Sequence[int], axes: int, elements: int) -> None:
    if len(shape) > axes:
        raise LimitError(f"a tensor has {len(shape)} axes, at most {axes} are allowed", reason="axes")
    # An empty axis counts as 1: torch computes strides from the other axes, which overflow even if the tensor is empty.
    if math.prod(max(1, size) for size in shape) > elements:
        text = f"a tensor has shape {tuple(shape)}, at most {elements} elements are allowed"
        raise LimitError(text, reason="elements")


def _check_call(header: Header, tensors: int, limits: Limits) -> None:
    # The common case, without encoding the names: a character takes at most 4 bytes.
    characters = len(header.uid) + len(header.key) + len(header.client) + len(header.mini_batch) + len(header.trace)
    if 4 * characters <= limits.name_bytes and len(header.data) <= limits.data_bytes and tensors <= limits.tensors:
        return
    sizes = {
        name: ("name_bytes", len(getattr(header, name).encode()))
        for name in ("uid", "key", "client", "mini_batch", "trace")
    }
    for name, (limit, size) in {**sizes, "data": ("data_bytes", len(header.data))}.items():
        if size > getattr(limits, limit):
            raise LimitError(f"{name} takes {size} bytes, at most {getattr(limits, limit)} are allowed", reason=limit)
    _check_limit(limits, "tensors", tensors)


def _too_large(calls: Sequence[Call], sizes: dict[str, int], limits: Limits) -> LimitError:
    first = calls[0].header
    kind = "answer" if first.kind is Kind.RESULT else first.kind.name.lower()
    single = f"the {kind} of expert {first.uid!r}" if first.uid else f"one {kind}"
    name, size = next((name, size) for name, size in sizes.items() if size > getattr(limits, name))
    return LimitError(
        f"{name} of {single if len(calls) == 1 else f'{len(calls)} calls together'}: {size}, at most "
        f"{getattr(limits, name)} are allowed; send fewer rows at a time, compress them with a Policy, or "
        "allow more in the limits= of both ends (GrpcTransport or Connections, and ServerOptions)",
        reason=name,
    )


def decode(message: Bytes, limits: Limits = LIMITS) -> list[Received]:
    """The calls of one complete frame, with tensors that are views of ``message``. Raises only ``WireError``."""
    return Frame(message, limits).received()


class Frame:
    """A frame that is being received, possibly in parts. Raises as `decode`."""

    __slots__ = ("_body", "_calls", "_have", "_joined", "_limits", "body_bytes", "missing_bytes")

    def __init__(self, message: Bytes, limits: Limits = LIMITS) -> None:
        self._limits = limits
        flat = memoryview(message).cast("B")
        # In this order: each check bounds the memory that the next step takes.
        _check_limit(limits, "frame_bytes", len(flat))
        header, self._body = _split_fields(flat)
        if header is None:
            raise MalformedError("the frame holds no header", reason="empty")
        _check_limit(limits, "header_bytes", len(header))  # before it is parsed, which takes far more memory
        try:
            parsed: Any = _HEADER.FromString(bytes(header))
        except DecodeError as error:
            raise MalformedError(f"the header is not a Header of experts.proto: {error}", reason="header") from None
        if not parsed.calls:
            raise MalformedError("the frame holds no call", reason="empty")
        _check_limit(limits, "calls", len(parsed.calls))
        self.body_bytes = decoded = 0
        self._calls: list[tuple[Header, tuple[Descriptor, ...]]] = []
        for call in parsed.calls:
            try:
                decoded = self._read_call(call, decoded)
            except WireError as error:
                raise type(error)(str(error), reason=error.reason, call_id=call.call_id) from None
        self._joined: Body | None = None
        self._have = len(self._body)
        self.missing_bytes = self.body_bytes - self._have
        if self.missing_bytes < 0:
            raise MalformedError(f"the tensors take {self.body_bytes} bytes, the body has {self._have}", reason="sum")
        # The size of the whole frame is known from its first part, so a frame beyond the limit is rejected here.
        _check_limit(limits, "frame_bytes", len(flat) + self.missing_bytes)

    @property
    def can_continue(self) -> bool:
        """Whether the rest of the body can follow in further messages."""
        return self.missing_bytes > 0 and self._have >= _PART

    def append(self, message: Bytes) -> None:
        if self._joined is None:
            # Not zeroed: the system then provides pages only as parts arrive, not as many as the header claims.
            self._joined = np.empty(self.body_bytes, np.uint8)
            self._joined[: self._have] = self._body
            self._body = memoryview(b"")  # releases the first message
        header, part = _split_fields(memoryview(message).cast("B"))
        # Small parts are rejected: each costs a wake-up of the network loop, and a client could send single bytes.
        if header is not None or not min(_PART, self.missing_bytes) <= len(part) <= self.missing_bytes:
            got = "another frame" if header is not None else f"a part of {len(part)} bytes"
            raise TruncatedError(f"{self.missing_bytes} bytes of a frame are missing, got {got}", reason="length")
        self._joined[self._have : self._have + len(part)] = part
        self._have += len(part)
        self.missing_bytes -= len(part)

    def received(self) -> list[Received]:
        if self.missing_bytes:
            text = f"the body of a frame ends after {self._have} bytes, its tensors take {self.body_bytes}"
            raise TruncatedError(text, reason="length")
        body = aligned_body(self._body) if self._joined is None else self._joined
        return [Received(header, descriptors, body) for header, descriptors in self._calls]

    def _read_call(self, call: Any, decoded: int) -> int:
        """Return the decoded bytes of all tensors so far, with those of this call."""
        limits = self._limits
        values = _READ_FIELDS(call)
        code, call_id, uid, key, client, mini_batch, left, keep, evaluation, packing, step, data, trace, tensors = (
            values
        )
        kind, reply = _KINDS.get(code), _COMPRESSIONS.get(packing)
        if kind is None or reply is None:
            unknown = f"kind {code}" if kind is None else f"reply {packing}"
            raise MalformedError(f"{unknown} is not known", reason="kind" if kind is None else "reply")
        # 0 is a value of the optional field, and a missing one reads as 0 too.
        deadline = left if left or call.HasField("deadline_ms") else None
        header = Header(
            kind, call_id, uid, key, client, mini_batch, deadline, keep, evaluation, reply, step, data, trace
        )
        _check_call(header, len(tensors), limits)
        if tensors and kind not in WITH_TENSORS:
            text = f"a call of kind {kind.name} carries {len(tensors)} tensors, wanted none"
            raise MalformedError(text, reason="kind")
        descriptors: list[Descriptor] = []
        for encoded in tensors:
            read = _read_tensor if len(encoded) <= _CACHED_TENSOR_BYTES else _read_tensor.__wrapped__
            descriptor = read(encoded, limits.axes, limits.elements, self.body_bytes)
            descriptors.append(descriptor)
            self.body_bytes += descriptor.nbytes + -descriptor.nbytes % ALIGNMENT
            decoded += descriptor.decoded_bytes
        _check_limit(limits, "decoded_bytes", decoded)
        self._calls.append((header, tuple(descriptors)))
        return decoded


@lru_cache(4096)
def _read_tensor(encoded: bytes, axes: int, elements: int, offset: int) -> Descriptor:
    try:
        tensor: Any = _TENSOR.FromString(encoded)
    except DecodeError as error:
        raise MalformedError(f"a tensor is not a Tensor of experts.proto: {error}", reason="header") from None
    dtype, compression = DTYPES.get(tensor.dtype), _COMPRESSIONS.get(tensor.compression)
    if dtype is None or compression is None:
        text = f"a tensor of dtype {tensor.dtype}, compression {tensor.compression}; one of these is not known"
        raise MalformedError(text, reason="dtype")
    _check_shape(tensor.shape, axes, elements)  # before its tuple is made
    shape = tuple(tensor.shape)
    nbytes = packed_bytes(compression, dtype, shape)
    if nbytes is None:
        text = f"{compression.name} does not apply to a tensor of {dtype}, shape {shape}"
        raise MalformedError(text, reason="compression")
    return Descriptor(dtype, shape, compression, nbytes, offset, math.prod(shape) * dtype.itemsize)


def _check_limit(limits: Limits, name: str, value: int) -> None:
    if value > (most := getattr(limits, name)):
        raise LimitError(f"{name}: {value}, at most {most} are allowed", reason=name)


def _field_prefix(tag: int, size: int) -> bytes:
    # Tag and length as protobuf writes them: seven bits per byte, least first, and the eighth bit while more follow.
    prefix = bytearray((tag,))
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


def _split_fields(message: memoryview) -> tuple[memoryview | None, memoryview]:
    """The header and the body of a `Frame`, without a copy. Unknown fields are skipped."""
    header, body = None, message[:0]
    at, end = 0, len(message)
    while at < end:
        # Tag and length are read inline if they take one byte each, as is usual.
        tag, at = (message[at], at + 1) if message[at] < 0x80 else _read_varint(message, at)
        size = message[at] if at < end else 0x80
        at += 1
        if size >= 0x80:
            size, at = _read_varint(message, at - 1)
        if tag & 7 == 0:  # an unknown field of type varint, whose value is `size`
            continue
        # The types that remain (fixed-size numbers, groups) occur in no version of the format, so these bytes are
        # probably not a frame. Skipping them would only delay the error.
        if tag & 7 != 2:
            raise MalformedError(f"a frame has no field of type {tag & 7}", reason="field")
        # Nothing is allocated for `size`, which can be up to 2**64: a slice of a memoryview shares memory.
        start, at = at, at + size
        if at > end:
            raise TruncatedError(f"the frame ends at byte {end}, one of its fields at {at}", reason="length")
        if tag == _HEADER_TAG:
            header = message[start:at]
        elif tag == _BODY_TAG:
            body = message[start:at]
    return header, body


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(at, len(message)):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
        if shift >= 64:
            raise MalformedError("a number of more than 64 bits", reason="field")
    raise TruncatedError(f"the frame ends at byte {len(message)}, within a field", reason="length")


def to_bytes(tensor: Tensor, compression: Compression) -> tuple[Compression, list[memoryview]]:
    """The applied compression, and buffers with the bytes of ``tensor``, which can share its memory."""
    if compression is Compression.NONE and _is_plain(tensor):
        array = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        if not array.size:
            return compression, []
        # A memoryview casts faster than numpy, but does not support complex numbers.
        return compression, [array.reshape(-1).view(np.uint8).data if array.dtype.kind == "c" else array.data.cast("B")]
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.dtype not in CODES:
        text = f"a tensor of {tensor.dtype}, layout {tensor.layout}, on {tensor.device}"
        raise UsageError(f"{text} cannot be sent: wanted a dense tensor with data, of one of {sorted(map(str, CODES))}")
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    is_raw = compression is Compression.NONE
    applied, parts = (compression, [values.contiguous()]) if is_raw else compress(values, compression)
    # `reshape` would not do: a contiguous tensor of size 1 keeps its stride, with which a view as bytes fails.
    flat = (part.as_strided((part.numel(),), (1,)) for part in parts)
    return applied, [part.view(torch.uint8).numpy().data for part in flat if part.numel()]


def _is_plain(tensor: Tensor) -> bool:
    """Whether numpy can expose the memory of a tensor, byte for byte as it is sent."""
    if not tensor.is_cpu or tensor.dtype not in _NUMPY or tensor.layout is not torch.strided:
        return False
    if tensor.is_nested or not tensor.is_contiguous():
        return False
    return not (tensor.is_neg() or tensor.is_conj())


def aligned_body(message: memoryview) -> Body:
    """These bytes at an aligned address and writable: a view if they are aligned, else a copy."""
    view: Body = np.frombuffer(message, np.uint8)
    interface = view.__array_interface__
    address, read_only = interface["data"]
    if address % ALIGNMENT:
        copied: Body = torch.empty(len(view), dtype=torch.uint8, device="cpu").numpy()  # torch aligns to 64
        copied[:] = view
        return copied
    # torch has no read-only tensors, and warns about each. Writing is safe: a received message has no other user.
    if read_only:
        interface["data"] = (address, False)
        return np.asarray(_WritableView(view, interface))
    return view


class _WritableView:
    """Read-only memory that numpy treats as writable, and its owner."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: Body, interface: dict[str, Any]) -> None:
        self._owner, self.__array_interface__ = owner, interface


def to_tensor(packed: Body, dtype: torch.dtype, shape: tuple[int, ...], compression: Compression) -> Tensor:
    """The tensor of these bytes: a view, or a new one if they are compressed. Raises ``MalformedError``."""
    # Other values of a bool are undefined behaviour in torch.
    if dtype == torch.bool and packed.size and int(packed.max()) > 1:
        raise MalformedError(f"a bool is {int(packed.max())}, wanted 0 or 1", reason="bool")
    if compression is Compression.NONE and packed.size and dtype in _NUMPY:
        return torch.from_numpy(packed.view(_NUMPY[dtype]).reshape(shape))
    return expand(torch.from_numpy(packed), compression, dtype, shape)
