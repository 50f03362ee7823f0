"""Frames: what goes in comes out, to the bit, and without a copy where none is needed."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.wire_cases import calls, formed, random_tensor, same_bytes
from weft.core.errors import SpecError, UsageError
from weft.experts.compression import Compression
from weft.experts.wire import Call, Header, Kind, LimitError, Limits, MalformedError, decode, encode
from weft.experts.wire.dtypes import CODES, DTYPES
from weft.experts.wire.header import ALIGNMENT

ASK = Header(kind=Kind.FORWARD, call_id=1, uid="ffn.0")


def message(*tensors: torch.Tensor) -> bytes:
    return b"".join(encode([Call(ASK, tensors)]))


@given(st.lists(calls(), min_size=1, max_size=3), st.sampled_from([bytes, bytearray, memoryview]))
def test_what_is_encoded_is_decoded_to_the_bit(sent: list[Call], kind: type) -> None:
    received = decode(kind(b"".join(encode(sent))))
    assert [one.header for one in received] == [one.header for one in sent]
    for a, b in zip(sent, received, strict=True):
        arrived = b.tensors()
        assert len(arrived) == len(a.tensors)
        assert all(same_bytes(x, y) for x, y in zip(a.tensors, arrived, strict=True))


@pytest.mark.parametrize("dtype", sorted(CODES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 6)], ids=str)
@pytest.mark.parametrize("form", ["plain", "transposed", "expanded"])
def test_every_dtype_travels_from_any_strides(dtype: torch.dtype, shape: tuple[int, ...], form: str) -> None:
    sent = formed(random_tensor(dtype, shape, 3), form)
    assert same_bytes(decode(message(sent))[0].tensors()[0], sent)


@given(st.lists(calls(compressed=True), min_size=1, max_size=3))
def test_a_received_call_tells_shapes_and_dtypes_before_any_tensor_is_made(sent: list[Call]) -> None:
    for a, b in zip(sent, decode(b"".join(encode(sent))), strict=True):
        told = [(one.dtype, one.shape) for one in b.descriptors]
        assert told == [(tensor.dtype, tuple(tensor.shape)) for tensor in a.tensors]
        made = b.tensors()
        assert told == [(tensor.dtype, tuple(tensor.shape)) for tensor in made]
        assert [one.decoded_bytes for one in b.descriptors] == [tensor.nbytes for tensor in made]


def test_the_codes_of_dtypes_are_of_this_format_for_ever() -> None:
    known = {1: "bool", 5: "uint64", 6: "int8", 9: "int64", 16: "float16", 17: "bfloat16", 18: "float32", 19: "float64"}
    assert {code: str(DTYPES[code]).removeprefix("torch.") for code in known} == known
    assert len(CODES) == len(DTYPES)


def test_encoding_copies_no_bytes_of_a_contiguous_tensor() -> None:
    x = torch.arange(6.0)
    buffers = encode([Call(ASK, [x])])
    x[0] = 42.0  # seen by a buffer that looks into x
    assert decode(b"".join(buffers))[0].tensors()[0][0] == 42.0


def test_decoding_copies_no_bytes_unless_asked() -> None:
    frame = bytearray(message(torch.zeros(4)))
    received = decode(frame)[0]
    view, copy = received.tensors()[0], received.tensors(copy=True)[0]
    view[0] = 1.0
    assert decode(frame)[0].tensors()[0][0] == 1.0
    assert copy[0] == 0.0


def test_read_only_bytes_make_tensors_that_work_in_place_without_a_warning() -> None:
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = decode(message(torch.zeros(4)))[0].tensors()[0]
            tensor.add_(1)
    finally:
        torch.set_warn_always(False)
    assert tensor.tolist() == [1.0] * 4


def test_a_tensor_keeps_its_message_alive() -> None:
    tensors = [decode(message(torch.full((1000,), float(i))))[0].tensors()[0] for i in range(50)]
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))


@pytest.mark.parametrize("shift", range(1, 16))
def test_a_message_at_an_odd_address_still_gives_aligned_tensors(shift: int) -> None:
    frame = message(torch.arange(5.0, dtype=torch.float64), torch.ones(3, dtype=torch.int16))
    room = bytearray(shift) + frame
    first, second = decode(memoryview(room)[shift:])[0].tensors()
    assert first.tolist() == [0, 1, 2, 3, 4] and second.tolist() == [1, 1, 1]
    assert first.data_ptr() % ALIGNMENT == second.data_ptr() % ALIGNMENT == 0


@given(st.lists(calls(compressed=True), min_size=1, max_size=2))
def test_decoding_into_given_tensors_is_the_same_as_decoding(sent: list[Call]) -> None:
    for one in decode(b"".join(encode(sent))):
        # Wider by one, and every second column: strides that nothing here was made for.
        outs = [torch.zeros(*t.shape, 2, dtype=t.dtype)[..., 0] for t in one.descriptors]
        one.into(outs)
        assert all(same_bytes(a, b) for a, b in zip(one.tensors(), outs, strict=True))


def test_a_place_that_does_not_fit_is_refused_and_nothing_is_written() -> None:
    received = decode(message(torch.ones(2), torch.ones(3)))[0]
    outs = [torch.zeros(2), torch.zeros(4, dtype=torch.float64)]
    with pytest.raises(SpecError, match=r"1: torch.float32 \(3,\) does not go into torch.float64 \(4,\)"):
        received.into(outs)
    with pytest.raises(SpecError, match="2 tensors, and 1 to write into"):
        received.into(outs[:1])
    assert not outs[0].any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.empty(2, dtype=torch.uint4),
    ],
    ids=["sparse", "meta", "half bytes"],
)
def test_a_tensor_without_plain_bytes_is_refused_by_the_sender(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        message(tensor)


def test_a_column_of_one_row_travels_though_its_stride_is_not_one() -> None:
    column = torch.ones(1, 2, dtype=torch.bfloat16)[:, 0]
    assert column.is_contiguous() and column.stride() == (2,)
    assert same_bytes(decode(message(column))[0].tensors()[0], column)


def test_conjugated_and_negated_views_travel_as_their_values() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(decode(message(x.conj()))[0].tensors()[0], x.conj().resolve_conj())
    assert torch.equal(decode(message(x.conj().imag))[0].tensors()[0], -x.imag)


def test_a_tensor_that_wants_a_gradient_travels_without_it() -> None:
    received = decode(message(torch.ones(2, requires_grad=True)))[0].tensors()[0]
    assert not received.requires_grad


def test_a_bool_that_is_no_bool_is_refused() -> None:
    frame = bytearray(message(torch.zeros(16, dtype=torch.bool)))
    frame[-3] = 2
    received = decode(frame)[0]
    with pytest.raises(MalformedError, match="a bool is 2") as caught:
        received.tensors()
    assert caught.value.reason == "bool"
    out = torch.zeros(16, dtype=torch.bool)
    with pytest.raises(MalformedError):
        received.into([out])
    assert not out.any()


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(calls=1), "2 calls"),
        (Limits(tensors=1), "2 tensors"),
        (Limits(axes=1), "2 axes"),
        (Limits(elements=11), r"shape \(3, 4\)"),
        (Limits(name_bytes=4), "uid takes 5 bytes"),
        (Limits(data_bytes=2), "data takes 3 bytes"),
        (Limits(header_bytes=60), "header_bytes of 2 calls together: "),
        (Limits(frame_bytes=100), "frame_bytes of 2 calls together: "),
        (Limits(decoded_bytes=95), "decoded_bytes of 2 calls together: "),
    ],
    ids=lambda value: None if isinstance(value, str) else "limits",
)
def test_both_sides_refuse_what_is_larger_than_the_limits(limits: Limits, told: str) -> None:
    header = Header(kind=Kind.FORWARD, call_id=1, uid="ffn.0", data=b"abc")
    sent = [Call(header, [torch.ones(3, 4), torch.ones(3, 4)])] * 2
    with pytest.raises(LimitError, match=told):
        encode(sent, limits)
    with pytest.raises(LimitError):
        decode(b"".join(encode(sent)), limits)


@pytest.mark.parametrize(
    ("kind", "uid", "told"),
    [
        (Kind.FORWARD, "ffn.0", "the forward of expert 'ffn.0'"),
        (Kind.BACKWARD, "ffn.0", "the backward of expert 'ffn.0'"),
        (Kind.RESULT, "ffn.0", "the answer of expert 'ffn.0'"),
        (Kind.RESULT, "", "one answer"),
    ],
)
def test_who_sends_too_much_hears_whose_call_it_was_and_what_to_do(kind: Kind, uid: str, told: str) -> None:
    with pytest.raises(LimitError, match=f"frame_bytes of {told}: .*, at most 100 are allowed; send fewer rows"):
        encode([Call(Header(kind=kind, call_id=1, uid=uid), [torch.ones(30)])], Limits(frame_bytes=100))


def test_limits_are_inclusive() -> None:
    frame = message(torch.ones(3, 4))
    exact = Limits(frame_bytes=len(frame), decoded_bytes=48, tensors=1, calls=1, axes=2, elements=12, name_bytes=5)
    assert len(decode(frame, exact)) == 1


def test_limits_that_make_no_sense_are_all_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"calls is 0.*\n.*axes is 65") as caught:
        Limits(calls=0, axes=65)
    assert "frame_bytes" not in str(caught.value)


def test_faults_of_a_call_are_told_to_its_sender() -> None:
    for header in (Header(kind=Kind.PING, call_id=-1), Header(kind=Kind.PING, call_id=0, step=1 << 64)):
        with pytest.raises(UsageError, match=r"wanted 0 to 2\*\*64 - 1"):
            encode([Call(header)])
    with pytest.raises(UsageError, match="kind PING carries no tensors"):
        encode([Call(Header(kind=Kind.PING, call_id=0), [torch.ones(1)])])
    with pytest.raises(UsageError, match="at least one call"):
        encode([])
    with pytest.raises(UsageError, match="2 tensors, and compressions for 1"):
        encode([Call(ASK, [torch.ones(1)] * 2, [Compression.FP16])])


@pytest.mark.parametrize(("given_ms", "seen"), [(-5, 0), (0, 0), (1 << 40, (1 << 32) - 2), (None, None)])
def test_a_deadline_is_cut_to_what_the_format_holds(given_ms: int | None, seen: int | None) -> None:
    header = Header(kind=Kind.PING, call_id=0, deadline_ms=given_ms)
    assert decode(b"".join(encode([Call(header)])))[0].header.deadline_ms == seen


def test_a_compressed_tensor_takes_fewer_bytes_on_the_wire() -> None:
    x = torch.randn(64, 256)
    sizes = [len(b"".join(encode([Call(ASK, [x], [how])]))) for how in Compression]
    raw = math.prod(x.shape)
    for how, size, wanted in zip(Compression, sizes, (4 * raw, 2 * raw, 2 * raw, raw + 64 * 4), strict=True):
        assert wanted < size < wanted + 200, how
