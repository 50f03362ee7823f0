"""The skips of a model: from which partition to which, and whether their wiring is right.

    partition      0            1            2            3
                 stash a -----------------> pop a ------> pop a        routes[None, "a"] = (0, (2, 3))
                              stash b
                              pop b                                    routes[None, "b"] = (1, (1,)), no copy

A tensor goes straight from its source to each reading partition; those between see nothing of it. An `nn.Sequential`
runs its layers in order, and those below it likewise; a layer that stands twice is found twice. Of any other module
only the order of registration is known, so its skippable layers are taken to run in that order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from torch import nn

from weft.core.errors import SkipWiringError, listed
from weft.pipeline.skip.skippable import Skippable
from weft.pipeline.skip.tracker import Key, Namespace, describe

Layers: TypeAlias = nn.Module | Iterable[nn.Module]
Route: TypeAlias = tuple[int, tuple[int, ...]]
"""Source; reading partitions, ascending, each once."""
Arrival: TypeAlias = tuple[int, Namespace | None, str]
"""Source, namespace, name."""


class SkippableLayer(NamedTuple):
    """A skippable layer and its place in the model, as in `named_modules`."""

    place: str
    layer: Skippable[..., Any]

    def __str__(self) -> str:
        return f"layer {self.place!r} ({self.layer.module_cls.__name__})".removeprefix("layer '' ")


def skippables(layers: Layers, place: str = "") -> Iterator[SkippableLayer]:
    """All skippable layers of a module, itself included, or of several modules in a row."""
    if isinstance(layers, Skippable):
        yield SkippableLayer(place, cast("Skippable[..., Any]", layers))
    if isinstance(layers, nn.Sequential):  # whose named_children leave out the second place of a layer
        children: Iterable[tuple[Any, nn.Module]] = layers._modules.items()
    else:
        children = layers.named_children() if isinstance(layers, nn.Module) else enumerate(layers)
    for name, child in children:
        yield from skippables(child, f"{place}.{name}" if place else str(name))


def verify_skippables(module: nn.Module, *, one_to_one: bool = False) -> None:
    """Check that the skips of a model fit together, those of layers deep inside of it too.

    Raises one SkipWiringError (a TypeError) that lists every fault, as torchgpipe does: a layer that declares one name
    both ways; a second stash of a (namespace, name); a pop before any stash; a stash that nobody pops. With
    `one_to_one` a second pop is a fault too; otherwise any number of layers may pop one stash.

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
    """Raise SkipWiringError with every fault among layers that run in this order."""
    faults: list[str] = []
    stashed: dict[Key, SkippableLayer] = {}
    popped: dict[Key, SkippableLayer] = {}
    early: list[tuple[Key, SkippableLayer]] = []  # pops that found no stash before them
    for found in layers:
        layer = found.layer
        for name in sorted(layer.stashable_names & layer.poppable_names):
            faults.append(f"{found} declares {name!r} both as stash and as pop, wanted one of them")
        for key in layer.stashable():
            if key in stashed:
                faults.append(f"{found} stashes {describe(key)} again after {stashed[key]}, wanted one stash")
            stashed[key] = found
        for key in layer.poppable():
            if key not in stashed:
                early.append((key, found))
            elif one_to_one and key in popped:
                faults.append(f"{found} pops {describe(key)} again after {popped[key]}, wanted one pop")
            popped[key] = found
    for key, found in early:
        later = f"{stashed[key]} stashes it only later" if key in stashed else "nobody stashes it"
        faults.append(f"{found} pops {describe(key)} before any stash: {later}")
    unread = (key for key in stashed if key not in popped)
    faults += [f"{stashed[key]} stashes {describe(key)}, which nobody pops" for key in unread]
    if faults:
        raise SkipWiringError(
            listed("the skip connections of the model do not fit together:", faults)
            + "\ncorrect the stash= and pop= of @skippable or the order of the layers; if one name belongs "
            "to several connections, set them apart with .isolate(Namespace())"
        )


class SkipLayout:
    """The routes of all skips of a model.

    `routes` maps (namespace, name) to (source, readers), `by_ns_name` to (source, last reader); ``by_partition[j]``
    lists the (source, namespace, name) of all routes that end in partition j, in ascending order.
    """

    def __init__(self, partitions: int, routes: Mapping[Key, Route]) -> None:
        self.routes = dict(routes)
        self.by_ns_name = {key: (source, readers[-1]) for key, (source, readers) in routes.items()}
        arrivals = [(source, *key) for key, (source, _) in routes.items()]
        arrivals.sort(key=lambda each: (each[0], each[1] is not None, each[1] or 0, each[2]))
        self.by_partition: list[list[Arrival]] = [
            [(source, ns, name) for source, ns, name in arrivals if j in self.routes[ns, name][1]]
            for j in range(partitions)
        ]

    def copy_policy(self, j: int) -> Iterator[Arrival]:
        """The (source, namespace, name) to bring to partition j from others, by ascending source."""
        return (arrival for arrival in self.by_partition[j] if arrival[0] != j)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Whether some reader of this skip is in another partition than its stash; False if it is unknown."""
        source, readers = self.routes.get((ns, name), (0, (0,)))
        return any(j != source for j in readers)


def inspect_skip_layout(partitions: Sequence[Layers]) -> SkipLayout:
    """The skips that go from partition to partition (a module, or layers in a row). Raises as `verify_skippables`."""
    found = [list(skippables(partition, f"partition {j}")) for j, partition in enumerate(partitions)]
    _check(each for layers in found for each in layers)
    sources = {key: j for j, layers in enumerate(found) for each in layers for key in each.layer.stashable()}
    readers: dict[Key, dict[int, None]] = {key: {} for key in sources}
    for j, layers in enumerate(found):
        for key in (key for each in layers for key in each.layer.poppable()):
            readers[key][j] = None
    return SkipLayout(len(found), {key: (source, tuple(readers[key])) for key, source in sources.items()})
