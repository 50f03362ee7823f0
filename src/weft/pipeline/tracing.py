"""Who ran what, when, and what was alive for it. Listeners only: nothing here changes a run.

A `Recorder` watches a run. Its spans are what the forecast predicts and what the report draws. Its memory curve
counts bytes of *storages*, each once, however many tensors look into it: values on their way between stages,
inputs and saved tensors of every tape. A storage belongs to the stage that made it. Parameters, and what the
caller holds anyway, do not count.

    bytes |        ____            F of micro-batch i on stage s: + what its graph saves
          |   ____|    |____       B of the same:                 - the same
          |__|              |__    a value sent: + its bytes, until its readers (and its source) need it no more
"""

import copy
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weft.core.errors import InPlaceError
from weft.core.pytree import flatten
from weft.pipeline.routing import Address
from weft.pipeline.schedule import Action


@runtime_checkable
class Watcher(Protocol):
    """Somebody who wants to know what runs when, and what stays alive for it; see `Recorder`."""

    def doing(self, kind: str, action: Action) -> AbstractContextManager[None]:
        """Surrounds the work of an action, without its waiting; kind "R" is a recomputation."""
        ...

    def sent(self, source: int, address: Address, micro_batch: int, value: Any) -> None:
        """A value of stage `source` is on its way to a reader, who reads it with that micro-batch."""
        ...

    def released(self, action: Action) -> None:
        """The tape of the action's stage and micro-batch is gone."""
        ...


@runtime_checkable
class WatchesSteps(Watcher, Protocol):
    """A watcher that can tell steps apart: each run gets one of its own, and drops it when it is dropped itself."""

    def one_step(self) -> Watcher:
        """The watcher of one run."""
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
class _Ledger:
    """Storages by address, with the number of holders and the bytes of each."""

    ignored: set[int]
    holders: dict[int, int] = field(default_factory=dict[int, int])
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    total: int = 0

    def hold(self, tensor: Tensor) -> int | None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.ignored or size == 0:
            return None
        if self.holders.get(key, 0) == 0:
            self.total += size
            self.sizes[key] = size
        self.holders[key] = self.holders.get(key, 0) + 1
        return key

    def release(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.holders[key] -= 1
            if self.holders[key] == 0:
                self.total -= self.sizes.pop(key)
                del self.holders[key]


def seeing_saved(note: Callable[[Tensor], None]) -> saved_tensors_hooks:
    """A context in which `note` is told of every tensor that autograd saves for backward.

    Where hooks are in place, autograd does not look whether a saved tensor was written to since. So it is done here,
    or who is watched would get a wrong gradient instead of autograd's error: backward raises InPlaceError.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        note(tensor)
        return tensor.detach(), tensor._version  # packing an output itself would make a cycle with its graph

    return saved_tensors_hooks(pack, _unchanged)


def _unchanged(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise InPlaceError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, but was saved at "
            f"version {version}; use the out-of-place form of the operation that wrote to it"
        )
    return tensor


_Tapes = dict[tuple[int, int], list[tuple[int, int]]]
"""What the tape of each stage and micro-batch holds: storages, as (the stage that made it, address)."""


class Recorder:
    """Records the events of the runs that it watches, and, with `memory`, the bytes that stay alive for backward.

    Counting bytes looks at every tensor that autograd saves; it costs some microseconds each and changes no
    number. `ignore` are tensors that live anyway, such as parameters and the mini-batch itself.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), chunks=2, devices=["cpu", "cpu"])
        >>> recorder = weft.Recorder()
        >>> with pipe.watched_by(recorder):
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
        self._ledgers: dict[int, _Ledger] = {}
        self._all = _Ledger(set())
        self._owners: dict[int, int] = {}
        self._tapes: _Tapes = {}
        self._gone: SimpleQueue[_Tapes] = SimpleQueue()

    def _repr_html_(self) -> str:
        """The timeline, and the memory where it was recorded, for notebooks."""
        from weft.report.timeline import notebook_frame  # noqa: PLC0415  (a layer above: only pictures need it)

        return notebook_frame(self)

    def one_step(self) -> "Recorder":
        """A watcher of one step alone, that records here. What the step still holds when it is dropped, because it
        failed or nobody wanted its backward, is released then."""
        watcher = copy.copy(self)
        watcher._tapes = {}
        # The end may come at any moment, also while this thread has the lock: so it is only noted.
        weakref.finalize(watcher, self._gone.put, watcher._tapes).atexit = False
        return watcher

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of these."""
        self._all.ignored.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    @contextmanager
    def doing(self, kind: str, action: Action) -> Generator[None]:
        """Surrounds the work of one action; called by the run."""
        held: list[tuple[int, int]] = []

        def note(tensor: Tensor) -> None:
            self._hold(action.stage, tensor, held)

        counts = self._memory and kind in "FR"
        start = time.perf_counter()
        try:
            with seeing_saved(note) if counts else nullcontext():
                yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self.events.append(ActionEvent(kind, action, threading.current_thread().name, start, end))
                self._tapes.setdefault((action.stage, action.micro_batch), []).extend(held)
            self._sample(action.stage, end)

    def sent(self, source: int, address: Address, micro_batch: int, value: Any) -> None:
        """A value of `source` waits for its reader's `micro_batch`, and is an input of that tape from then on."""
        if self._memory and address.reader >= 0:
            held: list[tuple[int, int]] = []
            for leaf in flatten(value)[0]:
                if isinstance(leaf, Tensor):
                    self._hold(source, leaf, held)
            with self._lock:
                self._tapes.setdefault((address.reader, micro_batch), []).extend(held)

    def released(self, action: Action) -> None:
        """The tape of this stage and micro-batch, with its graph and inputs, is gone."""
        with self._lock:
            self._release(self._tapes.pop((action.stage, action.micro_batch), []))
        self._sample(action.stage, time.perf_counter())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at one time."""
        return max((count for _, count in self.bytes), default=0)

    def _release(self, held: Iterable[tuple[int, int]]) -> None:
        for owner, key in held:
            self._ledgers[owner].release([key])
            self._all.release([key])
            if key not in self._all.holders:
                del self._owners[key]

    def _forget_dropped(self) -> None:
        while not self._gone.empty():
            for held in self._gone.get().values():
                self._release(held)

    def _hold(self, stage: int, tensor: Tensor, held: list[tuple[int, int]]) -> None:
        with self._lock:
            self._forget_dropped()
            key = self._all.hold(tensor)
            if key is not None:
                owner = self._owners.setdefault(key, stage)  # a reader that saves its input does not own it
                self._ledgers.setdefault(owner, _Ledger(self._all.ignored)).hold(tensor)
                held.append((owner, key))

    def _sample(self, stage: int, now: float) -> None:
        if not self._memory:
            return
        with self._lock:
            self._forget_dropped()
            self.bytes.append((now, self._all.total))
            for each, ledger in self._ledgers.items():
                self.stage_bytes.setdefault(each, []).append((now, ledger.total))
