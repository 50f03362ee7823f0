"""Actions of a schedule: their dependencies, a serial order of a table of them, and its faults.

The stages form a chain, and no micro-batch waits for another:

    0F0 --> 1F0 --> 2F0          F   forward
     |       |       |           B   the whole backward, or in two parts
     v       v       v           I     the gradients of the stage's inputs
    0B0 <-- 1B0 <-- 2B0          W     the gradients of its weights: after I, and no other action waits for it

Skips add no dependency, because the chain between their source and their destination implies it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, cast

from torchweft.core.validation import is_whole

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One unit of work: `kind` (F, B, I or W) of one micro-batch on one stage. ``str()`` returns e.g. ``2F0``."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Table = tuple[tuple[Action, ...], ...]  # for every worker the actions that it runs, in order


def needs(action: Action) -> tuple[Action, ...]:
    """The actions that must be done first, and neighbours that a table does not hold."""
    stage, kind, micro_batch = action
    if kind == "F":
        return (Action(stage - 1, "F", micro_batch),)
    if kind == "W":
        return (Action(stage, "I", micro_batch),)
    # Those beyond the end of the chain, and B if the backward of the neighbour is split into I and W.
    return tuple(Action(s, k, micro_batch) for s, k in ((stage, "F"), (stage + 1, "B"), (stage + 1, "I")))


def waits(table: Table) -> dict[Action, tuple[Action, ...]]:
    present = {action for row in table for action in row}
    return {action: tuple(need for need in needs(action) if need in present) for action in present}


def walk_table(
    table: Table, waiting: Mapping[Action, tuple[Action, ...]]
) -> tuple[list[tuple[int, Action]], list[str]]:
    """Walk all lists at once, until every list ends or is stuck. Returns the order as (worker, action) pairs, and each
    worker that is stuck with its position and the actions that it waits for. Costs O(actions * workers)."""
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
        # The micro-batch that has come furthest. Its tensors are still in the cache, and its graph is freed early.
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


def find_faults(table: Table, stages: int | None = None, micro_batches: int | None = None) -> Iterator[str]:
    """Every fault of a table, empty if it is valid. Each cause is reported once."""
    for worker, action in ((worker, action) for worker, row in enumerate(table) for action in row):
        if not _is_known(action):
            shown = str(action) if isinstance(cast(Any, action), Action) else repr(action)
            yield f"worker {worker}: {shown} is not an action: a stage, F, B, I or W, and a micro-batch"
    # Later checks ignore the faults that earlier ones have reported.
    table = tuple(tuple(action for action in row if _is_known(action)) for row in table)
    counts = Counter(action for row in table for action in row)
    has_stages = 1 + max((action.stage for action in counts), default=-1)
    has_micro_batches = 1 + max((action.micro_batch for action in counts), default=-1)
    sizes = (has_stages, stages, "stages"), (has_micro_batches, micro_batches, "micro-batches")
    for has, wanted, what in sizes:
        if wanted is not None and has != wanted:
            yield f"the table has {has} {what}, but {wanted} are needed"
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
    waiting = waits(table)
    for worker, row in enumerate(table):
        place = {action: column for column, action in reversed(list(enumerate(row)))}
        for column, action in enumerate(row):
            late = [need for need in waiting[action] if place.get(need, -1) > column]
            # Removed, so that it is not reported as a deadlock as well. Actions that remain stuck are in a cycle.
            waiting[action] = tuple(need for need in waiting[action] if need not in late)
            for need in late:
                yield f"worker {worker}: {action} stands before {need}, which it needs"
    yield from walk_table(table, waiting)[1]


def _gaps(present: Iterable[int], end: int) -> str:
    pairs = pairwise([-1, *sorted(present), end])
    return ", ".join(f"{a + 1}-{b - 1}" if b - a > 2 else str(a + 1) for a, b in pairs if b - a > 1)
