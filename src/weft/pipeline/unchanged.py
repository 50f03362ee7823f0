"""What must not change between the forward of a step and the recomputations in its backward.

    forward ... seal()     the caller's code: optimizers, eval(), the end of a functional_call     check() ... backward

Weights and training modes are looked at twice per step, between the walks, not around every micro-batch. So what a
layer does to its own weights while it runs, as ``Embedding(max_norm=...)`` does, goes unnoticed. Other attributes are
left out, since a layer may keep there what it likes, such as its last loss. Buffers: see `replay.py`.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from weft.core.errors import ChangedError, UsageError
from weft.core.segment import versions
from weft.pipeline.stage import Stage

Held = tuple[list[bool], list[Tensor | None], list[int]]
"""Of all modules of a stage, in order: training or not, weights, and how often those were written to."""


class Unchanged:
    """The stages that will recompute, as they are now."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.seal()

    def seal(self) -> None:
        """From here on nothing may change."""
        self._held = [_held(stage) for stage in self._stages]

    def check(self) -> None:
        """Raise ChangedError, which names what changed since `seal`."""
        for stage, before in zip(self._stages, self._held, strict=True):
            now = _held(stage)
            same = before[0] == now[0] and before[2] == now[2] and len(before[1]) == len(now[1])
            if not same or any(one is not other for one, other in zip(before[1], now[1], strict=True)):
                raise ChangedError(
                    f"{_difference(stage, before, now)} between the forward of stage {stage.index} and its "
                    "recomputation in backward, which would compute something else now; change it after backward, or "
                    "use checkpoint='never' for this stage"
                )


def _held(stage: Stage) -> Held:
    training: list[bool] = []
    weights: list[Tensor | None] = []
    stack: list[nn.Module | None] = [layer for _, layer in reversed(stage.layers)]
    while stack:
        module = stack.pop()
        if module is not None:
            training.append(module.training)
            weights += module._parameters.values()
            stack += reversed(module._modules.values())
    return training, weights, versions(each for each in weights if each is not None)


def _difference(stage: Stage, before: Held, now: Held) -> str:
    """The first thing that changed, in words."""
    if len(before[0]) != len(now[0]) or len(before[1]) != len(now[1]):
        return "layers were added or removed"
    modules = [
        pair
        for name, layer in stage.layers
        for pair in cast("Iterable[tuple[str, nn.Module]]", layer.named_modules(prefix=name, remove_duplicate=False))
    ]
    names = [f"{path}.{key}" for path, module in modules for key in module._parameters]
    for name, one, other in zip(names, before[1], now[1], strict=True):
        if one is not other:
            return f"parameter {name!r} was replaced (by torch.func.functional_call, say, which ends with the call)"
    present = [name for name, each in zip(names, now[1], strict=True) if each is not None]
    for name, one, other in zip(present, before[2], now[2], strict=True):
        if one != other:
            return f"parameter {name!r} was written to (by an optimizer's step or load_state_dict, say)"
    return next(
        f"layer {path!r} went from {'training to evaluation' if was else 'evaluation to training'}"
        for (path, _), was, is_now in zip(modules, before[0], now[0], strict=True)
        if was != is_now
    )


def refuse_cached_weights(stages: Iterable[Stage]) -> None:
    """Raise UsageError inside ``parametrize.cached()``, if a layer is parametrized.

    The cache is the process's. A weight that it kept without a graph, from a forward that will be recomputed, would be
    handed to one that needs its gradient; and a graph that it kept would be walked once per micro-batch.
    """
    if not getattr(parametrize, "_cache_enabled", 0):
        return
    for stage in stages:
        for name, layer in stage.layers:
            if any(parametrize.is_parametrized(module) for module in layer.modules()):
                raise UsageError(
                    f"layer {name!r} of stage {stage.index} has parametrized weights, and the pipe was called inside "
                    "torch.nn.utils.parametrize.cached(): micro-batches cannot share such a cache, since their graphs "
                    "are apart. Call the pipe outside of it, or use executor='graph'"
                )
