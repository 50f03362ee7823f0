"""Schedules: for every worker, the ordered list of its actions. What can be wrong with one, its text form, the built-in
ones.

    worker 0   0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3        1F1B, two stages, four micro-batches
    worker 1   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

Nothing else decides what runs when: executors walk a schedule, the simulation predicts it. A worker holds one stage or
several. The stages form a chain, and no micro-batch waits for another:

    0F0 --> 1F0 --> 2F0          F   forward
     |       |       |           B   the whole backward, or in two parts
     v       v       v           I     the gradients of the stage's inputs
    0B0 <-- 1B0 <-- 2B0          W     the gradients of its weights: after I, and no other action waits for it

Skips add no arrow, since the chain between their source and their destination implies it. As text a schedule has one
line per worker, its actions separated by commas; empty cells are bubbles. This is the format of PyTorch's CSV tables,
both "compute_only" and "compute_comms". ``(0F0;1B0)OVERLAP_F_B`` becomes its parts, one after the other; sends,
receives, (un)sharding, reduction of gradients, and waits for them are dropped, because weft derives transfers from
the routes.

The built-in schedules take the same time and differ in what is alive; here with three stages and four micro-batches:

    gpipe   F0 F1 F2 F3             B3 B2 B1 B0
               F0 F1 F2 F3       B3 B2 B1 B0           every stage holds all four
                  F0 F1 F2 F3 B3 B2 B1 B0

    1f1b    F0 F1 F2       B0 F3 B1    B2    B3        at most 3
               F0 F1    B0 F2 B1 F3 B2    B3           at most 2
                  F0 B0 F1 B1 F2 B2 F3 B3              at most 1

Only gpipe can be cut between forward and backward, so that the loss may be computed outside.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

from weft.core.errors import ScheduleError, listed
from weft.core.validation import is_whole

KINDS = ("F", "B", "I", "W")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_DROPPED = re.compile(r"\d+((WAIT_)?(REDUCE_GRAD|SEND_F|SEND_B)|RECV_F|RECV_B|UNSHARD|RESHARD)\d*", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_COLORS = {"F": "#2f6fb0", "B": "#b86e00", "I": "#3d7d46", "W": "#b75d69"}


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
    """The actions that must be done first. Those which a table does not hold are to be ignored: a neighbour beyond the
    chain's end, or B where the neighbour's backward is split into I and W."""
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


def _walk(table: Table, waiting: Mapping[Action, tuple[Action, ...]]) -> tuple[list[tuple[int, Action]], list[str]]:
    """Walk all lists at once, one action after the other, as far as they go.

    Of the workers' next actions, the one whose micro-batch has come furthest goes first, while its tensors are still in
    the cache, and so that what is kept for backward is freed early. Returns the order as (worker, action) pairs; and,
    for each worker that is stuck, where it stands and what it waits for. Costs O(actions * workers).
    """
    depth = 1 + max((action.stage for row in table for action in row), default=0)

    def progress(worker: int) -> int:
        stage, kind, _ = table[worker][heads[worker]]
        return stage if kind == "F" else 2 * depth - (1 + stage if kind != "W" else 0)

    order: list[tuple[int, Action]] = []
    heads = [0] * len(table)
    done: set[Action] = set()
    while True:
        unfinished = [worker for worker, row in enumerate(table) if heads[worker] < len(row)]
        ready = [worker for worker in unfinished if done.issuperset(waiting[table[worker][heads[worker]]])]
        if not ready:
            break
        chosen = max(ready, key=progress)
        action = table[chosen][heads[chosen]]
        heads[chosen] += 1
        done.add(action)
        order.append((chosen, action))
    owner = {action: worker for worker, row in enumerate(table) for action in row}
    stuck: list[str] = []
    for worker in unfinished:
        action = table[worker][heads[worker]]
        missing = [f"{need} of worker {owner[need]}" for need in waiting[action] if need not in done]
        stuck.append(f"deadlock: worker {worker} stands at {action} and waits for {' and '.join(missing)}")
    return order, stuck


def _faults(table: Table, stages: int | None = None, micro_batches: int | None = None) -> Iterator[str]:
    """Every fault of a table; none if it is valid. Later checks forgive what earlier ones reported, so that every cause
    is named once: an action that is missing holds no other up, and one that stands too early on its own worker is not
    called a deadlock as well. What remains stuck is a cycle between workers."""
    for worker, action in ((worker, action) for worker, row in enumerate(table) for action in row):
        if not _is_known(action):
            shown = str(action) if isinstance(cast(Any, action), Action) else repr(action)
            yield f"worker {worker}: {shown} is no action: a stage, F, B, I or W, and a micro-batch"
    table = tuple(tuple(action for action in row if _is_known(action)) for row in table)
    counts = Counter(action for row in table for action in row)
    has_stages = 1 + max((action.stage for action in counts), default=-1)
    has_micro_batches = 1 + max((action.micro_batch for action in counts), default=-1)
    sizes = (has_stages, stages, "stages"), (has_micro_batches, micro_batches, "micro-batches")
    for has, wanted, what in sizes:
        if wanted is not None and has != wanted:
            yield f"the table has {has} {what}, but {wanted} are wanted"
    if not table:
        yield "the table has no workers"
    owners: defaultdict[int, list[int]] = defaultdict(list)
    for worker, row in enumerate(table):
        if not row:
            yield f"worker {worker} has nothing to do; leave it out"
        for stage in {action.stage for action in row}:
            owners[stage].append(worker)
    for stage, workers in sorted((stage, on) for stage, on in owners.items() if len(on) > 1):
        yield f"stage {stage} is on workers {' and '.join(map(str, workers))}; a stage lives on one worker"
    yield from (f"{action} occurs {count} times" for action, count in counts.items() if count > 1)
    yield from _incomplete(counts, has_stages, has_micro_batches)
    yield from _stuck(table)


def _is_known(action: Any) -> bool:
    if not isinstance(action, Action) or action.kind not in KINDS:
        return False
    return all(is_whole(number) and number >= 0 for number in (action.stage, action.micro_batch))


def _incomplete(actions: Iterable[Action], stages: int, micro_batches: int) -> Iterator[str]:
    """Every micro-batch needs F on every stage and, unless there is forward alone, B or I and W."""
    has: dict[int, dict[str, set[int]]] = {}
    for stage, kind, micro_batch in actions:
        has.setdefault(stage, {kind: set() for kind in KINDS})[kind].add(micro_batch)
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
            parts = " and ".join(kind for kind in "IW" if micro_batch in kinds[kind])
            yield f"stage {stage}: micro-batch {micro_batch} has both B and {parts}; B is both in one"


def _stuck(table: Table) -> Iterator[str]:
    """Actions that stand before what they need: first within each worker, then in circles between workers."""
    waiting = waits(table)
    for worker, row in enumerate(table):
        place = {action: column for column, action in reversed(list(enumerate(row)))}
        for column, action in enumerate(row):
            late = [need for need in waiting[action] if place.get(need, -1) > column]
            waiting[action] = tuple(need for need in waiting[action] if need not in late)
            for need in late:
                yield f"worker {worker}: {action} stands before {need}, which it needs"
    yield from _walk(table, waiting)[1]


def _gaps(present: Iterable[int], end: int) -> str:
    """The numbers below `end` that are absent, as ranges: ``0-3, 5``. Its cost does not grow with `end`."""
    pairs = pairwise([-1, *sorted(present), end])
    return ", ".join(f"{a + 1}-{b - 1}" if b - a > 2 else str(a + 1) for a, b in pairs if b - a > 1)


@dataclass(frozen=True)
class Schedule:
    """For every worker, the ordered list of its actions. Immutable and hashable. All but `check` expect a table that
    passed it, or a part of one.

    Example:
        >>> table = weft.Schedule.parse("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1")
        >>> table.stages, table.micro_batches, table.live()
        (2, 2, (2, 1))
    """

    workers: Table

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", tuple(tuple(row) for row in self.workers))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read a table: a line per worker, actions separated by commas, empty cells are bubbles; also the CSV tables of
        ``torch.distributed.pipelining``. Raises ScheduleError, which lists every cell that is no action."""
        table: list[list[Action]] = []
        faults: list[str] = []
        for worker, line in enumerate(line for line in text.splitlines() if line.strip()):
            table.append([])
            for column, cell in enumerate(line.split(",")):
                overlap = _OVERLAP.fullmatch(cell.strip())
                for part in map(str.strip, overlap[1].split(";") if overlap else [cell]):
                    if match := _ACTION.fullmatch(part):
                        table[-1].append(Action(int(match[1]), match[2], int(match[3])))
                    elif part and not _DROPPED.fullmatch(part):
                        faults.append(f"worker {worker}, cell {column}: {part!r} is no action")
        if faults:
            headline = "the table cannot be read; an action is a stage, F, B, I or W, and a micro-batch: 2F0"
            raise ScheduleError(listed(headline, faults))
        return cls(tuple(map(tuple, table)))

    def text(self) -> str:
        """The table as text, without bubbles, which `parse` and ``torch.distributed.pipelining`` read."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.workers)

    def _repr_html_(self) -> str:
        """A table for notebooks: a row per worker, a column per time, if all actions took equally long. A schedule that
        cannot run shows its rows as they are, without bubbles."""
        rows = [dict(enumerate(row)) for row in self.workers]
        if not any(_faults(self.workers)):
            rows = [dict[int, Action]() for _ in self.workers]
            begins: dict[Action, int] = {}
            waiting = waits(self.workers)
            for worker, action in self.order:
                before = [*(begins[need] for need in waiting[action]), *rows[worker]]
                begins[action] = 1 + max(before, default=-1)
                rows[worker][begins[action]] = action
        columns = 1 + max((place for row in rows for place in row), default=-1)
        cells = ["".join(_cell(row.get(place)) for place in range(columns)) for row in rows]
        lines = "".join(f"<tr><th>worker {worker}</th>{row}</tr>" for worker, row in enumerate(cells))
        return f'<table style="border-collapse: collapse; font-variant-numeric: tabular-nums">{lines}</table>'

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

        `stages` and `micro_batches`, where given, must be those of the table. Raises one ScheduleError that lists every
        fault: unknown actions; idle workers; a stage on two workers; missing or repeated actions; both B and I or W for
        one micro-batch on one stage; actions that stand before what they need; deadlocks.
        """
        if found := list(_faults(self.workers, stages, micro_batches)):
            raise ScheduleError(listed("the schedule cannot be used", found))

    @cached_property
    def order(self) -> tuple[tuple[int, Action], ...]:
        """One serial order as (worker, action) pairs, in which every list keeps its own order, and the micro-batch that
        has come furthest goes first. Raises ScheduleError on a deadlock."""
        order, stuck = _walk(self.workers, waits(self.workers))
        if stuck:
            raise ScheduleError(listed("the schedule has no valid order", stuck))
        return tuple(order)

    @cached_property
    def splits(self) -> bool:
        """True when on every worker all F come before all else, as a loss outside of the pipeline needs."""
        rows = [[action.kind != "F" for action in row] for row in self.workers]
        return all(row == sorted(row) for row in rows)

    @cached_property
    def backward_at_once(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose backward is the next action of their worker after their forward, so that
        recomputation would save nothing. A table that `splits` has none: the caller's code may run in between."""
        return frozenset(
            (one.stage, one.micro_batch)
            for row in self.workers
            for one, next_one in pairwise(row)
            if not self.splits and one.kind == "F" and next_one.kind in "BI" and one[::2] == next_one[::2]
        )

    def live(self) -> tuple[int, ...]:
        """For every stage the largest number of micro-batches that it holds for backward at one time: F has begun, and
        the last of B, I, W has not ended."""
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
        """The schedule of the first micro-batches; valid when this one is, as none waits for another."""
        return self._where(lambda action: action.micro_batch < micro_batches)

    def _where(self, keep: Callable[[Action], bool]) -> "Schedule":
        return Schedule(tuple(tuple(action for action in row if keep(action)) for row in self.workers))


def _cell(action: Action | None) -> str:
    if action is None:
        return "<td></td>"
    style = f"background: {_COLORS.get(action.kind, '#6b7280')}; color: white; text-align: center; padding: 2px 6px"
    return f'<td style="{style}">{action}</td>'


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Fill and drain (Huang et al., GPipe, 2019): all forward, then all backward in reverse order. Raises ScheduleError
    when a size is below 1.

    Example:
        >>> print(weft.pipeline.gpipe(2, 2).text())
        0F0,0F1,0B1,0B0
        1F0,1F1,1B1,1B0
    """
    _check_sizes(stages, micro_batches)
    kinds = [("F", i) for i in range(micro_batches)] + [("B", i) for i in reversed(range(micro_batches))]
    return Schedule(tuple(tuple(Action(stage, kind, i) for kind, i in kinds) for stage in range(stages)))


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush; Narayanan et al., 2021). Stage s holds at most
    ``min(stages - s, micro_batches)`` micro-batches. Raises ScheduleError when a size is below 1.

    Example:
        >>> print(weft.pipeline.one_f_one_b(2, 2).text())
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    _check_sizes(stages, micro_batches)
    rows: list[tuple[Action, ...]] = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        kinds = [("F", i) for i in range(ahead)]
        kinds += [each for i in range(micro_batches) for each in (("F", i + ahead), ("B", i))]
        rows.append(tuple(Action(stage, kind, i) for kind, i in kinds if i < micro_batches))
    return Schedule(tuple(rows))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules that go by a name."""


@lru_cache
def build(schedule: str | Schedule, stages: int, micro_batches: int) -> Schedule:
    """The schedule for so many stages and micro-batches, checked: of a name from `SCHEDULES`, a table as text, or a
    `Schedule`. A table must have just the wanted stages and at least the wanted micro-batches; what it holds beyond
    them is dropped. Raises ScheduleError for an unknown name, and with all faults for a table that cannot be used."""
    if isinstance(schedule, str):
        if schedule in SCHEDULES:
            return SCHEDULES[schedule](stages, micro_batches)
        text = schedule.strip()
        if not ("," in text or "\n" in text or _ACTION.fullmatch(text)):
            raise ScheduleError(
                f"no schedule is named {schedule!r}; there are {', '.join(SCHEDULES)}, and tables as text: a line per "
                "worker of comma separated actions: 0F0,0F1,0B1,0B0"
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
