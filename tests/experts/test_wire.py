"""Frames decode to the bits that were encoded, and arbitrary bytes give a frame or a WireError.
`TORCHWEFT_FUZZ=1000000` runs that many random mutations.
"""

import os
import random
import time
import tracemalloc
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.wire_cases import calls, formed, frames, random_tensor, same_bytes
from tests.processes import python
from torchweft.core.errors import UsageError
from torchweft.experts.compression import Compression
from torchweft.experts.errors import LimitError, MalformedError, TruncatedError, WireError
from torchweft.experts.protobuf import load_messages
from torchweft.experts.wire import Call, Frame, Header, Kind, Limits, decode, encode, encode_parts
from torchweft.experts.wire.frame import ALIGNMENT, CODES, DTYPES, MESSAGE_BYTES

ASK = Header(kind=Kind.FORWARD, call_id=1, uid="ffn.0")


def message(*tensors: torch.Tensor) -> bytes:
    return encode([Call(ASK, tensors)])


@given(st.lists(calls(), min_size=1, max_size=3), st.sampled_from([bytes, bytearray, memoryview]))
def test_decoding_restores_every_bit(sent: list[Call], kind: type) -> None:
    received = decode(kind(encode(sent)))
    assert [one.header for one in received] == [one.header for one in sent]
    for a, b in zip(sent, received, strict=True):
        arrived = b.tensors()
        assert len(arrived) == len(a.tensors)
        assert all(same_bytes(x, y) for x, y in zip(a.tensors, arrived, strict=True))


def test_every_dtype_travels_from_any_strides(subtests: pytest.Subtests) -> None:
    for dtype in sorted(CODES, key=str):
        with subtests.test(dtype=dtype):
            for shape in ((), (0, 3), (4, 6)):
                for form in ("plain", "transposed", "expanded"):
                    sent = formed(random_tensor(dtype, shape, 3), form)
                    assert same_bytes(decode(message(sent))[0].tensors()[0], sent)


@given(st.lists(calls(compressed=True), min_size=1, max_size=3))
def test_descriptors_match_the_tensors(sent: list[Call]) -> None:
    for a, b in zip(sent, decode(encode(sent)), strict=True):
        described = [(one.dtype, one.shape) for one in b.descriptors]
        assert described == [(tensor.dtype, tuple(tensor.shape)) for tensor in a.tensors]
        decoded = b.tensors()
        assert described == [(tensor.dtype, tuple(tensor.shape)) for tensor in decoded]
        assert [one.decoded_bytes for one in b.descriptors] == [tensor.nbytes for tensor in decoded]


def test_dtype_codes_never_change() -> None:
    known = {1: "bool", 5: "uint64", 6: "int8", 9: "int64", 16: "float16", 17: "bfloat16", 18: "float32", 19: "float64"}
    assert {code: str(DTYPES[code]).removeprefix("torch.") for code in known} == known
    assert len(CODES) == len(DTYPES)


def test_decoded_tensors_are_writable_views() -> None:
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensors = [decode(message(torch.full((1000,), float(i))))[0].tensors()[0].add_(1) for i in range(50)]
    finally:
        torch.set_warn_always(False)
    assert all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors)), "each tensor keeps its message alive"
    frame = bytearray(message(torch.zeros(4)))
    decode(frame)[0].tensors()[0][0] = 1.0
    assert decode(frame)[0].tensors()[0][0] == 1.0


@pytest.mark.parametrize("shift", [1, 8, 15])
def test_tensors_of_an_unaligned_message_are_aligned(shift: int) -> None:
    frame = message(torch.arange(5.0, dtype=torch.float64), torch.ones(3, dtype=torch.int16))
    room = bytearray(shift) + frame
    first, second = decode(memoryview(room)[shift:])[0].tensors()
    assert first.tolist() == [0, 1, 2, 3, 4] and second.tolist() == [1, 1, 1]
    assert first.data_ptr() % ALIGNMENT == second.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), torch.empty(2, dtype=torch.uint4)],
    ids=["sparse", "meta", "half bytes"],
)
def test_tensor_without_plain_bytes_is_not_sent(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        message(tensor)


def test_views_travel_as_their_values_and_without_a_gradient() -> None:
    x, column = torch.tensor([1 + 2j, 3 - 4j]), torch.ones(1, 2, dtype=torch.bfloat16)[:, 0]
    assert column.is_contiguous() and column.stride() == (2,)
    sent = [x.conj(), x.conj().imag, column, torch.ones(2, requires_grad=True)]
    expected = [x.conj().resolve_conj(), -x.imag, column.clone(), torch.ones(2)]
    received = decode(message(*sent))[0].tensors()
    assert all(map(same_bytes, received, expected)) and not received[-1].requires_grad


def test_invalid_bool_byte_is_rejected() -> None:
    frame = bytearray(message(torch.zeros(16, dtype=torch.bool)))
    frame[-3] = 2  # the frame ends with the 16 bytes of the tensor
    received = decode(frame)[0]
    with pytest.raises(MalformedError, match="a bool is 2") as caught:
        received.tensors()
    assert caught.value.reason == "bool"


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(calls=1), "calls: 2"),
        (Limits(tensors=1), "tensors: 2"),
        (Limits(axes=1), "2 axes"),
        (Limits(elements=11), r"shape \(3, 4\)"),
        (Limits(name_bytes=4), "uid takes 5 bytes"),
        (Limits(data_bytes=2), "data takes 3 bytes"),
        (Limits(header_bytes=30), "header_bytes of 2 calls together: "),
        (Limits(frame_bytes=100), "frame_bytes of 2 calls together: "),
        (Limits(decoded_bytes=95), "decoded_bytes of 2 calls together: "),
    ],
    ids=lambda value: None if isinstance(value, str) else "limits",
)
def test_both_sides_enforce_the_limits(limits: Limits, told: str) -> None:
    header = Header(kind=Kind.FORWARD, call_id=1, uid="ffn.0", data=b"abc")
    sent = [Call(header, [torch.ones(3, 4), torch.ones(3, 4)])] * 2
    with pytest.raises(LimitError, match=told):
        encode(sent, limits)
    with pytest.raises(LimitError):
        decode(encode(sent), limits)
    one = encode(sent[:1])
    exact = Limits(frame_bytes=len(one), decoded_bytes=96, tensors=2, calls=1, axes=2, elements=12, name_bytes=5)
    assert len(decode(one, exact)) == 1
    packed = encode([Call(Header(kind=Kind.FORWARD, call_id=1), [torch.ones(64, 512)], [Compression.INT8])])
    with pytest.raises(LimitError, match="decoded_bytes: 131072, at most 100000"):  # although the frame is smaller
        decode(packed, Limits(decoded_bytes=100_000))
    assert len(packed) < 40_000
    with pytest.raises(UsageError, match=r"calls is 0.*\n.*axes is 65"):
        Limits(calls=0, axes=65)


def test_limit_error_names_the_call_and_the_remedy() -> None:
    names = {Kind.FORWARD: "the forward of", Kind.BACKWARD: "the backward of", Kind.RESULT: "the answer of"}
    for kind, uid in [*((kind, "ffn.0") for kind in names), (Kind.RESULT, "")]:
        subject = f"{names[kind]} expert 'ffn.0'" if uid else "one answer"
        with pytest.raises(LimitError, match=f"frame_bytes of {subject}: .*, at most 100 are allowed; send fewer rows"):
            encode([Call(Header(kind=kind, call_id=1, uid=uid), [torch.ones(30)])], Limits(frame_bytes=100))


def test_frame_in_parts_equals_the_frame() -> None:
    sent = [Call(ASK, [torch.randn(300_000), torch.ones(5)]), Call(ASK, [torch.arange(20_000)])]
    first, *rest = encode_parts(sent)
    assert all(len(part) == MESSAGE_BYTES for part in [first, *rest][:-1]) and len(rest) == 2
    frame = Frame(first)
    with pytest.raises(TruncatedError, match="the body of a frame ends after"):
        decode(first)
    for part in rest:
        assert frame.can_continue and frame.missing_bytes
        frame.append(part)
    assert not frame.missing_bytes
    for a, b in zip(sent, frame.received(), strict=True):
        assert all(same_bytes(x, y) for x, y in zip(a.tensors, b.tensors(), strict=True))
    for wrong in (first, b"", rest[0][: MESSAGE_BYTES // 8]):
        with pytest.raises(TruncatedError):
            Frame(first).append(wrong)


def test_protobuf_message_is_a_frame() -> None:
    """Any client that reads and writes Frame of experts.proto can communicate with a server."""
    proto = load_messages("torchweft.experts.wire", "experts")
    tensor = proto["Tensor"](dtype=18, shape=[2])
    call = proto["Call"](kind=1, call_id=1, uid="ffn.0", tensors=[tensor])
    numbers = torch.tensor([1.0, 2.0])
    plain = proto["Frame"](header=proto["Header"](calls=[call]), body=numbers.numpy().tobytes() + bytes(8))
    (received,) = decode(plain.SerializeToString())
    assert received.header == ASK and torch.equal(received.tensors()[0], numbers)
    read = proto["Frame"].FromString(message(numbers))
    read.header.ClearField("padding")
    assert read == plain
    assert dict(proto["Call"].DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_name.items()).keys() == {
        "KIND_UNSPECIFIED",
        *Kind.__members__,
    }


def test_invalid_call_is_rejected_at_the_sender() -> None:
    for header in (Header(kind=Kind.PING, call_id=-1), Header(kind=Kind.PING, call_id=0, step=1 << 64)):
        with pytest.raises(UsageError, match=r"kind PING cannot be sent: .*out of range"):
            encode([Call(header)])
    with pytest.raises(UsageError, match="kind PING carries no tensors"):
        encode([Call(Header(kind=Kind.PING, call_id=0), [torch.ones(1)])])
    with pytest.raises(UsageError, match="at least one call"):
        encode([])
    with pytest.raises(UsageError, match="2 tensors, and compressions for 1"):
        encode([Call(ASK, [torch.ones(1)] * 2, [Compression.FP16])])


@pytest.mark.parametrize(("given_ms", "seen"), [(-5, 0), (0, 0), (1 << 40, (1 << 32) - 1), (None, None)])
def test_deadline_is_clamped_to_the_format(given_ms: int | None, seen: int | None) -> None:
    header = Header(kind=Kind.PING, call_id=0, deadline_ms=given_ms)
    assert decode(encode([Call(header)]))[0].header.deadline_ms == seen


TIMES = int(os.environ.get("TORCHWEFT_FUZZ") or ("100000" if os.environ.get("CI") else "10000"))
CAPS = Limits(frame_bytes=1 << 16, decoded_bytes=1 << 16, elements=1 << 14)
INTERESTING = [0, 1, 2, 127, 128, 255, 1 << 15, (1 << 16) - 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62]
INTERESTING += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def decode_and_check(message: bytes) -> bool:
    """Decode a message with all its tensors. Returns whether it was a frame. Only WireError counts as a rejection."""
    try:
        received = decode(message, CAPS)
    except WireError:
        return False
    assert sum(one.decoded_bytes for call in received for one in call.descriptors) <= CAPS.decoded_bytes
    for call in received:
        try:
            tensors = call.tensors()
        except WireError:
            continue
        assert [(t.dtype, tuple(t.shape)) for t in tensors] == [(one.dtype, one.shape) for one in call.descriptors]
        assert sum(t.nbytes for t in tensors) <= CAPS.decoded_bytes
    return True


def mutate(message: bytes, draw: random.Random) -> bytes:
    """Apply one to four changes: flipped bits, new bytes, integers at boundary values, cuts and insertions."""
    data = bytearray(message)
    for _ in range(draw.randint(1, 4)):
        # Most changes hit the header, which determines how the rest is read.
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


def seeds() -> list[bytes]:
    x, ids, mask = torch.randn(4, 8), torch.arange(6), torch.ones(3, dtype=torch.bool)
    ask = Header(kind=Kind.BACKWARD, call_id=5, uid="ffn.1", key="k1", client="me", mini_batch="m", deadline_ms=9)
    frames_of_calls = [
        [Call(ask, [x, ids, mask])],
        [Call(ask, [x, x.double(), x.to(torch.complex64)], [Compression.INT8, Compression.FP16, Compression.INT8])],
        [Call(Header(kind=Kind.INFO, call_id=1, data=b"{}")), Call(ask, [torch.ones(()), torch.empty(0, 3)])],
        [Call(Header(kind=Kind.RESULT, call_id=i), [x.to(torch.float8_e4m3fn), x.bfloat16()]) for i in range(4)],
    ]
    return [encode(calls) for calls in frames_of_calls]


BYTES = st.binary(max_size=300)
BYTES |= BYTES.map(lambda tail: b"\x0a%c" % (len(tail) & 127) + tail)  # with a header of the right length


@settings(max_examples=600)
@given(
    frames() | BYTES | BYTES.map(lambda tail: b"\x0a%c" % (len(tail) & 127) + tail), st.randoms(use_true_random=False)
)
def test_mutated_frame_is_a_frame_or_a_wire_error(message: bytes, draw: random.Random) -> None:
    decode_and_check(message)
    decode_and_check(mutate(message, draw))


@pytest.mark.long
def test_many_mutations_end_in_a_frame_or_a_wire_error() -> None:
    draw, known = random.Random(None if "TORCHWEFT_FUZZ" in os.environ else 1), seeds()
    whole = 0
    for turn in range(TIMES):
        whole += decode_and_check(mutate(known[turn % len(known)], draw))
    assert TIMES // 50 < whole < TIMES  # some mutations stay valid, and some do not


def test_every_truncation_of_a_frame_with_tensors_is_refused() -> None:
    for message in seeds():
        for end in range(len(message)):
            with pytest.raises((TruncatedError, MalformedError)):
                decode(message[:end])
        with pytest.raises(TruncatedError):
            decode(message + b"\0")


def frame_of(shape: tuple[int, ...], *, dtype: int = 18, packing: int = 0, kind: int = 1, body: bytes = b"") -> bytes:
    """Frame written by protobuf alone, with one tensor of these declared properties."""
    proto = load_messages("torchweft.experts.wire", "experts")
    call = proto["Call"](kind=kind, call_id=7, tensors=[proto["Tensor"](dtype=dtype, shape=shape, compression=packing)])
    return proto["Frame"](header=proto["Header"](calls=[call]), body=body).SerializeToString()


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (frame_of(((1 << 64) - 1,)), LimitError, "elements"),
        (frame_of((1 << 32, 1 << 32)), LimitError, "elements"),  # 2**64 elements: 0 where products wrap around
        (frame_of((0, 1 << 62, 1 << 62)), LimitError, "elements"),  # empty, but with strides that overflow
        (frame_of((4,), dtype=77, body=bytes(16)), MalformedError, "dtype"),
        (frame_of((4,), packing=9, body=bytes(16)), MalformedError, "dtype"),
        (frame_of((4,), dtype=9, packing=1, body=bytes(16)), MalformedError, "compression"),  # int64 as fp16
        (frame_of((1,) * 17, body=bytes(16)), LimitError, "axes"),
        (frame_of((1,) * 70_000, body=bytes(16)), LimitError, "axes"),
        (frame_of((4,), kind=7, body=bytes(16)), MalformedError, "kind"),
        (frame_of((4,), kind=70, body=bytes(16)), MalformedError, "kind"),
    ],
)
def test_false_header_is_rejected_with_the_reason(message: bytes, kind: type[WireError], reason: str) -> None:
    with pytest.raises(kind) as caught:
        decode(message)
    assert (caught.value.reason, caught.value.call_id) == (reason, 7)


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (frame_of((4,)), TruncatedError, "length"),
        (frame_of((4,), body=bytes(32)), MalformedError, "sum"),
        (frame_of((1 << 26,), body=bytes(1 << 17)), LimitError, "frame_bytes"),  # known before its parts are sent
        (b"\x0a\x00", MalformedError, "empty"),
        (b"", MalformedError, "empty"),
        (b"\x12\x04abcd", MalformedError, "empty"),
        (b"GET / HTTP/1.1", MalformedError, "field"),
        (b"\x0a\x04\xff\xff\xff\xff", MalformedError, "header"),
        (b"\x0a" + b"\xff" * 20, MalformedError, "field"),
    ],
)
def test_invalid_frame_is_rejected_with_the_reason(message: bytes, kind: type[WireError], reason: str) -> None:
    with pytest.raises(kind) as caught:
        decode(message)
    assert caught.value.reason == reason


def test_huge_sizes_in_a_header_cost_nothing() -> None:
    bad_frames = [frame_of(((1 << 63) - 1,)), frame_of((1 << 40, 1 << 23)), b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"]
    tracemalloc.start()
    try:
        start = time.perf_counter()
        for _ in range(100):
            for message in bad_frames:
                with pytest.raises(WireError):
                    decode(message)
        took, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert took / 300 < 0.05


HOSTILE = """
import resource
from torchweft.experts.errors import LimitError
from torchweft.experts.wire import decode
from torchweft.experts.wire.frame import HEADER_BYTES, _field_prefix

def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

calls = bytes([0x0A, 0]) * (HEADER_BYTES // 2)
tensors = bytes([0x08, 1]) + bytes([0x6A, 0]) * (HEADER_BYTES // 2 - 4)
for header in (calls, _field_prefix(0x0A, len(tensors)) + tensors):
    before = resident()
    try:
        decode(_field_prefix(0x0A, len(header)) + header)
    except LimitError as error:
        print(error.reason, resident() - before)
"""


def test_rejected_header_takes_bounded_memory() -> None:
    done = python(HOSTILE)
    assert done.stdout.split()[::2] == ["calls", "tensors"], done.stderr
    assert all(int(kilobytes) < 24 << 10 for kilobytes in done.stdout.split()[1::2])
