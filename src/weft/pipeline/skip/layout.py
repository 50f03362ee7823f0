"""The skips of a model: from which partition to which, and whether their wiring is right.

    partition      0            1            2            3
                 stash a -----------------> pop a ------> pop a        routes[None, "a"] = (0, (2, 3))
                              stash b
                              pop b                                    routes[None, "b"] = (1, (1,)), no copy

A tensor goes straight from its source to each reading partition; those between see nothing of it. A wrong skip would
show as an error in the middle of a step, or as a tensor that is kept for no reader: one walk over the layers finds
every fault, and one error reports them all.

An `nn.Sequential` runs its layers in order, and those below it likewise; a layer that stands twice is found twice. Of
any other module only the order of registration is known, so its skippable layers are taken to run in that order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from torch import nn

from weft.core.errors import SkipWiringError, listed
from weft.pipeline.skip.namespace import Key, Namespace, describe, order_of
from weft.pipeline.skip.skippable import Skippable


class SkippableLayer(NamedTuple):
    """A skippable layer and its place in the model, as in `named_modules`."""

    place: str
    layer: Skippable[..., Any]

    def __str__(self) -> str:
        place = f"layer {self.place!r} " if self.place else ""
        return f"{place}({self.layer.module_cls.__name__})"


def skippables(module: nn.Module | Iterable[nn.Module], place: str = "") -> Iterator[SkippableLayer]:
    """All skippable layers of a module, itself included, or of several modules in a row."""
    children = _children(module)
    if isinstance(module, Skippable):
        yield SkippableLayer(place, cast("Skippable[..., Any]", module))
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


def verify_skippables(module: nn.Module, *, one_to_one: bool = False) -> None:
    """Check that the skips of a model fit together.

    Raises one SkipWiringError (a TypeError) that lists every fault: a layer that declares one name both
    ways; a second stash of a (namespace, name); a pop before any stash; a stash that nobody pops. With
    `one_to_one` a second pop is a fault too; otherwise any number of layers may pop one stash. Skippable
    layers deep inside the model count, in the order in which they run (see `walk`). That all faults are
    reported at once follows torchgpipe.

    Example:
        >>> @weft.skippable(pop=["early"])
        ... class Decode(nn.Module):
        ...     def forward(self, x):
        ...         return x + (yield weft.pop("early"))
        >>> weft.verify_skippables(nn.Sequential(nn.ReLU(), Decode()))
        Traceback (most recent call last):
        weft.errors.SkipWiringError: the skips of this model do not fit together: ...
    """
    faults = list(wiring_faults(skippables(module), one_to_one=one_to_one))
    if faults:
        raise SkipWiringError(
            listed("the skip connections of the model do not fit together:", faults)
            + "\ncorrect the stash= and pop= of @skippable or the order of the layers; if one name belongs "
            "to several connections, set them apart with .isolate(Namespace())"
        )


def wiring_faults(layers: Iterable[SkippableLayer], *, one_to_one: bool = False) -> Iterator[str]:
    """One line for each fault among layers that run in this order."""
    stashed: dict[Key, SkippableLayer] = {}
    popped: dict[Key, SkippableLayer] = {}
    early: list[tuple[Key, SkippableLayer]] = []  # pops that found no stash before them
    for found in layers:
        layer = found.layer
        for name in sorted(layer.stashable_names & layer.poppable_names):
            yield f"{found} declares {name!r} both as stash and as pop, wanted one of them"
        for key in layer.stashable():
            if key in stashed:
                yield f"{found} stashes {describe(key)} again after {stashed[key]}, wanted one stash"
            stashed[key] = found
        for key in layer.poppable():
            if key not in stashed:
                early.append((key, found))
            elif one_to_one and key in popped:
                yield f"{found} pops {describe(key)} again after {popped[key]}, wanted one pop"
            popped[key] = found
    for key, found in early:
        later = f"{stashed[key]} stashes it only later" if key in stashed else "nobody stashes it"
        yield f"{found} pops {describe(key)} before any stash: {later}"
    for key in (key for key in stashed if key not in popped):
        yield f"{stashed[key]} stashes {describe(key)}, which nobody pops"


Route: TypeAlias = tuple[int, tuple[int, ...]]  # source; reading partitions, ascending, each once
Arrival: TypeAlias = tuple[int, Namespace | None, str]  # source, namespace, name


class SkipLayout:
    """The routes of all skips of a model.

    `routes` maps (namespace, name) to (source, readers), `by_ns_name` to (source, last reader);
    ``by_partition[j]`` lists the (source, namespace, name) of all routes that end in partition j, those
    that start there included, in ascending order.
    """

    def __init__(self, partitions: int, routes: Mapping[Key, Route]) -> None:
        self.routes = dict(routes)
        self.by_ns_name = {key: (source, readers[-1]) for key, (source, readers) in routes.items()}
        self.by_partition: list[list[Arrival]] = [[] for _ in range(partitions)]
        by_source = sorted(routes.items(), key=lambda item: (item[1][0], order_of(item[0])))
        for key, (source, readers) in by_source:
            for j in readers:
                self.by_partition[j].append((source, *key))

    def copy_policy(self, j: int) -> Iterator[Arrival]:
        """The (source, namespace, name) to bring to partition j from others, by ascending source."""
        return iter([arrival for arrival in self.by_partition[j] if arrival[0] != j])

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """True if some reader of this skip is in another partition than its stash; false if it is unknown."""
        if (ns, name) not in self.routes:
            return False
        source, readers = self.routes[ns, name]
        return any(j != source for j in readers)

    def __repr__(self) -> str:
        return f"SkipLayout(partitions={len(self.by_partition)}, routes={self.routes!r})"


def inspect_skip_layout(partitions: Sequence[nn.Module | Iterable[nn.Module]]) -> SkipLayout:
    """Find out which skips go from which partition to which.

    A partition is an `nn.Sequential`, a single layer, or an iterable of layers. Raises SkipWiringError with
    every fault if the skips do not fit together, as `verify_skippables` does.
    """
    found = [list(_in_partition(j, partition)) for j, partition in enumerate(partitions)]
    faults = list(wiring_faults(layer for layers in found for layer in layers))
    if faults:
        raise SkipWiringError(listed("the skip connections of the partitions do not fit together:", faults))
    sources = {key: j for j, layers in enumerate(found) for one in layers for key in one.layer.stashable()}
    readers: dict[Key, list[int]] = {key: [] for key in sources}
    for j, layers in enumerate(found):
        for key in {key: None for one in layers for key in one.layer.poppable()}:
            readers[key].append(j)
    return SkipLayout(len(found), {key: (sources[key], tuple(readers[key])) for key in sources})


def _in_partition(j: int, partition: nn.Module | Iterable[nn.Module]) -> Iterator[SkippableLayer]:
    """The skippable layers of one partition; messages name the partition before the place in it."""
    return skippables(partition, f"partition {j}")
