"""Snapshot of everything that the guards of a cell visited, which tells in microseconds that nothing has changed.

    walk of `CellGuards`      visits objects, and derives a key from their values      exact, slow
    snapshot                  compares the identities of what the walk visited         conservative, fast

If every container holds the same objects under the same names, a new walk would visit the same objects in the same
order. Those without containers are immutable, except tensors, whose form is compared too. So the key would be equal.
If anything differs, even by an object that is equal but not the same, the caller walks again. The snapshot must
therefore notice every change, but can report one where there is none.

Tensors are held weakly, because a plan must not keep them alive. Their identities are compared, so the caller must drop
the snapshot as soon as one of them is collected: another object could get its address.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from types import CellType, FunctionType
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

_ABSENT = object()
_EMPTY = object()  # stands for the content of a closure variable that is not bound


@runtime_checkable
class VisitedObjects(Protocol):
    """The results of a walk that a snapshot reads; see `CellGuards`."""

    key: list[Hashable]
    tensors: list[Tensor]
    held: list[object]
    functions: list[FunctionType]
    global_names: list[tuple[dict[str, Any], str]]


class GuardSnapshot:
    """The identities of what a walk visited.

    Args:
        visited: the walk.
        containers: dicts, lists and sets that it entered, and dicts of classes.
        objects: those whose class could be assigned.
        kinds: classes that it entered.
    """

    def __init__(
        self,
        cell: Callable[..., Any],
        visited: VisitedObjects,
        containers: Sequence[Any],
        objects: Sequence[object],
        kinds: Sequence[type],
    ) -> None:
        self.key = visited.key
        self.cell = cell
        self._tensors = [weakref.ref(tensor) for tensor in visited.tensors]
        # Views are live: they show later changes.
        self._names = [each.keys() for each in containers if hasattr(each, "keys")]
        self._values = [each.values() if hasattr(each, "values") else each for each in containers]
        self._objects, self._kinds = objects, kinds
        self._functions = visited.functions
        self._closures = [closure for function in self._functions for closure in function.__closure__ or ()]
        self._global_names = visited.global_names
        # Objects that are compared by address must live as long as this, except tensors.
        compared = [*chain.from_iterable(self._names), *chain.from_iterable(self._values)]
        compared += [_content_of(closure) for closure in self._closures]
        compared += [inside.get(name, _ABSENT) for inside, name in self._global_names]
        compared += [*chain.from_iterable(map(_parts_of, self._functions))]
        compared += [*map(type, objects), *(kind.__mro__ for kind in kinds)]
        self._held = [*visited.held, *(value for value in compared if not isinstance(value, Tensor))]
        self._expected = self._read(visited.tensors)

    def unchanged_tensors(self) -> list[Tensor] | None:
        """The tensors of the walk if a new walk would give the same key, else None."""
        tensors = [cast(Tensor, reference()) for reference in self._tensors]
        try:
            return tensors if self._read(tensors) == self._expected else None
        except (RuntimeError, AttributeError):  # another thread changed a container, or a tensor is gone
            return None

    def _read(self, tensors: Sequence[Tensor]) -> list[Any]:
        # Addresses, not values: comparing two tensors would compare their elements.
        return [
            [*map(id, chain.from_iterable(self._names))],
            [*map(id, chain.from_iterable(self._values))],
            [(tensor.requires_grad, tensor.is_leaf, tensor.shape, tensor.dtype) for tensor in tensors],
            [*map(id, map(type, self._objects))],
            [(id(kind.__mro__), hasattr(kind, "steps_in_backward")) for kind in self._kinds],
            [id(_content_of(closure)) for closure in self._closures],
            [*map(id, chain.from_iterable(map(_parts_of, self._functions)))],
            [id(inside.get(name, _ABSENT)) for inside, name in self._global_names],
        ]


def _content_of(closure: CellType) -> object:
    try:
        return closure.cell_contents
    except ValueError:
        return _EMPTY


def _parts_of(function: FunctionType) -> tuple[object, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__
