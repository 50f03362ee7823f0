"""What can be wrong with a table, all of it at once.

Each check below looks for one kind of fault and returns sentences. Later checks forgive what earlier ones
reported: an action that is missing holds nobody up, and one that stands too early on its own worker is not
called a deadlock as well. So every cause is named once, and what remains stuck is a circle between workers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from .schedule_action import KINDS, Action, Table, waits, walk
from .validation import is_whole


def faults(table: Table, stages: int | None, micro_batches: int | None) -> list[str]:
    """Every fault of a table, as sentences; none if it is valid. See `weft.core.schedule.Schedule.check`."""
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
