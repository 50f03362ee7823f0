"""Fewer bytes for a tensor on the wire, with a bound on what it costs.

    none    as it is
    fp16    half precision: 11 bits of mantissa, down to 6e-8
    bf16    8 bits of mantissa, the range of float32
    int8    per row along the last axis: one scale (absmax / 127), and 8 bits per number

        row    0.5  -2.0   1.0        scale 2/127
        codes   32  -127    64        error at most scale / 2

Integers and bools are never touched. Neither is a tensor with a NaN, an Inf, or a number too large for the narrow
type: it goes as it is, so that no number is silently capped and the receiver's guards see what was really sent. And a
tensor that would not get smaller (one axis only, rows that are too short, a dtype that is narrow already) also goes
as it is. The header of every tensor says what was done to it, so the receiver never has to guess.

Complex numbers count as twice as many real ones. Rows with an absmax of their own are from LLM.int8()
(Dettmers et al., 2022) and ZeroQuant (Yao et al., 2022).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from weft.core.errors import UsageError, listed

Role = Literal["inputs", "outputs", "output_gradients", "input_gradients"]


class Compression(IntEnum):
    """How a tensor's bytes are made. The numbers are part of the wire format."""

    NONE = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3


Choice = Compression | str | Sequence[Compression | str]

_NARROW = {Compression.FP16: torch.float16, Compression.BF16: torch.bfloat16}
_LEVELS = 127


@dataclass(frozen=True)
class Policy:
    """How each kind of tensor travels: one choice for all of that kind, or one for each in flat order.

    A choice is a `Compression` or its name (``"none"``, ``"fp16"``, ``"bf16"``, ``"int8"``). Raises ``UsageError``
    that lists every choice that is neither.
    """

    inputs: Choice = Compression.NONE
    outputs: Choice = Compression.NONE
    output_gradients: Choice = Compression.NONE
    input_gradients: Choice = Compression.NONE
    _chosen: dict[str, list[Compression]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, list[Compression]]
    )
    _alike: dict[str, bool] = field(init=False, repr=False, compare=False, default_factory=dict[str, bool])

    def __post_init__(self) -> None:
        faults: list[str] = []
        for role in ("inputs", "outputs", "output_gradients", "input_gradients"):
            choice: Choice = getattr(self, role)
            each = [choice] if isinstance(choice, str | Compression) else list(choice)
            faults += [f"{role}: {one!r}" for one in each if _named(one) is None]
            self._alike[role] = isinstance(choice, str | Compression)
            self._chosen[role] = [named for one in each if (named := _named(one)) is not None]
        if faults:
            known = ", ".join(one.name.lower() for one in Compression)
            raise UsageError(listed(f"these are no compressions; there are {known}:", faults))

    def choose(self, role: Role, count: int) -> list[Compression]:
        """The compression of each of ``count`` tensors of one role.

        Raises ``UsageError`` where the policy names another number of tensors.
        """
        chosen = self._chosen[role]
        if self._alike[role]:
            return chosen * count
        if len(chosen) != count:
            raise UsageError(f"the policy has {len(chosen)} choices for {role}, but there are {count} tensors")
        return chosen


def packed_bytes(how: Compression, dtype: torch.dtype, shape: Sequence[int]) -> int | None:
    """How many bytes such a tensor takes when compressed, or ``None`` where ``how`` does not apply to it.

    It applies to floating point and complex tensors that get smaller by it.
    """
    numbers = math.prod(shape)
    raw = numbers * dtype.itemsize
    if how is Compression.NONE:
        return raw
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    reals = numbers * (2 if dtype.is_complex else 1)
    if how is not Compression.INT8:
        packed = 2 * reals
    elif len(shape) > 1 and numbers:
        packed = numbers // shape[-1] * _scale_type(dtype).itemsize + reals
    else:
        return None
    return packed if packed < raw else None


def compress(tensor: Tensor, how: Compression) -> tuple[Compression, list[Tensor]]:
    """What was done, and contiguous tensors whose bytes, one after the other, are what travels.

    What was done is ``how``, or NONE where that does not apply (see `packed_bytes`) or would not keep the numbers
    apart from rounding: NaN, Inf, too large. The error of one number x is then at most

    - FP16: ``|x| * 2**-11 + 2**-25``
    - BF16: ``|x| * 2**-8 + 2**-133``
    - INT8: a = the row's absmax: ``a / 254``, and a hair of rounding: ``a * eps + 127 * tiny`` of the tensor's dtype
    """
    if how is Compression.NONE or packed_bytes(how, tensor.dtype, tensor.shape) is None:
        return Compression.NONE, [tensor.contiguous()]
    reals = torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor
    rows = math.prod(tensor.shape[:-1])
    parts = _quantized(reals, rows) if how is Compression.INT8 else _narrowed(reals, _NARROW[how])
    return (Compression.NONE, [tensor.contiguous()]) if parts is None else (how, parts)


def expand(packed: Tensor, how: Compression, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor out of its bytes: ``packed`` is a flat uint8 tensor of `packed_bytes` bytes, at an aligned address.

    For NONE it is a view of ``packed``; otherwise it is new.
    """
    if how is Compression.NONE:
        return packed.view(dtype).view(tuple(shape)) if packed.numel() else packed.new_empty(tuple(shape), dtype=dtype)
    if how is Compression.INT8:
        scales, codes = _rows(packed, dtype, shape)
        reals = codes.to(scales.dtype).mul_(scales)
    else:
        reals = packed.view(_NARROW[how])
    if dtype.is_complex:
        real = torch.float64 if dtype == torch.complex128 else torch.float32
        return torch.view_as_complex(reals.to(real).view(*shape, 2))
    return reals.to(dtype).view(tuple(shape))


def _named(choice: object) -> Compression | None:
    if isinstance(choice, Compression):
        return choice
    return Compression.__members__.get(choice.upper()) if isinstance(choice, str) else None


def _scale_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _narrowed(reals: Tensor, narrow: torch.dtype) -> list[Tensor] | None:
    low, high = torch.aminmax(reals)  # a NaN anywhere makes both NaN
    most = torch.finfo(narrow).max
    if not (low.item() >= -most and high.item() <= most):
        return None
    return [reals.to(narrow).contiguous()]


def _quantized(reals: Tensor, rows: int) -> list[Tensor] | None:
    """One scale per row, and the codes; ``None`` where the absmax of a row is no finite number."""
    kind = torch.float64 if reals.dtype == torch.float64 else torch.float32
    table = reals.to(kind).reshape(rows, -1)
    absmax = table.abs().amax(dim=1, keepdim=True)  # NaN if there is one, Inf if there is one
    if not bool(absmax.isfinite().all()):
        return None
    limits = torch.finfo(kind)
    # 127 times the scale must stay finite, and the scale of numbers that are all but zero may be zero itself.
    scales = (absmax / _LEVELS).clamp_(max=limits.max / _LEVELS * (1 - 4 * limits.eps))
    codes = table.div(scales.masked_fill(scales == 0, 1)).round_().clamp_(-_LEVELS, _LEVELS)
    return [scales.reshape(-1), codes.to(torch.int8)]


def _rows(packed: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The scales as a column, and the codes, one row below the other."""
    rows = math.prod(shape[:-1])
    kind = _scale_type(dtype)
    border = rows * kind.itemsize
    return packed[:border].view(kind).unsqueeze(1), packed[border:].view(torch.int8).view(rows, -1)
