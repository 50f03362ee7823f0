"""Names of skip tensors, and the namespaces that keep equal names apart.

A skip tensor is addressed by a key: (namespace, name). Two copies of one block in a model use the same
names; each copy gets its own `Namespace`, and the names no longer meet. ``None`` is the namespace of
everyone who asked
for none.

Routes are listed in the order of their keys, so keys need a total order. It is the order of creation: the
same program run by two ranks sorts its routes in the same way, though the random half of the namespaces
differs.
"""

import itertools
import uuid
from dataclasses import dataclass, field
from functools import total_ordering
from typing import TypeAlias

_serials = itertools.count(1)


def _next_serial() -> int:
    return next(_serials)


def _random_half() -> int:
    return uuid.uuid4().int


@total_ordering
@dataclass(frozen=True, slots=True, repr=False)
class Namespace:
    """A place for skip names where they meet no others.

    Two namespaces are equal only if one is a copy of the other: by `copy`, `copy.deepcopy` or pickling, also
    across processes. They are hashable and totally ordered by creation; ``None`` comes before all of them.

    Example:
        >>> inner = weft.Namespace()
        >>> inner == weft.Namespace()
        False
    """

    serial: int = field(init=False, default_factory=_next_serial)
    unique: int = field(init=False, default_factory=_random_half)

    def __lt__(self, other: object) -> bool:
        if other is None:
            return False
        if not isinstance(other, Namespace):
            return NotImplemented
        return (self.serial, self.unique) < (other.serial, other.unique)

    def __repr__(self) -> str:
        return f"Namespace#{self.serial}"


Key: TypeAlias = tuple[Namespace | None, str]


def order_of(key: Key) -> tuple[int, int, str]:
    """Sorts keys by namespace (``None`` first), then by name."""
    ns, name = key
    return (0, 0, name) if ns is None else (ns.serial, ns.unique, name)


def describe(key: Key) -> str:
    """A key as it stands in error messages."""
    ns, name = key
    return repr(name) if ns is None else f"{name!r} in {ns!r}"
