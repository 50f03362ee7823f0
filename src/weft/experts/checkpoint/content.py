"""A state dict as one safetensors file, and back, with every type as it was.

    {"state": {0: {"step": t, "exp_avg": u}}, "lr": 0.1, "betas": (0.9, 0.999)}

        tensors    state/0/step  state/0/exp_avg              safetensors, readable by any of its tools
        the rest   {"dict": [["state", ...], ["lr", 0.1], ["betas", {"tuple": [0.9, 0.999]}]]}     JSON, its metadata

Kept exactly: dicts with keys of any kind and order, `OrderedDict` with the versions that modules store on it,
`Counter` (some schedules hold one), lists, tuples, numbers with NaN and Inf, strings, booleans, ``None``. A tensor that
occurs twice (tied weights) is stored once, and is one tensor again. Nothing is ever executed to read a file.
"""

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from weft.core.errors import UsageError, listed
from weft.experts.errors import DamagedError, TornError
from weft.experts.wire.dtypes import CODES

FORMAT = "weft-1"
_KINDS = {"dict", "ordered", "counter", "list", "tuple", "tensor", "float"}
# What a safetensors file can name. The other dtypes that travel are stored as bytes.
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
_WHOLE = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
_PLAIN = _FLOATS | _WHOLE | {torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


def to_file(value: Any) -> bytes:
    """``value`` as the bytes of a safetensors file. Tensors may lie on any device.

    Raises ``UsageError`` that lists every leaf that cannot be stored, and ``TornError`` if a tensor was written to
    meanwhile. It takes twice the bytes of all tensors for a while.
    """
    writer = _Writer()
    tree = writer.node(value, "")
    if writer.faults:
        raise UsageError(
            listed("a checkpoint holds tensors, numbers, strings and their containers, but not:", writer.faults)
        )
    writer.check_versions()
    return save(writer.tensors, {"format": FORMAT, "tree": json.dumps(tree, allow_nan=False)})


def from_file(data: bytes) -> Any:
    """The value that `to_file` wrote, its tensors on the CPU. Raises ``DamagedError`` for anything else."""
    try:
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        if metadata["format"] == FORMAT:
            with torch.device("cpu"):  # where `load` makes what has no numbers
                tensors = load(data)
            return _Reader(tensors).value(json.loads(metadata["tree"]))
    except MemoryError:  # says nothing about the file
        raise
    except Exception as error:  # whatever trips over these bytes: they are no checkpoint
        raise DamagedError(f"this is no checkpoint: {type(error).__name__}: {error}") from error
    raise DamagedError(f"the file has format {metadata['format']!r}, wanted {FORMAT!r}")


class _Writer:
    """Gathers the tensors of a value on the way through it, and what cannot be stored."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.faults: list[str] = []
        self._names: dict[tuple[Any, ...], str] = {}
        self._sources: list[tuple[str, Tensor, int]] = []

    def node(self, value: Any, path: str) -> Any:
        """``value`` as JSON, in which tensors are names."""
        if isinstance(value, Tensor):
            return self._tensor(value, path or "tensor")
        kind = cast("type[Any]", type(value))
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind in (list, tuple):
            return {kind.__name__: [self.node(item, _join(path, str(index))) for index, item in enumerate(value)]}
        if kind in (dict, Counter):
            return {kind.__name__.lower(): self._pairs(value.items(), path)}
        if kind is OrderedDict:
            versions = self.node(dict(getattr(value, "_metadata", {})), f"{path}@")
            return {"ordered": self._pairs(value.items(), path), "versions": versions}
        self.faults.append(f"{path or 'the value'}, which is of type {kind.__module__}.{kind.__qualname__}")
        return None

    def check_versions(self) -> None:
        """Raise if a tensor was written to since it was copied, or while the others were."""
        torn = [path for path, source, version in self._sources if source._version != version]
        if torn:
            raise TornError(listed("these were written to while they were copied; stop the steps meanwhile:", torn))

    def _pairs(self, items: Iterable[tuple[Any, Any]], path: str) -> list[list[Any]]:
        return [[self.node(key, f"{path}@key"), self.node(item, _join(path, str(key)))] for key, item in items]

    def _tensor(self, value: Tensor, path: str) -> Any:
        plain = value.detach()
        if plain.layout != torch.strided or plain.device.type == "meta" or plain.dtype not in CODES:
            self.faults.append(f"{path}, which is a tensor of {plain.dtype}, layout {plain.layout}, on {plain.device}")
            return None
        key = (
            plain.device,
            plain.data_ptr(),
            plain.dtype,
            plain.shape,
            plain.stride(),
            plain.is_conj(),
            plain.is_neg(),
        )
        name = self._names.get(key) if plain.numel() else None
        if name is None:
            name = self._unused(path)
            self._names[key] = name
            if not value.is_inference():  # those do not count their changes
                self._sources.append((path, value, value._version))
            self.tensors[name] = _stored(plain)
        shape = None if plain.dtype in _PLAIN else list(plain.shape)
        node: dict[str, Any] = {"tensor": name}
        return node if shape is None else {**node, "dtype": str(plain.dtype).removeprefix("torch."), "shape": shape}

    def _unused(self, path: str) -> str:
        """The path, or, where keys of different types look alike, the path and a number."""
        name, turn = path, 1
        while name in self.tensors:
            turn += 1
            name = f"{path}#{turn}"
        return name


class _Reader:
    """Puts a value back together."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def value(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        fields = cast("dict[str, Any]", node)
        kind = min(fields.keys() & _KINDS)  # there is exactly one
        inner = fields[kind]
        if kind == "tensor":
            return self._tensor(inner, fields)
        if kind == "float":
            return float(inner)
        if kind in ("list", "tuple"):
            items = [self.value(item) for item in inner]
            return items if kind == "list" else tuple(items)
        pairs = [(self.value(key), self.value(item)) for key, item in inner]
        if kind == "counter":
            return Counter(dict(pairs))
        if kind == "dict":
            return dict(pairs)
        ordered: OrderedDict[Any, Any] = OrderedDict(pairs)
        if versions := self.value(fields["versions"]):
            ordered._metadata = versions  # pyright: ignore[reportAttributeAccessIssue]
        return ordered

    def _tensor(self, name: str, fields: dict[str, Any]) -> Tensor:
        """The same object for the same name, so that what was tied is tied again."""
        stored = self._tensors[name]
        if "dtype" in fields and stored.dtype == torch.uint8:
            dtype = _DTYPES[fields["dtype"]]
            stored = (stored.view(dtype) if stored.numel() else stored.new_empty(0, dtype=dtype)).view(fields["shape"])
            self._tensors[name] = stored
        return stored


def _stored(plain: Tensor) -> Tensor:
    """A contiguous copy on the CPU of its own, of a dtype that the file format has a name for."""
    copy = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    copy.copy_(plain)
    return copy if plain.dtype in _PLAIN else copy.view(-1).view(torch.uint8)


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
