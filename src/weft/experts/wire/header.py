"""The header of a frame: kinds of calls, what is said of them and of their tensors, and the limits of it all."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from weft.core.validation import Validator
from weft.experts.compression import Compression
from weft.experts.protobuf import load_messages

ALIGNMENT = 16
"""Every tensor begins at a multiple of it."""
HEADER_BYTES = 256 << 10
"""The largest header. Parsed it takes up to 80 times as much memory, for as long as `decode` runs."""
MOST_FRAME_BYTES = 0x7FFF_FFFF - (1 << 16)  # gRPC counts a message's bytes, with some of its own, in 31 bits
_MOST_AXES = 64  # of torch

# Left out are dtypes that torch cannot store as whole bytes (`uint1` ... `int7`, `float4_e2m1fn_x2`), the quantized
# ones, which carry a scale outside their bytes and crash when made from a buffer, and `complex32`, which torch calls
# experimental and warns about at every allocation.
_DTYPE_ENUM = load_messages("weft.experts.wire", "experts")["Tensor"].DESCRIPTOR.fields_by_name["dtype"].enum_type
DTYPES: dict[int, torch.dtype] = {
    each.number: getattr(torch, each.name.removesuffix("_")) for each in _DTYPE_ENUM.values if each.number
}
"""Which dtypes travel, by their numbers in experts.proto."""
CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}


class Kind(IntEnum):
    """What a call is, as in experts.proto."""

    FORWARD = 1
    BACKWARD = 2
    COMMIT = 3
    RESULT = 4
    ERROR = 5
    INFO = 6
    PING = 7
    GOAWAY = 8
    STATE = 9
    DISCARD = 10


WITH_TENSORS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.RESULT})


class Header(NamedTuple):  # a tuple: made for every call, and three times as fast as a frozen dataclass
    """All of a call but its tensors; experts.proto says what each field means.

    ``call_id`` is set on the way. ``key``: what stands behind a ``+`` tells several backwards of one forward apart.
    ``deadline_ms``: what is left of the caller's time when the frame is sent. ``data`` is opaque here.
    """

    kind: Kind
    call_id: int = 0
    uid: str = ""
    key: str = ""
    client: str = ""
    mini_batch: str = ""
    deadline_ms: int | None = None
    keep: bool = False
    evaluation: bool = False
    reply: Compression = Compression.NONE
    step: int = 0
    data: bytes = b""


class Descriptor(NamedTuple):
    """One tensor of a call, and where its ``nbytes`` bytes lie, counted from the start of the body."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    compression: Compression
    nbytes: int
    offset: int
    decoded_bytes: int


class Call(NamedTuple):
    """One call to send: its header, its tensors in flat order, and how each may be compressed (empty: none is)."""

    header: Header
    tensors: Sequence[Tensor] = ()
    compressions: Sequence[Compression] = ()


@dataclass(frozen=True)
class Limits:
    """The caps of one frame, all inclusive, checked before anything of it is allocated.

    ``frame_bytes`` and ``header_bytes`` are on the wire; ``decoded_bytes`` of all its tensors. ``elements`` are of a
    tensor, ``name_bytes`` of each name in a call, ``data_bytes`` of its opaque data. Raises ``UsageError``.
    """

    frame_bytes: int = 64 << 20
    header_bytes: int = HEADER_BYTES
    data_bytes: int = 128 << 10
    decoded_bytes: int = 256 << 20
    calls: int = 256
    tensors: int = 256
    axes: int = 16
    elements: int = 1 << 28
    name_bytes: int = 1024

    def __post_init__(self) -> None:
        caps = {"axes": _MOST_AXES, "header_bytes": HEADER_BYTES, "frame_bytes": MOST_FRAME_BYTES}
        with Validator("invalid limits") as check:
            for name in (field.name for field in fields(self)):
                value, cap = getattr(self, name), caps.get(name)
                if check.count(name, value) and cap is not None:
                    check.that(value <= cap, f"{name} is {value}, the format ends at {cap}")


LIMITS = Limits()
"""The limits where none are given."""
