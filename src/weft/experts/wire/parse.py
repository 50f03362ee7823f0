"""Reads the header of a frame that anybody may have sent. Nothing in it is believed before it was checked.

    bytes ──> preamble ──> calls ──> descriptors        numbers only: no tensor is made, no body byte is read
                 |            |            |
             lengths fit   counts and    dtype, axes, elements, bytes = what dtype x shape x compression says;
             the message   names fit     their sum = the body, and decoded it is no more than the limits allow

Whatever is wrong ends in a ``WireError`` with a reason and never in another exception: sizes are Python integers,
so no product overflows, and every read is preceded by a check of its bounds. Work and memory are bounded by the
length of the header.
"""

import struct
from dataclasses import dataclass

from weft.experts.compression import Compression, packed_bytes
from weft.experts.wire.dtypes import DTYPES
from weft.experts.wire.errors import LimitError, MalformedError, TruncatedError
from weft.experts.wire.header import (
    CALL,
    MAGIC,
    NO_DEADLINE,
    PREAMBLE,
    TENSOR,
    VERSION,
    WITH_TENSORS,
    Descriptor,
    Flags,
    Header,
    Kind,
    aligned,
    extent,
)
from weft.experts.wire.limits import Limits

_KINDS = {int(kind): kind for kind in Kind}
_COMPRESSIONS = {int(one): one for one in Compression}
_FLAGS = {bits: Flags(bits) for bits in range(2)}
_SHAPES = [struct.Struct(f"<{axes}q") for axes in range(256)]

Parsed = tuple[Header, tuple[Descriptor, ...]]


def parse(message: memoryview, limits: Limits) -> tuple[list[Parsed], int]:
    """Every call with its descriptors, and where the body starts. ``message`` is the whole frame, as flat bytes.

    Raises ``MalformedError``, ``TruncatedError`` or ``LimitError``.
    """
    calls, header_bytes, body_bytes = _preamble(message, limits)
    reader = _Reader(message, PREAMBLE.size, PREAMBLE.size + header_bytes, limits)
    parsed = [reader.call() for _ in range(calls)]
    if reader.at != reader.end:
        raise MalformedError(f"the calls end at byte {reader.at}, the header at {reader.end}", reason="sum")
    if reader.body != body_bytes:
        raise MalformedError(f"the tensors take {reader.body} bytes, the body has {body_bytes}", reason="sum")
    return parsed, aligned(reader.end)


def _preamble(message: memoryview, limits: Limits) -> tuple[int, int, int]:
    if len(message) < PREAMBLE.size:
        raise TruncatedError(f"a frame of {len(message)} bytes, wanted at least {PREAMBLE.size}", reason="length")
    magic, version, zero, calls, header_bytes, body_bytes = PREAMBLE.unpack_from(message)
    if magic != MAGIC:
        raise MalformedError(f"a frame starts with {MAGIC!r}, this with {magic!r}", reason="magic")
    if version != VERSION:
        raise MalformedError(f"the frame has version {version}, this side speaks {VERSION}", reason="version")
    if zero:
        raise MalformedError(f"the reserved byte of the frame is {zero}, wanted 0", reason="reserved")
    if not calls:
        raise MalformedError("the frame holds no call", reason="empty")
    wanted = aligned(PREAMBLE.size + header_bytes) + body_bytes
    if calls > limits.calls:
        raise LimitError(f"{calls} calls in a frame, at most {limits.calls} are allowed", reason="calls")
    if header_bytes > limits.header_bytes:
        raise LimitError(f"a header of {header_bytes} bytes, at most {limits.header_bytes}", reason="header_bytes")
    if wanted > limits.frame_bytes:
        raise LimitError(f"a frame of {wanted} bytes, at most {limits.frame_bytes} are allowed", reason="frame_bytes")
    if wanted != len(message):
        raise TruncatedError(f"the frame has {len(message)} bytes, its header says {wanted}", reason="length")
    return calls, header_bytes, body_bytes


@dataclass
class _Reader:
    """Where the next number of the header is read, and what the tensors seen so far take."""

    message: memoryview
    at: int
    end: int
    limits: Limits
    call_id: int | None = None
    body: int = 0
    decoded: int = 0

    def call(self) -> Parsed:
        """The next call with its descriptors."""
        self.call_id = None
        at = self._skip(CALL.size)
        numbers: tuple[int, ...] = CALL.unpack_from(self.message, at)
        call_id, step, deadline, data_bytes, tensors, *sizes = numbers[:9]
        kind, flags, reply, zero = numbers[9:]
        self.call_id = call_id
        for what, value, known in (("kind", kind, _KINDS), ("flags", flags, _FLAGS), ("reply", reply, _COMPRESSIONS)):
            if value not in known:
                raise self._malformed(f"{what} {value} is not known", what)
        if zero:
            raise self._malformed(f"the reserved byte is {zero}, wanted 0", "reserved")
        if tensors and _KINDS[kind] not in WITH_TENSORS:
            raise self._malformed(f"a call of kind {_KINDS[kind].name} carries {tensors} tensors, wanted none", "kind")
        self._limit("tensors", tensors, self.limits.tensors)
        self._limit("data_bytes", data_bytes, self.limits.data_bytes)
        uid, key, client, mini_batch = (self._name(size) for size in sizes)
        data = self._skip(data_bytes)
        header = Header(
            kind=_KINDS[kind],
            call_id=call_id,
            uid=uid,
            key=key,
            client=client,
            mini_batch=mini_batch,
            deadline_ms=None if deadline == NO_DEADLINE else deadline,
            flags=_FLAGS[flags],
            reply=_COMPRESSIONS[reply],
            step=step,
            data=bytes(self.message[data : self.at]),
        )
        return header, tuple([self._tensor() for _ in range(tensors)])

    def _tensor(self) -> Descriptor:
        numbers: tuple[int, ...] = TENSOR.unpack_from(self.message, self._skip(TENSOR.size))
        code, packing, axes, zero, nbytes = numbers
        dtype, how = DTYPES.get(code), _COMPRESSIONS.get(packing)
        if dtype is None or how is None or zero:
            raise self._malformed(f"a tensor of dtype {code}, compression {packing}, reserved {zero}", "dtype")
        self._limit("axes", axes, self.limits.axes)
        shape: tuple[int, ...] = _SHAPES[axes].unpack_from(self.message, self._skip(8 * axes))
        if any(size < 0 for size in shape):
            raise self._malformed(f"a tensor of shape {shape}", "shape")
        self._limit("elements", extent(shape), self.limits.elements)
        wanted = packed_bytes(how, dtype, shape)
        if wanted is None:
            raise self._malformed(f"{how.name} does not apply to a tensor of {dtype}, shape {shape}", "compression")
        if nbytes != wanted:
            raise self._malformed(f"{nbytes} bytes for a tensor of {dtype}, shape {shape}: wanted {wanted}", "bytes")
        tensor = Descriptor(dtype, shape, how, nbytes, self.body)
        self.decoded += tensor.decoded_bytes
        self._limit("decoded_bytes", self.decoded, self.limits.decoded_bytes)
        self.body += aligned(nbytes)
        return tensor

    def _name(self, size: int) -> str:
        self._limit("name_bytes", size, self.limits.name_bytes)
        at = self._skip(size)
        try:
            return str(self.message[at : self.at], "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self._malformed("a name is not UTF-8", "name") from None

    def _skip(self, size: int) -> int:
        """Go on by ``size`` bytes, and return where they start."""
        start = self.at
        if size > self.end - start:
            text = f"the header ends at byte {self.end}, wanted {size} more from {start}"
            raise TruncatedError(text, reason="header", call_id=self.call_id)
        self.at = start + size
        return start

    def _limit(self, name: str, seen: int, most: int) -> None:
        if seen > most:
            raise LimitError(f"{name}: {seen}, at most {most} are allowed", reason=name, call_id=self.call_id)

    def _malformed(self, text: str, reason: str) -> MalformedError:
        return MalformedError(text, reason=reason, call_id=self.call_id)
