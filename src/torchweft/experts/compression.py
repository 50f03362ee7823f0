"""Compression of tensors on the wire, with a bound on the error of every number.

    none    unchanged
    fp16    half precision: 11 bits of mantissa, down to 6e-8
    bf16    8 bits of mantissa, the range of float32
    int8    per row along the last axis: one scale (absmax / 127), and 8 bits per number

Integers, bools and complex numbers are sent unchanged. So is a tensor with a NaN, an Inf, or a number too large for the
narrow type: capping such a number would hide it from the receiver's guards. So is a tensor that would not get smaller.
The header of every tensor names its compression. One scale for a whole tensor would let a single large row round all
others to zero. Scales per row are from LLM.int8() (Dettmers et al., 2022) and ZeroQuant (Yao et al., 2022).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from torchweft.core.validation import Validator

Role = Literal["inputs", "outputs", "output_gradients", "input_gradients"]


class Compression(IntEnum):
    """Encoding of a tensor's bytes. The numbers are part of the wire format."""

    NONE = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3


_NARROW = {Compression.FP16: torch.float16, Compression.BF16: torch.bfloat16}
_LEVELS = 127


@dataclass(frozen=True)
class Policy:
    """A `Compression`, or its name (``"fp16"``), for each kind of tensor. ``UsageError`` lists all other values."""

    inputs: Compression | str = Compression.NONE
    outputs: Compression | str = Compression.NONE
    output_gradients: Compression | str = Compression.NONE
    input_gradients: Compression | str = Compression.NONE

    def __post_init__(self) -> None:
        known = {compression.name.lower(): compression for compression in Compression}
        with Validator(f"invalid compression policy; compressions are {', '.join(known)}") as check:
            for role, choice in asdict(self).items():
                compression = known.get(choice.lower()) if isinstance(choice, str) else choice
                check.require(isinstance(compression, Compression), f"{role} has {choice!r}")
                object.__setattr__(self, role, compression)

    def choose(self, role: Role, count: int) -> list[Compression]:
        return [getattr(self, role)] * count


def packed_bytes(how: Compression, dtype: torch.dtype, shape: Sequence[int]) -> int | None:
    numbers = math.prod(shape)
    raw = numbers * dtype.itemsize
    if how is Compression.NONE:
        return raw
    if not dtype.is_floating_point or (how is Compression.INT8 and (len(shape) < 2 or not numbers)):
        return None
    packed = 2 * numbers
    if how is Compression.INT8:
        packed = numbers // shape[-1] * _scale_type(dtype).itemsize + numbers
    return packed if packed < raw else None


def compress(tensor: Tensor, how: Compression) -> tuple[Compression, list[Tensor]]:
    """The compression that was used, and contiguous tensors, to be sent as their concatenated bytes.

    It is ``how``, or NONE if that saves nothing or the error of a number x could exceed

    - FP16: ``|x| * 2**-11 + 2**-25``
    - BF16: ``|x| * 2**-8 + 2**-133``
    - INT8: with the row's absmax a, ``a / 254``, plus rounding, ``a * eps + 127 * tiny`` of the tensor's dtype
    """
    if how is Compression.NONE or packed_bytes(how, tensor.dtype, tensor.shape) is None:
        return Compression.NONE, [tensor.contiguous()]
    if how is Compression.INT8:
        parts = _quantize_rows(tensor)
    else:
        low, high = torch.aminmax(tensor)  # a NaN anywhere makes both NaN, and fails both comparisons
        most = torch.finfo(_NARROW[how]).max
        parts = [tensor.to(_NARROW[how]).contiguous()] if low.item() >= -most and high.item() <= most else None
    return (Compression.NONE, [tensor.contiguous()]) if parts is None else (how, parts)


def expand(packed: Tensor, how: Compression, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor of its bytes, a flat uint8 tensor at an aligned address. For NONE it is a view of that."""
    if how is Compression.NONE:
        return packed.view(dtype).view(tuple(shape)) if packed.numel() else packed.new_empty(tuple(shape), dtype=dtype)
    if how is Compression.INT8:
        rows, kind = math.prod(shape[:-1]), _scale_type(dtype)
        border = rows * kind.itemsize  # all scales, then all rows of codes
        scales, codes = packed[:border].view(kind).unsqueeze(1), packed[border:].view(torch.int8).view(rows, -1)
        reals = codes.to(kind).mul_(scales)
    else:
        reals = packed.view(_NARROW[how])
    return reals.to(dtype).view(tuple(shape))


def _scale_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _quantize_rows(reals: Tensor) -> list[Tensor] | None:
    kind = _scale_type(reals.dtype)
    table = reals.to(kind).reshape(math.prod(reals.shape[:-1]), -1)
    absmax = table.abs().amax(dim=1, keepdim=True)  # a NaN or Inf anywhere makes it NaN or Inf
    if not bool(absmax.isfinite().all()):
        return None
    limits = torch.finfo(kind)
    # Clamped, because 127 times the scale must stay finite. The scale of denormal numbers can underflow to zero; the
    # division below uses 1 then, and all codes are 0.
    scales = (absmax / _LEVELS).clamp_(max=limits.max / _LEVELS * (1 - 4 * limits.eps))
    codes = table.div(scales.masked_fill(scales == 0, 1)).round_().clamp_(-_LEVELS, _LEVELS)
    return [scales.reshape(-1), codes.to(torch.int8)]
