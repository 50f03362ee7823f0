"""Simulation of a schedule: its time and its bytes before it runs, from measured costs.

Time. A worker runs its list in order, and an action starts as soon as its worker is free and what it needs is
done. A stage that recomputes does so (R) before its backward; that needs only its own worker, so it may start
while the gradient is still on its way:

    worker 0   ├─ 0F0 ─┤├─ 0F1 ─┤├─ 0R1 ─┤          ├── 0B1 ──┤├─ 0R0 ─┤├── 0B0 ──┤
    worker 1            ├─ 1F0 ─┤├─ 1F1 ─┤├── 1B1 ──┤├── 1B0 ──┤

Memory. It is a pure function of lifetimes, one per micro-batch:

    stage 0     ├─ F ─┤                            ├─ B ─┤
    stage 1            ├─ F ─┤      ├─ R ─┤├─ B ──┤

    kept               ├──────────────────────────┤           stage 1's graph: start of F to end of B
    recomputed                      ├─────────────┤           the same:        start of R to end of B
    value              ├──────────────────────────┤           made by stage 0: end of its F to end of the
                                                              last reader's B, and of its own if kept there

Where B is split into I and W, read W for the end of B. Graphs are charged to their stage, and a value once,
to the stage that made it. A value from outside is the caller's and is not counted. In a forward-only schedule
no graph is kept, and a value lives to the end of its last reader's F. A lifetime holds its first instant and
not its last: what ends when another begins does not overlap it. Workers of a real run decide such a tie by a hair,
and the peak may then be off by one value. Gradients on their way are not counted.

The costs come from recordings of a few steps:

    Recorder (times)  --- median per stage and kind ---> StageCost.forward, .backward, .recompute
    Sizes    (bytes)  --- one lifetime each ----------> StageCost.saved_bytes, .recomputed_bytes, ValueCost

Times and sizes want steps of their own: looking at every tensor that autograd saves would slow down the clock.
"""

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, median
from typing import Any, NamedTuple

from torch import Tensor

from weft.core.errors import ScheduleError, UsageError, listed
from weft.core.pytree import flatten
from weft.pipeline.routing import Address
from weft.pipeline.schedule import Action, Schedule, waits
from weft.pipeline.tracing import Recorder, seeing_saved


@dataclass(frozen=True)
class StageCost:
    """What one micro-batch costs on one stage. Times are in seconds (or any one unit), all at least 0."""

    forward: float
    backward: float
    """Of B, without recomputation; I and W take half of it each."""
    recompute: float = 0.0
    """Of the second forward; 0 when the graph is kept."""
    saved_bytes: int = 0
    """What the graph of one micro-batch keeps beyond the values that the stage reads and makes."""
    recomputed_bytes: int | None = None
    """The same of a graph that is made again. By default `saved_bytes`, and the values that the first graph would
    keep (`ValueCost.kept_by_source`): the second one has copies of its own."""


@dataclass(frozen=True)
class ValueCost:
    """A value of every micro-batch that crosses a cut: the main path or a skip."""

    source: int
    """The stage that makes it, or -1 when it comes from outside."""
    readers: tuple[int, ...]
    """The stages that read it."""
    bytes: int
    kept_by_source: bool = False
    """True when the source's own graph holds it too, up to the end of the source's backward. (Where the source
    recomputes, there is no graph yet that could.)"""


class Span(NamedTuple):
    """One action in time. Recomputation is a span of its own, of kind R."""

    worker: int
    action: Action
    start: float
    end: float


Curve = tuple[tuple[float, int], ...]
"""Steps (time, bytes from that time on), in order of time; nothing is alive before the first."""


@dataclass(frozen=True)
class Forecast:
    """What `forecast` found; `spans` are in order of their start.

    Example:
        >>> from weft.pipeline.simulate import StageCost
        >>> costs = weft.pipeline.Costs([StageCost(forward=1.0, backward=2.0)] * 2)
        >>> forecast = costs.forecast(weft.pipeline.one_f_one_b(2, 4))
        >>> forecast.total, round(forecast.bubble, 2)
        (15.0, 0.2)
    """

    spans: tuple[Span, ...]
    stage_bytes: tuple[Curve, ...]
    """Per stage: the graphs that it keeps and the values that it made."""
    live_bytes: Curve
    """The sum over all stages."""

    @cached_property
    def total(self) -> float:
        """When the last action ends; the first starts at 0."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """The idle share of the time of all workers: 0 when all work all the time. Recomputation is work."""
        workers = 1 + max((span.worker for span in self.spans), default=-1)
        busy = sum(span.end - span.start for span in self.spans)
        return max(0.0, 1 - busy / (self.total * workers)) if self.total > 0 else 0.0

    @cached_property
    def stage_peaks(self) -> tuple[int, ...]:
        """Per stage the most bytes at one time."""
        return tuple(_peak(curve) for curve in self.stage_bytes)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes at one time, over all stages together."""
        return _peak(self.live_bytes)


def forecast(
    schedule: Schedule,
    stages: Sequence[StageCost],
    values: Sequence[ValueCost] = (),
    *,
    checkpointed: Callable[[int, int], bool] | None = None,
) -> Forecast:
    """Predict when every action runs, and which bytes live when.

    `stages` gives each stage's costs, `values` what crosses the cuts. `checkpointed(stage, micro_batch)` says
    which graphs are recomputed; by default those of the stages whose `recompute` is not 0. None is whose backward
    follows its forward at once (`Schedule.backward_at_once`).
    Raises ScheduleError with all faults, of the schedule or of the costs.
    """
    schedule.check(stages=len(stages))
    _check_costs(stages, values)
    spans = _spans(schedule, stages, checkpointed or _where_it_costs(stages))
    lifetimes = [*_graphs(spans, stages, values), *_values(schedule, spans, values)]
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


def _where_it_costs(stages: Sequence[StageCost]) -> Callable[[int, int], bool]:
    def recomputes(stage: int, micro_batch: int) -> bool:
        del micro_batch
        return stages[stage].recompute > 0

    return recomputes


def _spans(
    schedule: Schedule, costs: Sequence[StageCost], recomputes: Callable[[int, int], bool]
) -> dict[Action, Span]:
    """List scheduling: any valid serial order gives the same times."""
    waiting = waits(schedule.workers)
    free = [0.0] * len(schedule.workers)
    spans: dict[Action, Span] = {}

    def run(worker: int, action: Action, duration: float, start: float) -> None:
        spans[action] = Span(worker, action, start, start + duration)
        free[worker] = start + duration

    for worker, action in schedule.order:
        cost = costs[action.stage]
        at_once = (action.stage, action.micro_batch) in schedule.backward_at_once
        if action.kind in "BI" and not at_once and recomputes(action.stage, action.micro_batch):
            run(worker, action._replace(kind="R"), cost.recompute, free[worker])
        start = max([free[worker], *(spans[need].end for need in waiting[action])])
        run(worker, action, _duration(cost, action.kind), start)
    return spans


def _duration(cost: StageCost, kind: str) -> float:
    return {"F": cost.forward, "B": cost.backward}.get(kind, cost.backward / 2)


def _graphs(spans: dict[Action, Span], costs: Sequence[StageCost], values: Sequence[ValueCost]) -> Iterator[_Lifetime]:
    """From F, or from the recomputation, to the end of the backward. Without backward there are none."""
    for action, span in spans.items():
        end = _last(spans, action.stage, action.micro_batch)
        if action.kind != "F" or end.action.kind == "F":
            continue
        again = _recomputation(spans, action.stage, action.micro_batch)
        start, cost = (again or span).start, costs[action.stage]
        size = _made_again(action.stage, cost, values) if again else cost.saved_bytes
        yield _Lifetime(action.stage, start, end.end, size)


def _made_again(stage: int, cost: StageCost, values: Sequence[ValueCost]) -> int:
    """Bytes of a graph that is made a second time."""
    if cost.recomputed_bytes is not None:
        return cost.recomputed_bytes
    return cost.saved_bytes + sum(value.bytes for value in values if value.source == stage and value.kept_by_source)


def _values(schedule: Schedule, spans: dict[Action, Span], values: Sequence[ValueCost]) -> Iterator[_Lifetime]:
    for value in values:
        if value.source < 0:
            continue
        for micro_batch in range(schedule.micro_batches):
            kept = value.kept_by_source and _recomputation(spans, value.source, micro_batch) is None
            holders = (*value.readers, value.source) if kept else value.readers
            start = spans[Action(value.source, "F", micro_batch)].end
            end = max((_last(spans, stage, micro_batch).end for stage in holders), default=start)
            yield _Lifetime(value.source, start, end, value.bytes)


def _recomputation(spans: dict[Action, Span], stage: int, micro_batch: int) -> Span | None:
    return spans.get(Action(stage, "R", micro_batch))


def _last(spans: dict[Action, Span], stage: int, micro_batch: int) -> Span:
    """The last thing that a stage does with a micro-batch."""
    return next(spans[a] for k in "WBF" if (a := Action(stage, k, micro_batch)) in spans)


def _curve(lifetimes: Iterable[_Lifetime]) -> Curve:
    """Add up lifetimes. All that happens at one time makes one step."""
    changes: dict[float, int] = {}
    for life in lifetimes:
        changes[life.start] = changes.get(life.start, 0) + life.bytes
        changes[life.end] = changes.get(life.end, 0) - life.bytes
    level = 0
    steps: list[tuple[float, int]] = []
    for time in sorted(changes):
        if changes[time]:
            level += changes[time]
            steps.append((time, level))
    return tuple(steps)


def _peak(curve: Curve) -> int:
    return max((level for _, level in curve), default=0)


def _check_costs(stages: Sequence[StageCost], values: Sequence[ValueCost]) -> None:
    faults = [
        f"stage {stage}: {cost} has a cost that is no number from 0 up"
        for stage, cost in enumerate(stages)
        if not all(0 <= x < math.inf for x in _numbers(cost))
    ]
    for value in values:
        if not -1 <= value.source < len(stages) or value.bytes < 0:
            faults.append(f"{value} needs a source from -1 to {len(stages) - 1} and bytes from 0 up")
        if not all(value.source < reader < len(stages) for reader in value.readers):
            faults.append(f"{value} has a reader that is no stage behind its source")
    if faults:
        raise ScheduleError(listed("nothing can be forecast from these costs", faults))


def _numbers(cost: StageCost) -> tuple[int | float, ...]:
    return cost.forward, cost.backward, cost.recompute, cost.saved_bytes, cost.recomputed_bytes or 0


Storages = dict[int, int]
"""Bytes of storages by address; an address means one storage as long as it is alive."""


@dataclass
class _Sent:
    """One storage on its way: who reads it, and whether the graph of its source holds it too."""

    bytes: int
    kept: bool
    readers: set[int] = field(default_factory=set[int])


class Sizes:
    """Watches one step and notes what every micro-batch keeps and sends; give it to `Pipe.watched_by`.

    `ignore` are tensors that live anyway: parameters, buffers, the mini-batch and its target. Storages are told
    apart by their address, which is compared only while they are alive.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), chunks=2, devices=["cpu", "cpu"])
        >>> sizes = weft.pipeline.Sizes(ignore=pipe.parameters())
        >>> with pipe.watched_by(sizes):
        ...     pipe(torch.randn(4, 2)).sum().backward()
        >>> sizes.saved_bytes(1)  # of one micro-batch: the output of Tanh, 2 x 2 numbers of 4 bytes
        16
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignore}
        self._lock = threading.Lock()
        self._graphs: dict[tuple[int, int], Storages] = {}
        self._again: dict[tuple[int, int], Storages] = {}  # the graphs that were made by recomputation
        self._received: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._sent: dict[tuple[int, int], dict[int, _Sent]] = defaultdict(dict)

    @contextmanager
    def doing(self, kind: str, action: Action) -> Generator[None]:
        """See `weft.pipeline.step.Watcher`."""
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
            graphs[at] = {key: size for key, size in saved.items() if key not in self._received[at]}

    def sent(self, source: int, address: Address, micro_batch: int, value: Any) -> None:
        """See `weft.pipeline.step.Watcher`. The graph that the value came out of is made, and still there."""
        if address.reader < 0:
            return
        storages = self._storages(value)
        with self._lock:
            graph, sent = self._graphs[source, address.micro_batch], self._sent[source, address.micro_batch]
            for key, size in storages.items():
                kept = graph.pop(key, None) is not None  # from now on it counts as a value
                sent.setdefault(key, _Sent(size, kept)).readers.add(address.reader)
            self._received[address.reader, micro_batch].update(storages)

    def released(self, action: Action) -> None:
        """See `weft.pipeline.step.Watcher`. Sizes are no matter of time."""

    def saved_bytes(self, stage: int) -> int:
        """What a graph that is kept from F on holds beyond the values that the stage reads and sends, on average."""
        return _mean([graph for at, graph in self._graphs.items() if at[0] == stage and at not in self._again])

    def recomputed_bytes(self, stage: int) -> int | None:
        """What a graph that is made again holds beyond the values that the stage reads, on average, if any is."""
        found = [graph for at, graph in self._again.items() if at[0] == stage]
        return _mean(found) if found else None

    def values(self) -> list[ValueCost]:
        """What crosses the cuts, by source and readers, with the bytes of a micro-batch on average.

        A tensor that goes out twice, as main path and as skip, is one value. What the graph of its source keeps
        is learned from the micro-batches that are not recomputed; where all are, nothing is kept.
        """
        total: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
        held: dict[tuple[int, tuple[int, ...], bool], int] = defaultdict(int)
        for at, sent in self._sent.items():
            for each in sent.values():
                place = at[0], tuple(sorted(each.readers))
                total[place] += each.bytes
                if at not in self._again:
                    held[*place, each.kept] += each.bytes
        counts = Counter(source for source, _ in self._sent)
        return [
            ValueCost(*place, size, kept)
            for place, whole in sorted(total.items())
            for kept in (False, True)
            if (size := round(whole / counts[place[0]] * _share(held[*place, kept], held[*place, not kept], kept)))
        ]

    def _storages(self, value: Any) -> Storages:
        storages = [leaf.untyped_storage() for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
        return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() and s.data_ptr() not in self._ignored}


def _mean(graphs: Iterable[Storages]) -> int:
    """Bytes of a graph on average; 0 for none."""
    found = [sum(graph.values()) for graph in graphs]
    return round(mean(found)) if found else 0


def _share(one: int, other: int, kept: bool) -> float:
    """The share of `one` kind in both. Where nothing is known nothing is kept."""
    return one / (one + other) if one + other else float(not kept)


@dataclass(frozen=True)
class Costs:
    """What one micro-batch costs on each stage, and what crosses the cuts.

    Example:
        >>> from weft.pipeline.simulate import StageCost
        >>> costs = weft.pipeline.Costs([StageCost(forward=1.0, backward=2.0)] * 2)
        >>> costs.forecast(weft.pipeline.gpipe(2, 4)).total  # seconds: 4 micro-batches, and one to fill and drain
        15.0
    """

    stages: list[StageCost]
    values: list[ValueCost] = field(default_factory=list[ValueCost])
    recomputed: frozenset[tuple[int, int]] = frozenset()
    """Which (stage, micro-batch) ran their forward twice."""

    def recomputes(self, stage: int, micro_batch: int) -> bool:
        """Whether this forward ran twice."""
        return (stage, micro_batch) in self.recomputed

    def forecast(self, schedule: Schedule) -> Forecast:
        """The forecast of a schedule at these costs, with the same recomputations."""
        return forecast(schedule, self.stages, self.values, checkpointed=self.recomputes)


def costs_from(recorders: Sequence[Recorder], sizes: Sizes | None = None) -> Costs:
    """The costs behind some recorded steps of one pipe: the median time of each kind per stage.

    Give a recorder per step, after some to warm up. I and W together count as B. Without `sizes` bytes are 0.
    Bytes are those of an average micro-batch; graphs that are kept and graphs that are made again are averaged apart.
    Raises UsageError when nothing was recorded.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), chunks=2, devices=["cpu", "cpu"])
        >>> recorder = weft.Recorder()
        >>> with pipe.watched_by(recorder):
        ...     pipe(torch.randn(4, 2)).sum().backward()
        >>> weft.pipeline.costs_from([recorder]).forecast(weft.pipeline.gpipe(2, 8)).total > 0
        True
    """
    events = [event for recorder in recorders for event in recorder.events]
    if not events:
        raise UsageError("costs come from recorded steps, but these recorders saw no event; run steps under them")
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in events:
        times[event.action.stage, event.kind].append(event.end - event.start)
    typical = {at: median(found) for at, found in times.items()}
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
    return Costs(stages, sizes.values() if sizes is not None else [], again)
