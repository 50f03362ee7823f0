"""Finds the skippable layers of a model in the order in which they run.

    Sequential            '0' Stash
    ├── 0 Stash           '1.0' Pop
    └── 1 Sequential  ──> '1.1' Pop     a layer that stands twice is found twice
        ├── 0 Pop
        └── 1 Pop

An `nn.Sequential` runs its layers in order, and those below it likewise. Of any other module only the order
of registration is known, so its skippable layers are taken to run in that order, once each.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from torch import nn

from weft.pipeline.skip.skippable import Skippable


class Found(NamedTuple):
    """A skippable layer and its place in the model, as in `named_modules`."""

    place: str
    layer: Skippable[..., Any]

    def __str__(self) -> str:
        place = f"layer {self.place!r} " if self.place else ""
        return f"{place}({self.layer.module_cls.__name__})"


def skippables(module: nn.Module | Iterable[nn.Module], place: str = "") -> Iterator[Found]:
    """All skippable layers of a module, itself included, or of several modules in a row."""
    children = _children(module)
    if isinstance(module, Skippable):
        yield Found(place, cast("Skippable[..., Any]", module))
    for name, child in children:
        yield from skippables(child, f"{place}.{name}" if place else name)


def _children(module: nn.Module | Iterable[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    if not isinstance(module, nn.Module):
        return [(str(index), layer) for index, layer in enumerate(module)]
    if not isinstance(module, nn.Sequential):
        return module.named_children()
    # Here named_children would leave out the second place of a layer that stands twice.
    everywhere = cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    return [(name, layer) for name, layer in everywhere if name and "." not in name]
