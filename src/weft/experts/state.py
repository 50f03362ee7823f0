"""The state of an expert: what is in it, and whether one can be this expert's, told before anything of it is loaded.

module, optimizer, schedule       tables of their own; None where the expert has none
optimizer_class, schedule_class   their kinds: torch would load the state of another, and fail or go astray later
steps, seed, ..._batches          counts
branch                            by which a journal knows it, see `weft.experts.entry`
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault

_KINDS = {"optimizer": "optimizer_class", "schedule": "schedule_class"}
_TABLES = {"module", "optimizer", "schedule"}
_WORDS = {*_KINDS.values(), "branch"}  # which older states lack
_COUNTS = {"steps", "seed", "forward_batches", "backward_batches"}
_MAY_LACK = {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "initial_lr"}
"""What torch came to add to its optimizers, and fills in itself."""


def state_of(
    module: nn.Module, optimizer: Optimizer | None, schedule: LRScheduler | None, counts: Mapping[str, int | str]
) -> dict[str, Any]:
    """A copy of the state of an expert with these parts."""
    state = {
        "module": module.state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "schedule": None if schedule is None else schedule.state_dict(),
        _KINDS["optimizer"]: None if optimizer is None else type(optimizer).__name__,
        _KINDS["schedule"]: None if schedule is None else type(schedule).__name__,
        **counts,
    }
    return copy.deepcopy(state)


def check_state(name: str, state: Mapping[str, Any], optimizer: Optimizer | None, schedule: LRScheduler | None) -> None:
    """Raise ``UsageError`` that lists why this is no state of the expert of this name, with these parts."""
    faults = [f"{each!r} is missing" for each in sorted((_TABLES | _COUNTS) - state.keys())]
    faults += [f"{each!r} is not known" for each in sorted(state.keys() - _TABLES - _COUNTS - _WORDS)]
    faults += [
        f"there is {'no' if state[each] is None else 'a'} state of the {each}, but this expert has "
        f"{'none' if part is None else 'one'}"
        for each, part in (("optimizer", optimizer), ("schedule", schedule))
        if each in state and (state[each] is None) != (part is None)
    ]
    for each in sorted(_COUNTS & state.keys()):
        faults += count_fault(each, state[each], zero=True)
    faults += [
        f"{each} is of type {type(state[each]).__name__}, wanted a dict"
        for each in sorted(_TABLES & state.keys())
        if not isinstance(state[each], Mapping) and (each == "module" or state[each] is not None)
    ]
    if not isinstance(state.get("branch", ""), str):
        faults.append(f"'branch' is {state['branch']!r}, wanted a str")
    if not faults:
        parts = {"optimizer": optimizer, "schedule": schedule}
        faults += [fault for each, part in parts.items() for fault in _kind_faults(each, part, state.get(_KINDS[each]))]
    if not faults and optimizer is not None and state.get(_KINDS["optimizer"]) is None:
        faults += _optimizer_faults(optimizer, state["optimizer"])
    if faults:
        raise UsageError(listed(f"this is no state of expert {name!r}:", faults))


def _kind_faults(what: str, part: object, kind: str | None) -> list[str]:
    mine = type(part).__name__
    if part is None or kind is None or kind == mine:
        return []
    return [f"the state is of {what} {kind}, but this expert has {mine}"]


def _optimizer_faults(optimizer: Optimizer, state: Mapping[str, Any]) -> list[str]:
    """Whether a state that does not tell its kind is of another optimizer, seen by what it lacks."""
    mine = type(optimizer).__name__
    if not isinstance(state.get("param_groups"), list):
        return [f"the state of the optimizer has no list of param_groups, wanted one of {mine}"]
    groups = cast("list[Mapping[str, Any]]", state["param_groups"])
    pairs = zip(optimizer.param_groups, groups, strict=False)  # of how many groups there are, torch itself complains
    lacks = {name for own, saved in pairs for name in own.keys() - saved.keys()} - _MAY_LACK
    return [f"the state of the optimizer lacks {name}, which {mine} has" for name in sorted(lacks)]
