"""Schedules: for every worker, the ordered list of its actions. What can be wrong with one, its text form, the built-in
ones.

    worker 0   0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3        1F1B, two stages, four micro-batches
    worker 1   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

Nothing else decides what runs when: executors walk a schedule, the simulation predicts it, the report draws it, and a
user may write one by hand or take it from ``torch.distributed.pipelining``. A worker holds one stage or several.

The stages form a chain. Forward runs down it, backward runs up again, and no micro-batch waits for another:

    0F0 --> 1F0 --> 2F0          F   forward
     |       |       |           B   the whole backward, or in two parts
     v       v       v           I     the gradients of the stage's inputs
    0B0 <-- 1B0 <-- 2B0          W     the gradients of its weights: after I, and no other action waits for it

Skip routes add no arrow, since the chain between their source and their destination implies it. What binds
micro-batches to each other is only the list of each worker. `needs` defines this once, for the checks, the serial order
and the simulation.

A check returns sentences. Later checks forgive what earlier ones reported: an action that is missing holds no other up,
and one that stands too early on its own worker is not called a deadlock as well. So every cause is named once, and what
remains stuck is a cycle between workers.

As text a schedule has one line per worker, its actions separated by commas; empty cells are bubbles:

    0F0,0F1,   ,0B0,0B1            stage 0 on worker 0
       ,1F0,1B0,1F1,1B1            stage 1 on worker 1

This is the format of PyTorch's CSV tables, both "compute_only" and "compute_comms". ``(0F0;1B0)OVERLAP_F_B`` becomes
its parts, one after the other; sends, receives, (un)sharding, reduction of gradients, and (from PyTorch 2.15 on) waits
for them are dropped, because weft derives transfers from the routes.

The built-in schedules have one stage per worker. They take the same time and differ in what is alive; here with three
stages and four micro-batches:

    gpipe   F0 F1 F2 F3             B3 B2 B1 B0
               F0 F1 F2 F3       B3 B2 B1 B0           every stage holds all four
                  F0 F1 F2 F3 B3 B2 B1 B0

    1f1b    F0 F1 F2       B0 F3 B1    B2    B3        at most 3
               F0 F1    B0 F2 B1 F3 B2    B3           at most 2
                  F0 B0 F1 B1 F2 B2 F3 B3              at most 1

gpipe can be cut between forward and backward, so the loss may be computed outside. 1f1b cannot: its last stage computes
the loss of each micro-batch.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

from weft.core.errors import ScheduleError, listed
from weft.core.validation import is_whole

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One unit of work: `kind` (F, B, I or W) of one micro-batch on one stage. ``str()`` gives ``2F0``."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Table = tuple[tuple[Action, ...], ...]
"""For every worker the actions that it runs, in order."""


def needs(action: Action) -> tuple[Action, ...]:
    """The actions that must be done first. Those which a table does not hold are to be ignored:
    a neighbour beyond the chain's end, or B where the neighbour's backward is split into I and W."""
    stage, kind, micro_batch = action
    if kind == "F":
        return (Action(stage - 1, "F", micro_batch),)
    if kind == "W":
        return (Action(stage, "I", micro_batch),)
    return tuple(Action(s, k, micro_batch) for s, k in ((stage, "F"), (stage + 1, "B"), (stage + 1, "I")))


def waits(table: Table) -> dict[Action, tuple[Action, ...]]:
    """For every action of the table, those of its needs that the table holds."""
    present = {action for row in table for action in row}
    return {action: tuple(need for need in needs(action) if need in present) for action in present}


def walk(table: Table, waiting: Mapping[Action, tuple[Action, ...]]) -> tuple[list[tuple[int, Action]], list[int]]:
    """Walk all lists at once, one action after the other, as far as they go.

    Among the workers' next actions, the one whose micro-batch has come furthest goes first: deep stages
    before shallow ones in forward, backward before forward, weight gradients at once. So a micro-batch goes
    through while its tensors are still in the cache, and what is kept for backward is freed early.

    Returns the order as (worker, action) pairs, and for each worker how far it came; a worker that did not
    reach the end of its list is stuck for ever. Costs O(actions * workers).
    """
    depth = 1 + max((action.stage for row in table for action in row), default=0)
    order: list[tuple[int, Action]] = []
    heads = [0] * len(table)
    done: set[Action] = set()
    while True:
        best, chosen = -1, -1
        for worker, row in enumerate(table):
            if heads[worker] == len(row) or not done.issuperset(waiting[row[heads[worker]]]):
                continue
            progress = _progress(row[heads[worker]], depth)
            if progress > best:
                best, chosen = progress, worker
        if chosen < 0:
            return order, heads
        action = table[chosen][heads[chosen]]
        heads[chosen] += 1
        done.add(action)
        order.append((chosen, action))


def _progress(action: Action, depth: int) -> int:
    """How far its micro-batch has come: 0 at the first stage's forward, 2 * depth - 1 at its backward."""
    if action.kind == "F":
        return action.stage
    return 2 * depth - 1 - action.stage if action.kind != "W" else 2 * depth


def faults(table: Table, stages: int | None, micro_batches: int | None) -> list[str]:
    """Every fault of a table, as sentences; none if it is valid. See `weft.pipeline.schedule.Schedule.check`."""
    found = list(_unknown(table))
    table = tuple(tuple(action for action in row if _is_known(action)) for row in table)
    has_stages = 1 + max((action.stage for row in table for action in row), default=-1)
    has_micro_batches = 1 + max((action.micro_batch for row in table for action in row), default=-1)
    found += _counts(has_stages, stages, "stages")
    found += _counts(has_micro_batches, micro_batches, "micro-batches")
    found += _idle(table)
    found += _shared(table)
    found += _repeated(table)
    found += _incomplete(table, has_stages, has_micro_batches)
    found += _stuck(table)
    return found


def deadlocks(table: Table, waiting: Mapping[Action, tuple[Action, ...]], heads: Sequence[int]) -> list[str]:
    """For each worker that did not reach its end in a walk: where it stands, and what it waits for."""
    done = {action for row, head in zip(table, heads, strict=True) for action in row[:head]}
    owner = {action: worker for worker, row in enumerate(table) for action in row}
    found: list[str] = []
    for worker, (row, head) in enumerate(zip(table, heads, strict=True)):
        if head < len(row):
            missing = [f"{need} of worker {owner[need]}" for need in waiting[row[head]] if need not in done]
            found.append(f"deadlock: worker {worker} stands at {row[head]} and waits for {_and(missing)}")
    return found


def _is_known(action: Any) -> bool:
    if not isinstance(action, Action) or action.kind not in KINDS:
        return False
    return all(is_whole(number) and number >= 0 for number in (action.stage, action.micro_batch))


def _unknown(table: Table) -> Iterator[str]:
    for worker, row in enumerate(table):
        for action in row:
            if not _is_known(action):
                shown = str(action) if isinstance(cast(Any, action), Action) else repr(action)
                yield f"worker {worker}: {shown} is no action: a stage, F, B, I or W, and a micro-batch"


def _counts(has: int, wanted: int | None, what: str) -> Iterator[str]:
    if wanted is not None and has != wanted:
        yield f"the table has {has} {what}, but {wanted} are wanted"


def _idle(table: Table) -> Iterator[str]:
    if not table:
        yield "the table has no workers"
    for worker, row in enumerate(table):
        if not row:
            yield f"worker {worker} has nothing to do; leave it out"


def _shared(table: Table) -> Iterator[str]:
    owners: dict[int, list[int]] = {}
    for worker, row in enumerate(table):
        for stage in sorted({action.stage for action in row}):
            owners.setdefault(stage, []).append(worker)
    for stage, workers in sorted(owners.items()):
        if len(workers) > 1:
            yield f"stage {stage} is on workers {_and(workers)}; a stage lives on one worker"


def _repeated(table: Table) -> Iterator[str]:
    counts = Counter(action for row in table for action in row)
    for action, count in counts.items():
        if count > 1:
            yield f"{action} occurs {count} times"


def _incomplete(table: Table, stages: int, micro_batches: int) -> Iterator[str]:
    """Every micro-batch needs F on every stage and, unless there is forward alone, B or I and W."""
    has: dict[int, dict[str, set[int]]] = {}
    for action in (action for row in table for action in row):
        has.setdefault(action.stage, {kind: set() for kind in KINDS})[action.kind].add(action.micro_batch)
    if gaps := _gaps(has, stages):
        yield f"stage {gaps} has no action at all"
    backward = any(kinds["B"] | kinds["I"] | kinds["W"] for kinds in has.values())
    for stage, kinds in sorted(has.items()):
        if gaps := _gaps(kinds["F"], micro_batches):
            yield f"stage {stage}: F is missing for micro-batch {gaps}"
        if backward and (gaps := _gaps(kinds["B"] | kinds["I"] | kinds["W"], micro_batches)):
            yield f"stage {stage}: B, or I and W, is missing for micro-batch {gaps}"
        for have, lack in ("IW", "WI"):
            for micro_batch in sorted(kinds[have] - kinds[lack] - kinds["B"]):
                yield f"stage {stage}: {lack} is missing for micro-batch {micro_batch}, which has {have}"
        for micro_batch in sorted(kinds["B"] & (kinds["I"] | kinds["W"])):
            parts = [kind for kind in "IW" if micro_batch in kinds[kind]]
            yield f"stage {stage}: micro-batch {micro_batch} has both B and {_and(parts)}; B is both in one"


def _stuck(table: Table) -> Iterator[str]:
    """Actions that stand before what they need: first within each worker, then in circles between workers."""
    waiting = waits(table)
    for worker, row in enumerate(table):
        place = {action: column for column, action in reversed(list(enumerate(row)))}
        for column, action in enumerate(row):
            late = tuple(need for need in waiting[action] if place.get(need, -1) > column)
            waiting[action] = tuple(need for need in waiting[action] if need not in late)
            for need in late:
                yield f"worker {worker}: {action} stands before {need}, which it needs"
    yield from deadlocks(table, waiting, walk(table, waiting)[1])


def _gaps(present: Iterable[int], end: int) -> str:
    """The numbers below `end` that are absent, as ranges: ``0-3, 5``. Its cost does not grow with `end`."""
    ranges: list[str] = []
    start = 0
    for number in [*sorted(present), end]:
        if number > start:
            ranges.append(str(start) if number == start + 1 else f"{start}-{number - 1}")
        start = max(start, number + 1)
    return ", ".join(ranges)


def _and(items: Sequence[int] | Sequence[str]) -> str:
    return " and ".join(map(str, items))


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_DROPPED = re.compile(r"\d+((WAIT_)?(REDUCE_GRAD|SEND_F|SEND_B)|RECV_F|RECV_B|UNSHARD|RESHARD)\d*", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def looks_like_table(text: str) -> bool:
    """Is this meant as a table, rather than as the name of a schedule?"""
    return "," in text or "\n" in text.strip() or _ACTION.fullmatch(text.strip()) is not None


def parse_table(text: str) -> Table:
    """Read a table. Lines of white space are skipped; whether the table makes sense is not asked.

    Raises ScheduleError, which lists every cell that is no action.
    """
    faults: list[str] = []
    lines = [line for line in text.splitlines() if line.strip()]
    table = tuple(tuple(_actions(worker, line, faults)) for worker, line in enumerate(lines))
    if faults:
        headline = "the table cannot be read; an action is a stage, F, B, I or W, and a micro-batch: 2F0"
        raise ScheduleError(listed(headline, faults))
    return table


def table_text(table: Table) -> str:
    """Write a table, without bubbles; every line ends with a line feed."""
    return "".join(",".join(map(str, row)) + "\n" for row in table)


def _actions(worker: int, line: str, faults: list[str]) -> Iterator[Action]:
    for column, cell in enumerate(line.split(",")):
        overlap = _OVERLAP.fullmatch(cell.strip())
        for part in overlap[1].split(";") if overlap else [cell]:
            if match := _ACTION.fullmatch(part.strip()):
                yield Action(int(match[1]), match[2], int(match[3]))
            elif part.strip() and not _DROPPED.fullmatch(part.strip()):
                faults.append(f"worker {worker}, cell {column}: {part.strip()!r} is no action")


@dataclass(frozen=True)
class Schedule:
    """For every worker, the ordered list of its actions. Immutable, hashable; equal when the lists are equal.

    Building one checks nothing but that there are rows, which may be any sequences; `check` does. All else here
    expects a table that passed, or a part of one.

    Example:
        >>> table = weft.Schedule.parse("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1")
        >>> table.stages, table.micro_batches, table.live()
        (2, 2, (2, 1))
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

        The CSV tables of ``torch.distributed.pipelining`` can be read; see `weft.pipeline.schedule`.
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

    @cached_property
    def order(self) -> tuple[tuple[int, Action], ...]:
        """One serial order as (worker, action) pairs, in which every list keeps its own order.

        The micro-batch that has come furthest goes first: its tensors are still in the cache, and what
        backward needs is freed early. Raises ScheduleError on a deadlock.
        """
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

    @cached_property
    def forward_only(self) -> "Schedule":
        """The F actions, in order; a valid schedule by itself."""
        return self._where(lambda action: action.kind == "F")

    @cached_property
    def backward_only(self) -> "Schedule":
        """All but the F actions, in order. `order` works on it; `check` would miss the forward."""
        return self._where(lambda action: action.kind != "F")

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
    for worker, action in schedule.order:
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


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Fill and drain (Huang et al., GPipe, 2019): all forward, then all backward in reverse order.

    Every stage holds all micro-batches at once. Raises ScheduleError when a size is below 1.

    Example:
        >>> print(weft.pipeline.gpipe(2, 2).text())
        0F0,0F1,0B1,0B0
        1F0,1F1,1B1,1B0
    """
    _check_sizes(stages, micro_batches)
    kinds = [("F", i) for i in range(micro_batches)] + [("B", i) for i in reversed(range(micro_batches))]
    return Schedule(tuple(tuple(Action(stage, kind, i) for kind, i in kinds) for stage in range(stages)))


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush; Narayanan et al., 2021).

    Stage s holds at most ``min(stages - s, micro_batches)`` micro-batches, as many as it takes until its
    first gradient comes back. Takes as long as `gpipe`. Raises ScheduleError when a size is below 1.

    Example:
        >>> print(weft.pipeline.one_f_one_b(2, 2).text())
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    _check_sizes(stages, micro_batches)
    return Schedule(tuple(_one_f_one_b_row(s, stages - 1 - s, micro_batches) for s in range(stages)))


def _one_f_one_b_row(stage: int, ahead: int, micro_batches: int) -> tuple[Action, ...]:
    row = [Action(stage, "F", i) for i in range(min(ahead, micro_batches))]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            row.append(Action(stage, "F", i + ahead))
        row.append(Action(stage, "B", i))
    return tuple(row)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules that go by a name."""


@lru_cache
def build(schedule: str | Schedule, stages: int, micro_batches: int) -> Schedule:
    """The schedule for so many stages and micro-batches, checked.

    `schedule` is a name from `SCHEDULES`, a table as text, or a `Schedule`. A table must have just the wanted
    stages and at least the wanted micro-batches; what it holds beyond them is dropped.
    Raises ScheduleError for an unknown name, and with all its faults for a table that cannot be used.
    """
    if isinstance(schedule, str):
        if schedule in SCHEDULES:
            return SCHEDULES[schedule](stages, micro_batches)
        if not looks_like_table(schedule):
            raise ScheduleError(
                f"no schedule is named {schedule!r}; there are {', '.join(SCHEDULES)}. "
                "Or pass a table as text: a line per worker of comma separated actions: 0F0,0F1,0B1,0B0"
            )
        schedule = Schedule.parse(schedule)
    _check_sizes(stages, micro_batches)
    schedule.check(stages=stages, micro_batches=max(micro_batches, schedule.micro_batches))
    return schedule.restricted(micro_batches)


def _check_sizes(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ScheduleError(
            f"a schedule needs at least one stage and one micro-batch, but got {stages} stages "
            f"and {micro_batches} micro-batches"
        )
