"""Figures of recorded actions: idle time, and the work of each stage.

Idle time counts for workers and not for stages. Under ``executor="serial"`` one thread runs all stages, so it is busy
although each stage rests most of the time.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torchweft.pipeline.tracing import ActionEvent


@dataclass(frozen=True)
class StepStatistics:
    """``work``: seconds of actions by stage. ``idle``: the share of the time in which workers ran no action."""

    micro_batches: int
    workers: int
    seconds: float
    idle: float
    work: tuple[float, ...]

    def __str__(self) -> str:
        if not self.work:
            return "no actions"
        stages = len(self.work)
        counts = ((stages, "stage", "s"), (self.micro_batches, "micro-batch", "es"), (self.workers, "worker", "s"))
        words = ", ".join(f"{count} {noun}{ending * (count != 1)}" for count, noun, ending in counts)
        slowest = f"; stage {self.work.index(max(self.work))} is the slowest" if stages > 1 else ""
        return f"{words}: {self.idle:.0%} idle{slowest}"


def step_statistics(events: Sequence[ActionEvent]) -> StepStatistics:
    """The figures of these actions, which can be of several steps. The tail of a cut model is not work of a stage."""
    events = [event for event in events if event.kind != "T"]
    work: defaultdict[int, float] = defaultdict(float)
    stages_of: defaultdict[str, set[int]] = defaultdict(set)
    for event in events:
        work[event.action.stage] += event.end - event.start
        stages_of[event.thread].add(event.action.stage)
    # Threads with the same stages are one worker, because autograd runs the backward of a GPU in a thread of its own.
    workers: defaultdict[frozenset[int], list[ActionEvent]] = defaultdict(list)
    for event in events:
        workers[frozenset(stages_of[event.thread])].append(event)
    seconds = max((e.end for e in events), default=0.0) - min((e.start for e in events), default=0.0)
    available = seconds * len(workers)
    idle = 1.0 - sum(map(_busy_seconds, workers.values())) / available if available else 0.0
    of_stages = tuple(work[stage] for stage in range(1 + max(work, default=-1)))
    return StepStatistics(len({event.action.micro_batch for event in events}), len(workers), seconds, idle, of_stages)


def _busy_seconds(events: Sequence[ActionEvent]) -> float:
    """The time in which at least one of these actions ran."""
    busy, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        busy += max(0.0, event.end - max(event.start, end))
        end = max(end, event.end)
    return busy
