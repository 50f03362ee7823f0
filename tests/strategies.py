"""What the laws draw their cases from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

from weft.core.schedule import Action, Schedule
from weft.core.schedule_action import needs


@contextmanager
def random_untouched() -> Iterator[None]:
    """Let a strategy call weft. The run-time checks sample tuples with `random`, whose state must not change
    within a strategy; here it is put back.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@st.composite
def valid_schedules(
    draw: st.DrawFn,
    stages: int,
    micro_batches: int,
    *,
    split_backward: bool = True,
    forward_only: bool = False,
) -> Schedule:
    """Any valid schedule of this size: a random serial order that honours the chain, dealt to the workers.

    Every worker has one stage, or several in any mixture. Each backward is B, or I and W unless
    `split_backward` is false; `forward_only` leaves it out.
    """
    sizes = [(stage, i) for stage in range(stages) for i in range(micro_batches)]
    actions = [Action(stage, "F", i) for stage, i in sizes]
    for stage, i in () if forward_only else sizes:
        kinds = "IW" if split_backward and draw(st.booleans()) else "B"
        actions += [Action(stage, kind, i) for kind in kinds]
    owner = _owners(draw, stages)
    rows: list[list[Action]] = [[] for _ in range(max(owner) + 1)]
    wishes = draw(st.permutations(actions))
    with random_untouched():
        for action in _topological(wishes):
            rows[owner[action.stage]].append(action)
        return Schedule(tuple(map(tuple, rows)))


def any_schedules(most_stages: int = 4, most_micro_batches: int = 4) -> st.SearchStrategy[Schedule]:
    """Valid schedules of any size up to these."""
    sizes = st.tuples(st.integers(1, most_stages), st.integers(1, most_micro_batches))
    return sizes.flatmap(lambda size: valid_schedules(*size))


def _owners(draw: st.DrawFn, stages: int) -> list[int]:
    """For every stage a worker, so that no worker is idle: one each in order, or drawn freely."""
    if draw(st.booleans()):
        return list(range(stages))
    drawn = draw(st.lists(st.integers(0, stages - 1), min_size=stages, max_size=stages))
    names = {worker: place for place, worker in enumerate(sorted(set(drawn)))}
    return [names[worker] for worker in drawn]


def _topological(wishes: list[Action]) -> list[Action]:
    """Always the first wish that may run. Any order that honours the chain can come out."""
    waiting = dict.fromkeys(wishes)
    order: list[Action] = []
    while waiting:
        order.append(next(a for a in waiting if not any(need in waiting for need in needs(a))))
        del waiting[order[-1]]
    return order
