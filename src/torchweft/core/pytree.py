"""Nested values, such as a model takes and returns: trees with tensors and other objects as leaves.

    ({"mask": m, "ids": [a, b]}, None)        flatten ->   leaves     [m, a, b, None]
                                                           structure  ({"mask": *, "ids": [*, *]}, *)
                                                           paths      [0]['mask']  [0]['ids'][0]  ...  [1]

Containers are tuples, lists, dicts (in their own order), named tuples, and all other containers of PyTorch
(``OrderedDict``, ``torch.return_types``, classes registered as pytree nodes). Everything else is a leaf, including
``None``. This is the only file that uses ``torch.utils._pytree``. The ``nested_*`` functions are hivemind's idea.
"""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from torchweft.core.errors import SpecError

# The nesting of a value. Hashable; two are equal if containers, keys and their order are equal.
Structure = pytree.TreeSpec

LEAF: Structure = pytree.tree_structure(None)  # the structure of a value that is one leaf

# Advice for a class that hides tensors.
CONTAINER_ADVICE = (
    "use a tuple, list, dict or NamedTuple, or register the class "
    "(torch.utils._pytree.register_dataclass, register_pytree_node)"
)


def flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """The leaves of ``value`` in order, and its structure. ``is_leaf``: other nodes to treat as leaves."""
    if type(value) is torch.Tensor:  # the common case, in every micro-batch
        return [value], LEAF
    return pytree.tree_flatten(value, is_leaf)


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The inverse of :func:`flatten`. Raises ``SpecError`` if the number of leaves is wrong."""
    if len(leaves) != structure.num_leaves:
        raise SpecError(f"this structure has {structure.num_leaves} leaves, but {len(leaves)} were given")
    if structure is LEAF:
        return leaves[0]
    return pytree.tree_unflatten(leaves, structure)


def register_dataclasses(value: Any) -> None:
    """Register the dataclasses among the leaves of ``value`` that hold tensors as containers."""
    while True:
        kinds = cast("set[type[Any]]", {type(leaf) for leaf in flatten(value)[0] if _opaque_dataclass(leaf)})
        if not kinds:
            return
        for kind in kinds:
            pytree.register_dataclass(kind)


def _opaque_dataclass(leaf: Any) -> bool:
    kind = cast("type[Any]", type(leaf))
    # PyTorch rebuilds a dataclass by its constructor, so every field must be an argument of it.
    if not hasattr(kind, "__dataclass_fields__") or not all(field.init for field in fields(kind)):
        return False
    inside = flatten([getattr(leaf, field.name) for field in fields(kind)])[0]
    return any(isinstance(inner, torch.Tensor) or _opaque_dataclass(inner) for inner in inside)


def nested_pack(leaves: Sequence[Any], like: Any) -> Any:
    """The leaves, nested like ``like``. Raises ``SpecError`` if their number differs."""
    return unflatten(flatten(like)[1], leaves)


def nested_flatten(value: Any) -> list[Any]:
    return flatten(value)[0]


def nested_compare(a: Any, b: Any) -> bool:
    return flatten(a)[1] == flatten(b)[1]


def map_leaves(fn: Callable[..., Any], *values: Any) -> Any:
    """Apply ``fn`` to the leaves of values with the same structure; the result has that structure too.

    Raises a ``SpecError`` that names the first place where a value is nested differently from the first one.
    """
    if not values:
        raise SpecError("map_leaves needs at least one value")
    columns: list[list[Any]] = []
    expected = flatten(values[0])[1]
    for position, value in enumerate(values):
        leaves, structure = flatten(value)
        fault = difference(expected, structure)
        if fault is not None:
            raise SpecError(f"value {position} is not nested as value 0: {fault}")
        columns.append(leaves)
    return unflatten(expected, [fn(*row) for row in zip(*columns, strict=True)])


nested_map = map_leaves


def structure_paths(structure: Structure, root: str = "") -> list[str]:
    """A readable name for every leaf, e.g. ``args[0]['mask']`` for the root ``args``."""
    if structure.is_leaf():
        return [root]
    children = zip(_keys(structure), structure.children(), strict=True)
    return [name for key, child in children for name in structure_paths(child, root + key)]


def difference(wanted: Structure, seen: Structure, root: str = "") -> str | None:
    """A description of the first place where two structures differ, or ``None`` if they are equal."""
    if wanted == seen:
        return None
    place = root or "the value"
    if (wanted.type, wanted.num_children) != (seen.type, seen.num_children) or wanted.context != seen.context:
        return f"{place} should be {_describe(wanted)}, but is {_describe(seen)}"
    pairs = zip(_keys(wanted), wanted.children(), seen.children(), strict=True)
    faults = (difference(child, other, root + key) for key, child, other in pairs)
    return next(fault for fault in faults if fault is not None)


def broadcast_prefix(prefix: Any, structure: Structure, root: str = "") -> list[Any]:
    """One entry of ``prefix`` per leaf: an entry for a part of the value is repeated for all leaves of that part.

    ``prefix`` is nested like the value, down to entries that are neither dict, list nor tuple. Raises a ``SpecError``
    that names the first place where the nesting differs.
    """
    if not isinstance(prefix, dict | list | tuple):
        return [prefix] * structure.num_leaves
    keys = None if structure.is_leaf() else _mapping_keys(structure)
    entries = cast("dict[Any, Any] | list[Any] | tuple[Any, ...]", prefix)
    if isinstance(entries, dict):
        fits = keys is not None and entries.keys() == set(keys)
        entries = [entries[key] for key in keys or ()] if fits else []
    else:
        fits = keys is None and not structure.is_leaf() and len(entries) == structure.num_children
    if not fits:
        raise SpecError(f"{root or 'the value'} is {_describe(structure)}, but {prefix!r} is given for it")
    names = _keys(structure)
    parts = zip(entries, structure.children(), names, strict=True)
    return [item for entry, child, name in parts for item in broadcast_prefix(entry, child, root + name)]


def to_plain(structure: Structure, *, classes: bool = False) -> Any:
    """Encode a structure as lists, strings and keys, for a message. `from_plain` is the inverse.

    A leaf is ``None``; another node is ``[kind, keys, children]``. With `classes`, a class that PyTorch knows as a
    container is ``[name, None, children, context]``. Raises ``SpecError`` for a container other than tuple, list, dict,
    ``OrderedDict`` and named tuple, and for a key that is neither str, int, float, bool nor None.
    """
    if structure.is_leaf():
        return None
    kind, keys = structure.type, _mapping_keys(structure)
    name = _PLAIN.get(kind)
    if getattr(structure.context, "_fields", None) is not None:
        name = f"{structure.context.__module__}:{structure.context.__qualname__}"
    unsupported = [key for key in keys or () if not isinstance(key, str | int | float | None)]
    children = [to_plain(child, classes=classes) for child in structure.children()]
    if name is None and classes and _find_class(known := f"{kind.__module__}:{kind.__qualname__}") is kind:
        values, nesting = flatten(structure.context)
        return [known, None, children, [values, to_plain(nesting)]]
    if name is None or unsupported:
        culprit = f"a key {unsupported[0]!r}" if unsupported else f"a {kind.__name__}"
        raise SpecError(
            f"{culprit} cannot be sent to another process; nest values in tuples, lists and dicts with str keys"
        )
    return [name, keys, children]


def from_plain(plain: Any, *, classes: bool = False) -> Structure:
    """The structure that `to_plain` encoded. Raises ``SpecError`` for a named tuple that is unknown here; with
    `classes`, also for a class that PyTorch does not know as a container."""
    if plain is None:
        return LEAF
    name, keys, children, *context = cast("tuple[str, list[Any] | None, list[Any], Any]", plain)
    inner = [from_plain(child, classes=classes) for child in children]
    if not (context and classes):
        node = flatten(_value_of(name, keys, len(children)))[1]
        return pytree.TreeSpec(node.type, node.context, inner)
    kind = _find_class(name)
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__") and kind not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(kind)
    if kind not in pytree.SUPPORTED_NODES:
        raise SpecError(f"{name} is not known to PyTorch as a container in this process; register it in a module")
    values, nesting = context[0]
    return pytree.TreeSpec(kind, unflatten(from_plain(nesting), values), inner)


_PLAIN: dict[Any, str] = {tuple: "tuple", list: "list", dict: "dict", OrderedDict: "OrderedDict"}


def _find_class(name: str) -> Any:
    """The object of this process with the name ``module:qualname``, or None."""
    module, _, path = name.partition(":")
    # Only modules that are loaded already: a message must not cause an import.
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _value_of(name: str, keys: list[Any] | None, children: int) -> Any:
    """A container with None for its children."""
    values = [None] * children
    kind = next((kind for kind, plain in _PLAIN.items() if plain == name), None)
    if kind is not None:
        return kind(zip(keys, values, strict=True)) if keys is not None else kind(values)
    cls = _find_class(name)
    is_tuple = isinstance(cls, type) and issubclass(cls, tuple)
    if not is_tuple or len(getattr(cast(Any, cls), "_fields", ())) != len(values):
        raise SpecError(f"{name} is not a named tuple of {len(values)} fields in this process; define it in a module")
    # Not by calling the class: a message must not run code of its choice.
    return cast(Any, tuple).__new__(cls, values)


def _mapping_keys(structure: Structure) -> list[Any] | None:
    """The keys of a dict, or ``None`` for every other node."""
    if not (isinstance(structure.type, type) and issubclass(structure.type, dict)):
        return None
    context = cast("list[Any]", structure.context)
    # The context of a defaultdict starts with its factory.
    return context[1] if issubclass(structure.type, defaultdict) else context


def _keys(structure: Structure) -> list[str]:
    if (keys := _mapping_keys(structure)) is not None:
        return [f"[{key!r}]" for key in keys]
    if (fields := getattr(structure.context, "_fields", None)) is not None:
        return [f".{field}" for field in fields]
    return [f"[{index}]" for index in range(structure.num_children)]


def _describe(structure: Structure) -> str:
    if structure.is_leaf():
        return "a leaf"
    if (keys := _mapping_keys(structure)) is not None:
        return f"a {structure.type.__name__} with keys {keys}"
    if (fields := getattr(structure.context, "_fields", None)) is not None:
        return f"a {structure.context.__name__} with fields {list(fields)}"
    return f"a {structure.type.__name__} of {structure.num_children}"
