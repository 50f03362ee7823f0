"""What a schedule will cost, in time and in bytes, before it runs.

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
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.core.errors import ScheduleError, listed
from weft.pipeline.schedule import Action, Schedule, waits


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
