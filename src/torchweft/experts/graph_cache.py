"""Cache from forward to backward: the graph, so that the forward is not run again, and the inputs, so that they are not
sent again.

    forward  of tasks k1 k2, one batch ──> outputs; their graph is kept, and the inputs of k1 and of k2
    backward of tasks k1 k2, one batch ──> uses that graph, if it is still there
    backward of k1 alone               ──> runs the forward again, with the kept inputs
    any optimizer step                 ──> drops all graphs, because they belong to older weights. Inputs stay

A graph serves a batch of exactly the tasks that made it, with equal inputs. So the cache pays off for one trainer, for
several that run in step, or for mini-batches that are committed later.
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

from torchweft.core.segment import Tape, version
from torchweft.core.validation import Validator
from torchweft.experts.task import Task, split_rows

Name = tuple[str | None, str]  # A client, and its key


@dataclass(frozen=True)
class GraphBudget:
    """The most ``nbytes`` of kept inputs and saved tensors, each for at most ``seconds``.

    Attributes on the ``ctx`` of a `torch.autograd.Function` are not counted: use ``ctx.save_for_backward``.

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


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold its memory: itself, or the parts of a COO tensor. Empty for other layouts."""
    if tensor.layout is torch.sparse_coo:  # which does not report its size itself
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout is torch.strided else []


@dataclass
class ForwardGraph:
    """A forward with its graph, for one backward."""

    tape: Tape
    leaves: list[Tensor]
    shapes: list[torch.Size]
    seed: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Packed:
    tensor: Tensor
    version: int

    @property
    def untouched(self) -> bool:
        return version(self.tensor) == self.version

    def unpack(self) -> Tensor:
        if not self.untouched:
            name = f"{self.tensor.type()} {list(self.tensor.shape)}"
            raise RuntimeError(f"{name}, needed for gradient computation, was modified by an inplace operation")
        return self.tensor


@dataclass
class SavedTensors:
    """The tensors that one graph saves, by storage, because that is the memory that stays alive."""

    # ``ignored``: addresses of storages that are alive anyway.
    ignored: set[int]
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    packed: "list[weakref.ref[_Packed]]" = field(default_factory=list["weakref.ref[_Packed]"])

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def untouched(self) -> bool:
        # Autograd does not check versions of hooked tensors itself.
        return all([packed is None or packed.untouched for packed in [ref() for ref in self.packed]])

    @contextmanager
    def count_tensors(self) -> Generator[None]:
        def pack(tensor: Tensor) -> _Packed:
            for part in strided_parts(tensor):
                storage = part.untyped_storage()
                if storage.data_ptr() not in self.ignored:
                    self.sizes[storage.data_ptr()] = storage.nbytes()
            # Detached, because a saved output would hold its own graph: a cycle that garbage collection cannot see.
            packed = _Packed(tensor.detach(), version(tensor))
            self.packed.append(weakref.ref(packed))
            return packed

        with saved_tensors_hooks(pack, _Packed.unpack):
            yield


@dataclass(eq=False, slots=True)
class _CacheEntry:
    """The rest of one forward: a graph until a step or a backward, and the flat inputs of every task, on the host."""

    graph: ForwardGraph | None
    saved: SavedTensors
    inputs: dict[Name, list[Tensor]]
    graph_bytes: int
    input_bytes: int  # until the last of them is gone, because they can share memory
    born: float
    principal: str | None  # of its first task

    def drop_graph(self) -> None:
        self.graph = None


class GraphCache:
    """Graphs and inputs of one expert. Guarded by the expert's lock, except `find_inputs`."""

    def __init__(self, budget: GraphBudget | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self.enabled = budget is not None
        self._clock = clock
        self._all: OrderedDict[_CacheEntry, None] = OrderedDict()  # oldest first
        self._graphs: dict[_CacheEntry, None] = {}  # entries that still have a graph
        self._by_name: dict[Name, _CacheEntry] = {}
        self._shares: dict[str | None, OrderedDict[_CacheEntry, None]] = {}  # by principal, oldest first
        self._held_bytes: Counter[str | None] = Counter()  # by principal
        self.nbytes, self.used = 0, 0

    def __len__(self) -> int:
        return len(self._graphs)

    def is_wanted(self, tasks: Sequence[Task]) -> bool:
        return self._budget is not None and all([task.keep and task.key is not None for task in tasks])

    def keep_forward(self, tasks: Sequence[Task], graph: ForwardGraph, saved: SavedTensors) -> None:
        self.drop_expired()
        names = _task_names(tasks)
        for name in names:
            self._remove_task(name)
        leaves = [leaf.detach() for leaf in graph.leaves]
        size, nbytes = sum([leaf.nbytes for leaf in leaves]), saved.nbytes
        if all([leaf.is_cpu for leaf in leaves]):  # views of the graph's own inputs, so that nothing is held twice
            inputs = split_rows(leaves, [task.rows for task in tasks])
        else:
            inputs, nbytes = [list(task.tensors[: len(leaves)]) for task in tasks], nbytes + size
        named, principal = dict(zip(names, inputs, strict=True)), tasks[0].principal
        entry = _CacheEntry(graph, saved, named, nbytes, size, self._clock(), principal)
        total = nbytes + size
        # Two tasks of one name in a batch leave fewer inputs than tasks. Neither could be told from the other later.
        if self._budget is None or total > self._budget.nbytes or len(entry.inputs) < len(names):
            return
        # The oldest entry of the whole cache would let one client push out the graphs of all others.
        while self.nbytes + total > self._budget.nbytes:
            largest = max(self._shares, key=self._held_bytes.__getitem__)
            self._drop(next(iter(self._shares[largest])))
        self._shares.setdefault(principal, OrderedDict())[entry] = None
        self._held_bytes[principal] += total
        self._all[entry] = self._graphs[entry] = None
        self._by_name.update(dict.fromkeys(names, entry))
        self.nbytes += total

    def pop_graph(self, tasks: Sequence[Task], parameters: Sequence[Tensor]) -> tuple[ForwardGraph | None, bool]:
        """Remove and return the graph that exactly these tasks made, if it is intact and leads to these parameters."""
        # Also whether the tasks hold the very input tensors of that forward, which then need no comparison.
        self.drop_expired()
        names = _task_names(tasks)
        entry = self._by_name.get(names[0])
        if entry is None or tuple(entry.inputs) != names:
            for name in names:
                self._remove_task(name)
            return None, False
        graph, pairs = entry.graph, list(zip(tasks, entry.inputs.values(), strict=True))
        self._drop(entry)
        # Layers can have been frozen or unfrozen since, and another expert can have stepped shared weights.
        reached = [] if graph is None else graph.tape.segment.parameters
        if graph is None or [*map(id, reached)] != [*map(id, parameters)] or not entry.saved.untouched:
            return None, False
        return graph, all([x is kept for task, inputs in pairs for kept, x in zip(inputs, task.tensors, strict=False)])

    def count_use(self) -> None:
        self.used += 1

    def find_inputs(self, client: str | None, key: str) -> list[Tensor] | None:
        # For any thread: each of the two look-ups is atomic under the GIL, and inputs are never written to.
        entry = self._by_name.get((client, key))
        return None if entry is None else entry.inputs.get((client, key))

    def void_graphs(self) -> None:
        for entry in list(self._graphs):
            self._void_graph(entry)

    def drop_expired(self) -> None:
        while self._budget is not None and self._all:
            oldest = next(iter(self._all))
            if oldest.born > self._clock() - self._budget.seconds:
                return
            self._drop(oldest)

    def _remove_task(self, name: Name) -> None:
        # A graph that it made with others cannot be used any more.
        if entry := self._by_name.pop(name, None):
            self._void_graph(entry)
            del entry.inputs[name]
            if not entry.inputs:
                self._drop(entry)

    def _void_graph(self, entry: _CacheEntry) -> None:
        if entry in self._graphs:
            del self._graphs[entry]
            entry.drop_graph()
            self.nbytes -= entry.graph_bytes
            self._held_bytes[entry.principal] -= entry.graph_bytes

    def _drop(self, entry: _CacheEntry) -> None:
        self._void_graph(entry)
        del self._all[entry], self._shares[entry.principal][entry]
        self.nbytes -= entry.input_bytes
        self._held_bytes[entry.principal] -= entry.input_bytes
        if not self._shares[entry.principal]:
            del self._shares[entry.principal], self._held_bytes[entry.principal]
        for name in entry.inputs:
            del self._by_name[name]


def _task_names(tasks: Sequence[Task]) -> tuple[Name, ...]:
    return tuple([(task.client, task.key or "") for task in tasks])
