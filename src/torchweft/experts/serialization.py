"""Serialization of nested values with tensors, such as state dicts, as one safetensors file, with all their types.

    {"state": {0: {"step": t, "exp_avg": u}}, "lr": 0.1, "betas": (0.9, 0.999)}

        tensors    state/0/step  state/0/exp_avg              readable by any tool for safetensors
        metadata   {"dict": [["state", ...], ["lr", 0.1], ["betas", {"tuple": [0.9, 0.999]}]]}     JSON

`torch.save` stores types by pickle, and reading a pickle can run code. safetensors has only flat dicts of tensors, so
the nesting is stored as JSON next to them. These come back exactly: dicts with keys of any kind and order,
`OrderedDict` with the versions that modules store on it, `Counter` (some schedules hold one), lists, tuples, numbers,
strings, booleans, ``None``. A tensor that occurs twice (tied weights) is stored once, and is one tensor again.
"""

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, cast

import torch
from safetensors.torch import load
from torch import Tensor

from torchweft.core.errors import UsageError, join_faults
from torchweft.experts.errors import DamagedError, FormatError
from torchweft.experts.wire.frame import CODES, DTYPES_BY_NAME

_FORMAT = "torchweft-1"
_ALIGNMENT = 64  # bytes, of the tensors' memory in the file
# Dtypes that safetensors can name. Others that travel are stored as bytes.
_NAMED: dict[torch.dtype, str] = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.bool: "BOOL"},
    **{torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"},
    **{torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"},
}


def serialize(value: Any) -> memoryview:
    """The bytes of a safetensors file with a copy of this value. Raises ``UsageError`` that lists other types."""
    encoder = _Encoder()
    tree = encoder.encode(value, "")
    if encoder.faults:
        raise UsageError(
            join_faults("a checkpoint holds tensors, numbers, strings and their containers, but not:", encoder.faults)
        )
    entries: dict[str, Any] = {"__metadata__": {"format": _FORMAT, "tree": json.dumps(tree, allow_nan=False)}}
    end = 0
    # Wide dtypes first, as safetensors orders them. Without it, a tensor after an odd number of bytes is misaligned.
    tensors = sorted(encoder.tensors.items(), key=lambda item: -item[1].itemsize)
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        named = tensor.dtype in _NAMED
        entries[name] = {
            "dtype": _NAMED.get(tensor.dtype, "U8"),
            "shape": list(tensor.shape) if named else [tensor.nbytes],
            "data_offsets": [start, end],
        }
    # Padded with spaces, which JSON ignores, so that the tensors start at an aligned offset.
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    head = len(header).to_bytes(8, "little") + header
    file = torch.empty(len(head) + end, dtype=torch.uint8, device="cpu")
    data = memoryview(cast("Any", file.numpy()))
    data[: len(head)] = head
    for name, tensor in tensors:
        if tensor.nbytes:
            start, end = [len(head) + offset for offset in entries[name]["data_offsets"]]
            file[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return data


def deserialize(data: bytes | bytearray | memoryview) -> Any:
    """The inverse of `serialize`, with tensors on the CPU. Raises ``DamagedError`` or ``FormatError``."""
    data = bytes(data)
    try:
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        if metadata["format"] == _FORMAT:
            with torch.device("cpu"):  # `load` makes empty tensors on the default device
                tensors = load(data)
            return _decode(json.loads(metadata["tree"]), tensors)
    except MemoryError:  # does not mean that the file is damaged
        raise
    except Exception as error:  # any library can fail on damaged bytes, in its own way
        raise DamagedError(f"not a checkpoint: {type(error).__name__}: {error}") from error
    raise FormatError(
        f"it has format {metadata['format']!r}, and this version of torchweft reads {_FORMAT!r}; start the version "
        "that wrote it"
    )


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.faults: list[str] = []
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path.removeprefix("/") or "tensor")
        # The exact type: an instance of a subclass would come back as its base class, without any error.
        kind = cast("type[Any]", type(value))
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind in (list, tuple):
            return {kind.__name__: [self.encode(item, f"{path}/{index}") for index, item in enumerate(value)]}
        if kind in (dict, Counter):
            return {kind.__name__.lower(): self._encode_items(value.items(), path)}
        if kind is OrderedDict:
            versions = self.encode(dict(getattr(value, "_metadata", {})), f"{path}@")
            return {"ordered": self._encode_items(value.items(), path), "versions": versions}
        self.faults.append(f"{path.removeprefix('/') or 'the value'}, of type {kind.__module__}.{kind.__qualname__}")
        return None

    def _encode_items(self, items: Iterable[tuple[Any, Any]], path: str) -> list[list[Any]]:
        return [[self.encode(key, f"{path}@key"), self.encode(item, f"{path}/{key}")] for key, item in items]

    def _encode_tensor(self, value: Tensor, path: str) -> Any:
        plain = value.detach()
        if plain.layout != torch.strided or plain.device.type == "meta" or plain.dtype not in CODES:
            self.faults.append(f"{path}, which is a tensor of {plain.dtype}, layout {plain.layout}, on {plain.device}")
            return None
        # Tied weights are the same memory read in the same way. Views of other parts are stored separately.
        memory = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
        key = (*memory, plain.is_conj(), plain.is_neg())
        name = self._names.get(key) if plain.numel() else None
        if name is None:
            name = path
            while name in self.tensors:  # paths of keys of different types can be equal: 0 and "0"
                name += "#"
            self._names[key], self.tensors[name] = name, plain
        if plain.dtype in _NAMED:
            return {"tensor": name}
        return {"tensor": name, "dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}


def _decode(node: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    fields = cast("dict[str, Any]", node)
    kind, inner = next(iter(fields.items()))
    if kind == "tensor":
        stored = tensors[inner]
        if "dtype" in fields and stored.dtype == torch.uint8:
            dtype = DTYPES_BY_NAME[fields["dtype"]]
            stored = (stored.view(dtype) if stored.numel() else stored.new_empty(0, dtype=dtype)).view(fields["shape"])
            tensors[inner] = stored  # one object per name, so that tied weights are tied again
        return stored
    if kind == "float":
        return float(inner)
    if kind in ("list", "tuple"):
        items = [_decode(item, tensors) for item in inner]
        return items if kind == "list" else tuple(items)
    pairs = [(_decode(key, tensors), _decode(item, tensors)) for key, item in inner]
    if kind != "ordered":
        return dict(pairs) if kind == "dict" else Counter(dict(pairs))
    ordered: OrderedDict[Any, Any] = OrderedDict(pairs)
    if versions := _decode(fields["versions"], tensors):
        ordered._metadata = versions  # pyright: ignore[reportAttributeAccessIssue]
    return ordered
