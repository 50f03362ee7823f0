"""Tensors as bytes and back, without a copy where none is needed.

    encode   contiguous CPU tensor  ──view as bytes──>  memoryview on the tensor's own memory
    decode   the frame's bytes      ──view as dtype──>  tensor on the frame's own memory

Between the two stands numpy where it knows the dtype: nearly every operation of torch lets go of the interpreter's
lock, and where many threads send small tensors each of them waits for it again.

A decoded tensor that was not compressed looks into the message: it keeps the whole message alive, and whoever
writes into it writes into the message. Messages that arrived belong to nobody else, so a module may work in place on
its input. A message at an odd address is copied once.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import UsageError
from weft.experts.compression import Compression, compress, expand
from weft.experts.errors import MalformedError
from weft.experts.protobuf import load_messages

ALIGNMENT = 16
"""Every tensor begins at a multiple of it."""
Body = np.ndarray[Any, np.dtype[np.uint8]]
"""The body of a frame: flat, at an aligned address."""

# Left out are dtypes that torch cannot store as whole bytes (`uint1` ... `int7`, `float4_e2m1fn_x2`), the quantized
# ones, which carry a scale outside their bytes and crash when made from a buffer, and `complex32`, which torch calls
# experimental and warns about at every allocation.
_DTYPE_ENUM = load_messages("weft.experts.wire", "experts")["Tensor"].DESCRIPTOR.fields_by_name["dtype"].enum_type
DTYPES: dict[int, torch.dtype] = {
    each.number: getattr(torch, each.name.removesuffix("_")) for each in _DTYPE_ENUM.values if each.number
}
"""Which dtypes travel, by their numbers in experts.proto."""
CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}
_NUMPY: dict[torch.dtype, "np.dtype[np.generic]"] = {
    dtype: np.dtype(str(dtype).removeprefix("torch.").replace("bool", "bool_"))
    for dtype in CODES
    if (dtype.itemsize > 1 and dtype is not torch.bfloat16) or not dtype.is_floating_point
}


def to_bytes(tensor: Tensor, how: Compression) -> tuple[Compression, list[memoryview]]:
    """What was done to ``tensor`` (any device, strides and size), and buffers that hold its bytes in order.

    The buffers look into the tensor where it is contiguous, on the CPU and not compressed: do not write into it
    before they were sent. Raises ``UsageError`` for tensors without plain bytes.
    """
    if how is Compression.NONE and _is_plain(tensor):
        seen = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        if not seen.size:
            return how, []
        # A memoryview casts faster than numpy, but knows no complex numbers.
        return how, [seen.reshape(-1).view(np.uint8).data if seen.dtype.kind == "c" else seen.data.cast("B")]
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.dtype not in CODES:
        text = f"a tensor of {tensor.dtype}, layout {tensor.layout}, on {tensor.device}"
        raise UsageError(f"{text} cannot be sent: wanted a dense tensor with data, of one of {sorted(map(str, CODES))}")
    done, parts = compress(tensor.detach().cpu().resolve_conj().resolve_neg(), how)
    # A contiguous tensor of size 1 may have any stride, which views as bytes and `reshape` leave alone.
    flat = (part.as_strided((part.numel(),), (1,)) for part in parts)
    return done, [part.view(torch.uint8).numpy().data for part in flat if part.numel()]


def _is_plain(tensor: Tensor) -> bool:
    """Whether numpy can show its memory, byte for byte as it is sent."""
    if not tensor.is_cpu or tensor.dtype not in _NUMPY or tensor.layout is not torch.strided:
        return False
    if tensor.is_nested or not tensor.is_contiguous():
        return False
    return not (tensor.is_neg() or tensor.is_conj())


def aligned_body(message: memoryview) -> Body:
    """These bytes at an aligned address; a view if it can be, and torch may have it."""
    seen: Body = np.frombuffer(message, np.uint8)
    interface = seen.__array_interface__
    address, read_only = interface["data"]
    if address % ALIGNMENT:
        fresh: Body = torch.empty(len(seen), dtype=torch.uint8, device="cpu").numpy()  # torch aligns to 64
        fresh[:] = seen
        return fresh
    if read_only:
        interface["data"] = (address, False)
        return np.asarray(_Borrowed(seen, interface))
    return seen


class _Borrowed:
    """Read-only memory, shown to torch as what it can hold: it knows no read-only tensors, and warns about them."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: Body, interface: dict[str, Any]) -> None:
        self._owner = owner
        self.__array_interface__ = interface


def to_tensor(packed: Body, dtype: torch.dtype, shape: tuple[int, ...], how: Compression) -> Tensor:
    """The tensor of these bytes: new if they are compressed, else a view of them.

    Raises ``MalformedError`` for a bool that is neither 0 nor 1: torch would compute nonsense with it.
    """
    if dtype == torch.bool and packed.size and int(packed.max()) > 1:
        raise MalformedError(f"a bool is {int(packed.max())}, wanted 0 or 1", reason="bool")
    if how is Compression.NONE and packed.size and dtype in _NUMPY:
        return torch.from_numpy(packed.view(_NUMPY[dtype]).reshape(shape))
    return expand(torch.from_numpy(packed), how, dtype, shape)
