"""Parsing what anybody may send: a frame, or a WireError; nothing else, and no memory beyond the caps.

The fuzzing tries 10000 mutated frames, 100000 where CI is set, and as many as `WEFT_FUZZ=1000000` says.
"""

import os
import random
import struct
import time
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.wire_cases import frames
from weft.experts.compression import Compression
from weft.experts.wire import Call, Header, Kind, LimitError, Limits, MalformedError, TruncatedError, WireError
from weft.experts.wire.frame import decode, encode
from weft.experts.wire.header import CALL, PREAMBLE, TENSOR, aligned

TIMES = int(os.environ.get("WEFT_FUZZ") or ("100000" if os.environ.get("CI") else "10000"))
CAPS = Limits(frame_bytes=1 << 16, decoded_bytes=1 << 16, elements=1 << 14)
INTERESTING = [0, 1, 2, 127, 128, 255, 1 << 15, (1 << 16) - 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62]
INTERESTING += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def swallow(message: bytes) -> bool:
    """Decode and make all tensors. Returns whether it was a frame; lets nothing but WireError pass as a refusal."""
    try:
        received = decode(message, CAPS)
    except WireError:
        return False
    assert sum(one.decoded_bytes for call in received for one in call.descriptors) <= CAPS.decoded_bytes
    for call in received:
        try:
            made = call.tensors()
            call.into([torch.empty_like(tensor) for tensor in made])
        except WireError:
            continue
        assert [(t.dtype, tuple(t.shape)) for t in made] == [(one.dtype, one.shape) for one in call.descriptors]
        assert sum(t.nbytes for t in made) <= CAPS.decoded_bytes
    return True


def mutated(message: bytes, draw: random.Random) -> bytes:
    """One to four changes: bits, bytes, numbers of any width set to interesting values, cuts and insertions."""
    data = bytearray(message)
    for _ in range(draw.randint(1, 4)):
        # Most hits go into the header, where everything is decided.
        at = draw.randrange(max(1, len(data) if draw.random() < 0.3 else min(len(data), 160)))
        what = draw.randrange(7)
        if what == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
        elif what == 1:
            data[at : at + 1] = bytes([draw.randrange(256)])
        elif what in (2, 3):
            width = draw.choice([1, 2, 4, 8])
            value = draw.choice(INTERESTING) & ((1 << 8 * width) - 1)
            data[at : at + width] = value.to_bytes(width, "little")
        elif what == 4:
            del data[at : at + draw.randint(1, 20)]
        elif what == 5:
            data[at:at] = draw.randbytes(draw.randint(1, 20))
        else:
            del data[draw.randrange(len(data) + 1) :]
    return bytes(data)


def mended(message: bytes) -> bytes:
    """The same bytes with lengths in the preamble that fit, so that a mutation gets past the first check."""
    if len(message) < PREAMBLE.size:
        return message
    magic, version, zero, calls, header, _ = PREAMBLE.unpack_from(message)
    header = min(header, len(message) - PREAMBLE.size)
    start = aligned(PREAMBLE.size + header)
    body = message[start:]
    gap = bytes(start - PREAMBLE.size - header)
    preamble = PREAMBLE.pack(magic, version, zero, calls, header, len(body))
    return preamble + message[PREAMBLE.size : PREAMBLE.size + header] + gap + body


def seeds() -> list[bytes]:
    """Frames of all sorts, to be mutated."""
    x, ids, mask = torch.randn(4, 8), torch.arange(6), torch.ones(3, dtype=torch.bool)
    ask = Header(kind=Kind.BACKWARD, call_id=5, uid="ffn.1", key="k1", client="me", mini_batch="m", deadline_ms=9)
    made = [
        [Call(ask, [x, ids, mask])],
        [Call(ask, [x, x.double(), x.to(torch.complex64)], [Compression.INT8, Compression.FP16, Compression.INT8])],
        [Call(Header(kind=Kind.INFO, call_id=1, data=b"{}")), Call(ask, [torch.ones(()), torch.empty(0, 3)])],
        [Call(Header(kind=Kind.RESULT, call_id=i), [x.to(torch.float8_e4m3fn), x.bfloat16()]) for i in range(4)],
    ]
    return [b"".join(encode(calls)) for calls in made]


@settings(max_examples=500)
@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda tail: b"WEFT\x01\x00" + tail))
def test_random_bytes_are_refused_with_a_wire_error(message: bytes) -> None:
    swallow(message)


@settings(max_examples=300)
@given(frames(), st.randoms(use_true_random=False))
def test_any_frame_that_was_tampered_with_is_a_frame_or_a_wire_error(message: bytes, draw: random.Random) -> None:
    swallow(message)
    broken = mutated(message, draw)
    swallow(broken)
    swallow(mended(broken))


@pytest.mark.long
def test_many_mutations_end_in_a_frame_or_a_wire_error() -> None:
    draw, known = random.Random(None if "WEFT_FUZZ" in os.environ else 1), seeds()
    whole = 0
    for turn in range(TIMES):
        broken = mutated(known[turn % len(known)], draw)
        whole += swallow(mended(broken) if turn % 2 else broken)
    assert TIMES // 50 < whole < TIMES  # the mutations reach the depths, and are not all harmless


def test_every_truncation_of_a_frame_is_told_as_one() -> None:
    for message in seeds():
        for end in range(len(message)):
            with pytest.raises(TruncatedError):
                decode(message[:end])
        with pytest.raises(TruncatedError):
            decode(message + b"\0")


def frame_of(shape: tuple[int, ...], nbytes: int, *, dtype: int = 18, packing: int = 0, body: bytes = b"") -> bytes:
    """A frame made by hand, with one tensor that says this of itself."""
    tensor = TENSOR.pack(dtype, packing, len(shape), 0, nbytes & ((1 << 64) - 1)) + b"".join(
        struct.pack("<Q", size & ((1 << 64) - 1)) for size in shape
    )
    header = CALL.pack(7, 0, 0, 0, 1, 0, 0, 0, 0, Kind.FORWARD, 0, 0, 0) + tensor
    start = PREAMBLE.pack(b"WEFT", 1, 0, 1, len(header), len(body)) + header
    return start + bytes(aligned(len(start)) - len(start)) + body


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (frame_of((1 << 63,), 1 << 63), MalformedError, "shape"),
        (frame_of(((1 << 63) - 1,), 64), LimitError, "elements"),
        (frame_of((1 << 32, 1 << 32), 0), LimitError, "elements"),  # 2**64 elements: 0 where products wrap around
        (frame_of((1 << 62, 4), 0), LimitError, "elements"),
        (frame_of((0, 1 << 62, 1 << 62), 0), LimitError, "elements"),  # empty, but with strides that overflow
        (frame_of((-1,), 4), MalformedError, "shape"),
        (frame_of((-2, -2), 16), MalformedError, "shape"),
        (frame_of((4,), 1 << 62), MalformedError, "bytes"),
        (frame_of((4,), 0), MalformedError, "bytes"),
        (frame_of((4,), 16), MalformedError, "sum"),  # says 16 bytes, brings none
        (frame_of((4,), 16, body=bytes(32)), MalformedError, "sum"),
        (frame_of((4,), 16, dtype=77, body=bytes(16)), MalformedError, "dtype"),
        (frame_of((4,), 16, packing=9, body=bytes(16)), MalformedError, "dtype"),
        (frame_of((4,), 8, dtype=9, packing=1, body=bytes(16)), MalformedError, "compression"),  # int64 as fp16
        (frame_of((1,) * 17, 4, body=bytes(16)), LimitError, "axes"),
    ],
)
def test_a_header_that_lies_is_refused_with_the_reason(message: bytes, kind: type[WireError], reason: str) -> None:
    with pytest.raises(kind) as caught:
        decode(message)
    assert (
        (caught.value.reason, caught.value.call_id) == (reason, 7) if reason != "sum" else caught.value.reason == reason
    )


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [(0, b"PAGE", "magic"), (4, b"\2", "version"), (5, b"\1", "reserved"), (6, b"\0\0", "empty")],
)
def test_a_preamble_that_is_not_ours_is_refused_with_the_reason(at: int, value: bytes, reason: str) -> None:
    message = bytearray(seeds()[0])
    message[at : at + len(value)] = value
    with pytest.raises(MalformedError) as caught:
        decode(bytes(message))
    assert caught.value.reason == reason


def test_a_header_that_asks_for_2_to_the_63_costs_no_memory_and_no_time() -> None:
    liars = [
        frame_of(((1 << 63) - 1,), (1 << 63) - 1),
        frame_of((1 << 40, 1 << 23), (1 << 64) - 4),
        PREAMBLE.pack(b"WEFT", 1, 0, 1, 40, (1 << 64) - 1) + bytes(60),
        PREAMBLE.pack(b"WEFT", 1, 0, 65535, (1 << 32) - 1, 0) + bytes(60),
    ]
    tracemalloc.start()
    try:
        start = time.perf_counter()
        for _ in range(100):
            for message in liars:
                with pytest.raises(WireError):
                    decode(message)
        took, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert took / 400 < 0.05


def test_small_frames_cannot_be_blown_up_beyond_the_cap() -> None:
    # Int8 packs at most 8 to 1: a frame within its own cap is still refused by what it would become.
    message = b"".join(encode([Call(Header(kind=Kind.FORWARD, call_id=1), [torch.ones(64, 512)], [Compression.INT8])]))
    assert len(message) < 40000
    with pytest.raises(LimitError, match="decoded_bytes: 131072, at most 100000"):
        decode(message, Limits(decoded_bytes=100_000))
