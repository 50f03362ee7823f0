"""What an optimizer was asked to be, and what its checkpoint says: a checkpoint wins, and that is to be told.

asked: lr 0.5 ──> restored: lr 0.01 ──> "lr is 0.01, as in the checkpoint, not 0.5 as asked for"
"""

from typing import Any, cast

from torch import Tensor

from weft.experts.backend import ExpertBackend

_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # not what is computed, but how

Hyperparameters = list[dict[str, Any]]
"""For each group of parameters, by name."""


def hyperparameters(backend: ExpertBackend) -> Hyperparameters:
    """Those of now; none where a schedule changes them as it goes."""
    if backend.optimizer is None or backend.schedule is not None:
        return []
    return [{name: _plain(value) for name, value in group.items()} for group in backend.optimizer.param_groups]


def changed(asked: Hyperparameters, found: Hyperparameters) -> list[str]:
    """What a checkpoint has changed, in words."""
    pairs = [
        (name, one[name], two[name]) for one, two in zip(asked, found, strict=False) for name in one if name in two
    ]
    seen = dict.fromkeys(
        f"{name} is {after!r}, as in its checkpoint, and not {before!r} as asked for; to change it, write it into the "
        "checkpoint (docs/experts.md), or begin in another folder"
        for name, before, after in pairs
        if name not in _HOW and before != after
    )
    return list(seen)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return cast("Any", value).tolist()
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value
