"""Hypothesis strategies for the wire format: tensors of every dtype, headers, calls and frames."""

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from torchweft.experts.compression import Compression
from torchweft.experts.wire.frame import CODES, WITH_TENSORS, Call, Header, Kind, encode

SHAPES = ((), (0,), (1,), (3,), (0, 4), (4, 0), (2, 3), (5, 1, 7), (1, 2, 1, 3))
FORMS = ("plain", "transposed", "strided", "expanded")


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Tensor of random bytes, so that floating-point values include NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    drawn = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return drawn.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def formed(tensor: Tensor, form: str) -> Tensor:
    if form == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if form == "strided" and tensor.dim():
        return tensor[::2]
    if form == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal. NaN equals itself, and -0.0 differs from 0.0."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(one.clone(memory_format=torch.contiguous_format).ravel().view(torch.uint8) for one in (a, b)))


def tensors() -> st.SearchStrategy[Tensor]:
    """Tensors of every supported dtype, with any bytes, strides and shape."""
    dtypes = st.sampled_from(sorted(CODES, key=str))
    drawn = st.builds(random_tensor, dtypes, st.sampled_from(SHAPES), st.integers(0, 1 << 20))
    return st.builds(formed, drawn, st.sampled_from(FORMS))


@st.composite
def headers(draw: st.DrawFn) -> Header:
    """Any header with a deadline that the format can hold."""
    words = st.text(max_size=12)
    wide = st.integers(0, (1 << 64) - 1)
    return Header(
        kind=draw(st.sampled_from(Kind)),
        call_id=draw(wide),
        uid=draw(words),
        key=draw(words),
        client=draw(words),
        mini_batch=draw(words),
        deadline_ms=draw(st.none() | st.integers(0, (1 << 32) - 1)),
        keep=draw(st.booleans()),
        evaluation=draw(st.booleans()),
        reply=draw(st.sampled_from(Compression)),
        step=draw(wide),
        data=draw(st.binary(max_size=20)),
    )


@st.composite
def calls(draw: st.DrawFn, compressed: bool = False) -> Call:
    """Call with tensors if its kind carries them. With `compressed`, each has any compression."""
    header = draw(headers())
    drawn: list[Any] = draw(st.lists(tensors(), max_size=3)) if header.kind in WITH_TENSORS else []
    compressions = st.lists(st.sampled_from(Compression), min_size=len(drawn), max_size=len(drawn))
    return Call(header, drawn, draw(compressions) if compressed else [])


def frames() -> st.SearchStrategy[bytes]:
    return st.lists(calls(compressed=True), min_size=1, max_size=3).map(encode)
