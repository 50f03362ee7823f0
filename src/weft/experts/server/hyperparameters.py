"""What optimizer and schedule were asked to be, and what a checkpoint says: that wins, and this is to be told.

asked: lr 0.5 ──> restored: lr 0.01 ──> "lr is 0.01, as in the checkpoint, not 0.5 as asked for"
"""

import inspect
from collections import Counter
from typing import Any, cast

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from weft.experts.expert import ExpertBackend

_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # not what is computed, but how

_MOVED = {"lr", "momentum", "betas"}  # by schedules, as they go
_SETTING = (bool, int, float, str, list, Counter)

Hyperparameters = list[dict[str, Any]]
"""For each group of parameters, by name; those of a schedule last."""


def hyperparameters(backend: ExpertBackend) -> Hyperparameters:
    """Those of now, but for what a schedule changes as it goes."""
    if backend.optimizer is None:
        return []
    moved = set[str]() if backend.schedule is None else _MOVED
    groups = [
        {name: _plain(value) for name, value in group.items() if name not in moved}
        for group in backend.optimizer.param_groups
    ]
    return groups if backend.schedule is None else [*groups, _settings(backend.schedule)]


def _settings(schedule: LRScheduler) -> dict[str, Any]:
    """What a schedule was made with, as far as it keeps that under the same name."""
    asked = inspect.signature(type(schedule)).parameters.keys() - {"optimizer", "last_epoch"}
    kept: dict[str, Any] = schedule.state_dict()
    return {
        f"{name} of {type(schedule).__name__}": _plain(value)
        for name, value in kept.items()
        if name in asked and isinstance(value, _SETTING)
    }


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
    if isinstance(value, Counter):  # the milestones of a schedule
        return tuple(sorted(cast("Counter[Any]", value).elements()))
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value
