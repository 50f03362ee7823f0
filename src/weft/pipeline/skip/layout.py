"""From where to where the skips of a partitioned model go.

    partition      0            1            2            3
                 stash a ─────────────────> pop a ──────> pop a        routes[None, "a"] = (0, (2, 3))
                              stash b
                              pop b                                    routes[None, "b"] = (1, (1,)), no copy

A tensor goes straight from its source to each reading partition; those between see nothing of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import nn

from weft.core.errors import SkipWiringError, listed
from weft.pipeline.skip.namespace import Key, Namespace, order_of
from weft.pipeline.skip.verify import wiring_faults
from weft.pipeline.skip.walk import Found, skippables

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


def _in_partition(j: int, partition: nn.Module | Iterable[nn.Module]) -> Iterator[Found]:
    """The skippable layers of one partition; messages name the partition before the place in it."""
    return skippables(partition, f"partition {j}")
