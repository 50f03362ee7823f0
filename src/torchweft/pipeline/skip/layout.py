"""The skips of a model: their source and reading partitions, and a check of their wiring.

    partition      0            1            2            3
                 stash a -----------------> pop a ------> pop a        routes[None, "a"] = (0, (2, 3))
                              stash b
                              pop b                                    routes[None, "b"] = (1, (1,)), no copy

A tensor goes straight from its source to each reading partition, and not through the partitions between. An
`nn.Sequential` runs its layers in order, nested ones included. A layer that occurs twice counts twice. For any other
module only the order of registration is known, so its skippable layers are assumed to run in that order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from torch import nn

from torchweft.core.errors import SkipWiringError, join_faults
from torchweft.pipeline.skip.skippable import Skippable
from torchweft.pipeline.skip.tracker import Key, Namespace, describe

Layers: TypeAlias = nn.Module | Iterable[nn.Module]
Route: TypeAlias = tuple[int, tuple[int, ...]]
"""Source, and the reading partitions in ascending order, each once."""
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
    if isinstance(layers, nn.Sequential):  # named_children() would list a layer that occurs twice only once
        children: Iterable[tuple[Any, nn.Module]] = layers._modules.items()
    else:
        children = layers.named_children() if isinstance(layers, nn.Module) else enumerate(layers)
    for name, child in children:
        yield from skippables(child, f"{place}.{name}" if place else str(name))


def verify_skippables(module: nn.Module, *, one_to_one: bool = False) -> None:
    """Check that the skips of a model fit together, including those of nested layers.

    Raises one SkipWiringError (a TypeError) that lists every fault, as torchgpipe does: a layer that declares one name
    both ways, a second stash of a (namespace, name), a pop before any stash, a stash without a pop. With `one_to_one` a
    second pop is a fault too. Otherwise any number of layers can pop one stash.

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
    early: list[tuple[Key, SkippableLayer]] = []  # pops without a stash before them
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


class SkipLayout:
    """The routes of all skips of a model.

    `routes` maps (namespace, name) to (source, readers), and `by_ns_name` to (source, last reader). ``by_partition[j]``
    lists the (source, namespace, name) of all routes that end in partition j, in ascending order.
    """

    def __init__(self, partitions: int, routes: Mapping[Key, Route]) -> None:
        self.routes = dict(routes)
        self.by_ns_name = {key: (source, readers[-1]) for key, (source, readers) in routes.items()}
        arrivals = [(source, *key) for key, (source, _) in routes.items()]
        arrivals.sort(key=lambda arrival: (arrival[0], arrival[1] is not None, arrival[1] or 0, arrival[2]))
        self.by_partition: list[list[Arrival]] = [
            [(source, ns, name) for source, ns, name in arrivals if j in self.routes[ns, name][1]]
            for j in range(partitions)
        ]

    def copy_policy(self, j: int) -> Iterator[Arrival]:
        """The (source, namespace, name) to bring to partition j from others, by ascending source."""
        return (arrival for arrival in self.by_partition[j] if arrival[0] != j)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Whether a reader of this skip is in another partition than its stash. False for an unknown skip."""
        source, readers = self.routes.get((ns, name), (0, (0,)))
        return any(j != source for j in readers)


def inspect_skip_layout(partitions: Sequence[Layers]) -> SkipLayout:
    """The skips between partitions, each a module or several layers in a row. Raises as `verify_skippables`."""
    blocks = [list(skippables(partition, f"partition {j}")) for j, partition in enumerate(partitions)]
    _check(placed for block in blocks for placed in block)
    sources = {key: j for j, block in enumerate(blocks) for placed in block for key in placed.layer.stashable()}
    readers: dict[Key, dict[int, None]] = {key: {} for key in sources}
    for j, block in enumerate(blocks):
        for key in (key for placed in block for key in placed.layer.poppable()):
            readers[key][j] = None
    return SkipLayout(len(blocks), {key: (source, tuple(readers[key])) for key, source in sources.items()})
