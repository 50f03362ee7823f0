"""The encoding of values: every kind of value that can be sent arrives unchanged."""

import importlib
import json
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchweft.core.errors import SpecError
from torchweft.core.pytree import flatten
from torchweft.pipeline.processes.frames import (
    CPU_LANE,
    FRAME,
    INLINE,
    SHAPES,
    SentShapes,
    Shape,
    decode_header,
    decode_shape,
    encode_control,
    encode_plain,
    join_value,
    memory_of,
    split_value,
)

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


class Pair(NamedTuple):
    first: Any
    second: Any


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and layout in memory: expanded, transposed, sliced, conjugated, a leaf or not."""
    dtype = draw(st.sampled_from(DTYPES))
    dims = draw(st.lists(st.integers(0, 3), max_size=3))
    content = torch.randint(0, 2, dims, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    tensor = content.to(dtype)
    if dtype.is_complex:
        tensor = draw(st.sampled_from([tensor, (tensor + 1j).conj(), (tensor + 1j).conj().imag]))
    kind = draw(st.sampled_from(["plain", "expanded", "permuted", "sliced"]))
    if kind == "expanded":
        tensor = tensor.expand(2, *tensor.shape)
    elif kind == "permuted":
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    elif kind == "sliced" and tensor.dim():
        tensor = tensor[::2]
    if tensor.is_floating_point() and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    return tensor


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5),
    st.complex_numbers(), st.sampled_from([torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])]),
)  # fmt: skip
values = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def carry(value: Any, sent: SentShapes, received: dict[int, Shape]) -> Any:
    """Encode a value as the bytes of a frame, and decode it."""
    shape, leaves, parts = split_value(value, device_lane=False)
    slot, text = sent.find(shape)
    if text:
        received[slot] = decode_shape(text)
    known = received[slot]
    buffers = [torch.empty_strided(leaf.dims, leaf.strides, dtype=leaf.dtype) for leaf in known.tensors]
    data, start = b"".join([memory_of(part) for part in parts if part.numel()]), 0
    for buffer in buffers:
        if buffer.numel():
            memory_of(buffer)[:] = data[start : start + buffer.nbytes]
        start += buffer.nbytes
    assert start == len(data)
    return join_value(known, json.loads(encode_plain(leaves)), buffers, torch.device("cpu"))


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.requires_grad == right.requires_grad
            and right.is_leaf
            # A kernel sums in the order of memory. A copy in PyTorch keeps the strides of a dense tensor.
            and (not left.numel() or right.stride() == left.detach().resolve_neg().clone().stride())
            and left.detach().tolist() == right.detach().tolist()
        )
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    if isinstance(left, complex):
        return is_same(left.real, right.real) and is_same(left.imag, right.imag)
    return type(left) is type(right) and left == right


@given(values)
def test_a_value_arrives_as_it_was_sent(value: Any) -> None:
    sent, received = SentShapes(), dict[int, Shape]()
    for _ in range(2):  # the second time, only the number of the shape is sent
        arrived = carry(value, sent, received)
        (leaves, structure), (others, other) = flatten(value), flatten(arrived)
        assert structure == other
        assert all(map(is_same, leaves, others))


def test_lazy_views_are_sent_as_their_values() -> None:
    number = torch.tensor([1 + 2j])
    arrived = carry([number.conj(), number.conj().imag], SentShapes(), {})
    assert arrived[0].tolist() == [1 - 2j] and arrived[1].tolist() == [-2.0]


def test_size_is_one_leaf_under_all_imports() -> None:
    importlib.import_module("torch.fx.experimental.proxy_tensor")  # makes torch.Size a container
    shape, leaves, _ = split_value({"a": torch.Size([2, 3])}, device_lane=False)
    assert shape.leaves == (None,) and leaves == [{"size": [2, 3]}]
    assert carry({"a": torch.Size([2, 3])}, SentShapes(), {}) == {"a": torch.Size([2, 3])}


def test_parameters_and_float8_arrive() -> None:
    parameter = nn.Parameter(torch.ones(2))
    arrived = carry([parameter, torch.tensor([1, 2]).to(torch.float8_e5m2)], SentShapes(), {})
    assert arrived[0].requires_grad and type(arrived[0]) is torch.Tensor and arrived[0].tolist() == [1, 1]
    assert arrived[1].dtype == torch.float8_e5m2 and arrived[1].tolist() == [1, 2]


def test_both_ends_forget_the_same_shapes() -> None:
    sent, received = SentShapes(), dict[int, Shape]()
    for size in [*range(SHAPES + 10), 3, SHAPES + 5, 1, 0]:
        assert len(carry(torch.ones(size), sent, received)) == size
        assert len(sent._slots) <= SHAPES and len(received) <= SHAPES
    assert len(sent._slots) == len(received) == SHAPES


def test_numbers_do_not_fill_the_cache_of_shapes() -> None:
    sent, received = SentShapes(), dict[int, Shape]()
    for step in range(10):
        assert carry({"step": step, "loss": step / 3}, sent, received) == {"step": step, "loss": step / 3}
    assert len(sent._slots) == 1


def test_small_tensors_travel_in_the_frame() -> None:
    small, large = torch.zeros(INLINE // 4), torch.zeros(INLINE // 4 + 1)
    ways = [leaf.way for leaf in split_value([small, large, torch.zeros(0)], device_lane=False)[0].tensors]
    assert ways == [FRAME, CPU_LANE, FRAME]
    ways = [leaf.way for leaf in split_value([small, torch.zeros(1)], device_lane=False)[0].tensors]
    assert ways == [FRAME, CPU_LANE], "the limit holds for a whole message"


class Opaque:
    pass


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [Opaque()]}, r"\['a'\]\[0\] is a Opaque"),
        ((torch.zeros(2).to_sparse(),), r"\[0\] is a tensor that is torch.sparse_coo"),
        ((torch.zeros(2, device="meta"),), r"\[0\] is a tensor that is meta"),
        ([torch.zeros(2).as_subclass(Tagged)], r"\[0\] is a Tagged, a subclass of Tensor"),
        ([{1, 2}], r"\[0\] is a set"),
    ],
)
def test_place_of_an_unsendable_value_is_named(value: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        split_value(value, device_lane=False)


def test_a_shape_that_cannot_be_sent_changes_nothing() -> None:
    sent = SentShapes()
    with pytest.raises(SpecError):
        sent.find(split_value({(1, 2): 3}, device_lane=False)[0])
    assert len(sent._slots) == 0


@pytest.mark.parametrize("strides", [[0, 1], [2, 2], [4, 1]])
def test_a_tensor_that_is_not_dense_is_rejected(strides: list[int]) -> None:
    _, text = SentShapes().find(split_value([torch.ones(2, 3)], device_lane=False)[0])
    assert decode_shape(text.replace(b"[3, 1]", b"[1, 2]")).tensors[0].strides == (1, 2)
    with pytest.raises(ValueError, match="not dense"):
        decode_shape(text.replace(b"[3, 1]", json.dumps(strides).encode()))


@pytest.mark.parametrize("frame", [b"\xff" * 33, encode_control(0, 1, None)[:13] + b"\xff" * 20])
def test_a_malformed_frame_is_rejected(frame: bytes) -> None:
    size = len(encode_control(0, 0, None)) - len(b"null")
    with pytest.raises(ValueError, match="malformed"):
        decode_header(frame[:size])


def test_tensors_of_an_accelerator_get_to_the_stage_device() -> None:
    shape, plain, tensors = split_value([torch.ones(2), torch.zeros(3)], device_lane=False)
    first, second = shape.tensors
    shape = shape._replace(leaves=(first, second._replace(on_device=True)))
    arrived = join_value(shape, plain, tensors, torch.device("meta"))
    assert [tensor.device.type for tensor in arrived] == ["cpu", "meta"]
