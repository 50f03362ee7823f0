"""Hyperparameters of an expert's optimizer and schedule: read, compared with a checkpoint, and set while it lives.

    groups of the optimizer    lr, betas, weight_decay, ...      the group's number and the name
    schedule                   gamma, step_size, T_max, ...      -1 and "NAME of CLASS"

PyTorch has no function to set one. Its optimizers read them from ``param_groups`` at every step and check them only in
their constructors. So a new value is checked by an optimizer of the same class, with one parameter of its own.

A schedule computes ``lr`` from the rate before, or from its base rates. To change the rate of a scheduled expert, both
are scaled by the same factor: the schedule continues at the new height.
"""

import inspect
import json
import warnings
from collections.abc import Mapping
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from torchweft.core.validation import Validator, is_number, suggest

Key = tuple[int, str]
Group = dict[str, Any]
_IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}  # they do not change results
_SCHEDULED = {"lr", "momentum", "betas"}  # a schedule changes them at every step
_CYCLIC = (OneCycleLR, CyclicLR)  # they have rates of their own, and read most arguments only when they are made
_PROGRESS = {"optimizer", "last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}


def read_hyperparameters(optimizer: Optimizer | None, schedule: LRScheduler | None) -> dict[Key, str]:
    """The present hyperparameters as JSON. Without those that the schedule changes at every step."""
    if optimizer is None:
        return {}
    left_out = _IMPLEMENTATION if schedule is None else _IMPLEMENTATION | _SCHEDULED
    values: dict[Key, Any] = {
        (number, name): value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in left_out
    }
    if schedule is not None:
        values |= {(-1, f"{name} of {type(schedule).__name__}"): x for name, x in _settings_of(schedule).items()}
    return {key: json.dumps(value, sort_keys=True, default=_to_json) for key, value in values.items()}


def describe_changes(configured: Mapping[Key, str], saved: Mapping[Key, str], *, prefer_configured: bool) -> list[str]:
    """Notes on hyperparameters that differ between the configuration and the checkpoint, and which of them hold."""
    texts: list[str] = []
    for key, value in configured.items():
        if key not in saved or value == saved[key]:
            continue
        if prefer_configured:
            texts.append(f"{key[1]} is {value}, as configured, and not {saved[key]} as in its checkpoint")
        else:
            texts.append(
                f"{key[1]} is {saved[key]}, as in its checkpoint, and not {value} as asked for; to change it, see "
                '`torchweft set`, or prefer = "file" (docs/experts.md)'
            )
    return list(dict.fromkeys(texts))


def set_hyperparameters(
    name: str,
    optimizer: Optimizer | None,
    schedule: LRScheduler | None,
    values: Mapping[str, Any],
    group: int | None = None,
) -> None:
    """Set them by name, all or none, in all groups or in one. Raises ``UsageError`` that lists all that cannot be."""
    groups: list[Group] = [] if optimizer is None else optimizer.param_groups
    changes = list[tuple[Group, str, Any]]()
    with Validator(f"hyperparameters of expert {name!r} cannot be set") as check:
        check.require(optimizer is not None, "it has no optimizer")
        check.require(bool(values), "none is given, wanted at least one, such as lr")
        fits = group is None or group in range(len(groups)) or not groups
        check.require(fits, f"group is {group}, wanted one of {list(range(len(groups)))}")
        if not check.faults:
            chosen = groups if group is None else [groups[group]]
            for key, value in values.items():
                changes += _find_changes(check, chosen, schedule if group is None else None, key, value)
            scaled = [holder for holder, key, _ in changes if key == "lr"]
            check.add(*([] if schedule is None or not scaled else _scale_faults(schedule, scaled)))
        if optimizer is not None and not check.faults:
            check.add(*_class_faults(optimizer, changes))
    for holder, key, new in changes:
        if key == "lr" and schedule is not None:
            _scale_base_rate(schedule, groups, holder, float(new) / float(holder["lr"]))
        holder[key] = new


class HyperparameterSettings:
    """The hyperparameters with which an expert was made, to be put back after a checkpoint was loaded."""

    def __init__(self, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._groups = [{key: copy(x) for key, x in one.items() if key != "params"} for one in optimizer.param_groups]
        self._settings: Group = {}
        if isinstance(schedule, _CYCLIC):
            self._settings = {key: copy(x) for key, x in vars(schedule).items() if key not in _PROGRESS}
        elif schedule is not None:
            self._settings = _settings_of(schedule)

    def put_back(self) -> None:
        schedule, groups = self._schedule, self._optimizer.param_groups
        for configured, group in zip(self._groups, groups, strict=True):
            kept = set(_IMPLEMENTATION)  # and the values of this step of the schedule
            if isinstance(schedule, _CYCLIC):
                kept |= _SCHEDULED
            elif schedule is not None:
                kept |= {"lr", "initial_lr"}
                if hasattr(schedule, "base_lrs") and group["initial_lr"]:
                    factor = float(configured["initial_lr"]) / float(group["initial_lr"])
                    _scale_base_rate(schedule, groups, group, factor)
                    group["lr"] *= factor
            group.update({key: copy(x) for key, x in configured.items() if key not in kept})
        if schedule is not None:
            vars(schedule).update(self._settings)
        if isinstance(schedule, _CYCLIC):
            with warnings.catch_warnings():  # of a call outside of `step`
                warnings.simplefilter("ignore")
                for rate, group in zip(schedule.get_lr(), groups, strict=True):
                    group["lr"] = rate


def _settings_of(schedule: LRScheduler) -> Group:
    """The arguments of a schedule that it keeps as attributes."""
    arguments = inspect.signature(type(schedule)).parameters.keys() - {"optimizer", "last_epoch"}
    return {name: value for name, value in schedule.state_dict().items() if name in arguments}


def _find_changes(
    check: Validator, groups: list[Group], schedule: LRScheduler | None, key: str, value: Any
) -> list[tuple[Group, str, Any]]:
    """The dicts in which to set ``key``, with the value in the form of the present one."""
    settings = {} if schedule is None or isinstance(schedule, _CYCLIC) else _settings_of(schedule)
    holders = [one for one in groups if key in one and key not in _IMPLEMENTATION]
    if of_schedule := not holders and key in settings:
        holders = [vars(schedule)]
    if not holders:
        known = [key for key in dict.fromkeys([*(key for one in groups for key in one), *settings])]
        known = [key for key in known if key not in _IMPLEMENTATION]
        check.add(f"it has no {key!r} that can be set, known are {', '.join(known)}{suggest(key, known)}")
        return []
    old = _to_number(holders[0][key])
    if any(_to_number(holder[key]) != old for holder in holders):
        check.add(f"{key} differs between the groups of parameters; give the number of one, such as group=0")
        return []
    new = [_convert(holder[key], value, whole=of_schedule) for holder in holders]
    check.require(None not in new, f"{key} is {value!r}, wanted a value like {old!r}")
    return [(holder, key, x) for holder, x in zip(holders, new, strict=True)]


def _convert(old: Any, value: Any, *, whole: bool) -> Any:
    """The value in the form of ``old``, or None if it cannot take its place. ``whole``: an int stays an int."""
    if isinstance(old, bool) or isinstance(value, bool):
        return value if type(old) is type(value) else None
    if isinstance(old, list | tuple):
        items: list[Any] = list(cast("Any", value)) if isinstance(value, list | tuple) else []
        olds: list[Any] = list(cast("Any", old))
        parts = [_convert(*pair, whole=whole) for pair in zip(olds, items, strict=False)]
        return None if len(olds) != len(items) or None in parts else (tuple(parts) if isinstance(old, tuple) else parts)
    if not is_number(value) or not abs(value) < float("inf"):
        return None
    if isinstance(old, Tensor):
        return torch.full_like(old, value) if old.numel() == 1 else None
    if not is_number(old) or (whole and isinstance(old, int) and not isinstance(value, int)):
        return None
    return float(value) if isinstance(old, float) else value


def _class_faults(optimizer: Optimizer, changes: list[tuple[Group, str, Any]]) -> list[str]:
    """The errors of the optimizer's own class for groups with these changes, and for a step after them."""
    faults: list[str] = []
    accepted = inspect.signature(type(optimizer)).parameters.keys() - _IMPLEMENTATION
    for group in optimizer.param_groups:
        before = {key: _to_number(value) for key, value in group.items() if key in accepted}
        after = {key: _to_number(new) for holder, key, new in changes if holder is group and key in accepted}
        parameter = torch.zeros(1, requires_grad=True, device="cpu")
        parameter.grad = torch.ones_like(parameter)
        kind = cast("Any", type(optimizer))
        try:
            rehearsed: Optimizer = kind([parameter], **before)
            rehearsed.step()
        except Exception:  # a class with other arguments than its groups hold, or of another step: it cannot be asked
            continue
        try:
            kind([parameter], **before | after)
            # Some hyperparameters need a state that is made in the first step only, such as ``amsgrad``.
            rehearsed.param_groups[0].update(after)
            rehearsed.step()
        except Exception as error:
            words = str(error) if isinstance(error, ValueError) else f"{', '.join(after)} can be set at the start only"
            faults.append(words)
    return list(dict.fromkeys(faults))


def _scale_faults(schedule: LRScheduler, groups: list[Group]) -> list[str]:
    kind = type(schedule).__name__
    if isinstance(schedule, OneCycleLR):
        return ["lr is computed by the OneCycleLR at every step; set its max_lr and min_lr"]
    if isinstance(schedule, CyclicLR) or not hasattr(schedule, "base_lrs"):
        text = f"lr is computed by the {kind} at every step, and its rates are fixed when it is made"
        return [f'{text}; change the configuration, with prefer = "file"']
    if any(not float(one["lr"]) for one in groups):
        return [f"lr is 0 at this step of the {kind}, from which it cannot be scaled; set it at another step"]
    return []


def _scale_base_rate(schedule: LRScheduler, groups: list[Group], group: Group, factor: float) -> None:
    schedule.base_lrs = [
        rate * factor if one is group else rate for rate, one in zip(schedule.base_lrs, groups, strict=True)
    ]
    if "initial_lr" in group:
        group["initial_lr"] *= factor


def _to_number(value: Any) -> Any:
    return cast("Any", value).tolist() if isinstance(value, Tensor) else value


def _to_json(value: Any) -> Any:
    return cast("Any", value).tolist() if isinstance(value, Tensor) else type(value).__name__
