"""Graphs of forwards that their backward may use instead of running the forward again.

    forward  of tasks k1 k2, one batch ──> outputs, and the graph, kept under (k1, k2)
    backward of tasks k1 k2, one batch ──> walks that graph, if it is there still
    any optimizer step                 ──> no graph is kept any more: they belong to older weights

A graph serves a batch of exactly the tasks that made it, with equal inputs. Otherwise the forward runs again, with the
same result up to the random numbers that it draws. So this pays for one trainer, for several who keep step with each
other (`weft.experts.linger`), or under mini-batches that are committed later.
Held are at most so many bytes, counted as what autograd saves, for so many seconds.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weft.core.errors import UsageError
from weft.experts.runner import Graph
from weft.experts.task import Task

Names = tuple[tuple[str | None, str], ...]


@dataclass(frozen=True)
class GraphBudget:
    """``nbytes`` of saved tensors that may be kept, each for at most ``seconds``."""

    nbytes: int
    seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.nbytes < 1 or not self.seconds > 0:
            raise UsageError(f"a graph budget wants nbytes >= 1 and seconds > 0, but got {self}")


@dataclass
class Saved:
    """What one graph saves: a graph keeps tensors alive by their storages, each counted once."""

    ignored: set[int]
    sizes: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def nbytes(self) -> int:
        """The bytes of all storages."""
        return sum(self.sizes.values())

    @contextmanager
    def counting(self) -> Generator[None]:
        """Surrounds the forward that makes the graph."""

        def pack(tensor: Tensor) -> Tensor:
            self.add(tensor)
            return tensor.detach()  # packing an output itself would make a cycle with its graph

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.ignored:
            self.sizes[storage.data_ptr()] = storage.nbytes()


@dataclass
class _Kept:
    graph: Graph
    seed: int
    nbytes: int
    born: float


class KeptGraphs:
    """The graphs of one expert. Belongs to whoever holds the expert's lock."""

    def __init__(self, budget: GraphBudget | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._kept: OrderedDict[Names, _Kept] = OrderedDict()
        self.nbytes = 0
        self.used = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keeps(self, tasks: Sequence[Task]) -> bool:
        """Whether the graph of a forward of these tasks is to be kept: all of them have a key to find it by."""
        return self._budget is not None and all(task.key is not None for task in tasks)

    def keep(self, tasks: Sequence[Task], graph: Graph, seed: int, nbytes: int) -> None:
        """Keep a graph, at the cost of the oldest ones; one that is larger than the whole budget is not kept."""
        self.forget_old()
        names = _names(tasks)
        self._drop(names)
        if self._budget is None or nbytes > self._budget.nbytes:
            return
        while self.nbytes + nbytes > self._budget.nbytes:
            self._drop(next(iter(self._kept)))
        self._kept[names] = _Kept(graph, seed, nbytes, self._clock())
        self.nbytes += nbytes

    def take(self, tasks: Sequence[Task], inputs: Sequence[Tensor]) -> tuple[Graph, int] | None:
        """The graph that exactly these tasks made with these inputs, and its seed. It can be walked once."""
        self.forget_old()
        if not self._kept or not self.keeps(tasks):
            return None
        names = _names(tasks)
        kept = self._kept.get(names)
        self._drop(names)
        if kept is None or not all(torch.equal(a, b) for a, b in zip(kept.graph.leaves, inputs, strict=True)):
            return None
        self.used += 1
        return kept.graph, kept.seed

    def void(self) -> None:
        """The weights have changed."""
        self._kept.clear()
        self.nbytes = 0

    def forget_old(self) -> None:
        """Drop what is older than the budget allows."""
        while self._budget is not None and self._kept:
            names, kept = next(iter(self._kept.items()))
            if kept.born > self._clock() - self._budget.seconds:
                return
            self._drop(names)

    def _drop(self, names: Names) -> None:
        kept = self._kept.pop(names, None)
        if kept is not None:
            self.nbytes -= kept.nbytes


def _names(tasks: Sequence[Task]) -> Names:
    return tuple((task.client, task.key or "") for task in tasks)
