"""One unit of work, what it has to wait for, and the walk that honours this.

The stages form a chain. Forward runs down it, backward runs up again, and no micro-batch waits for another:

    0F0 ──> 1F0 ──> 2F0          F   forward
     │       │       │           B   the whole backward, or in two parts
     v       v       v           I     the gradients of the stage's inputs
    0B0 <── 1B0 <── 2B0          W     the gradients of its weights: after I, and nobody waits for it

Skip routes add no arrow, because the chain between their source and their destination already implies it.
What binds micro-batches to each other is only the list of each worker. This file knows no more than that, so
the checks, the serial order and the forecast all stand on one definition of "may start now".
"""

from collections.abc import Mapping
from typing import NamedTuple

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
