"""Simulation of a schedule: its time and its bytes before it runs, from measured costs.

A worker runs its list in order. An action starts as soon as its worker is free and its dependencies are done. R, the
recomputation before a backward, needs only its own worker, so it can start while the gradient is still on its way:

    worker 0   ├─ 0F0 ─┤├─ 0F1 ─┤├─ 0R1 ─┤          ├── 0B1 ──┤├─ 0R0 ─┤├── 0B0 ──┤
    worker 1            ├─ 1F0 ─┤├─ 1F1 ─┤├── 1B1 ──┤├── 1B0 ──┤

Memory is a pure function of lifetimes, one per micro-batch:

    stage 0     ├─ F ─┤                            ├─ B ─┤
    stage 1            ├─ F ─┤      ├─ R ─┤├─ B ──┤

    kept               ├──────────────────────────┤           stage 1's graph: start of F to end of B
    recomputed                      ├─────────────┤           the same:        start of R to end of B
    value              ├──────────────────────────┤           made by stage 0: end of its F to end of the
                                                              last reader's B, and of its own if kept there

Where B is split, the end of W replaces the end of B. A value counts once, for the stage that made it. Values from
outside and gradients on their way do not count. A real run resolves ties nondeterministically, so its peak can differ
by one value.

Times come from a `Recorder`, and bytes from a `MemoryRecorder`. Record them in different steps, because inspecting
every tensor that autograd saves takes time.
"""

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from statistics import mean, median
from typing import Any, NamedTuple

from torch import Tensor

from torchweft.core.errors import ScheduleError, UsageError
from torchweft.core.pytree import flatten
from torchweft.core.validation import Validator
from torchweft.pipeline.routing import Address
from torchweft.pipeline.schedule import Action, Schedule, waits
from torchweft.pipeline.tracing import Recorder, seeing_saved, storages


@dataclass(frozen=True)
class StageCost:
    """Cost of one micro-batch on one stage. Times are in seconds (or any one unit). I and W take half of `backward`
    each. `recompute` is the time of the second forward, 0 if the graph is kept. `saved_bytes` are those that the graph
    keeps, without the values that the stage reads and makes. `recomputed_bytes` are those of a recomputed graph, by
    default with the values that the first graph would keep (`ValueCost.kept_by_source`)."""

    forward: float
    backward: float
    recompute: float = 0.0
    saved_bytes: int = 0
    recomputed_bytes: int | None = None


@dataclass(frozen=True)
class ValueCost:
    """A value that crosses a cut in every micro-batch: the main path or a skip. `source` is the stage that makes it, -1
    for one from outside. `kept_by_source`: the graph of the source holds it too, until the end of its backward."""

    source: int
    readers: tuple[int, ...]
    bytes: int
    kept_by_source: bool = False


class TailCost(NamedTuple):
    """Cost of the end of forward() of a cut model, which runs once for all micro-batches, between their last forward
    and their first backward. `bytes` are those that its graph keeps, joined values included."""

    seconds: float
    bytes: int


class Span(NamedTuple):
    worker: int
    action: Action
    start: float
    end: float


Curve = tuple[tuple[float, int], ...]  # (time, bytes from that time on), in order of time


@dataclass(frozen=True)
class Forecast:
    """The result of `forecast`. `spans` are in order of their start. `stage_bytes` are the graphs that a stage keeps
    and the values that it made, `live_bytes` those of all stages together.

    Example:
        >>> from torchweft.pipeline.simulate import StageCost, forecast
        >>> round(forecast(weft.pipeline.gpipe(2, 4), [StageCost(1.0, 2.0)] * 2).bubble, 2)
        0.2
    """

    spans: tuple[Span, ...]
    stage_bytes: tuple[Curve, ...]
    live_bytes: Curve

    @cached_property
    def total(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """The idle share of the time of all workers, 0 if no worker is ever idle. Recomputation counts as work."""
        workers = 1 + max((span.worker for span in self.spans), default=-1)
        busy = sum(span.end - span.start for span in self.spans)
        return max(0.0, 1 - busy / (self.total * workers)) if self.total > 0 else 0.0

    @cached_property
    def stage_peaks(self) -> tuple[int, ...]:
        return tuple(max((level for _, level in curve), default=0) for curve in self.stage_bytes)

    @cached_property
    def peak_bytes(self) -> int:
        return max((level for _, level in self.live_bytes), default=0)


def forecast(
    schedule: Schedule,
    stages: Sequence[StageCost],
    values: Sequence[ValueCost] = (),
    *,
    checkpointed: Callable[[int, int], bool] | None = None,
    tail: TailCost | None = None,
) -> Forecast:
    """Predict when every action runs, and the bytes alive at each time. `checkpointed(stage, micro_batch)` returns
    whether a graph is recomputed, by default if the stage has a `recompute` time. The span of a `tail` has kind T and
    micro-batch -1. Raises ScheduleError."""
    schedule.check(stages=len(stages))
    if tail is not None and not schedule.allows_external_loss:
        raise ScheduleError("a tail needs all forwards before it, but this schedule starts backward earlier")
    with Validator("nothing can be forecast from these costs", ScheduleError) as check:
        for stage, cost in enumerate(stages):
            numbers = cost.forward, cost.backward, cost.recompute, cost.saved_bytes, cost.recomputed_bytes or 0
            valid = all(0 <= x < math.inf for x in numbers)
            check.require(valid, f"stage {stage}: {cost} has a cost that is negative or not a finite number")
        for value in values:
            valid = -1 <= value.source < len(stages) and value.bytes >= 0
            check.require(valid, f"{value} needs a source from -1 to {len(stages) - 1} and bytes from 0 up")
            valid = all(value.source < reader < len(stages) for reader in value.readers)
            check.require(valid, f"{value} has a reader that is not a stage after its source")
    spans = _spans(schedule, stages, checkpointed or (lambda stage, _: stages[stage].recompute > 0), tail)
    lifetimes = list(_lifetimes(schedule, spans, stages, values))
    lifetimes += [_Lifetime(a.stage, x.start, x.end, tail.bytes) for a, x in spans.items() if tail and a.kind == "T"]
    return Forecast(
        spans=tuple(sorted(spans.values(), key=lambda span: (span.start, span.worker))),
        stage_bytes=tuple(_curve(life for life in lifetimes if life.stage == s) for s in range(len(stages))),
        live_bytes=_curve(lifetimes),
    )


class _Lifetime(NamedTuple):
    stage: int
    start: float
    end: float
    bytes: int


def _spans(
    schedule: Schedule, costs: Sequence[StageCost], recomputes: Callable[[int, int], bool], tail: TailCost | None
) -> dict[Action, Span]:
    waiting = waits(schedule.workers)
    free = [0.0] * len(schedule.workers)
    spans: dict[Action, Span] = {}

    def run(worker: int, action: Action, duration: float, start: float) -> None:
        spans[action] = Span(worker, action, start, start + duration)
        free[worker] = start + duration

    # Any valid serial order gives the same times, because a start depends only on earlier ends.
    for worker, action in schedule.order:
        stage, kind, micro_batch = action
        cost = costs[stage]
        if tail is not None and kind != "F" and stage == len(costs) - 1:
            run(worker, Action(stage, "T", -1), tail.seconds, free[worker])
            tail = None
        at_once = (stage, micro_batch) in schedule.backward_at_once
        if kind in "BI" and not at_once and recomputes(stage, micro_batch):
            run(worker, action._replace(kind="R"), cost.recompute, free[worker])
        duration = cost.forward if kind == "F" else cost.backward if kind == "B" else cost.backward / 2
        run(worker, action, duration, max([free[worker], *(spans[need].end for need in waiting[action])]))
    return spans


def _lifetimes(
    schedule: Schedule, spans: dict[Action, Span], costs: Sequence[StageCost], values: Sequence[ValueCost]
) -> Iterator[_Lifetime]:
    """Lifetimes of graphs and values. A graph lives from F, or from its recomputation, to the end of its backward."""

    def last(stage: int, micro_batch: int) -> Span:
        return next(spans[a] for k in "WBF" if (a := Action(stage, k, micro_batch)) in spans)

    for (stage, kind, i), span in spans.items():
        if kind != "F" or (end := last(stage, i)).action.kind == "F":
            continue
        again, cost = spans.get(Action(stage, "R", i)), costs[stage]
        size = cost.saved_bytes
        if again and cost.recomputed_bytes is not None:
            size = cost.recomputed_bytes
        elif again:
            size += sum(value.bytes for value in values if value.source == stage and value.kept_by_source)
        yield _Lifetime(stage, (again or span).start, end.end, size)
    for value in (value for value in values if value.source >= 0):
        for i in range(schedule.micro_batches):
            kept = value.kept_by_source and Action(value.source, "R", i) not in spans
            holders = (*value.readers, value.source) if kept else value.readers
            start = spans[Action(value.source, "F", i)].end
            end = max((last(stage, i).end for stage in holders), default=start)
            yield _Lifetime(value.source, start, end, value.bytes)


def _curve(lifetimes: Iterable[_Lifetime]) -> Curve:
    # All changes at one time make one step. Intervals that touch therefore do not overlap.
    changes: Counter[float] = Counter()
    for life in lifetimes:
        changes[life.start] += life.bytes
        changes[life.end] -= life.bytes
    times = sorted(time for time, change in changes.items() if change)
    return tuple(zip(times, accumulate(changes[time] for time in times), strict=True))


# Bytes by address. An address identifies a storage only while it is alive, as the tensors of one micro-batch are.
Storages = dict[int, int]


@dataclass
class _Sent:
    bytes: int
    kept: bool
    readers: set[int] = field(default_factory=set[int])


class MemoryRecorder:
    """Observer of one step that records the bytes that every micro-batch keeps and sends. For `Pipe.observed_by`.

    `ignore` are tensors that are alive anyway: parameters, buffers, the mini-batch and its target.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), chunks=2, devices=["cpu", "cpu"])
        >>> sizes = weft.pipeline.MemoryRecorder(ignore=pipe.parameters())
        >>> with pipe.observed_by(sizes):
        ...     pipe(torch.randn(4, 2)).sum().backward()
        >>> sizes.saved_bytes(1)  # of one micro-batch: the output of Tanh, 2 x 2 numbers of 4 bytes
        16
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        self._ignored = {address for address, _ in storages(ignore)}
        self._lock = threading.Lock()
        self._graphs: dict[tuple[int, int], Storages] = {}
        self._again: dict[tuple[int, int], Storages] = {}  # the graphs that were made by recomputation
        self._received: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._sent: dict[tuple[int, int], dict[int, _Sent]] = defaultdict(dict)
        self._tail: Storages = {}

    @contextmanager
    def action_scope(self, kind: str, action: Action) -> Generator[None]:
        if kind == "T":
            with seeing_saved(lambda tensor: self._tail.update(self._storages(tensor))):
                yield
            return
        if kind not in "FR":
            yield
            return
        at = action.stage, action.micro_batch
        saved: Storages = {}
        graphs = self._again if kind == "R" else self._graphs
        with self._lock:
            graphs[at] = saved
        with seeing_saved(lambda tensor: saved.update(self._storages(tensor))):
            yield
        with self._lock:
            # A value that the stage received belongs to its source, and counts there.
            graphs[at] = {key: size for key, size in saved.items() if key not in self._received[at]}

    def sent(self, source: int, address: Address, micro_batch: int, value: Any) -> None:
        if address.reader < 0:
            return
        sizes = self._storages(value)
        with self._lock:
            graph, sent = self._graphs[source, address.micro_batch], self._sent[source, address.micro_batch]
            for key, size in sizes.items():
                kept = graph.pop(key, None) is not None  # from now on it counts as a value
                sent.setdefault(key, _Sent(size, kept)).readers.add(address.reader)
            self._received[address.reader, micro_batch].update(sizes)

    def released(self, action: Action) -> None:
        """See `Observer`. Does nothing, because sizes do not depend on the time."""

    def saved_bytes(self, stage: int) -> int:
        """Mean bytes of a graph kept from F on, without the values that the stage reads and sends."""
        sizes = [sum(graph.values()) for at, graph in self._graphs.items() if at[0] == stage and at not in self._again]
        return round(mean(sizes)) if sizes else 0

    @property
    def tail_bytes(self) -> int:
        """Bytes that the end of a cut model's forward() keeps for backward, for all micro-batches together."""
        return sum(self._tail.values())

    def recomputed_bytes(self, stage: int) -> int | None:
        """Mean bytes of a recomputed graph, without the values that the stage reads. None if no graph is recomputed."""
        sizes = [sum(graph.values()) for at, graph in self._again.items() if at[0] == stage]
        return round(mean(sizes)) if sizes else None

    def values(self) -> list[ValueCost]:
        """The values that cross the cuts, by source and readers, with the mean bytes of a micro-batch."""
        total: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
        held: dict[tuple[int, tuple[int, ...], bool], int] = defaultdict(int)
        for at, sent in self._sent.items():
            for storage in sent.values():
                route = at[0], tuple(sorted(storage.readers))
                total[route] += storage.bytes
                # A recomputed graph keeps its own copies, so only the other micro-batches show what a graph keeps.
                if at not in self._again:
                    held[*route, storage.kept] += storage.bytes
        counts = Counter(source for source, _ in self._sent)
        values: list[ValueCost] = []
        for route, size_of_all in sorted(total.items()):
            loose, kept = (held[*route, by_source] for by_source in (False, True))
            size = size_of_all / counts[route[0]]
            size_kept = size * (kept / (loose + kept) if loose + kept else 0.0)
            parts = {False: round(size - size_kept), True: round(size_kept)}
            values += [ValueCost(*route, part, by_source) for by_source, part in parts.items() if part]
        return values

    def _storages(self, value: Any) -> Storages:
        return {key: size for key, size in storages(flatten(value)[0]) if key not in self._ignored}


@dataclass(frozen=True)
class Costs:
    """Cost of one micro-batch on each stage, and the values that cross the cuts. `recomputed` are the (stage,
    micro-batch) pairs that ran their forward twice. `tail` is that of a cut model, if its forward() ends on all rows.

    Example:
        >>> from torchweft.pipeline.simulate import StageCost
        >>> costs = weft.pipeline.Costs([StageCost(forward=1.0, backward=2.0)] * 2)
        >>> costs.forecast(weft.pipeline.gpipe(2, 4)).total  # seconds: 4 micro-batches, and one to fill and drain
        15.0
    """

    stages: list[StageCost]
    values: list[ValueCost] = field(default_factory=list[ValueCost])
    recomputed: frozenset[tuple[int, int]] = frozenset()
    tail: TailCost | None = None

    def forecast(self, schedule: Schedule) -> Forecast:
        again, tail = self.recomputed, self.tail
        return forecast(schedule, self.stages, self.values, checkpointed=lambda s, i: (s, i) in again, tail=tail)


def costs_from(recorders: Sequence[Recorder], sizes: MemoryRecorder | None = None) -> Costs:
    """The costs in recorded steps of one pipe: the median time of each kind per stage, one recorder per step.

    I and W together count as B. Without `sizes` bytes are 0. Raises UsageError if no event was recorded.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), chunks=2, devices=["cpu", "cpu"])
        >>> recorder = weft.Recorder()
        >>> with pipe.observed_by(recorder):
        ...     pipe(torch.randn(4, 2)).sum().backward()
        >>> weft.pipeline.costs_from([recorder]).forecast(weft.pipeline.gpipe(2, 8)).total > 0
        True
    """
    events = [event for recorder in recorders for event in recorder.events]
    if not events:
        raise UsageError("costs come from recorded steps, but these recorders have no event; run steps under them")
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in events:
        times[event.action.stage, event.kind].append(event.end - event.start)
    typical = {at: median(seconds) for at, seconds in times.items()}
    stages = [
        StageCost(
            forward=typical.get((stage, "F"), 0.0),
            backward=sum(typical.get((stage, kind), 0.0) for kind in "BIW"),
            recompute=typical.get((stage, "R"), 0.0),
            saved_bytes=sizes.saved_bytes(stage) if sizes is not None else 0,
            recomputed_bytes=sizes.recomputed_bytes(stage) if sizes is not None else None,
        )
        for stage in range(1 + max(stage for stage, _ in times))
    ]
    again = frozenset((e.action.stage, e.action.micro_batch) for e in events if e.kind == "R")
    last = len(stages) - 1
    seconds = typical.get((last, "T"))
    tail = None if seconds is None else TailCost(seconds, sizes.tail_bytes if sizes is not None else 0)
    return Costs(stages, sizes.values() if sizes is not None else [], again, tail)
