"""Compression errors are bounded, and tensors that cannot be compressed stay unchanged."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.experts.wire_cases import random_tensor, same_bytes, tensors
from torchweft.core.errors import UsageError
from torchweft.experts.compression import Compression, Policy, compress, expand, packed_bytes

LOSSY = [Compression.FP16, Compression.BF16, Compression.INT8]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def round_trip(tensor: Tensor, how: Compression) -> tuple[Compression, Tensor]:
    done, parts = compress(tensor, how)
    packed = torch.cat([part.clone(memory_format=torch.contiguous_format).ravel().view(torch.uint8) for part in parts])
    assert packed.numel() == packed_bytes(done, tensor.dtype, tensor.shape)
    return done, expand(packed, done, tensor.dtype, tensor.shape)


@st.composite
def finite(draw: st.DrawFn) -> Tensor:
    """Floating-point tensors of 2 or 3 axes, with one magnitude or with widely different ones."""
    dtype = draw(st.sampled_from(FLOATS))
    shape = draw(st.sampled_from([(3, 8), (1, 40), (2, 3, 16), (5, 9)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    low, high = math.log10(torch.finfo(dtype).tiny) - 3, math.log10(torch.finfo(dtype).max)
    middle, width = draw(st.floats(low, high)), draw(st.sampled_from([0.0, 2.0, 20.0]))
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    power = (middle + width * (drawn - 0.5)).clamp(low, high - 1e-3)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sign * 10.0**power * (torch.rand(shape, generator=generator) > 0.1)).to(dtype)  # -0.0 too


def allowed(values: Tensor, how: Compression, dtype: torch.dtype) -> Tensor:
    """Largest error of each number that the docstring of `compress` permits."""
    size = values.abs()
    if how is Compression.FP16:
        return size * 2**-11 + 2**-25
    if how is Compression.BF16:
        return size * 2**-8 + 2**-133
    absmax = size.amax(dim=-1, keepdim=True)
    limits = torch.finfo(dtype)
    return absmax / 254 + absmax * limits.eps + 127 * limits.tiny


@given(finite(), st.sampled_from(LOSSY))
def test_error_of_every_number_is_bounded(tensor: Tensor, how: Compression) -> None:
    done, seen = round_trip(tensor, how)
    assert seen.dtype == tensor.dtype and seen.shape == tensor.shape
    if done is Compression.NONE:
        assert same_bytes(seen, tensor)
        return
    error = (seen.double() - tensor.double()).abs()
    assert bool((error <= allowed(tensor.double(), how, tensor.dtype)).all())


@given(tensors(), st.sampled_from(Compression))
def test_any_bits_are_compressed_finite_or_unchanged(tensor: Tensor, how: Compression) -> None:
    done, seen = round_trip(tensor, how)
    if done is Compression.NONE:
        assert same_bytes(seen, tensor)
    else:
        assert done is how
        assert bool(tensor.double().isfinite().all()) and bool(seen.double().isfinite().all())


def test_integers_and_bools_are_never_lossy(subtests: pytest.Subtests) -> None:
    for how in Compression:
        for dtype in [torch.int64, torch.int32, torch.uint16, torch.uint8, torch.bool]:
            with subtests.test(how=how, dtype=dtype):
                tensor = random_tensor(dtype, (6, 20), 1)
                done, seen = round_trip(tensor, how)
                assert done is Compression.NONE and same_bytes(seen, tensor)


@pytest.mark.parametrize("how", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 65505.0])
def test_numbers_beyond_the_narrow_type_are_not_capped(how: Compression, bad: float) -> None:
    tensor = torch.zeros(4, 64)
    assert round_trip(tensor, how)[0] is how
    tensor[2, 5] = bad
    done, seen = round_trip(tensor, how)
    if not math.isfinite(bad) or how is Compression.FP16:
        assert done is Compression.NONE and same_bytes(seen, tensor)
    tensor[2, 5] = 65504.0
    assert round_trip(tensor, how)[0] is how


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_largest_and_smallest_numbers_survive_eight_bits(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    tensor = torch.full((3, 64), limits.max, dtype=dtype)
    tensor[1] = limits.smallest_normal / 4
    tensor[2] = 0
    done, seen = round_trip(tensor, Compression.INT8)
    assert done is Compression.INT8 and bool(seen.isfinite().all())
    torch.testing.assert_close(seen[0], tensor[0], rtol=1e-2, atol=0)
    assert not seen[2].any()


def test_rows_are_compressed_independently() -> None:
    rows = torch.randn(5, 32) * torch.logspace(-3, 3, 5).unsqueeze(1)
    together = round_trip(rows, Compression.INT8)[1]
    alone = [round_trip(row.unsqueeze(0), Compression.INT8)[1] for row in rows]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("how", LOSSY)
@pytest.mark.parametrize("tensor", [torch.ones(()), torch.ones(0, 3), torch.ones(3, 1).half()], ids=["0d", "0", "thin"])
def test_tensor_that_would_not_shrink_is_unchanged(tensor: Tensor, how: Compression) -> None:
    done, seen = round_trip(tensor, how)
    assert same_bytes(seen, tensor) or (how is Compression.FP16 and done is how)
    assert packed_bytes(done, tensor.dtype, tensor.shape) <= tensor.nbytes


def test_policy_chooses_by_role() -> None:
    policy = Policy(inputs="fp16", outputs=Compression.INT8)
    assert policy.choose("inputs", 3) == [Compression.FP16] * 3
    assert policy.choose("outputs", 1) == [Compression.INT8]
    assert policy.choose("input_gradients", 1) == [Compression.NONE]
    assert policy == Policy(inputs=Compression.FP16, outputs="INT8")
    with pytest.raises(UsageError, match=r"none, fp16, bf16, int8(.|\n)*inputs has 'fp8'(.|\n)*outputs has 'zip'"):
        Policy(inputs="fp8", outputs="zip")
