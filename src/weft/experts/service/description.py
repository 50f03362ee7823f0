"""What a client must know of an expert, as JSON: its schemas, nested as they are, without naming any class.

    (TensorSpec((None, 4), float32), {"mask": None})
    {"tuple": [{"spec": [[null, 4], "float32", true]}, {"dict": [["mask", null]]}]}

Containers are tuples, lists, dicts with text or number keys, and named tuples, which become new named tuples of
the same fields on the other side. Constants among the tensors are None, booleans, numbers and texts.
"""

import json
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from weft.core.errors import UsageError, listed
from weft.core.spec import TensorSpec
from weft.experts.errors import MalformedError
from weft.experts.wire.dtypes import CODES

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_MOST_DEPTH = 64


@dataclass(frozen=True)
class Description:
    """An expert as its clients see it. ``args``, ``kwargs`` and ``outputs`` have TensorSpec as leaves.

    ``trained``: whether a backward steps. ``max_batch_size``: rows of the largest call. The rest is as of the
    moment of asking: optimizer ``steps``, the ``durable`` ones of them (None: there are no checkpoints), and the
    server's ``incarnation``.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    trained: bool
    max_batch_size: int
    steps: int
    durable: int | None
    incarnation: int


def describe(info: Mapping[str, Any], durable: int | None, incarnation: int) -> bytes:
    """What `ExpertBackend.get_info` says, as JSON. Raises ``UsageError`` that lists what cannot be told."""
    faults: list[str] = []
    args, kwargs = info["forward_schema"]
    fields = {
        "name": info["name"],
        "args": _written(tuple(args), "args", faults),
        "kwargs": _written(dict(kwargs), "kwargs", faults),
        "outputs": _written(info["outputs_schema"], "output", faults),
        "trained": info["trained"],
        "max_batch_size": info["max_batch_size"],
        "steps": info["steps"],
        "durable": durable,
        "incarnation": incarnation,
    }
    if faults:
        raise UsageError(listed(f"clients cannot be told what expert {info['name']!r} takes:", faults))
    return json.dumps(fields).encode()


def read_description(data: bytes) -> Description:
    """The inverse. Raises ``MalformedError`` for bytes that `describe` did not write."""
    try:
        fields: dict[str, Any] = json.loads(data)
        trees = {name: _read(fields.pop(name)) for name in ("args", "kwargs", "outputs")}
        found = Description(**trees, **fields)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        text = f"this does not describe an expert: {type(error).__name__}: {error}"
        raise MalformedError(text, reason="description") from None
    _check(found)
    return found


def _check(found: Description) -> None:
    kinds: dict[str, type | tuple[type, ...]] = {
        "name": str,
        "args": tuple,
        "kwargs": dict,
        "trained": bool,
        "max_batch_size": int,
        "steps": int,
        "durable": (int, type(None)),
        "incarnation": int,
    }
    wrong = [name for name, kind in kinds.items() if not isinstance(getattr(found, name), kind)]
    if wrong:
        raise MalformedError(f"this does not describe an expert: {', '.join(wrong)} have a wrong type", reason="type")


def _written(tree: object, path: str, faults: list[str], depth: int = 0) -> Any:
    value: Any = tree
    if isinstance(value, TensorSpec):
        return {"spec": [list(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad]}
    kind, fields = cast("Any", type(value)), getattr(value, "_fields", None)
    if value is None or kind in (bool, int, float, str):
        return value
    if depth < _MOST_DEPTH:
        if kind in (tuple, list):
            items = [_written(one, f"{path}[{i}]", faults, depth + 1) for i, one in enumerate(value)]
            return {kind.__name__: items}
        if kind in (dict, OrderedDict):
            pairs = list(value.items())
            faults += [f"{path} has the key {key!r}" for key, _ in pairs if type(key) not in (str, int)]
            return {"dict": [[key, _written(one, f"{path}[{key!r}]", faults, depth + 1)] for key, one in pairs]}
        if fields is not None and issubclass(kind, tuple):
            names: list[str] = list(fields)
            rest = [_written(one, f"{path}.{name}", faults, depth + 1) for name, one in zip(names, value, strict=True)]
            return {"named": [kind.__name__, names, rest]}
    faults.append(f"{path} is {value!r} of type {kind.__qualname__}")
    return None


def _read(node: Any) -> Any:
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise MalformedError("a list outside of a container", reason="description")
        return node
    ((kind, inner),) = cast("dict[str, Any]", node).items()
    if kind == "spec":
        shape, dtype, requires_grad = inner
        return TensorSpec(_shape(shape), _DTYPES[dtype], bool(requires_grad))
    if kind in ("tuple", "list"):
        items = [_read(one) for one in inner]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: _read(one) for key, one in inner}
    if kind == "named":
        name, names, rest = inner
        made: Any = namedtuple(name, names)  # pyright: ignore[reportUntypedNamedTuple]
        return made(*[_read(one) for one in rest])
    raise MalformedError(f"a container of kind {kind!r} is not known", reason="description")


def _shape(sizes: Any) -> tuple[int | None, ...]:
    if not all(size is None or (type(size) is int and size >= 0) for size in sizes):
        raise MalformedError(f"a shape {sizes!r}", reason="description")
    return tuple(sizes)
