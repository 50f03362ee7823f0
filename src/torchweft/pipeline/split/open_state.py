"""Attributes of modules that the code between blocks reads: part of the key by which a program is found.

A program that does not fit is noticed anyway, because each step compares the calls of forward() with it. So the key
only has to be cheap, and to tell apart the programs between which a model changes often: those of flags and numbers.
"""

from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

PLAIN: tuple[type[Any], ...] = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.Size, slice, range),
)
"""Types that are compared by value, and that a block can return together with tensors."""

_PLAIN = frozenset({*PLAIN} - {slice})  # a slice cannot be hashed before Python 3.12
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


class OpenState:
    """The attributes that were read between blocks so far."""

    def __init__(self) -> None:
        # By the id() of a module's table of attributes, and a name in it. The table is kept, so its id is not reused.
        self._places: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}

    @contextmanager
    def watching(self, model: nn.Module, is_open: Callable[[], bool]) -> Generator[None]:
        """Note every attribute of the model's modules that is read inside, while `is_open` is true."""
        known = {id(module) for module in model.modules()}

        def reader(read: Callable[..., Any]) -> Callable[..., Any]:
            def watched(module: Any, name: str) -> Any:
                value = read(module, name)
                if name not in _OF_MODULES and name[:2] != "__" and is_open() and id(module) in known:
                    table = cast("dict[str, Any]", vars(module))
                    self._places.setdefault((id(table), name), (table, name))
                return value

            return watched

        kinds = cast("set[Any]", {type(module) for module in model.modules()})
        own: dict[Any, Any] = {kind: vars(kind).get("__getattribute__") for kind in kinds}
        # All readers are made before any class changes. Otherwise a subclass would wrap the reader of its base class.
        readers = {kind: reader(kind.__getattribute__) for kind in kinds}
        try:
            for kind, read in readers.items():
                kind.__getattribute__ = read
            yield
        finally:
            for kind, read in own.items():
                if read is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = read

    def key(self) -> tuple[Hashable, ...]:
        """The present values of those attributes that are flags, numbers and the like."""
        # With the type, because True == 1 == 1.0.
        values = [table.get(name) for table, name in self._places.values()]
        kinds = [cast("type[Any]", type(x)) for x in values]
        return tuple([(kind, x if kind in _PLAIN else None) for kind, x in zip(kinds, values, strict=True)])
