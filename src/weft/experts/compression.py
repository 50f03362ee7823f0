"""Fewer bytes for a tensor on the wire, with a bound on what it costs.

    none    as it is
    fp16    half precision: 11 bits of mantissa, down to 6e-8
    bf16    8 bits of mantissa, the range of float32
    int8    per row along the last axis: one scale (absmax / 127), and 8 bits per number

Integers, bools and complex numbers go as they are. So does a tensor with a NaN, an Inf, or a number too large for the
narrow type (no number is silently capped, and the receiver's guards see what was really sent), and one that would not
get smaller. The header of every tensor says what was done to it. Rows with an absmax of their own are from LLM.int8()
(Dettmers et al., 2022) and ZeroQuant (Yao et al., 2022).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from weft.core.validation import Validator

Role = Literal["inputs", "outputs", "output_gradients", "input_gradients"]


class Compression(IntEnum):
    """How a tensor's bytes are made. The numbers are part of the wire format."""

    NONE = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3


_NARROW = {Compression.FP16: torch.float16, Compression.BF16: torch.bfloat16}
_LEVELS = 127


@dataclass(frozen=True)
class Policy:
    """How each kind of tensor travels: by a `Compression` or its name (``"fp16"``), for all tensors of that kind.

    Raises ``UsageError`` that lists every choice that is neither.
    """

    inputs: Compression | str = Compression.NONE
    outputs: Compression | str = Compression.NONE
    output_gradients: Compression | str = Compression.NONE
    input_gradients: Compression | str = Compression.NONE

    def __post_init__(self) -> None:
        known = {one.name.lower(): one for one in Compression}
        with Validator(f"invalid compression policy; compressions are {', '.join(known)}") as check:
            for role, choice in asdict(self).items():
                found = known.get(choice.lower()) if isinstance(choice, str) else choice
                check.that(isinstance(found, Compression), f"{role} has {choice!r}")
                object.__setattr__(self, role, found)

    def choose(self, role: Role, count: int) -> list[Compression]:
        """The compression of each of ``count`` tensors of this kind."""
        return [getattr(self, role)] * count


def packed_bytes(how: Compression, dtype: torch.dtype, shape: Sequence[int]) -> int | None:
    """How many bytes such a tensor takes when compressed, or ``None`` where it does not get smaller by that."""
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
    """What was done, and contiguous tensors whose bytes, one after the other, are what travels.

    What was done is ``how``, or NONE where that saves nothing or would change more than the rounding of a number x, by

    - FP16: ``|x| * 2**-11 + 2**-25``
    - BF16: ``|x| * 2**-8 + 2**-133``
    - INT8: a = the row's absmax: ``a / 254``, and a hair of rounding: ``a * eps + 127 * tiny`` of the tensor's dtype
    """
    if how is Compression.NONE or packed_bytes(how, tensor.dtype, tensor.shape) is None:
        return Compression.NONE, [tensor.contiguous()]
    if how is Compression.INT8:
        parts = _quantized(tensor)
    else:
        low, high = torch.aminmax(tensor)  # a NaN anywhere makes both NaN
        most = torch.finfo(_NARROW[how]).max
        parts = [tensor.to(_NARROW[how]).contiguous()] if low.item() >= -most and high.item() <= most else None
    return (Compression.NONE, [tensor.contiguous()]) if parts is None else (how, parts)


def expand(packed: Tensor, how: Compression, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor out of its bytes, a flat uint8 tensor at an aligned address; for NONE it is a view of that."""
    if how is Compression.NONE:
        return packed.view(dtype).view(tuple(shape)) if packed.numel() else packed.new_empty(tuple(shape), dtype=dtype)
    if how is Compression.INT8:
        rows, kind = math.prod(shape[:-1]), _scale_type(dtype)
        border = rows * kind.itemsize  # the scales, and below each other the rows of codes
        scales, codes = packed[:border].view(kind).unsqueeze(1), packed[border:].view(torch.int8).view(rows, -1)
        reals = codes.to(kind).mul_(scales)
    else:
        reals = packed.view(_NARROW[how])
    return reals.to(dtype).view(tuple(shape))


def _scale_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _quantized(reals: Tensor) -> list[Tensor] | None:
    """One scale per row, and the codes; ``None`` where the absmax of a row is no finite number."""
    kind = _scale_type(reals.dtype)
    table = reals.to(kind).reshape(math.prod(reals.shape[:-1]), -1)
    absmax = table.abs().amax(dim=1, keepdim=True)  # NaN if there is one, Inf if there is one
    if not bool(absmax.isfinite().all()):
        return None
    limits = torch.finfo(kind)
    # 127 times the scale must stay finite, and the scale of numbers that are all but zero may be zero itself.
    scales = (absmax / _LEVELS).clamp_(max=limits.max / _LEVELS * (1 - 4 * limits.eps))
    codes = table.div(scales.masked_fill(scales == 0, 1)).round_().clamp_(-_LEVELS, _LEVELS)
    return [scales.reshape(-1), codes.to(torch.int8)]
