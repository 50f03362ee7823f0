"""Cache from forward to backward: the graph, so that the forward is not run again, and the inputs, so that they need
not be sent again.

    forward  of tasks k1 k2, one batch ──> outputs; their graph is kept, and the inputs of k1 and of k2
    backward of tasks k1 k2, one batch ──> walks that graph, if it is there still
    backward of k1 alone               ──> runs the forward again, with the inputs that are here
    any optimizer step                 ──> no graph is kept any more: they belong to older weights. Inputs stay

A graph serves a batch of exactly the tasks that made it, with equal inputs. Otherwise the forward runs again, with the
same result up to the random numbers that it draws. So this pays for one trainer, for several who keep step with each
other (`weft.experts.task_pool`), or under mini-batches that are committed later.
Held are at most so many bytes, inputs and what autograd saves, for so many seconds. Beyond that, the oldest goes of the
client that holds most.
"""

import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weft.core.segment import Tape, version
from weft.core.validation import Validator
from weft.experts.optimizer_step import strided
from weft.experts.task import Task, split_rows

Name = tuple[str | None, str]
"""A client, and its key."""


@dataclass(frozen=True)
class GraphBudget:
    """``nbytes`` of inputs and saved tensors that may be kept, each for at most ``seconds``.

    What a `torch.autograd.Function` of your own keeps as an attribute of its ``ctx`` is not seen, and not counted: use
    ``ctx.save_for_backward``.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> budget = weft.experts.GraphBudget(nbytes=64 << 20, seconds=10.0)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows, keep_graphs=budget)
    """

    nbytes: int
    seconds: float = 30.0

    def __post_init__(self) -> None:
        with Validator("invalid graph budget") as check:
            check.count("nbytes", self.nbytes)
            check.seconds("seconds", self.seconds)


@dataclass
class ForwardGraph:
    """A forward whose graph is there, to be walked back once."""

    tape: Tape
    leaves: list[Tensor]
    shapes: list[torch.Size]


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Packed:
    """A saved tensor, and how often it was written to by then."""

    tensor: Tensor
    version: int

    @property
    def untouched(self) -> bool:
        """Whether it was not written to since."""
        return version(self.tensor) == self.version

    def unpack(self) -> Tensor:
        """The tensor. Raises what autograd raises where it was written to."""
        if not self.untouched:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {version(self.tensor)}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


@dataclass
class SavedTensors:
    """What one graph saves: a graph keeps tensors alive by their storages, each counted once."""

    ignored: set[int]
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    packed: "list[weakref.ref[_Packed]]" = field(default_factory=list["weakref.ref[_Packed]"])

    @property
    def nbytes(self) -> int:
        """The bytes of all storages."""
        return sum(self.sizes.values())

    @property
    def untouched(self) -> bool:
        """Whether no saved tensor was written to. Autograd checks that itself, but not behind hooks."""
        return all([one is None or one.untouched for one in [ref() for ref in self.packed]])

    @contextmanager
    def counting(self) -> Generator[None]:
        """Surrounds the forward that makes the graph."""

        def pack(tensor: Tensor) -> _Packed:
            for part in strided(tensor):
                storage = part.untyped_storage()
                if storage.data_ptr() not in self.ignored:
                    self.sizes[storage.data_ptr()] = storage.nbytes()
            packed = _Packed(tensor.detach(), version(tensor))  # packing an output itself makes a cycle with its graph
            self.packed.append(weakref.ref(packed))
            return packed

        with saved_tensors_hooks(pack, _Packed.unpack):
            yield


@dataclass(frozen=True, slots=True)
class CachedGraph:
    """A graph to be walked back once, and its seed.

    ``known``: the backward has the very input tensors of the graph, so they need no comparison.
    """

    graph: ForwardGraph
    seed: int
    known: bool


@dataclass(eq=False, slots=True)
class _CacheEntry:
    """What one forward left: a graph until a step or a backward, and the flat inputs of every task, on the host."""

    graph: ForwardGraph | None
    saved: SavedTensors
    seed: int
    inputs: dict[Name, list[Tensor]]
    graph_bytes: int
    input_bytes: int  # until the last of them is gone: they may share memory
    born: float
    principal: str | None  # of its first task

    def leads_to(self, parameters: Sequence[Tensor]) -> bool:
        """Whether just these had a gradient in its forward: layers may have been frozen or freed since."""
        had = [] if self.graph is None else self.graph.tape.segment.parameters
        return [id(each) for each in had] == [id(each) for each in parameters]

    def brought_by(self, tasks: Sequence[Task]) -> bool:
        """Whether these tasks, which are in this order, have the tensors that are here, and not equal ones."""
        pairs = zip(tasks, self.inputs.values(), strict=True)
        return all([mine is its for task, inputs in pairs for mine, its in zip(inputs, task.tensors, strict=False)])


class GraphCache:
    """Graphs and inputs of one expert. Guarded by the expert's lock, but for `inputs`."""

    def __init__(self, budget: GraphBudget | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self.enabled = budget is not None
        self._clock = clock
        self._all: OrderedDict[_CacheEntry, None] = OrderedDict()
        self._graphs: dict[_CacheEntry, None] = {}
        self._found: dict[Name, _CacheEntry] = {}
        self._shares: dict[str | None, OrderedDict[_CacheEntry, None]] = {}  # by principal, oldest first
        self._held: Counter[str | None] = Counter()  # bytes by principal
        self.nbytes = 0
        self.used = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def keeps(self, tasks: Sequence[Task]) -> bool:
        """Whether something of a forward of these tasks is to be kept: all wish it, and have a key to find it by."""
        return self._budget is not None and all([task.keep and task.key is not None for task in tasks])

    def keep(self, tasks: Sequence[Task], graph: ForwardGraph, seed: int, saved: SavedTensors) -> None:
        """Keep a graph that saves so much beside its leaves, and the inputs; the largest holder's oldest make room.

        What is larger than the whole budget is not kept.
        """
        self.forget_old()
        names = _names(tasks)
        for name in names:
            self._leave(name)
        leaves = [leaf.detach() for leaf in graph.leaves]
        size, nbytes = sum([leaf.nbytes for leaf in leaves]), saved.nbytes
        if all([leaf.is_cpu for leaf in leaves]):  # the graph's own, so that nothing is held twice
            inputs = split_rows(leaves, [task.rows for task in tasks])
        else:
            inputs, nbytes = [list(task.tensors[: len(leaves)]) for task in tasks], nbytes + size
        named, principal = dict(zip(names, inputs, strict=True)), tasks[0].principal
        kept = _CacheEntry(graph, saved, seed, named, nbytes, size, self._clock(), principal)
        total = nbytes + size
        if self._budget is None or total > self._budget.nbytes or len(kept.inputs) < len(names):
            return
        while self.nbytes + total > self._budget.nbytes:
            largest = max(self._shares, key=self._held.__getitem__)
            self._drop(next(iter(self._shares[largest])))
        self._shares.setdefault(principal, OrderedDict())[kept] = None
        self._held[principal] += total
        self._all[kept] = self._graphs[kept] = None
        self._found.update(dict.fromkeys(names, kept))
        self.nbytes += total

    def take(self, tasks: Sequence[Task], parameters: Sequence[Tensor]) -> CachedGraph | None:
        """The graph that exactly these tasks made, if it is here as it was, and leads to just these parameters.

        What was theirs is not held any more.

        Who writes into what a graph saves, be it the module itself or another that shares its weights, has the forward
        run again; if that cannot be walked back either, autograd says why.
        """
        self.forget_old()
        names = _names(tasks)
        kept = self._found.get(names[0])
        if kept is None or tuple(kept.inputs) != names:
            for name in names:
                self._leave(name)
            return None
        walk = None
        if kept.graph is not None and kept.leads_to(parameters) and kept.saved.untouched:
            walk = CachedGraph(kept.graph, kept.seed, kept.brought_by(tasks))
        self._drop(kept)
        return walk

    def inputs(self, client: str | None, key: str) -> list[Tensor] | None:
        """The flat inputs of the forward of this client and key, if they are here. For any thread."""
        kept = self._found.get((client, key))
        return None if kept is None else kept.inputs.get((client, key))

    def void(self) -> None:
        """The weights have changed."""
        for kept in list(self._graphs):
            self._void(kept)

    def forget_old(self) -> None:
        """Drop what is older than the budget allows."""
        while self._budget is not None and self._all:
            kept = next(iter(self._all))
            if kept.born > self._clock() - self._budget.seconds:
                return
            self._drop(kept)

    def _leave(self, name: Name) -> None:
        """Remove one task; a graph that it made with others is of no use any more."""
        kept = self._found.pop(name, None)
        if kept is None:
            return
        self._void(kept)
        del kept.inputs[name]
        if not kept.inputs:
            self._drop(kept)

    def _void(self, kept: _CacheEntry) -> None:
        if kept in self._graphs:
            del self._graphs[kept]
            kept.graph = None
            self.nbytes -= kept.graph_bytes
            self._held[kept.principal] -= kept.graph_bytes

    def _drop(self, kept: _CacheEntry) -> None:
        self._void(kept)
        del self._all[kept], self._shares[kept.principal][kept]
        self.nbytes -= kept.input_bytes
        self._held[kept.principal] -= kept.input_bytes
        if not self._shares[kept.principal]:
            del self._shares[kept.principal], self._held[kept.principal]
        for name in kept.inputs:
            del self._found[name]


def _names(tasks: Sequence[Task]) -> tuple[Name, ...]:
    return tuple([(task.client, task.key or "") for task in tasks])
