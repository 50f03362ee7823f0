"""Hypothesis strategies for the laws."""

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from tests.laws.models import LayerPlan, ModelPlan
from torchweft.pipeline.actions import Action, needs
from torchweft.pipeline.schedule import SCHEDULES, Schedule


@st.composite
def valid_schedules(
    draw: st.DrawFn, stages: int, micro_batches: int, *, split_backward: bool = True, forward_only: bool = False
) -> Schedule:
    """Any valid schedule of this size: a random serial order that satisfies the dependences, divided among workers.

    A worker has one or more stages, in any mixture. Each backward is B, or I and W unless `split_backward` is false.
    `forward_only` omits backwards.
    """
    sizes = [(stage, i) for stage in range(stages) for i in range(micro_batches)]
    actions = [Action(stage, "F", i) for stage, i in sizes]
    for stage, i in () if forward_only else sizes:
        kinds = "IW" if split_backward and draw(st.booleans()) else "B"
        actions += [Action(stage, kind, i) for kind in kinds]
    owner = _owners(draw, stages)
    rows: list[list[Action]] = [[] for _ in range(max(owner) + 1)]
    preferred = draw(st.permutations(actions))
    for action in _topological(preferred):
        rows[owner[action.stage]].append(action)
    return Schedule(tuple(map(tuple, rows)))


def any_schedules(most_stages: int = 4, most_micro_batches: int = 4) -> st.SearchStrategy[Schedule]:
    """Valid schedules up to this size."""
    sizes = st.tuples(st.integers(1, most_stages), st.integers(1, most_micro_batches))
    return sizes.flatmap(lambda size: valid_schedules(*size))


def fitting_schedules(stages: int) -> list[str]:
    """Names of the schedules that support this number of stages. Some place two stages on each worker."""
    return [name for name in SCHEDULES if stages % 2 == 0 or name in ("gpipe", "1f1b", "zero_bubble")]


def _owners(draw: st.DrawFn, stages: int) -> list[int]:
    """The worker of every stage: one stage per worker in order, or any assignment without idle workers."""
    if draw(st.booleans()):
        return list(range(stages))
    drawn = draw(st.lists(st.integers(0, stages - 1), min_size=stages, max_size=stages))
    names = {worker: place for place, worker in enumerate(sorted(set(drawn)))}
    return [names[worker] for worker in drawn]


def _topological(preferred: list[Action]) -> list[Action]:
    """Repeatedly take the first action that can run. Can produce every order that satisfies the dependences."""
    waiting = dict.fromkeys(preferred)
    order: list[Action] = []
    while waiting:
        order.append(next(a for a in waiting if not any(need in waiting for need in needs(a))))
        del waiting[order[-1]]
    return order


OPS = ("linear", "linear", "bias", "inplace", "same")
FORMS = ("tensor", "tensor", "pair", "twice", "integers", "nested")
SKIP_KINDS = ("main", "input", "fresh", "integer", "none")


@st.composite
def model_plans(draw: st.DrawFn, *, most_layers: int = 6, most_skips: int = 3, dropout: bool = False) -> ModelPlan:
    """Models of any depth, cut anywhere, with skips of all kinds and any readers, even within a stage.

    With `dropout`, many layers draw random numbers. Every model can be trained, because its first layer is trainable
    and its main path is unbroken.
    """
    ops = (*OPS, "dropout", "dropout", "dropout") if dropout else OPS
    depth = draw(st.integers(1, most_layers))
    stashes: list[list[tuple[str, str]]] = [[] for _ in range(depth)]
    pops: list[list[tuple[str, bool]]] = [[] for _ in range(depth)]
    for skip in range(draw(st.integers(0, most_skips)) if depth > 1 else 0):
        source = draw(st.integers(0, depth - 2))
        stashes[source].append((f"skip{skip}", draw(st.sampled_from(SKIP_KINDS))))
        count = draw(st.integers(1, min(3, depth - 1 - source)))
        for reader in draw(st.sets(st.integers(source + 1, depth - 1), min_size=count, max_size=count)):
            pops[reader].append((f"skip{skip}", draw(st.integers(0, 3)) > 0))
    layers = [
        LayerPlan(
            op="linear" if index == 0 else draw(st.sampled_from(ops)),
            form=draw(st.sampled_from(FORMS)),
            stashes=tuple(stashes[index]),
            pops=tuple(pops[index]),
            frozen=index > 0 and draw(st.integers(0, 3)) == 0,
        )
        for index in range(depth)
    ]
    tied = [i for i in range(1, depth) if layers[i].op == "linear" and draw(st.integers(0, 4)) == 0]
    return ModelPlan(
        tuple(layers),
        draw(balances(depth)),
        tuple(tied),
        draw(st.sampled_from(FORMS)),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


@st.composite
def balances(draw: st.DrawFn, layers: int, most_stages: int = 4) -> tuple[int, ...]:
    """Layers per stage: any division of the layers into at most `most_stages` stages."""
    stages = draw(st.integers(1, min(most_stages, layers)))
    inner = st.integers(1, max(1, layers - 1))
    cuts = draw(st.sets(inner, min_size=stages - 1, max_size=stages - 1))
    ends = [0, *sorted(cuts), layers]
    return tuple(end - start for start, end in pairwise(ends))


def checkpoints(stages: int) -> st.SearchStrategy[Any]:
    """Every form of `checkpoint=`: a mode, a predicate, or a list of modes and predicates."""
    modes = st.sampled_from(["always", "except_last", "never"])
    predicates = st.frozensets(st.tuples(st.integers(0, stages - 1), st.integers(0, 5))).map(_Among)
    return modes | predicates | st.lists(modes | predicates, min_size=stages, max_size=stages)


class _Among:
    """A predicate that is true for the given (stage, micro-batch) pairs, and that Hypothesis can print."""

    def __init__(self, pairs: frozenset[tuple[int, int]]) -> None:
        self._pairs = pairs

    def __call__(self, stage: int, micro_batch: int, micro_batches: int) -> bool:
        return (stage, micro_batch) in self._pairs

    def __repr__(self) -> str:
        return f"Among({sorted(self._pairs)})"


def forwards_first(schedule: Schedule) -> Schedule:
    """The same order with all forwards of a worker first, so that the loss can be computed outside the pipe."""
    forward, backward = schedule.forward_only, schedule.backward_only
    return Schedule(tuple(f + b for f, b in zip(forward.workers, backward.workers, strict=True)))
