"""The header of a frame: what is asked, by whom, until when, and what the tensors behind it look like.

    frame   | magic 4 | version 1 | 0 1 | calls 2 | header bytes 4 | body bytes 8 |          20 bytes, little-endian
    call    | id 8 | step 8 | deadline ms 4 | data bytes 4 | tensors 2 | uid 2 | key 2 | client 2 |
            | mini-batch 2 | kind 1 | flags 1 | reply 1 | 0 1 |  uid  key  client  mini-batch (UTF-8)  data |
    tensor  | dtype 1 | compression 1 | axes 1 | 0 1 | bytes 8 | axis sizes 8 each |

The calls stand one after the other, each followed by its tensors, then padding up to a multiple of 16. After that
comes the body (`frame.py`): the bytes of all tensors in the same order, each padded to a multiple of 16, so every
tensor lies aligned. How values nest is in the expert's schema and does not travel; tensors come in flat order.

Everything about a tensor is told by its dtype, shape and compression; its number of bytes is there to be checked.
"""

import math
import struct
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import NamedTuple

import torch

from weft.core.errors import UsageError, listed
from weft.experts.compression import Compression
from weft.experts.errors import LimitError
from weft.experts.wire.dtypes import CODES
from weft.experts.wire.limits import Limits

MAGIC = b"WEFT"
VERSION = 1
ALIGNMENT = 16
NO_DEADLINE = 0xFFFFFFFF
_MOST = 1 << 64
NAMES = ("uid", "key", "client", "mini_batch")
PREAMBLE = struct.Struct("<4sBBHIQ")
CALL = struct.Struct("<QQIIHHHHHBBBB")
TENSOR = struct.Struct("<BBBBQ")


class Kind(IntEnum):
    """What a call is. The numbers are part of the format."""

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


class Flags(IntFlag):
    """KEEP, of a forward: keep its graph and its inputs for the backward that has the same key. Of its result: they
    are kept. Of a backward: its inputs are those that are kept, and not sent again. EVALUATION, of a forward and its
    backward: the module runs as after ``eval()``."""

    NONE = 0
    KEEP = 1
    EVALUATION = 2


class Header(NamedTuple):  # a tuple: made for every call, and three times as fast as a frozen dataclass
    """All of a call but its tensors.

    ``call_id`` pairs an answer with its question. ``key`` is the idempotency key of a backward or commit; that of a
    backward is also the key of its forward: by it both draw the same random numbers. What stands behind a ``+`` tells
    several backwards of one forward apart.
    ``mini_batch`` names the sum that a backward's gradient is added to, that a commit applies and a discard drops;
    empty: step now.
    ``deadline_ms`` is what is left of the caller's time when the frame is sent, ``None`` for no deadline. ``reply``
    is how the caller would like the answer's tensors compressed. ``step`` is, in a result, the expert's number of
    optimizer steps. ``data`` is opaque here: a fault (`fault.py`), or what an info call answers.
    """

    kind: Kind
    call_id: int
    uid: str = ""
    key: str = ""
    client: str = ""
    mini_batch: str = ""
    deadline_ms: int | None = None
    flags: Flags = Flags.NONE
    reply: Compression = Compression.NONE
    step: int = 0
    data: bytes = b""


class Descriptor(NamedTuple):
    """One tensor of a call: what it is, and where its ``nbytes`` bytes lie, counted from the start of the body."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    compression: Compression
    nbytes: int
    offset: int

    @property
    def decoded_bytes(self) -> int:
        """How many bytes the tensor takes once decoded."""
        return math.prod(self.shape) * self.dtype.itemsize


@lru_cache(4096)
def extent(shape: tuple[int, ...]) -> int:
    """The number of elements, with empty axes counted as 1: the largest stride that torch has to count to."""
    return math.prod(max(1, size) for size in shape)


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_call(header: Header, tensors: Sequence[Descriptor], limits: Limits) -> bytes:
    """The bytes of one call and its descriptors.

    Raises ``UsageError`` for numbers that do not fit into their fields, ``LimitError`` for more than the limits allow.
    """
    uid, key, client, mini_batch = names = [
        name.encode("utf-8", "surrogatepass") for name in (header.uid, header.key, header.client, header.mini_batch)
    ]
    data, deadline = header.data, header.deadline_ms
    _check_fields(header, len(tensors))
    _check_limits(header, names, tensors, limits)
    head = CALL.pack(
        header.call_id,
        header.step,
        NO_DEADLINE if deadline is None else min(max(0, deadline), NO_DEADLINE - 1),
        len(data),
        len(tensors),
        len(uid),
        len(key),
        len(client),
        len(mini_batch),
        header.kind,
        header.flags,
        header.reply,
        0,
    )
    described = [_write_tensor(one.dtype, one.compression, one.shape, one.nbytes) for one in tensors]
    return b"".join([head, uid, key, client, mini_batch, data, *described])


@lru_cache(4096)
def _write_tensor(dtype: torch.dtype, how: Compression, shape: tuple[int, ...], nbytes: int) -> bytes:
    axes = len(shape)
    return TENSOR.pack(CODES[dtype], how, axes, 0, nbytes) + struct.pack(f"<{axes}q", *shape)


def _check_fields(header: Header, tensors: int) -> None:
    if 0 <= header.call_id < _MOST and 0 <= header.step < _MOST and (not tensors or header.kind in WITH_TENSORS):
        return
    numbers = {"call_id": header.call_id, "step": header.step}
    faults = [f"{name} is {value}, wanted 0 to 2**64 - 1" for name, value in numbers.items() if not 0 <= value < _MOST]
    if tensors and header.kind not in WITH_TENSORS:
        faults.append(f"a call of kind {header.kind.name} carries no tensors, and {tensors} were given")
    raise UsageError(listed("this call cannot be sent:", faults))


def _check_limits(header: Header, names: Sequence[bytes], tensors: Sequence[Descriptor], limits: Limits) -> None:
    faults: list[str] = []
    if max(map(len, names)) > limits.name_bytes:
        faults += [
            f"{field} takes {len(name)} bytes, at most {limits.name_bytes} are allowed"
            for field, name in zip(NAMES, names, strict=True)
            if len(name) > limits.name_bytes
        ]
    if len(header.data) > limits.data_bytes:
        faults.append(f"data takes {len(header.data)} bytes, at most {limits.data_bytes} are allowed")
    if len(tensors) > limits.tensors:
        faults.append(f"there are {len(tensors)} tensors, at most {limits.tensors} are allowed")
    for index, tensor in enumerate(tensors):
        if len(tensor.shape) > limits.axes:
            faults.append(f"tensor {index} has {len(tensor.shape)} axes, at most {limits.axes} are allowed")
        if extent(tensor.shape) > limits.elements:
            faults.append(f"tensor {index} has shape {tensor.shape}, at most {limits.elements} elements are allowed")
    if faults:
        raise LimitError(listed("this call is larger than the limits:", faults), reason="limit", call_id=header.call_id)
