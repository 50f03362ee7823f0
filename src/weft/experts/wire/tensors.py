"""Tensors as bytes and back, without a copy where none is needed.

    encode   contiguous CPU tensor  ──view as bytes──>  memoryview on the tensor's own memory
    decode   the frame's bytes      ──view as dtype──>  tensor on the frame's own memory

Between the two stands numpy where it knows the dtype: nearly every operation of torch lets go of the interpreter's
lock, and where many threads send small tensors each of them waits for it again.

A decoded tensor that was not compressed looks into the message: it keeps the whole message alive, and whoever
writes into it writes into the message. Messages that arrived belong to nobody else, so a module may work in place on
its input; who decodes bytes that he still needs asks for copies. A message at an odd address is copied once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import SpecError, UsageError, listed
from weft.experts.compression import Compression, compress, expand
from weft.experts.errors import MalformedError
from weft.experts.wire.dtypes import CODES, NUMPY
from weft.experts.wire.header import ALIGNMENT, Descriptor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""The body of a frame: flat, at an aligned address."""


def to_bytes(tensor: Tensor, how: Compression) -> tuple[Compression, list[memoryview]]:
    """What was done to ``tensor`` (any device, strides and size), and buffers that hold its bytes in order.

    The buffers look into the tensor where it is contiguous, on the CPU and not compressed: do not write into it
    before they were sent. Raises ``UsageError`` for tensors without plain bytes.
    """
    if how is Compression.NONE and _as_it_lies(tensor):
        seen = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return how, [seen.reshape(-1).view(np.uint8).data] if seen.size else []
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.dtype not in CODES:
        text = f"a tensor of {tensor.dtype}, layout {tensor.layout}, on {tensor.device}"
        raise UsageError(f"{text} cannot be sent: wanted a dense tensor with data, of one of {sorted(map(str, CODES))}")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    done, parts = compress(plain, how)
    return done, [_flat(part).view(torch.uint8).numpy().data for part in parts if part.numel()]


def _as_it_lies(tensor: Tensor) -> bool:
    """Whether numpy can show its memory, byte for byte as it is sent."""
    if not tensor.is_cpu or tensor.dtype not in NUMPY or tensor.layout is not torch.strided:
        return False
    if tensor.is_nested or not tensor.is_contiguous():
        return False
    return not (tensor.is_neg() or tensor.is_conj())


def _flat(part: Tensor) -> Tensor:
    """One axis. A contiguous tensor of size 1 may have any stride, which views as bytes and `reshape` leave alone."""
    return part.as_strided((part.numel(),), (1,))


def memory(message: memoryview, start: int) -> Bytes:
    """The bytes of ``message`` from ``start`` on, at an aligned address; a view if it can be, and torch may have it."""
    seen: Bytes = np.frombuffer(message, np.uint8)[start:]
    interface = seen.__array_interface__
    address, read_only = interface["data"]
    if address % ALIGNMENT:
        fresh: Bytes = torch.empty(len(seen), dtype=torch.uint8, device="cpu").numpy()  # torch aligns to 64
        fresh[:] = seen
        return fresh
    if read_only:
        interface["data"] = (address, False)
        return np.asarray(_Borrowed(seen, interface))
    return seen


class _Borrowed:
    """Read-only memory, shown to torch as what it can hold: it knows no read-only tensors, and warns about them."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: Bytes, interface: dict[str, Any]) -> None:
        self._owner = owner
        self.__array_interface__ = interface


def to_tensor(body: Bytes, which: Descriptor) -> Tensor:
    """The tensor that ``which`` describes: new if it was compressed, else a view of ``body``.

    Raises ``MalformedError`` for a bool that is neither 0 nor 1: torch would compute nonsense with it.
    """
    packed = body[which.offset : which.offset + which.nbytes]
    if which.dtype == torch.bool and which.nbytes and int(packed.max()) > 1:
        raise MalformedError(f"a bool is {int(packed.max())}, wanted 0 or 1", reason="bool")
    if which.compression is Compression.NONE and which.nbytes and which.dtype in NUMPY:
        return torch.from_numpy(packed.view(NUMPY[which.dtype]).reshape(which.shape))
    return expand(torch.from_numpy(packed), which.compression, which.dtype, which.shape)


def into(body: Bytes, which: Sequence[Descriptor], outs: Sequence[Tensor]) -> None:
    """Write each tensor into one of ``outs``, of its shape and dtype, on any device and with any strides.

    Raises ``SpecError`` that lists every out that does not fit; then none was written.
    """
    faults = [] if len(which) == len(outs) else [f"there are {len(which)} tensors, and {len(outs)} to write into"]
    for index, (one, out) in enumerate(zip(which, outs, strict=False)):
        if (out.dtype, tuple(out.shape)) != (one.dtype, one.shape):
            faults.append(f"{index}: {one.dtype} {one.shape} does not go into {out.dtype} {tuple(out.shape)}")
    if faults:
        raise SpecError(listed("the tensors of this call do not fit where they should go:", faults))
    ready = [to_tensor(body, one) for one in which]
    with torch.no_grad():
        for out, one in zip(outs, ready, strict=True):
            out.copy_(one)
