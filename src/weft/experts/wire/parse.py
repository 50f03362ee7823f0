"""Reads the header of a frame that anybody may have sent. Nothing in it is believed before it was checked.

    bytes ──> preamble ──> calls ──> descriptors        numbers only: no tensor is made, no body byte is read
                 |            |            |
             lengths fit   counts and    dtype, axes, elements, bytes = what dtype x shape x compression says;
             the message   names fit     their sum = the body, and decoded it is no more than the limits allow

Whatever is wrong ends in a ``WireError`` with a reason and never in another exception: sizes are Python integers,
so no product overflows, and every read is preceded by a check of its bounds. Work and memory are bounded by the
length of the header.
"""

import math
import struct
from functools import lru_cache
from itertools import product

import torch

from weft.experts.compression import Compression, packed_bytes
from weft.experts.errors import LimitError, MalformedError, TruncatedError, WireError
from weft.experts.wire.dtypes import DTYPES
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
_FLAGS = {bits: Flags(bits) for bits in range(2 * max(Flags))}
_WORDS = {tuple(map(int, words)): words for words in product(_KINDS.values(), _FLAGS.values(), _COMPRESSIONS.values())}

Parsed = tuple[Header, tuple[Descriptor, ...]]


def parse(message: memoryview, limits: Limits) -> tuple[list[Parsed], int]:
    """Every call with its descriptors, and where the body starts. ``message`` is the whole frame, as flat bytes.

    Raises ``MalformedError``, ``TruncatedError`` or ``LimitError``.
    """
    calls, header_bytes, body_bytes, wanted = _preamble(message, limits)
    if wanted != len(message):
        raise TruncatedError(f"the frame has {len(message)} bytes, its header says {wanted}", reason="length")
    end = PREAMBLE.size + header_bytes
    reader = _Reader(bytes(message[PREAMBLE.size : end]), limits)
    parsed = [reader.call() for _ in range(calls)]
    if reader.at != header_bytes:
        text = f"the calls end at byte {PREAMBLE.size + reader.at}, the header at {end}"
        raise MalformedError(text, reason="sum")
    if reader.body != body_bytes:
        raise MalformedError(f"the tensors take {reader.body} bytes, the body has {body_bytes}", reason="sum")
    return parsed, aligned(end)


def frame_size(start: memoryview, limits: Limits) -> int:
    """Bytes of the whole frame that starts like this. Raises as `parse` does."""
    return _preamble(start, limits)[3]


def _preamble(message: memoryview, limits: Limits) -> tuple[int, int, int, int]:
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
    return calls, header_bytes, body_bytes, wanted


class _Reader:
    """Where the next call of the header is read, and what the tensors seen so far take."""

    def __init__(self, head: bytes, limits: Limits) -> None:
        self.at = self.body = 0
        self._head, self._limits, self._decoded = head, limits, 0
        self._call_id: int | None = None

    def call(self) -> Parsed:
        """The next call with its descriptors."""
        self._call_id = None
        numbers: tuple[int, ...] = CALL.unpack_from(self._head, self._skip(CALL.size))
        call_id, step, deadline, data_bytes, tensors, uid, key, client, mini_batch, kind, flags, reply, zero = numbers
        self._call_id = call_id
        words = None if zero else _WORDS.get((kind, flags, reply))
        if words is None:
            raise self._unknown(kind, flags, reply, zero)
        if tensors and words[0] not in WITH_TENSORS:
            raise self._malformed(f"a call of kind {words[0].name} carries {tensors} tensors, wanted none", "kind")
        self._limit("tensors", tensors, self._limits.tensors)
        self._limit("data_bytes", data_bytes, self._limits.data_bytes)
        header = Header(
            words[0],
            call_id,
            self._name(uid),
            self._name(key),
            self._name(client),
            self._name(mini_batch),
            None if deadline == NO_DEADLINE else deadline,
            words[1],
            words[2],
            step,
            self._bytes(data_bytes),
        )
        return header, tuple([self._tensor() for _ in range(tensors)])

    def _tensor(self) -> Descriptor:
        at = self._skip(TENSOR.size)
        axes = self._head[at + 2]
        self._limit("axes", axes, self._limits.axes)
        self._skip(8 * axes)
        try:
            dtype, shape, how, nbytes, decoded = _described(self._head[at : self.at], self._limits.elements)
        except WireError as error:
            error.call_id = self._call_id
            raise
        tensor = Descriptor(dtype, shape, how, nbytes, self.body)
        self._decoded += decoded
        self._limit("decoded_bytes", self._decoded, self._limits.decoded_bytes)
        self.body += aligned(nbytes)
        return tensor

    def _name(self, size: int) -> str:
        if not size:
            return ""
        self._limit("name_bytes", size, self._limits.name_bytes)
        try:
            return self._bytes(size).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self._malformed("a name is not UTF-8", "name") from None

    def _bytes(self, size: int) -> bytes:
        at = self._skip(size)
        return self._head[at : self.at]

    def _skip(self, size: int) -> int:
        """Go on by ``size`` bytes, and return where they start."""
        start, end = self.at, len(self._head)
        if size > end - start:
            text = f"the header ends at byte {PREAMBLE.size + end}, wanted {size} more from {PREAMBLE.size + start}"
            raise TruncatedError(text, reason="header", call_id=self._call_id)
        self.at = start + size
        return start

    def _limit(self, name: str, seen: int, most: int) -> None:
        if seen > most:
            raise LimitError(f"{name}: {seen}, at most {most} are allowed", reason=name, call_id=self._call_id)

    def _unknown(self, kind: int, flags: int, reply: int, zero: int) -> MalformedError:
        for what, value, known in (("kind", kind, _KINDS), ("flags", flags, _FLAGS), ("reply", reply, _COMPRESSIONS)):
            if value not in known:
                return self._malformed(f"{what} {value} is not known", what)
        return self._malformed(f"the reserved byte is {zero}, wanted 0", "reserved")

    def _malformed(self, text: str, reason: str) -> MalformedError:
        return MalformedError(text, reason=reason, call_id=self._call_id)


@lru_cache(4096)
def _described(raw: bytes, elements: int) -> tuple[torch.dtype, tuple[int, ...], Compression, int, int]:
    """What one descriptor says, from its bytes alone: dtype, shape, compression, bytes, bytes once decoded.

    Remembered, for most calls carry tensors that look like those before. What is wrong is not remembered.
    """
    numbers: tuple[int, ...] = TENSOR.unpack_from(raw)
    code, packing, axes, zero, nbytes = numbers
    dtype, how = DTYPES.get(code), _COMPRESSIONS.get(packing)
    if dtype is None or how is None or zero:
        text = f"a tensor of dtype {code}, compression {packing}, reserved {zero}"
        raise MalformedError(text, reason="dtype")
    shape: tuple[int, ...] = struct.unpack_from(f"<{axes}q", raw, TENSOR.size)
    if any(size < 0 for size in shape):
        raise MalformedError(f"a tensor of shape {shape}", reason="shape")
    if extent(shape) > elements:
        raise LimitError(f"elements: {extent(shape)}, at most {elements} are allowed", reason="elements")
    wanted = packed_bytes(how, dtype, shape)
    if wanted is None:
        text = f"{how.name} does not apply to a tensor of {dtype}, shape {shape}"
        raise MalformedError(text, reason="compression")
    if nbytes != wanted:
        text = f"{nbytes} bytes for a tensor of {dtype}, shape {shape}: wanted {wanted}"
        raise MalformedError(text, reason="bytes")
    return dtype, shape, how, nbytes, math.prod(shape) * dtype.itemsize
