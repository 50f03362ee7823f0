"""Cache from forward to backward: the graph, so that the forward is not run again, and the inputs, so that they need
not be sent again.

    forward  of tasks k1 k2, one batch ──> outputs; their graph is kept, and the inputs of k1 and of k2
    backward of tasks k1 k2, one batch ──> walks that graph, if it is there still
    backward of k1 alone               ──> runs the forward again, with the inputs that are here
    any optimizer step                 ──> no graph is kept any more: they belong to older weights. Inputs stay

A graph serves a batch of exactly the tasks that made it, with equal inputs; otherwise the forward runs again. So this
pays for one trainer, for several who keep step with each other, or under mini-batches that are committed later. Held
are at most so many bytes for so many seconds; beyond that, the oldest goes of the client that holds most.
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
from weft.experts.task import Task, split_rows
from weft.experts.tensors import strided_parts

Name = tuple[str | None, str]
"""A client, and its key."""


@dataclass(frozen=True)
class GraphBudget:
    """``nbytes`` of inputs and saved tensors that may be kept, each for at most ``seconds``.

    What a `torch.autograd.Function` keeps as an attribute of its ``ctx`` is not seen: use ``ctx.save_for_backward``.

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
    seed: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Packed:
    """A saved tensor, and how often it was written to by then."""

    tensor: Tensor
    version: int

    @property
    def untouched(self) -> bool:
        return version(self.tensor) == self.version

    def unpack(self) -> Tensor:
        """The tensor. Raises what autograd raises where it was written to."""
        if not self.untouched:
            what = f"{self.tensor.type()} {list(self.tensor.shape)}"
            raise RuntimeError(f"{what}, needed for gradient computation, was modified by an inplace operation")
        return self.tensor


@dataclass
class SavedTensors:
    """What one graph saves: a graph keeps tensors alive by their storages, each counted once."""

    ignored: set[int]
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    packed: "list[weakref.ref[_Packed]]" = field(default_factory=list["weakref.ref[_Packed]"])

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def untouched(self) -> bool:
        """Whether no saved tensor was written to. Autograd checks that itself, but not behind hooks."""
        return all([one is None or one.untouched for one in [ref() for ref in self.packed]])

    @contextmanager
    def counting(self) -> Generator[None]:
        """Surrounds the forward that makes the graph."""

        def pack(tensor: Tensor) -> _Packed:
            for part in strided_parts(tensor):
                storage = part.untyped_storage()
                if storage.data_ptr() not in self.ignored:
                    self.sizes[storage.data_ptr()] = storage.nbytes()
            packed = _Packed(tensor.detach(), version(tensor))  # packing an output itself makes a cycle with its graph
            self.packed.append(weakref.ref(packed))
            return packed

        with saved_tensors_hooks(pack, _Packed.unpack):
            yield


@dataclass(eq=False, slots=True)
class _CacheEntry:
    """What one forward left: a graph until a step or a backward, and the flat inputs of every task, on the host."""

    graph: ForwardGraph | None
    saved: SavedTensors
    inputs: dict[Name, list[Tensor]]
    graph_bytes: int
    input_bytes: int  # until the last of them is gone: they may share memory
    born: float
    principal: str | None  # of its first task


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

    def keep(self, tasks: Sequence[Task], graph: ForwardGraph, saved: SavedTensors) -> None:
        """Keep a graph and its inputs, if they are within the budget; the largest holder's oldest make room."""
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
        kept = _CacheEntry(graph, saved, named, nbytes, size, self._clock(), principal)
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

    def take(self, tasks: Sequence[Task], parameters: Sequence[Tensor]) -> tuple[ForwardGraph | None, bool]:
        """The graph that just these tasks made, as it was, if it leads to just these parameters; it is held no more.

        And whether they have its very input tensors, which then need no comparison.
        """
        self.forget_old()
        names = _names(tasks)
        kept = self._found.get(names[0])
        if kept is None or tuple(kept.inputs) != names:
            for name in names:
                self._leave(name)
            return None, False
        graph, pairs = kept.graph, list(zip(tasks, kept.inputs.values(), strict=True))
        self._drop(kept)
        had = [] if graph is None else graph.tape.segment.parameters  # layers may have been frozen or freed since
        if graph is None or [*map(id, had)] != [*map(id, parameters)] or not kept.saved.untouched:
            return None, False
        same = [mine is its for task, mine_all in pairs for mine, its in zip(mine_all, task.tensors, strict=False)]
        return graph, all(same)

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
        if kept := self._found.pop(name, None):
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
