"""Frames: calls of one client, packed into one message, and unpacked on the other side; and the limits of a frame.

    Call(Header(FORWARD, 7, "ffn.3"), [x])  ─┐                                    ┌─ Received(header, descriptors)
    Call(Header(BACKWARD, 8, ...), [x, g])  ─┴─ encode ──> message ── decode ─────┴─ Received   .tensors()

    | call 7, x | call 8, x, g | padding |  bytes of x .. | bytes of x .. | bytes of g .. |
    |<----- Header of experts.proto ---->|<------------- body, 16-aligned --------------->|     a Frame of experts.proto

Protobuf for all but the tensors, which lie behind it as they are; no pickle, no eval. Everything that a header says of
tensors is checked against the limits before a byte of theirs is allocated. A frame that breaks the format is refused
whole: past a fault nothing in it can be believed. All its calls are of one client, so nobody else pays.

A contiguous CPU tensor is sent from its own memory, and a decoded one is a view of the message, which it keeps alive:
messages that arrived belong to nobody else, so a module may work in place on its input. Between bytes and tensors
stands numpy where it knows the dtype: nearly every operation of torch lets go of the interpreter's lock, and where many
threads send small tensors each of them waits for it again.

A server takes messages of `MESSAGE_BYTES` at most: gRPC holds a message before anybody has seen a byte of it. A larger
frame goes on in messages with a body only (`Frame.append`), for which the server has counted its size before.
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

from weft.core.errors import UsageError
from weft.core.validation import Validator
from weft.experts.compression import Compression, compress, expand, packed_bytes
from weft.experts.errors import LimitError, MalformedError, TruncatedError, WireError
from weft.experts.protobuf import load_messages

ALIGNMENT = 16
"""Every tensor begins at a multiple of it."""
HEADER_BYTES = 256 << 10
"""The largest header. Parsed it takes up to 80 times as much memory, for as long as `decode` runs."""
MESSAGE_BYTES = 512 << 10
"""The largest message that a server takes, which is a frame or a part of one."""
MOST_FRAME_BYTES = 0x7FFF_FFFF - (1 << 16)  # gRPC counts a message's bytes, with some of its own, in 31 bits
_PART = 128 << 10  # bytes of the body in every part of a frame but the last
_HEADER_TAG, _BODY_TAG, _PADDING_TAG = 0x0A, 0x12, 0x12  # number << 3 | 2; the last is of `Header`
_MOST_AXES = 64  # of torch
_MOST_DEADLINE = (1 << 32) - 1
_TENSOR = load_messages("weft.experts.wire", "experts")["Tensor"]

# Left out are dtypes that torch cannot store as whole bytes (`uint1` ... `int7`, `float4_e2m1fn_x2`), the quantized
# ones, which carry a scale outside their bytes and crash when made from a buffer, and `complex32`, which torch calls
# experimental and warns about at every allocation.
DTYPES: dict[int, torch.dtype] = {
    each.number: getattr(torch, each.name.removesuffix("_"))
    for each in _TENSOR.DESCRIPTOR.fields_by_name["dtype"].enum_type.values
    if each.number
}
"""Which dtypes travel, by their numbers in experts.proto."""
CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}


class Kind(IntEnum):
    """What a call is, as in experts.proto."""

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


WITH_TENSORS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.RESULT})


class Header(NamedTuple):  # a tuple: made for every call, and three times as fast as a frozen dataclass
    """All of a call but its tensors; experts.proto says what each field means.

    ``call_id`` is set on the way. ``key``: what stands behind a ``+`` tells several backwards of one forward apart.
    ``deadline_ms``: what is left of the caller's time when the frame is sent. ``data`` is opaque here.
    """

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


class Descriptor(NamedTuple):
    """One tensor of a call, and where its ``nbytes`` bytes lie, counted from the start of the body."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    compression: Compression
    nbytes: int
    offset: int
    decoded_bytes: int


class Call(NamedTuple):
    """One call to send: its header, its tensors in flat order, and how each may be compressed (empty: none is)."""

    header: Header
    tensors: Sequence[Tensor] = ()
    compressions: Sequence[Compression] = ()


@dataclass(frozen=True)
class Limits:
    """The caps of one frame, all inclusive, checked before anything of it is allocated.

    ``frame_bytes`` and ``header_bytes`` are on the wire; ``decoded_bytes`` of all its tensors. ``elements`` are of a
    tensor, ``name_bytes`` of each name in a call, ``data_bytes`` of its opaque data. Raises ``UsageError``.
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
                    check.that(value <= cap, f"{name} is {value}, the format ends at {cap}")


LIMITS = Limits()
"""The limits where none are given."""

# Tensors stay bytes until they are looked up: most calls' are like those of calls before.
_HEADER = load_messages("weft.experts.wire", "experts", "Call.tensors")["Header"]
_TENSOR_BYTES = 1024  # of those that are remembered
_KINDS = {int(kind): kind for kind in Kind}
_FIELDS = Header._fields
_READ: Callable[[Any], tuple[Any, ...]] = attrgetter(*_FIELDS, "tensors")
_COMPRESSIONS = {int(one): one for one in Compression}
Bytes = bytes | bytearray | memoryview
Body = np.ndarray[Any, np.dtype[np.uint8]]
"""The body of a frame: flat, at an aligned address."""
_NUMPY: dict[torch.dtype, "np.dtype[np.generic]"] = {
    dtype: np.dtype(str(dtype).removeprefix("torch.").replace("bool", "bool_"))
    for dtype in CODES
    if (dtype.itemsize > 1 and dtype is not torch.bfloat16) or not dtype.is_floating_point
}


class Received(NamedTuple):
    """One call that arrived. Its tensors are described, and made only when asked for; ``body`` has their bytes."""

    header: Header
    descriptors: tuple[Descriptor, ...]
    body: Body

    def tensors(self) -> list[Tensor]:
        """The tensors on the CPU; views of the message where they can be. Raises ``MalformedError``."""
        return [
            to_tensor(self.body[offset : offset + nbytes], dtype, shape, how)
            for dtype, shape, how, nbytes, offset, _ in self.descriptors
        ]


def encode(calls: Sequence[Call], limits: Limits = LIMITS) -> bytes:
    """One message with all ``calls``. Raises ``UsageError``, and ``LimitError`` for what is larger than ``limits``."""
    return b"".join(_encoded(calls, limits)[0])


def encode_parts(calls: Sequence[Call], limits: Limits = LIMITS) -> Iterator[bytes]:
    """The same, as the messages that a server takes. Raises as `encode`, before the first of them."""
    buffers, body_bytes = _encoded(calls, limits)
    message = b"".join(buffers)
    if len(message) <= MESSAGE_BYTES:
        yield message
        return
    body = memoryview(message)[len(message) - body_bytes :]
    head = buffers[0]
    while len(body):
        part = body[: MESSAGE_BYTES - len(head) - len(_prefix(_BODY_TAG, MESSAGE_BYTES))]
        yield b"".join([head, _prefix(_BODY_TAG, len(part)), part])
        head, body = b"", body[len(part) :]


def _encoded(calls: Sequence[Call], limits: Limits) -> tuple[list[bytes | memoryview], int]:
    """Buffers that make one message, first the header; and the size of the body. They look into the tensors."""
    if not calls:
        raise UsageError("a frame holds at least one call, and none was given")
    _check(limits, "calls", len(calls))
    header = _HEADER()
    body: list[bytes | memoryview] = []
    body_bytes = decoded = 0
    for call in calls:
        compressions = call.compressions or [Compression.NONE] * len(call.tensors)
        if len(compressions) != len(call.tensors):
            raise UsageError(f"{len(call.tensors)} tensors, and compressions for {len(compressions)}")
        tensors: list[bytes] = []
        for tensor, how in zip(call.tensors, compressions, strict=True):
            done, buffers = to_bytes(tensor, how)
            tensors.append(_write_tensor(tensor.dtype, tensor.shape, done, limits.axes, limits.elements))
            body += buffers
            nbytes = sum(map(len, buffers))
            if padding := -nbytes % ALIGNMENT:
                body.append(bytes(padding))
            body_bytes += nbytes + padding
            decoded += tensor.nbytes
        _write_call(header.calls, call.header, tensors)
        _check_call(call.header, len(tensors), limits)
    head: bytes = header.SerializeToString()
    prefix = _prefix(_BODY_TAG, body_bytes) if body_bytes else b""
    if body_bytes:  # the body begins at a multiple of `ALIGNMENT`: the padding's own tag and length take two bytes
        size = len(head) + 2
        padding = -(len(_prefix(_HEADER_TAG, size + ALIGNMENT)) + size + len(prefix)) % ALIGNMENT
        head = b"".join([head, _prefix(_PADDING_TAG, padding), bytes(padding)])
    start = _prefix(_HEADER_TAG, len(head)) + head
    frame = len(start) + len(prefix) + body_bytes
    if frame > limits.frame_bytes or decoded > limits.decoded_bytes or len(head) > limits.header_bytes:
        raise _too_large(calls, {"header_bytes": len(head), "frame_bytes": frame, "decoded_bytes": decoded}, limits)
    return [start, prefix, *body], body_bytes


def _write_call(calls: Any, header: Header, tensors: list[bytes]) -> None:
    """Add a call to those of a message. Raises ``UsageError`` for what no field can hold."""
    if tensors and header.kind not in WITH_TENSORS:
        raise UsageError(f"a call of kind {header.kind.name} carries no tensors, and {len(tensors)} were given")
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
def _write_tensor(dtype: torch.dtype, shape: torch.Size, how: Compression, axes: int, elements: int) -> bytes:
    """A `Tensor` of experts.proto. Raises ``LimitError`` for a shape beyond these limits."""
    _check_shape(shape, axes, elements)
    return _TENSOR(dtype=CODES[dtype], shape=shape, compression=how).SerializeToString()


def _check_shape(shape: Sequence[int], axes: int, elements: int) -> None:
    """Raise ``LimitError``. Empty axes count as 1: that is the largest stride that torch has to count to."""
    if len(shape) > axes:
        raise LimitError(f"a tensor has {len(shape)} axes, at most {axes} are allowed", reason="axes")
    if math.prod(max(1, size) for size in shape) > elements:
        text = f"a tensor has shape {tuple(shape)}, at most {elements} elements are allowed"
        raise LimitError(text, reason="elements")


def _check_call(header: Header, tensors: int, limits: Limits) -> None:
    """Raise ``LimitError`` for names, data and tensors beyond the limits."""
    letters = len(header.uid) + len(header.key) + len(header.client) + len(header.mini_batch)
    if 4 * letters <= limits.name_bytes and len(header.data) <= limits.data_bytes and tensors <= limits.tensors:
        return  # a letter takes 4 bytes at most
    sizes = {
        name: ("name_bytes", len(getattr(header, name).encode())) for name in ("uid", "key", "client", "mini_batch")
    }
    for what, (limit, size) in {**sizes, "data": ("data_bytes", len(header.data))}.items():
        if size > getattr(limits, limit):
            raise LimitError(f"{what} takes {size} bytes, at most {getattr(limits, limit)} are allowed", reason=limit)
    _check(limits, "tensors", tensors)


def _too_large(calls: Sequence[Call], sizes: dict[str, int], limits: Limits) -> LimitError:
    """The error for the first of these sizes that is beyond its limit."""
    first = calls[0].header
    what = "answer" if first.kind is Kind.RESULT else first.kind.name.lower()
    one = f"the {what} of expert {first.uid!r}" if first.uid else f"one {what}"
    name, seen = next((name, seen) for name, seen in sizes.items() if seen > getattr(limits, name))
    return LimitError(
        f"{name} of {one if len(calls) == 1 else f'{len(calls)} calls together'}: {seen}, at most "
        f"{getattr(limits, name)} are allowed; send fewer rows at a time, compress them with a Policy, or "
        "allow more in the limits= of both ends (GrpcTransport or Connections, and ServerOptions)",
        reason=name,
    )


def decode(message: Bytes, limits: Limits = LIMITS) -> list[Received]:
    """The calls of one whole frame, whose tensors are views of ``message``.

    Raises ``MalformedError``, ``TruncatedError`` or ``LimitError``, and nothing else, whatever the bytes are.
    """
    return Frame(message, limits).received()


class Frame:
    """A frame as it arrives: all of it, or the first part; ``wanted`` bytes are still to come. Raises as `decode`."""

    __slots__ = ("_body", "_calls", "_have", "_joined", "_limits", "body_bytes", "wanted")

    def __init__(self, message: Bytes, limits: Limits = LIMITS) -> None:
        self._limits = limits
        flat = memoryview(message).cast("B")
        _check(limits, "frame_bytes", len(flat))
        header, self._body = _split(flat)
        if header is None:
            raise MalformedError("the frame holds no header", reason="empty")
        _check(limits, "header_bytes", len(header))
        try:
            parsed: Any = _HEADER.FromString(bytes(header))
        except DecodeError as error:
            raise MalformedError(f"the header is no Header of experts.proto: {error}", reason="header") from None
        if not parsed.calls:
            raise MalformedError("the frame holds no call", reason="empty")
        _check(limits, "calls", len(parsed.calls))
        self.body_bytes = decoded = 0
        self._calls: list[tuple[Header, tuple[Descriptor, ...]]] = []
        for call in parsed.calls:
            try:
                decoded = self._read(call, decoded)
            except WireError as error:
                error.call_id = call.call_id
                raise
        self._joined: Body | None = None
        self._have = len(self._body)
        self.wanted = self.body_bytes - self._have
        if self.wanted < 0:
            raise MalformedError(f"the tensors take {self.body_bytes} bytes, the body has {self._have}", reason="sum")
        _check(limits, "frame_bytes", len(flat) + self.wanted)

    @property
    def partial(self) -> bool:
        """Whether the rest of the body may come in further messages."""
        return self.wanted > 0 and self._have >= _PART

    def append(self, message: Bytes) -> None:
        """Take the next part of the body; with the first of them, memory is allocated for all. Raises as `decode`."""
        if self._joined is None:
            self._joined = np.empty(self.body_bytes, np.uint8)  # not zeroed: no page is there before its bytes are
            self._joined[: self._have] = self._body
            self._body = memoryview(b"")
        header, part = _split(memoryview(message).cast("B"))
        if header is not None or not min(_PART, self.wanted) <= len(part) <= self.wanted:
            what = "another frame" if header is not None else f"a part of {len(part)} bytes"
            raise TruncatedError(f"{self.wanted} bytes of a frame are to come, and then comes {what}", reason="length")
        self._joined[self._have : self._have + len(part)] = part
        self._have += len(part)
        self.wanted -= len(part)

    def received(self) -> list[Received]:
        """Its calls. Raises ``TruncatedError`` if bytes are wanting."""
        if self.wanted:
            text = f"the body of a frame ends after {self._have} bytes, its tensors take {self.body_bytes}"
            raise TruncatedError(text, reason="length")
        body = aligned_body(self._body) if self._joined is None else self._joined
        return [Received(header, descriptors, body) for header, descriptors in self._calls]

    def _read(self, call: Any, decoded: int) -> int:
        """Read one call. Takes and returns the bytes of all tensors so far once they are decoded."""
        limits = self._limits
        code, call_id, uid, key, client, mini_batch, left, keep, evaluation, packing, step, data, tensors = _READ(call)
        kind, reply = _KINDS.get(code), _COMPRESSIONS.get(packing)
        if kind is None or reply is None:
            what = f"kind {code}" if kind is None else f"reply {packing}"
            raise MalformedError(f"{what} is not known", reason="kind" if kind is None else "reply")
        deadline = left if left or call.HasField("deadline_ms") else None
        header = Header(kind, call_id, uid, key, client, mini_batch, deadline, keep, evaluation, reply, step, data)
        _check_call(header, len(tensors), limits)
        if tensors and kind not in WITH_TENSORS:
            text = f"a call of kind {kind.name} carries {len(tensors)} tensors, wanted none"
            raise MalformedError(text, reason="kind")
        found: list[Descriptor] = []
        for raw in tensors:
            read = _read_tensor if len(raw) <= _TENSOR_BYTES else _read_tensor.__wrapped__
            descriptor = read(raw, limits.axes, limits.elements, self.body_bytes)
            found.append(descriptor)
            self.body_bytes += descriptor.nbytes + -descriptor.nbytes % ALIGNMENT
            decoded += descriptor.decoded_bytes
        _check(limits, "decoded_bytes", decoded)
        self._calls.append((header, tuple(found)))
        return decoded


@lru_cache(4096)
def _read_tensor(raw: bytes, axes: int, elements: int, offset: int) -> Descriptor:
    """The inverse of `_write_tensor`, with the place of its bytes in the body."""
    try:
        tensor: Any = _TENSOR.FromString(raw)
    except DecodeError as error:
        raise MalformedError(f"a tensor is no Tensor of experts.proto: {error}", reason="header") from None
    dtype, how = DTYPES.get(tensor.dtype), _COMPRESSIONS.get(tensor.compression)
    if dtype is None or how is None:
        raise MalformedError(f"a tensor of dtype {tensor.dtype}, compression {tensor.compression}", reason="dtype")
    _check_shape(tensor.shape, axes, elements)
    shape = tuple(tensor.shape)
    nbytes = packed_bytes(how, dtype, shape)
    if nbytes is None:
        text = f"{how.name} does not apply to a tensor of {dtype}, shape {shape}"
        raise MalformedError(text, reason="compression")
    return Descriptor(dtype, shape, how, nbytes, offset, math.prod(shape) * dtype.itemsize)


def _check(limits: Limits, name: str, seen: int) -> None:
    if seen > (most := getattr(limits, name)):
        raise LimitError(f"{name}: {seen}, at most {most} are allowed", reason=name)


def _prefix(tag: int, size: int) -> bytes:
    """Tag and length of a field, as protobuf writes them."""
    found = bytearray((tag,))
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)


def _split(message: memoryview) -> tuple[memoryview | None, memoryview]:
    """The header and the body of a `Frame`, without a copy. Other fields are passed over."""
    header, body = None, message[:0]
    at, end = 0, len(message)
    while at < end:
        tag, at = (message[at], at + 1) if message[at] < 0x80 else _varint(message, at)
        size = message[at] if at < end else 0x80
        at += 1
        if size >= 0x80:
            size, at = _varint(message, at - 1)
        if tag & 7 == 0:
            continue
        if tag & 7 != 2:
            raise MalformedError(f"a frame has no field of type {tag & 7}", reason="field")
        start, at = at, at + size
        if at > end:
            raise TruncatedError(f"the frame ends at byte {end}, a field of it at {at}", reason="length")
        if tag == _HEADER_TAG:
            header = message[start:at]
        elif tag == _BODY_TAG:
            body = message[start:at]
    return header, body


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number at this place, and where it ends."""
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


def to_bytes(tensor: Tensor, how: Compression) -> tuple[Compression, list[memoryview]]:
    """What was done to ``tensor`` (any device, strides and size), and buffers that hold its bytes in order.

    They may look into the tensor: do not write into it before they were sent. Raises ``UsageError``.
    """
    if how is Compression.NONE and _is_plain(tensor):
        seen = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        if not seen.size:
            return how, []
        # A memoryview casts faster than numpy, but knows no complex numbers.
        return how, [seen.reshape(-1).view(np.uint8).data if seen.dtype.kind == "c" else seen.data.cast("B")]
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.dtype not in CODES:
        text = f"a tensor of {tensor.dtype}, layout {tensor.layout}, on {tensor.device}"
        raise UsageError(f"{text} cannot be sent: wanted a dense tensor with data, of one of {sorted(map(str, CODES))}")
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    done, parts = (how, [values.contiguous()]) if how is Compression.NONE else compress(values, how)
    # A contiguous tensor of size 1 may have any stride, which views as bytes and `reshape` leave alone.
    flat = (part.as_strided((part.numel(),), (1,)) for part in parts)
    return done, [part.view(torch.uint8).numpy().data for part in flat if part.numel()]


def _is_plain(tensor: Tensor) -> bool:
    """Whether numpy can show its memory, byte for byte as it is sent."""
    if not tensor.is_cpu or tensor.dtype not in _NUMPY or tensor.layout is not torch.strided:
        return False
    if tensor.is_nested or not tensor.is_contiguous():
        return False
    return not (tensor.is_neg() or tensor.is_conj())


def aligned_body(message: memoryview) -> Body:
    """These bytes at an aligned address; a view if it can be, and torch may have it."""
    seen: Body = np.frombuffer(message, np.uint8)
    interface = seen.__array_interface__
    address, read_only = interface["data"]
    if address % ALIGNMENT:
        fresh: Body = torch.empty(len(seen), dtype=torch.uint8, device="cpu").numpy()  # torch aligns to 64
        fresh[:] = seen
        return fresh
    if read_only:
        interface["data"] = (address, False)
        return np.asarray(_Borrowed(seen, interface))
    return seen


class _Borrowed:
    """Read-only memory, shown to torch as what it can hold: it knows no read-only tensors, and warns about them."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: Body, interface: dict[str, Any]) -> None:
        self._owner, self.__array_interface__ = owner, interface


def to_tensor(packed: Body, dtype: torch.dtype, shape: tuple[int, ...], how: Compression) -> Tensor:
    """The tensor of these bytes: new if they are compressed, else a view of them. Raises ``MalformedError``."""
    if dtype == torch.bool and packed.size and int(packed.max()) > 1:
        raise MalformedError(f"a bool is {int(packed.max())}, wanted 0 or 1", reason="bool")
    if how is Compression.NONE and packed.size and dtype in _NUMPY:
        return torch.from_numpy(packed.view(_NUMPY[dtype]).reshape(shape))
    return expand(torch.from_numpy(packed), how, dtype, shape)
