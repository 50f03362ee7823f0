"""Who asked for what already: a backward that is asked for twice steps once.

    first   key k ── runs, steps ──> answer, recorded under (client, k)
    again, while it runs   ──────────> joins the first
    again, later           ──────────> the recorded answer
    again, much later      ──────────> RepeatedError: it was applied, its answer is gone
    again, after a failure ──────────> runs: nothing was applied

Answers are held up to a number of bytes, the oldest go first; keys alone, which are small, are held longer, up to
a number and an age. Within those bounds no step is applied twice, whatever the network loses. An answer is kept
and given out as a copy: who gets it may write into it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault, seconds_fault
from weft.experts.counts import RecordsStatistics
from weft.experts.errors import RepeatedError
from weft.experts.task import Results, Task

Kind = Literal["backward", "commit"]
Name = tuple[Kind, str | None, str]
"""Kind of task, client, key: a client knows no key of another."""


@dataclass(frozen=True)
class RecordsOptions:
    """``result_bytes`` of answers, and ``keys`` that are at most ``seconds`` old."""

    result_bytes: int = 64 << 20
    keys: int = 100_000
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        faults = count_fault("result_bytes", self.result_bytes, zero=True) + count_fault("keys", self.keys)
        faults += seconds_fault("seconds", self.seconds)
        if faults:
            raise UsageError(listed("records cannot be kept like this:", faults))


@dataclass
class _Record:
    step: int
    form: tuple[Any, ...]
    born: float
    mini_batch: str | None
    results: Results | None = field(repr=False)


class Records:
    """The keys of one expert. Thread-safe."""

    def __init__(self, options: RecordsOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options or RecordsOptions()
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[Name, Task] = {}
        self._done: OrderedDict[Name, _Record] = OrderedDict()
        self._held: OrderedDict[Name, int] = OrderedDict()
        self._open: dict[tuple[str | None, str], list[Name]] = {}
        self._bytes = 0
        self._repeated = 0

    def of(self, kind: Kind) -> "KindOfRecords":
        """What the pool of one kind of task sees."""
        return KindOfRecords(self, kind)

    def find(self, name: Name, form: tuple[Any, ...]) -> Task | Results | None:
        """What became of a key, or None if it is new.

        Raises ``UsageError`` if it was used for a task of another form, `RepeatedError` if the answer is gone.
        """
        with self._lock:
            self._forget_old()
            task, record = self._running.get(name), self._done.get(name)
            seen = None if task is None else form_of(task)
            seen = record.form if record is not None else seen
            if seen is None:
                return None
            if seen != form:
                raise UsageError(
                    f"key {name[2]!r} of client {name[1]!r} was used for a {name[0]} of form {seen}, not {form}; "
                    "use a new key for every new task, and the old one only to ask again"
                )
            self._repeated += 1
            if record is None:
                return task
            if record.results is None:
                raise RepeatedError(
                    f"key {name[2]!r} of client {name[1]!r} was applied, and was part of step {record.step}; its "
                    "answer is not held any more. Do not send it again; raise result_bytes to hold answers longer"
                )
            return [tensor.clone() for tensor in record.results]

    def begin(self, name: Name, task: Task) -> None:
        """A task of this key is under way."""
        with self._lock:
            self._running[name] = task

    def give_up(self, name: Name, task: Task) -> None:
        """It is not any more."""
        with self._lock:
            if self._running.get(name) is task:
                del self._running[name]

    def settle(self, name: Name, task: Task, results: Results, step: int) -> None:
        """A task was applied, and is part of this step; or of none yet, if it added to a mini-batch.

        ``results`` are the records' own from here on: a copy, made before the step, so that nothing can fail here.
        """
        with self._lock:
            pending = task.mini_batch if name[0] == "backward" else None
            self._put(name, _Record(step, form_of(task), self._clock(), pending, results))

    def step_of(self, kind: Kind, client: str | None, key: str) -> int | None:
        """The optimizer step that a key was part of; None if it is not known as applied."""
        with self._lock:
            record = self._done.get((kind, client, key))
            return None if record is None else record.step

    def committed(self, client: str | None, mini_batch: str, step: int) -> None:
        """The tasks of this mini-batch are part of that step."""
        with self._lock:
            for name in self._open.pop((client, mini_batch), []):
                if name in self._done:
                    self._done[name].step, self._done[name].mini_batch = step, None

    def lost(self, client: str | None, mini_batch: str) -> None:
        """The sum of this mini-batch is gone: its tasks were not applied after all."""
        with self._lock:
            for name in self._open.pop((client, mini_batch), []):
                self._drop(name)

    def state_dict(self) -> list[tuple[str, str | None, str, int, tuple[Any, ...], Results | None]]:
        """All that is part of a step, oldest first: kind, client, key, step, form, answer. To be saved with it."""
        with self._lock:
            return [
                (*name, record.step, record.form, record.results)
                for name, record in self._done.items()
                if record.mini_batch is None
            ]

    def load_state_dict(self, state: Sequence[tuple[Any, Any, Any, int, Any, Results | None]]) -> None:
        """In place of all that is known. Ages count from now."""
        with self._lock:
            for name in list(self._done):
                self._drop(name)
            self._open.clear()
            for kind, client, key, step, form, results in state:
                self._put((kind, client, key), _Record(step, _tupled(form), self._clock(), None, results))

    def statistics(self) -> RecordsStatistics:
        """What is held now."""
        with self._lock:
            self._forget_old()
            held = len(self._held)
            return RecordsStatistics(len(self._running), len(self._done), held, self._bytes, self._repeated)

    def _put(self, name: Name, record: _Record) -> None:
        self._drop(name)
        self._done[name] = record
        if record.mini_batch is not None:
            self._open.setdefault((name[1], record.mini_batch), []).append(name)
        if record.results is not None:
            self._held[name] = sum(tensor.nbytes for tensor in record.results)
            self._bytes += self._held[name]
        while self._bytes > self.options.result_bytes:
            self._let_go(next(iter(self._held)))
        self._forget_old()

    def _forget_old(self) -> None:
        limit = self._clock() - self.options.seconds
        while self._done:
            name, record = next(iter(self._done.items()))
            if len(self._done) <= self.options.keys and record.born > limit:
                return
            self._drop(name)

    def _drop(self, name: Name) -> None:
        self._let_go(name)
        self._done.pop(name, None)

    def _let_go(self, name: Name) -> None:
        if name in self._held:
            self._bytes -= self._held.pop(name)
            self._done[name].results = None


class KindOfRecords:
    """The records as one pool sees them."""

    def __init__(self, records: Records, kind: Kind) -> None:
        self._records = records
        self._kind: Kind = kind

    def name(self, task: Task) -> Name:
        """Under which name a task is recorded; it must have a key."""
        return (self._kind, task.client, task.key or "")

    def find(self, task: Task) -> Task | Results | None:
        """See `Records.find`."""
        return self._records.find(self.name(task), form_of(task))

    def begin(self, task: Task) -> None:
        """See `Records.begin`."""
        self._records.begin(self.name(task), task)

    def give_up(self, task: Task) -> None:
        """See `Records.give_up`."""
        self._records.give_up(self.name(task), task)

    def settle(self, task: Task, results: Results, step: int) -> None:
        """See `Records.settle`."""
        if task.key is not None:
            self._records.settle(self.name(task), task, results, step)


def form_of(task: Task) -> tuple[Any, ...]:
    """What a repetition must agree in; its numbers are its author's concern."""
    return (task.mini_batch, *(tuple(tensor.shape) for tensor in task.tensors))


def _tupled(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    return tuple(_tupled(one) for one in cast("Sequence[Any]", value))
