"""A recorder of the actions of a run, with their times and the bytes alive. It does not change the run.

PyTorch's profiler shows operators and allocations, but not which stage and micro-batch they belong to.

The memory curve counts bytes of *storages*, each once, even if several tensors share it. It includes values on their
way between stages, and the inputs and saved tensors of every tape. A storage belongs to the stage that made it.
Parameters, and tensors that the caller holds anyway, do not count.

    bytes |        ____            F of micro-batch i on stage s: + what its graph saves
          |   ____|    |____       B of the same:                 - the same
          |__|              |__    a value sent: + its bytes, until its readers (and its source) no longer need it
"""

import copy
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchweft.core.errors import InPlaceError, UsageError
from torchweft.core.pytree import flatten
from torchweft.pipeline.routing import Address
from torchweft.pipeline.schedule import Action


@runtime_checkable
class Observer(Protocol):
    """Observer of a run: it receives the start and end of each action, and the tensors that stay alive for it."""

    def action_scope(self, kind: str, action: Action) -> AbstractContextManager[None]:
        """Context manager around the work of an action, without its waiting. Kind "R" is a recomputation."""
        ...

    def sent(self, source: int, address: Address, micro_batch: int, value: Any) -> None:
        """Called when a value of stage `source` is sent to a reader, which reads it with that micro-batch."""

    def released(self, action: Action) -> None:
        """Called when the tape of the action's stage and micro-batch is freed."""


_observers_of_new: list[Callable[[Any], Observer]] = []


@contextmanager
def observing_new_pipes(make_observer: Callable[[Any], Observer]) -> Generator[None]:
    """Observe every pipe that is made in this context, but no copy of it, by the observer that is made for it."""
    _observers_of_new.append(make_observer)
    try:
        yield
    finally:
        _observers_of_new.remove(make_observer)


def observer_of_new(pipe: Any) -> Observer | None:
    """The observer of a pipe that is just being made."""
    return _observers_of_new[-1](pipe) if _observers_of_new else None


@dataclass(frozen=True)
class ActionEvent:
    """One piece of work: kind F, B, I, W, R for a recomputation, or T for the tail of a cut model, which runs once for
    all micro-batches (its action has micro-batch -1). Times are in seconds of `time.perf_counter`."""

    kind: str
    action: Action
    thread: str
    start: float
    end: float


@dataclass
class _Storage:
    bytes: int
    owner: int
    holders: int = 0


def storages(leaves: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()).nbytes():
            yield storage.data_ptr(), storage.nbytes()


def seeing_saved(note: Callable[[Tensor], None]) -> saved_tensors_hooks:
    """A context in which `note` is called with every tensor that autograd saves for backward."""

    # With such hooks, autograd no longer checks whether a saved tensor was written to. An observed run would compute a
    # wrong gradient without notice, so the check is made here.
    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        note(tensor)
        # The detached tensor shares memory and version. An output itself would make a cycle with its graph.
        return tensor.detach(), tensor._version

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


_Tapes = dict[tuple[int, int], list[int]]  # addresses of the storages that a tape holds, by stage and micro-batch


class Recorder:
    """Records the events of the runs that it observes. With `memory`, also the bytes that stay alive for backward.

    Times are those of the host: for a GPU they show when kernels are launched, and not when they run. `memory` costs
    some microseconds per tensor that autograd saves.

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
    _write: ClassVar[Callable[..., None] | None] = None

    @classmethod
    def show_by(cls, draw: Callable[["Recorder"], str], write: Callable[..., None]) -> None:
        # `weft.report` sets both when it is imported. This module cannot import it, because it imports this one.
        Recorder._draw, Recorder._write = draw, write

    def _repr_html_(self) -> str | None:
        return None if Recorder._draw is None else Recorder._draw(self)

    def save(self, path: str | Path, *, title: str = "A recorded step") -> Path:
        """Write a report (``step.html``) or a trace for https://ui.perfetto.dev (``step.json``), and return its path.

        Raises UsageError for another suffix, and if nothing was recorded.
        """
        if Recorder._write is None:
            raise UsageError("saving a recording needs weft.report; import it first")
        if not self.events:
            raise UsageError(
                f"nothing was recorded, so {path} is not written; run a step within `with pipe.observed_by(recorder):`"
            )
        Recorder._write({title: self}, Path(path), title)
        return Path(path)

    def one_step(self) -> "Recorder":
        # When the step is dropped without a backward, the storages that it still holds are released.
        observer = copy.copy(self)
        observer._tapes = {}
        # The garbage collector can run this at any moment, also while this thread has the lock. So it only queues.
        weakref.finalize(observer, self._gone.put, observer._tapes).atexit = False
        return observer

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of `tensors`, such as parameters and the mini-batch, which are alive anyway."""
        self._ignored.update(address for address, _ in storages(tensors))

    @contextmanager
    def action_scope(self, kind: str, action: Action) -> Generator[None]:
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
        if self._memory and address.reader >= 0:
            held: list[int] = []
            self._hold(source, flatten(value)[0], held)
            with self._lock:
                self._tapes.setdefault((address.reader, micro_batch), []).extend(held)

    def released(self, action: Action) -> None:
        with self._lock:
            self._release(self._tapes.pop((action.stage, action.micro_batch), []))
        self._sample(time.perf_counter())

    @property
    def peak_bytes(self) -> int:
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
                if address not in self._alive:  # the stage that holds it first owns it, and not a reader that saves it
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
            for stage, total in self._totals.items():
                self.stage_bytes.setdefault(stage, []).append((now, total))
