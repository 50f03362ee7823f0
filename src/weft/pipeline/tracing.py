"""A recorder of what ran when, and of the bytes that were alive for it. It changes nothing of a run.

Its memory curve counts bytes of *storages*, each once, however many tensors look into it: values on their way between
stages, inputs and saved tensors of every tape. A storage belongs to the stage that made it. Parameters, and what the
caller holds anyway, do not count.

    bytes |        ____            F of micro-batch i on stage s: + what its graph saves
          |   ____|    |____       B of the same:                 - the same
          |__|              |__    a value sent: + its bytes, until its readers (and its source) need it no more
"""

import copy
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weft.core.errors import InPlaceError
from weft.core.pytree import flatten
from weft.pipeline.routing import Address
from weft.pipeline.schedule import Action


@runtime_checkable
class Observer(Protocol):
    """What a pipe tells of a run to: what runs when, and what stays alive for it; see `Recorder`."""

    def doing(self, kind: str, action: Action) -> AbstractContextManager[None]:
        """Surrounds the work of an action, without its waiting; kind "R" is a recomputation."""
        ...

    def sent(self, source: int, address: Address, micro_batch: int, value: Any) -> None:
        """A value of stage `source` is on its way to a reader, who reads it with that micro-batch."""
        ...

    def released(self, action: Action) -> None:
        """The tape of the action's stage and micro-batch is gone."""
        ...


@dataclass(frozen=True)
class ActionEvent:
    """One piece of work: kind F, B, I, W, or R for a recomputation; times in seconds of `time.perf_counter`."""

    kind: str
    action: Action
    thread: str
    start: float
    end: float


@dataclass
class _Storage:
    """One storage that is alive: how many tapes hold it, its bytes, and the stage that made it."""

    bytes: int
    owner: int
    holders: int = 0


def storages(leaves: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Address and bytes of the storages of all tensors that are not empty."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()).nbytes():
            yield storage.data_ptr(), storage.nbytes()


def seeing_saved(note: Callable[[Tensor], None]) -> saved_tensors_hooks:
    """A context in which `note` is told of every tensor that autograd saves for backward.

    Where hooks are in place, autograd does not look whether a saved tensor was written to since. So it is done here, or
    a watched run would get a wrong gradient in silence: backward raises InPlaceError.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        note(tensor)
        return tensor.detach(), tensor._version  # packing an output itself would make a cycle with its graph

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if tensor._version != version:
            raise InPlaceError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, but was saved "
                f"at version {version}; use the out-of-place form of the operation that wrote to it"
            )
        return tensor

    return saved_tensors_hooks(pack, unpack)


_Tapes = dict[tuple[int, int], list[int]]
"""The storages that the tape of each stage and micro-batch holds, by address."""


class Recorder:
    """Records the events of the runs that it watches, and, with `memory`, the bytes that stay alive for backward, for
    some microseconds per tensor that autograd saves.

    Times are the host's: on a GPU, the time to launch, not to run.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), chunks=2, devices=["cpu", "cpu"])
        >>> recorder = weft.Recorder()
        >>> with pipe.observed_by(recorder):
        ...     pipe(torch.randn(4, 2)).sum().backward()
        >>> len(recorder.events)  # forward and backward of 2 stages and 2 micro-batches
        8
    """

    def __init__(self, *, memory: bool = False) -> None:
        self.events: list[ActionEvent] = []
        self.bytes: list[tuple[float, int]] = []
        self.stage_bytes: dict[int, list[tuple[float, int]]] = {}
        self._memory = memory
        self._lock = threading.Lock()
        self._ignored: set[int] = set()
        self._alive: dict[int, _Storage] = {}  # by address
        self._totals: dict[int, int] = {}  # bytes alive by the stage that made them
        self._tapes: _Tapes = {}
        self._gone: SimpleQueue[_Tapes] = SimpleQueue()

    _draw: ClassVar[Callable[["Recorder"], str] | None] = None

    @classmethod
    def show_by(cls, draw: Callable[["Recorder"], str]) -> None:
        """Set the function that draws recorders in notebooks. `weft.report` does so, because it imports this module."""
        Recorder._draw = draw

    def _repr_html_(self) -> str | None:
        """The timeline, and the memory if it was recorded, for notebooks."""
        return None if Recorder._draw is None else Recorder._draw(self)

    def one_step(self) -> "Recorder":
        """A watcher of one step alone, that records here. What the step still holds when it is dropped, because it
        failed or nobody wanted its backward, is released then."""
        watcher = copy.copy(self)
        watcher._tapes = {}
        # The end may come at any moment, also while this thread has the lock: so it is only noted.
        weakref.finalize(watcher, self._gone.put, watcher._tapes).atexit = False
        return watcher

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of these, which live anyway: parameters, the mini-batch."""
        self._ignored.update(address for address, _ in storages(tensors))

    @contextmanager
    def doing(self, kind: str, action: Action) -> Generator[None]:
        """Surrounds the work of one action; called by the run."""
        held: list[int] = []
        counts = self._memory and kind in "FR"
        start = time.perf_counter()
        try:
            with seeing_saved(lambda x: self._hold(action.stage, [x], held)) if counts else nullcontext():
                yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self.events.append(ActionEvent(kind, action, threading.current_thread().name, start, end))
                self._tapes.setdefault((action.stage, action.micro_batch), []).extend(held)
            self._sample(end)

    def sent(self, source: int, address: Address, micro_batch: int, value: Any) -> None:
        """A value of `source` waits for its reader's `micro_batch`, and is an input of that tape from then on."""
        if self._memory and address.reader >= 0:
            held: list[int] = []
            self._hold(source, flatten(value)[0], held)
            with self._lock:
                self._tapes.setdefault((address.reader, micro_batch), []).extend(held)

    def released(self, action: Action) -> None:
        """The tape of this stage and micro-batch, with its graph and inputs, is gone."""
        with self._lock:
            self._release(self._tapes.pop((action.stage, action.micro_batch), []))
        self._sample(time.perf_counter())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at one time."""
        return max((count for _, count in self.bytes), default=0)

    def _release(self, held: Iterable[int]) -> None:
        for address in held:
            storage = self._alive[address]
            storage.holders -= 1
            if not storage.holders:
                self._totals[storage.owner] -= self._alive.pop(address).bytes

    def _forget_dropped(self) -> None:
        while not self._gone.empty():
            for held in self._gone.get().values():
                self._release(held)

    def _hold(self, stage: int, leaves: Iterable[Any], held: list[int]) -> None:
        with self._lock:
            self._forget_dropped()
            for address, size in storages(leaves):
                if address in self._ignored:
                    continue
                if address not in self._alive:  # a reader that saves its input does not own it
                    self._alive[address] = _Storage(size, stage)
                    self._totals[stage] = self._totals.get(stage, 0) + size
                self._alive[address].holders += 1
                held.append(address)

    def _sample(self, now: float) -> None:
        if not self._memory:
            return
        with self._lock:
            self._forget_dropped()
            self.bytes.append((now, sum(self._totals.values())))
            for each, total in self._totals.items():
                self.stage_bytes.setdefault(each, []).append((now, total))
