"""Encoding of the messages between two ranks; no pickle, no code of the sender runs at the receiver.

    header | shape, if it is new | plain leaves | bytes of small tensors          larger tensors follow on a lane

The shape of a value is its structure and the dtype, size and `requires_grad` of its tensors. It travels once per
connection and has a slot number afterwards. Plain leaves (numbers, strings) change from message to message, so they
travel next to it. Both ends keep the same `SHAPES` slots: the sender reuses the oldest, the receiver overwrites it.
"""

import json
import struct
from collections.abc import Callable, Sequence
from ctypes import c_char
from typing import Any, NamedTuple, cast

import torch

from torchweft.core.errors import SpecError
from torchweft.core.pytree import LEAF, Structure, flatten, from_plain, structure_paths, to_plain, unflatten

DATA, DONE, FAILED, PING, PONG, BYE = range(6)
FRAME, CPU_LANE, DEVICE_LANE = range(3)
"""Ways of a tensor: within the frame, by gloo, by NCCL."""
SHAPES = 1024
INLINE = 256 << 10
"""Bytes of tensors that travel within one frame. A lane takes about 1 ms per tensor, a frame 25 us and three copies."""
_LONGEST = 64 << 20  # bytes of a shape or of plain leaves
_HEADER = struct.Struct("<BQiiiHII")
HEADER_BYTES = _HEADER.size
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_LIST_OF_ONE = flatten([None])[1]
_PLAIN = (type(None), bool, int, float, str)
_WRITERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", bytes.hex),
    complex: ("complex", lambda value: [value.real, value.imag]),
    torch.dtype: ("dtype", str),
    torch.device: ("device", str),
    torch.Size: ("size", list),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "dtype": _DTYPES.__getitem__,
    "device": torch.device,
    "size": torch.Size,
}


class TensorShape(NamedTuple):
    """A tensor without its content. `on_device`: whether it was on an accelerator at the sender."""

    dtype: torch.dtype
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    way: int
    on_device: bool


class Shape(NamedTuple):
    """A value without its content; None stands for a plain leaf."""

    structure: Structure
    leaves: tuple[TensorShape | None, ...]

    @property
    def tensors(self) -> list[TensorShape]:
        return [leaf for leaf in self.leaves if leaf is not None]


class FrameHeader(NamedTuple):
    kind: int
    walk: int = 0
    address: tuple[int, int, int] = (0, 0, 0)
    slot: int = 0
    shape_bytes: int = 0
    plain_bytes: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(self.kind, self.walk, *self.address, *self[3:])


def decode_header(data: bytes) -> FrameHeader:
    kind, walk, route, reader, micro_batch, slot, shape_bytes, plain_bytes = _HEADER.unpack(data)
    # Checked before anything is allocated. A stranger cannot be here, but a broken peer can.
    if kind > BYE or slot >= SHAPES or max(shape_bytes, plain_bytes) > _LONGEST:
        raise ValueError(f"a malformed frame: kind {kind}, {shape_bytes} and {plain_bytes} bytes")
    return FrameHeader(kind, walk, (route, reader, micro_batch), slot, shape_bytes, plain_bytes)


def encode_plain(content: Any) -> bytes:
    """JSON, with inf and nan. Raises ``SpecError`` for a value that is too long or not plain."""
    try:
        text = json.dumps(content).encode()
    except (TypeError, ValueError) as error:
        raise SpecError(f"this cannot be sent to another process: {error}; use None, bool, int, float, str") from error
    if len(text) > _LONGEST:
        raise SpecError(f"plain values of {len(text):,} bytes exceed the {_LONGEST:,} of one message; send a tensor")
    return text


def encode_control(kind: int, walk: int, content: Any) -> bytes:
    text = encode_plain(content)
    return FrameHeader(kind, walk, plain_bytes=len(text)).encode() + text


def split_value(value: Any, *, device_lane: bool) -> tuple[Shape, list[Any], list[torch.Tensor]]:
    """The shape of a value, its plain leaves ready for JSON, and its tensors, dense and where their way starts. Raises
    ``SpecError`` that names the first leaf that cannot be sent."""
    gradients = cast("list[Any]", value) if type(value) is list else []
    if len(gradients) == 1 and type(gradients[0]) is torch.Tensor:
        leaves, structure = gradients, _LIST_OF_ONE  # those of most values; pytree would take 30 us
    else:
        # A torch.Size is a container for PyTorch once torch.fx is imported, which can differ between the ranks.
        leaves, structure = flatten(value, lambda node: type(node) is torch.Size)
    shapes: list[TensorShape | None] = []
    plain: list[Any] = []
    tensors: list[torch.Tensor] = []
    left = INLINE
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensor, way = _sendable(leaf, structure, place), FRAME
            on_device = not tensor.is_cpu
            if on_device and not device_lane:
                tensor = tensor.cpu()  # gloo takes CPU tensors only
            if tensor.numel():
                way = DEVICE_LANE if on_device and device_lane else CPU_LANE if tensor.nbytes > left else FRAME
            left -= tensor.nbytes if way == FRAME else 0
            dims, strides = tuple(tensor.shape), tensor.stride()
            shapes.append(TensorShape(tensor.dtype, dims, strides, leaf.requires_grad, way, on_device))
            tensors.append(tensor)
        else:
            kind = cast("type[Any]", type(leaf))
            if kind not in _PLAIN:
                if kind not in _WRITERS:  # a subclass, such as numpy.float64, would arrive as another type
                    raise _rejection(structure, place, f"a {kind.__name__}")
                name, write = _WRITERS[kind]
                leaf = {name: write(leaf)}
            shapes.append(None)
            plain.append(leaf)
    return Shape(structure, tuple(shapes)), plain, tensors


def _sendable(tensor: torch.Tensor, structure: Structure, place: int) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _rejection(structure, place, f"a {type(tensor).__name__}, a subclass of Tensor,")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
        raise _rejection(structure, place, f"a tensor that is {kind}")
    # The bytes of a lazily conjugated or negated view are those of its base.
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Strides decide the order of sums in the next stage, so they are kept, except for gaps and overlaps.
    return plain if plain.is_contiguous() or _is_dense(plain.shape, plain.stride()) else plain.clone()


def _is_dense(dims: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill a range of memory, in any order of the dimensions."""
    length = 1
    for stride, size in sorted(zip(strides, dims, strict=True)):
        if size != 1 and stride != length:
            return False
        length *= size
    return True


def _rejection(structure: Structure, place: int, seen: str) -> SpecError:
    path = structure_paths(structure, "the value")[place]
    return SpecError(
        f"{path} is {seen} and cannot be sent to another process; send strided tensors, None, bool, int, float, "
        "complex, str, bytes, torch.dtype, torch.device and torch.Size"
    )


class SentShapes:
    def __init__(self) -> None:
        self._slots: dict[Shape, int] = {}

    def find(self, shape: Shape) -> tuple[int, bytes]:
        """The slot of a shape, and its text if the other end does not know it."""
        if (slot := self._slots.get(shape)) is not None:
            return slot, b""
        leaves = [leaf and [str(leaf.dtype), *leaf[1:]] for leaf in shape.leaves]
        text = encode_plain([to_plain(shape.structure, classes=True), leaves])  # may raise: nothing has changed yet
        slot = len(self._slots)
        # The oldest. The receiver overwrites the same slot, so both ends stay equal without a message.
        if slot == SHAPES:
            slot = self._slots.pop(next(iter(self._slots)))
        self._slots[shape] = slot
        return slot, text


def decode_shape(text: bytes) -> Shape:
    plain, leaves = json.loads(text)
    shapes = [leaf and TensorShape(_DTYPES[leaf[0]], tuple(leaf[1]), tuple(leaf[2]), *leaf[3:]) for leaf in leaves]
    # The bytes of a tensor with overlaps would not fit into its memory.
    if not all(leaf is None or 0 in leaf.dims or _is_dense(leaf.dims, leaf.strides) for leaf in shapes):
        raise ValueError(f"a tensor that is not dense: {text!r:.200}")
    structure = from_plain(plain, classes=True)
    # `unflatten` and `join_value` recognize common structures by identity.
    return Shape({LEAF: LEAF, _LIST_OF_ONE: _LIST_OF_ONE}.get(structure, structure), tuple(shapes))


def memory_of(tensor: torch.Tensor) -> Any:
    """The writable memory of a dense CPU tensor, which must not be empty."""
    return (c_char * tensor.nbytes).from_address(tensor.data_ptr())


def join_value(shape: Shape, plain: Sequence[Any], tensors: Sequence[torch.Tensor], device: torch.device) -> Any:
    """The inverse of `split_value`. The tensors become leaves with the sender's `requires_grad`. Those that were on an
    accelerator at the sender get to `device`."""
    left, arrived = iter(plain), iter(tensors)
    leaves: list[Any] = []
    for leaf in shape.leaves:
        if leaf is None:
            item = next(left)
            if isinstance(item, dict):
                ((name, content),) = cast("dict[str, Any]", item).items()
                # Fixed types only. A message cannot name a function of this process.
                item = _READERS[name](content)
            leaves.append(item)
        else:
            tensor = next(arrived)
            if leaf.on_device and tensor.is_cpu:
                tensor = tensor.to(device)  # it went through the CPU, as gloo needs it
            leaves.append(tensor.requires_grad_() if leaf.requires_grad else tensor)
    return leaves if shape.structure is _LIST_OF_ONE else unflatten(shape.structure, leaves)
