"""The skips of a model: their source and reading partitions, and a check of their wiring.

    partition      0            1            2            3
                 stash a -----------------> pop a ------> pop a        routes[None, "a"] = (0, (2, 3))
                              stash b
                              pop b                                    routes[None, "b"] = (1, (1,)), no copy

A tensor goes straight from its source to each reading partition, and not through the partitions between. An
`nn.Sequential` runs its layers in order, nested ones included. A layer that occurs twice counts twice. For any other
module only the order of registration is known, so its skippable layers are assumed to run in that order.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from torch import nn

from torchweft.core.errors import SkipWiringError, join_faults
from torchweft.pipeline.skip.skippable import Skippable
from torchweft.pipeline.skip.tracker import Key, describe

Layers: TypeAlias = nn.Module | Iterable[nn.Module]
Route: TypeAlias = tuple[int, tuple[int, ...]]  # source, and the reading partitions in ascending order, each once


class SkippableLayer(NamedTuple):
    place: str
    layer: Skippable[..., Any]

    def __str__(self) -> str:
        return f"layer {self.place!r} ({self.layer.module_cls.__name__})".removeprefix("layer '' ")


def skippables(layers: Layers, place: str = "") -> Iterator[SkippableLayer]:
    """All skippable layers of a module, itself included, or of several modules in a row."""
    if isinstance(layers, Skippable):
        yield SkippableLayer(place, cast("Skippable[..., Any]", layers))
    # named_children() would list a layer that occurs twice only once.
    if isinstance(layers, nn.Sequential):
        children: Iterable[tuple[Any, nn.Module]] = layers._modules.items()
    else:
        children = layers.named_children() if isinstance(layers, nn.Module) else enumerate(layers)
    for name, child in children:
        yield from skippables(child, f"{place}.{name}" if place else str(name))


def verify_skippables(module: nn.Module, *, one_to_one: bool = False) -> None:
    """Check that the skips of a model fit together, including those of nested layers.

    Raises one SkipWiringError (a TypeError) that lists every fault. With `one_to_one` a second pop is a fault too.

    Example:
        >>> @weft.skippable(pop=["early"])
        ... class Decode(nn.Module):
        ...     def forward(self, x):
        ...         return x + (yield weft.pop("early"))
        >>> weft.verify_skippables(nn.Sequential(nn.ReLU(), Decode()))
        Traceback (most recent call last):
        weft.errors.SkipWiringError: the skips of this model do not fit together: ...
    """
    _check(skippables(module), one_to_one=one_to_one)


def _check(layers: Iterable[SkippableLayer], *, one_to_one: bool = False) -> None:
    faults: list[str] = []
    stashed: dict[Key, SkippableLayer] = {}
    popped: dict[Key, SkippableLayer] = {}
    # Reported after the walk, because only then is it known whether a later layer stashes the name.
    early: list[tuple[Key, SkippableLayer]] = []
    for placed in layers:
        layer = placed.layer
        for name in sorted(layer.stashable_names & layer.poppable_names):
            faults.append(f"{placed} declares {name!r} both as stash and as pop, but it can only be one of them")
        for key in layer.stashable():
            if key in stashed:
                faults.append(f"{placed} stashes {describe(key)} again after {stashed[key]}, but one stash is allowed")
            stashed[key] = placed
        for key in layer.poppable():
            if key not in stashed:
                early.append((key, placed))
            elif one_to_one and key in popped:
                faults.append(f"{placed} pops {describe(key)} again after {popped[key]}, but one pop is allowed")
            popped[key] = placed
    for key, placed in early:
        later = f"{stashed[key]} stashes it only later" if key in stashed else "no layer stashes it"
        faults.append(f"{placed} pops {describe(key)} before any stash: {later}")
    unread = (key for key in stashed if key not in popped)
    faults += [f"{stashed[key]} stashes {describe(key)}, which no layer pops" for key in unread]
    if faults:
        raise SkipWiringError(
            join_faults("the skip connections of the model do not fit together:", faults)
            + "\ncorrect the stash= and pop= of @skippable or the order of the layers; if one name belongs "
            "to several connections, separate them with .isolate(Namespace())"
        )


class SkipLayout(NamedTuple):
    """The routes of all skips of a model: (source, readers) by (namespace, name)."""

    routes: dict[Key, Route]


def inspect_skip_layout(partitions: Sequence[Layers]) -> SkipLayout:
    """The skips between partitions, each a module or several layers in a row. Raises as `verify_skippables`."""
    blocks = [list(skippables(partition, f"partition {j}")) for j, partition in enumerate(partitions)]
    _check(placed for block in blocks for placed in block)
    sources = {key: j for j, block in enumerate(blocks) for placed in block for key in placed.layer.stashable()}
    readers: dict[Key, dict[int, None]] = {key: {} for key in sources}
    for j, block in enumerate(blocks):
        for key in (key for placed in block for key in placed.layer.poppable()):
            readers[key][j] = None
    return SkipLayout({key: (source, tuple(readers[key])) for key, source in sources.items()})
