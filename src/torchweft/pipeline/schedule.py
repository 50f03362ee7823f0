"""Schedules: for every worker, the ordered list of its actions. Their text form, and the named schedules.

    worker 0   0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3        1F1B, two stages, four micro-batches
    worker 1   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

The schedule alone determines the order: executors walk it, and the simulation predicts its time. A worker holds one or
more stages. As text a schedule has one line per worker with its actions separated by commas. Empty cells are bubbles.
This is the format of PyTorch's CSV tables, both "compute_only" and "compute_comms". ``(0F0;1B0)OVERLAP_F_B`` becomes
its parts, one after the other. Sends, receives, (un)sharding, reduction of gradients, and waits for them are dropped,
because torchweft derives transfers from the routes.

Three stages and four micro-batches under two schedules that take the same time, but hold different numbers alive:

    gpipe   F0 F1 F2 F3             B3 B2 B1 B0
               F0 F1 F2 F3       B3 B2 B1 B0           every stage holds all four
                  F0 F1 F2 F3 B3 B2 B1 B0

    1f1b    F0 F1 F2       B0 F3 B1    B2    B3        at most 3
               F0 F1    B0 F2 B1 F3 B2    B3           at most 2
                  F0 B0 F1 B1 F2 B2 F3 B3              at most 1

Only gpipe and looped_bfs can be cut between forward and backward, so that the loss can be computed outside.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, zip_longest
from typing import Any

from torchweft.core.errors import ScheduleError, join_faults
from torchweft.core.validation import suggest
from torchweft.pipeline.actions import Action, Table, find_faults, waits, walk_table

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_DROPPED = re.compile(r"\d+((WAIT_)?(REDUCE_GRAD|SEND_F|SEND_B)|RECV_F|RECV_B|UNSHARD|RESHARD)\d*", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
# Background and text of a cell, as in reports: dark forwards and weight gradients beside light backwards, for all eyes.
_COLORS = {
    "F": "#0c2a5c; color: #fff",
    "B": "#c4761d; color: #000",
    "I": "#c4761d; color: #000",
    "W": "#0b3b37; color: #fff",
}


@dataclass(frozen=True)
class Schedule:
    """For every worker, the ordered list of its actions. Immutable and hashable. All methods except `check` expect a
    table that passed it, or a part of one.

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
        """Read a table with one line per worker and actions separated by commas, also the CSV tables of
        ``torch.distributed.pipelining``. Raises ScheduleError, which lists every invalid cell."""
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
                        faults.append(f"worker {worker}, cell {column}: {part!r} is not an action")
        if faults:
            headline = "the table cannot be read; an action is a stage, F, B, I or W, and a micro-batch: 2F0"
            raise ScheduleError(join_faults(headline, faults))
        return cls(tuple(map(tuple, table)))

    def text(self) -> str:
        """The table as text without bubbles, for `parse` and ``torch.distributed.pipelining``."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.workers)

    def _repr_html_(self) -> str:
        """A table for notebooks with a column per unit of time, as if all actions took equally long."""
        rows = [dict(enumerate(row)) for row in self.workers]
        if not any(find_faults(self.workers)):
            begins = self._begins
            rows = [{begins[action]: action for action in row} for row in self.workers]
        columns = 1 + max((place for row in rows for place in row), default=-1)
        cells = ["".join(_cell(row.get(place)) for place in range(columns)) for row in rows]
        lines = "".join(f"<tr><th>worker {worker}</th>{row}</tr>" for worker, row in enumerate(cells))
        return f'<table style="border-collapse: collapse; font-variant-numeric: tabular-nums">{lines}</table>'

    @cached_property
    def stages(self) -> int:
        return 1 + max((action.stage for row in self.workers for action in row), default=-1)

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max((action.micro_batch for row in self.workers for action in row), default=-1)

    @cached_property
    def worker_of(self) -> tuple[int, ...]:
        owner = {action.stage: worker for worker, row in enumerate(self.workers) for action in row}
        return tuple(owner[stage] for stage in range(self.stages))

    @cached_property
    def actions(self) -> frozenset[Action]:
        return frozenset(action for row in self.workers for action in row)

    def check(self, *, stages: int | None = None, micro_batches: int | None = None) -> None:
        """Check that the table can run, and that it does all the work once. A table of forwards alone is valid. Raises
        ScheduleError that lists every fault, such as other numbers than `stages` and `micro_batches`."""
        if faults := list(find_faults(self.workers, stages, micro_batches)):
            raise ScheduleError(join_faults("the schedule cannot be used", faults))

    @cached_property
    def order(self) -> tuple[tuple[int, Action], ...]:
        """One serial order as (worker, action) pairs. Raises ScheduleError on a deadlock."""
        order, stuck = walk_table(self.workers, waits(self.workers))
        if stuck:
            raise ScheduleError(join_faults("the schedule has no valid order", stuck))
        return tuple(order)

    @cached_property
    def launch_order(self) -> tuple[tuple[int, Action], ...]:
        """A serial order for one thread that launches work on several GPUs: by the time at which each action can begin,
        so that no GPU waits for work while the thread is busy with another one."""
        begins = self._begins
        return tuple(sorted(self.order, key=lambda pair: begins[pair[1]]))

    @cached_property
    def _begins(self) -> dict[Action, int]:
        """The time at which each action begins, if all actions take one unit of time."""
        begins: dict[Action, int] = {}
        free = [0] * len(self.workers)
        waiting = waits(self.workers)
        for worker, action in self.order:
            begins[action] = max([free[worker], *(1 + begins[need] for need in waiting[action])])
            free[worker] = 1 + begins[action]
        return begins

    @cached_property
    def allows_external_loss(self) -> bool:
        """Whether all F come before all other actions on every worker, as a loss outside of the pipeline needs."""
        rows = [[action.kind != "F" for action in row] for row in self.workers]
        return all(row == sorted(row) for row in rows)

    @cached_property
    def backward_at_once(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs with a backward that their worker runs directly after their forward."""
        # Recomputation would save no memory there. If the loss is outside, the code of the caller runs in between.
        return frozenset(
            (one.stage, one.micro_batch)
            for row in self.workers
            for one, next_one in pairwise(row)
            if not self.allows_external_loss and one.kind == "F" and next_one.kind in "BI" and one[::2] == next_one[::2]
        )

    def live(self) -> tuple[int, ...]:
        """For every stage, the largest number of micro-batches that it holds for backward at one time: from the start
        of F to the end of the last of B, I and W."""
        now, most = [0] * self.stages, [0] * self.stages
        for action in (action for row in self.workers for action in row):
            # I keeps the graph, because W still reads it.
            now[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            most[action.stage] = max(most[action.stage], now[action.stage])
        return tuple(most)

    @cached_property
    def forward_only(self) -> "Schedule":
        return self._where(lambda action: action.kind == "F")

    @cached_property
    def backward_only(self) -> "Schedule":
        """All actions except F, in order. `order` accepts it, but `check` does not, because F is missing."""
        return self._where(lambda action: action.kind != "F")

    def restricted(self, micro_batches: int) -> "Schedule":
        """The schedule of the first micro-batches. Valid if this one is, because they do not depend on each other."""
        return self._where(lambda action: action.micro_batch < micro_batches)

    def _where(self, keep: Callable[[Action], bool]) -> "Schedule":
        return Schedule(tuple(tuple(action for action in row if keep(action)) for row in self.workers))


def _cell(action: Action | None) -> str:
    if action is None:
        return "<td></td>"
    colors = _COLORS.get(action.kind, "#6b7280; color: #fff")
    style = f"background: {colors}; text-align: center; padding: 2px 6px"
    return f'<td style="{style}">{action}</td>'


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Fill and drain (Huang et al., GPipe, 2019): all forward, then all backward in reverse order. In torch:
    ``ScheduleGPipe``.

    Example:
        >>> print(weft.pipeline.gpipe(2, 2).text())
        0F0,0F1,0B1,0B0
        1F0,1F1,1B1,1B0
    """
    return looped_bfs(stages, micro_batches, workers=stages)


def looped_bfs(stages: int, micro_batches: int, workers: int | None = None) -> Schedule:
    """All forward, stage by stage, then all backward in reverse order (breadth-first; Lamy-Poirier, arXiv 2211.05953).
    In torch: ``ScheduleLoopedBFS``.

    Worker w holds the stages w, w + workers, and so on, by default two stages. Every stage holds all micro-batches.

    Example:
        >>> print(weft.pipeline.looped_bfs(2, 2).text())
        0F0,0F1,1F0,1F1,1B1,1B0,0B1,0B0
    """
    workers = _count_workers(stages, micro_batches, workers)
    rows: list[tuple[Action, ...]] = []
    for worker in range(workers):
        forwards = [Action(stage, "F", i) for stage in range(worker, stages, workers) for i in range(micro_batches)]
        rows.append((*forwards, *(action._replace(kind="B") for action in reversed(forwards))))
    return Schedule(tuple(rows))


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush; Narayanan et al., 2021). Stage s holds at most
    ``min(stages - s, micro_batches)`` micro-batches. In torch: ``Schedule1F1B``.

    Example:
        >>> print(weft.pipeline.one_f_one_b(2, 2).text())
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    return interleaved(stages, micro_batches, workers=stages)


def interleaved(stages: int, micro_batches: int, workers: int | None = None) -> Schedule:
    """1F1B with several stages per worker, which shortens the bubble (Megatron-LM; Narayanan et al., arXiv 2104.04473).
    In torch: ``ScheduleInterleaved1F1B``, which is defined for fewer numbers of micro-batches.

    Worker w holds the stages w, w + workers, and so on, by default two stages.

    Example:
        >>> print(weft.pipeline.interleaved(4, 2).text())
        0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1
        1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1
    """
    workers = _count_workers(stages, micro_batches, workers)
    # With several stages the gradient of a micro-batch takes longer to arrive, so each hop needs two forwards.
    return _alternate(stages, micro_batches, workers, hop=2 if stages > workers else 1)


def zero_bubble(stages: int, micro_batches: int, workers: int | None = None) -> Schedule:
    """1F1B with its backward split, and W in the time that 1F1B leaves idle (ZB-H1; Qi et al., arXiv 2401.10241). In
    torch: ``ScheduleInterleavedZeroBubble``, which is defined for fewer numbers of micro-batches.

    By default there is a worker per stage, and every stage holds at most ``min(stages, micro_batches)`` micro-batches.
    With fewer workers, worker w holds the stages w, w + workers, ...

    Example:
        >>> print(weft.pipeline.zero_bubble(2, 2).text())
        0F0,0F1,0I0,0W0,0I1,0W1
        1F0,1I0,1F1,1I1,1W0,1W1
    """
    workers = _count_workers(stages, micro_batches, stages if workers is None else workers)
    return _alternate(stages, micro_batches, workers, hop=1, split=True)


def _alternate(stages: int, micro_batches: int, workers: int, *, hop: int, split: bool = False) -> Schedule:
    """One forward, one backward, over rounds of micro-batches."""
    # A round has at least as many micro-batches as there are workers. Otherwise a worker idles before its next stage.
    # The first round is the largest. If a later one were larger, its forwards would be late, and workers deadlock.
    rounds = max(1, micro_batches // workers)
    largest = -(-micro_batches // rounds)
    rows: list[tuple[Action, ...]] = []
    for worker in range(workers):
        held = range(worker, stages, workers)
        work = [(i * rounds // micro_batches, stage, i) for stage in held for i in range(micro_batches)]
        forwards = [Action(stage, "F", i) for _, stage, i in sorted(work)]
        last_stage_first = sorted(work, key=lambda item: (item[0], -item[1], item[2]))
        backwards = [Action(stage, "I" if split else "B", i) for _, stage, i in last_stage_first]
        # Before its first backward, a worker runs `hop` forwards more than the worker after it.
        ahead = (len(held) - 1) * largest + hop * (workers - 1 - worker)
        # Worker w delays each W by w turns, so that the first gradients travel back without waiting for any W.
        weights = [None] * worker + [action._replace(kind="W") for action in backwards if split]
        turns = zip_longest(forwards[ahead:], backwards, weights)
        rows.append((*forwards[:ahead], *(action for turn in turns for action in turn if action is not None)))
    return Schedule(tuple(rows))


def zbv(stages: int, micro_batches: int) -> Schedule:
    """Split backward on stages placed in a V: of W workers, worker w holds the stages w and 2W - 1 - w (ZB-V; Qi et
    al., arXiv 2401.10241 and 2405.15362). In torch: ``ScheduleZBVZeroBubble``.

    If F, I and W take equally long, and there are at least 2W - 1 micro-batches, no worker idles between its first and
    its last action. Fewer micro-batches run the first part of that table. A worker holds at most 2W micro-batches.

    Example:
        >>> print(weft.pipeline.zbv(2, 2).text())
        0F0,1F0,1I0,1W0,0F1,0I0,0W0,1F1,1I1,1W1,0I1,0W1
    """
    workers = _count_workers(stages, micro_batches)
    count = max(micro_batches, stages - 1)
    rows: list[str] = []
    for worker in range(workers):
        after = workers - worker
        warm_up = "F" * (2 * after - 1) + "fF" * worker + "fiw" * after
        steady = "FIWfiw" * (count - 2 * workers + 1 + worker) + "IWfiw" * (after - 1)
        rows.append(warm_up + steady + "Ii" * worker + "IW" * after + "w" * worker + "W" * worker)
    return _in_v(rows, micro_batches)


def dualpipev(stages: int, micro_batches: int) -> Schedule:
    """One half of DualPipe (DeepSeek-AI, arXiv 2412.19437) on stages placed in a V, as those of `zbv`. In torch:
    ``ScheduleDualPipeV``, which is defined for at least as many micro-batches as stages.

    Most backwards are whole, and each comes after a forward of the worker's other stage. Fewer micro-batches than
    stages run the first part of the table. Of W workers, a worker holds at most 2W + 1 micro-batches.

    Example:
        >>> print(weft.pipeline.dualpipev(2, 2).text())
        0F0,1F0,0F1,1B0,1F1,0B0,1B1,0I1,0W1
    """
    workers = _count_workers(stages, micro_batches)
    count = max(micro_batches, stages)
    rows: list[str] = []
    for worker in range(workers):
        after = workers - 1 - worker
        warm_up = "FF" * after + "Ff" * (worker + 1) + "iwf" * after
        steady = "FbfB" * (count - stages + worker + 1) + "bfB" * after
        whole, split = ("bB" * (worker + 1))[: worker + 1], ("iI" * (worker + 1))[worker + 1 :]
        # The oldest W fills the time before each of the last gradients.
        weights = (split + "I" * after).replace("i", "w").replace("I", "W")
        drain = "".join(weight + "I" for weight in weights[:after]) + weights[after:]
        rows.append(warm_up + steady + whole + split + drain)
    return _in_v(rows, micro_batches)


def _in_v(rows: Sequence[str], micro_batches: int) -> Schedule:
    table: list[tuple[Action, ...]] = []
    for worker, row in enumerate(rows):
        done: Counter[tuple[int, str]] = Counter()
        actions: list[Action] = []
        for letter in row:
            # A capital is the first stage of the worker, a small letter the second.
            stage, kind = worker if letter.isupper() else 2 * len(rows) - 1 - worker, letter.upper()
            parts = "IW" if kind == "B" else kind
            actions.append(Action(stage, kind, done[stage, parts[0]]))
            done.update((stage, part) for part in parts)
        table.append(tuple(actions))
    return Schedule(tuple(table)).restricted(micro_batches)


ScheduleFunction = Callable[[int, int], Schedule]  # of the numbers of stages and micro-batches

SCHEDULES: dict[str, ScheduleFunction] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zero_bubble": zero_bubble,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
"""The named schedules. docs/pipeline.md has a table of them."""


_NAMES_OF_TORCH = (
    *("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"),
    *("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
)
_OF_TORCH = dict(zip(_NAMES_OF_TORCH, SCHEDULES, strict=True))
"""The schedules of `torch.distributed.pipelining`."""


@lru_cache
def build(schedule: str | Schedule | ScheduleFunction, stages: int, micro_batches: int) -> Schedule:
    """The checked schedule for these numbers of stages and micro-batches. Further micro-batches of a table are dropped.
    Raises ScheduleError for an unknown name, and with all faults of a table."""
    if isinstance(schedule, type) and schedule.__name__ in _OF_TORCH:
        schedule = schedule.__name__  # raises below
    if isinstance(schedule, str):
        if schedule in SCHEDULES:
            return SCHEDULES[schedule](stages, micro_batches)
        text, meant = schedule.strip(), _OF_TORCH.get(schedule)
        if not ("," in text or "\n" in text or _ACTION.fullmatch(text)):
            raise ScheduleError(
                f"there is no schedule {schedule!r}{suggest(meant or schedule, SCHEDULES) or '.'} Give one of "
                f"{', '.join(SCHEDULES)}, or a table as text, with a line per worker of actions separated by commas: "
                "0F0,0F1,0B1,0B0"
            )
        schedule = Schedule.parse(schedule)
    _check_sizes(stages, micro_batches)
    if not isinstance(schedule, Schedule):
        result: Any = schedule(stages, micro_batches)
        if not isinstance(result, Schedule):
            raise ScheduleError(
                f"the schedule function {schedule!r} returned {result!r} for {stages} stages and {micro_batches} "
                "micro-batches, but it must return a weft.Schedule"
            )
        schedule = result
    # Cached by `lru_cache`, so a table is checked once and not at every step.
    schedule.check(stages=stages, micro_batches=max(micro_batches, schedule.micro_batches))
    return schedule.restricted(micro_batches)


def _count_workers(stages: int, micro_batches: int, workers: int | None = None) -> int:
    """Return `workers`, by default one for every two stages. Raises ScheduleError if the stages do not fit them."""
    _check_sizes(stages, micro_batches)
    count: Any = stages / 2 if workers is None else workers
    if not (count >= 1 and count == int(count) and stages % count == 0):
        need = "two stages per worker" if workers is None else f"equally many stages on each of {workers} workers"
        raise ScheduleError(
            f"this schedule needs {need}, but got {stages} stages; give the pipe another number of stages (balance=, "
            "devices= or split=), or use another schedule, such as '1f1b', which needs one stage per worker"
        )
    return int(count)


def _check_sizes(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ScheduleError(
            f"a schedule needs at least one stage and one micro-batch, but got {stages} stages "
            f"and {micro_batches} micro-batches"
        )
