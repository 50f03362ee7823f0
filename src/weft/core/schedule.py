"""A schedule is data: for every worker, the ordered list of its actions.

    worker 0   0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3        1F1B, two stages, four micro-batches
    worker 1   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

Nothing else decides what runs when. Executors walk a schedule, the forecast predicts it, the report draws it,
and a user may write one by hand or take it from ``torch.distributed.pipelining``. A worker holds one stage or
several.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from .errors import ScheduleError, listed
from .schedule_action import KINDS, Action, Table, waits, walk
from .schedule_check import deadlocks, faults
from .schedule_text import parse_table, table_text

__all__ = ["KINDS", "Action", "Schedule", "Table"]


@dataclass(frozen=True)
class Schedule:
    """For every worker, the ordered list of its actions. Immutable, hashable; equal when the lists are equal.

    Building one checks nothing but that there are rows, which may be any sequences; `check` does. All else here
    expects a table that passed, or a part of one.
    """

    workers: Table

    def __post_init__(self) -> None:
        try:
            rows = tuple(tuple(row) for row in self.workers)
        except TypeError:
            raise ScheduleError(
                f"a schedule is a row of actions for every worker, but this is {self.workers!r}; "
                "Schedule.parse reads one from text"
            ) from None
        object.__setattr__(self, "workers", rows)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read a table: a line per worker, actions separated by commas, empty cells are bubbles.

        The CSV tables of ``torch.distributed.pipelining`` can be read; see `weft.core.schedule_text`.
        Raises ScheduleError, which lists every cell that is no action.
        """
        if not isinstance(cast(Any, text), str):
            raise ScheduleError(f"a table is parsed from text, but this is of type {type(text).__name__}")
        return cls(parse_table(text))

    def text(self) -> str:
        """The table as text, which `parse` and ``torch.distributed.pipelining`` read."""
        return table_text(self.workers)

    def _repr_html_(self) -> str:
        """A table for notebooks: a row per worker, a column per time, if all actions took equally long.

        A schedule that cannot run shows its rows as they are, without bubbles.
        """
        rows = [[(place, action) for place, action in enumerate(row)] for row in self.workers]
        if not faults(self.workers, None, None):
            rows = _unit_times(self)
        columns = 1 + max((place for row in rows for place, _ in row), default=-1)
        lines: list[str] = []
        for worker, row in enumerate(rows):
            at = dict(row)
            lines.append(f"<tr><th>worker {worker}</th>{''.join(_cell(at.get(i)) for i in range(columns))}</tr>")
        style = "border-collapse: collapse; font-variant-numeric: tabular-nums"
        return f'<table style="{style}">{"".join(lines)}</table>'

    @cached_property
    def stages(self) -> int:
        """How many stages there are; they are numbered from 0."""
        return 1 + max((action.stage for row in self.workers for action in row), default=-1)

    @cached_property
    def micro_batches(self) -> int:
        """How many micro-batches there are; they are numbered from 0."""
        return 1 + max((action.micro_batch for row in self.workers for action in row), default=-1)

    @cached_property
    def worker_of(self) -> tuple[int, ...]:
        """For every stage, the worker that holds it."""
        owner = {action.stage: worker for worker, row in enumerate(self.workers) for action in row}
        return tuple(owner[stage] for stage in range(self.stages))

    def check(self, *, stages: int | None = None, micro_batches: int | None = None) -> None:
        """Prove that the table can run, and that it does all the work once. Forward alone is fine as well.

        `stages` and `micro_batches`, where given, must be those of the table.
        Raises one ScheduleError that lists every fault: unknown actions; idle workers; a stage on two
        workers; missing or repeated actions; both B and I or W for one micro-batch on one stage; actions that
        stand before what they need on their own worker; deadlocks, with what each stuck worker waits for.
        """
        found = faults(self.workers, stages, micro_batches)
        if found:
            raise ScheduleError(listed("the schedule cannot be used", found))

    def order(self) -> tuple[tuple[int, Action], ...]:
        """One serial order as (worker, action) pairs, in which every list keeps its own order.

        The micro-batch that has come furthest goes first: its tensors are still in the cache, and what
        backward needs is freed early. Raises ScheduleError on a deadlock. Computed once.
        """
        return self._order

    @cached_property
    def _order(self) -> tuple[tuple[int, Action], ...]:
        waiting = waits(self.workers)
        order, heads = walk(self.workers, waiting)
        stuck = deadlocks(self.workers, waiting, heads)
        if stuck:
            raise ScheduleError(listed("the schedule has no valid order", stuck))
        return tuple(order)

    @cached_property
    def splits(self) -> bool:
        """True when on every worker all F come before all else, so that the table can be cut in between.
        This is what a loss outside the pipeline needs."""
        rows = [[action.kind != "F" for action in row] for row in self.workers]
        return all(row == sorted(row) for row in rows)

    @cached_property
    def backward_at_once(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose backward is the next action of their worker after their forward.

        To recompute them would save nothing. A table that `splits` has none: the caller's code may run in between.
        """
        return frozenset(
            (one.stage, one.micro_batch)
            for row in self.workers
            for one, next_one in pairwise(row)
            if not self.splits and one.kind == "F" and next_one.kind in "BI" and one[::2] == next_one[::2]
        )

    def live(self) -> tuple[int, ...]:
        """For every stage the largest number of micro-batches that it holds for backward at one time:
        F has begun, and the last of B, I, W has not ended."""
        now, most = [0] * self.stages, [0] * self.stages
        for action in (action for row in self.workers for action in row):
            # I keeps the graph, because W still reads it.
            now[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            most[action.stage] = max(most[action.stage], now[action.stage])
        return tuple(most)

    def forward_only(self) -> "Schedule":
        """The F actions, in order; a valid schedule by itself. Computed once."""
        return self._halves[0]

    def backward_only(self) -> "Schedule":
        """All but the F actions, in order. `order` works on it; `check` would miss the forward.
        Computed once."""
        return self._halves[1]

    @cached_property
    def _halves(self) -> "tuple[Schedule, Schedule]":
        return (
            self._where(lambda action: action.kind == "F"),
            self._where(lambda action: action.kind != "F"),
        )

    def restricted(self, micro_batches: int) -> "Schedule":
        """The schedule of the first micro-batches; valid when this one is, as micro-batches do not wait for
        each other. Raises ScheduleError when fewer than one is asked for."""
        if micro_batches < 1:
            raise ScheduleError(f"a schedule needs at least one micro-batch; {micro_batches} were asked for")
        return self._where(lambda action: action.micro_batch < micro_batches)

    def _where(self, keep: Callable[[Action], bool]) -> "Schedule":
        return Schedule(tuple(tuple(action for action in row if keep(action)) for row in self.workers))


_COLORS = {"F": "#2f6fb0", "B": "#b86e00", "I": "#3d7d46", "W": "#b75d69"}


def _unit_times(schedule: Schedule) -> list[list[tuple[int, Action]]]:
    """For every worker its actions with the times when they begin, if each takes 1."""
    ends: dict[Action, int] = {}
    rows: list[list[tuple[int, Action]]] = [[] for _ in schedule.workers]
    waiting = waits(schedule.workers)
    for worker, action in schedule.order():
        before = [ends[each] for each in waiting[action]]
        before += [rows[worker][-1][0] + 1] if rows[worker] else []
        begin = max(before, default=0)
        ends[action] = begin + 1
        rows[worker].append((begin, action))
    return rows


def _cell(action: Action | None) -> str:
    if action is None:
        return "<td></td>"
    style = f"background: {_COLORS.get(action.kind, '#6b7280')}; color: white; text-align: center; padding: 2px 6px"
    return f'<td style="{style}">{action}</td>'
