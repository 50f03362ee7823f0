"""State of an expert: what it holds, whether it fits this expert, and loading all of it or nothing.

module, optimizer, schedule       tables of their own; None where the expert has none
optimizer_class, schedule_class   their kinds: torch would load the state of another, and fail or go astray later
steps, seed, ..._batches          counts
branch                            by which a journal knows it, see `weft.experts.journal`

optimizer, schedule ── module     the module is loaded last: only it is written to in place
     '──── any raises ────> all three as before
"""

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.core.errors import UsageError
from weft.core.validation import Validator
from weft.experts.optimizer_step import laid_out

_KINDS = {"optimizer": "optimizer_class", "schedule": "schedule_class"}
_TABLES = {"module", "optimizer", "schedule"}
_WORDS = {*_KINDS.values(), "branch"}
_COUNTS = {"steps", "seed", "forward_batches", "backward_batches"}


def state_of(
    module: nn.Module, optimizer: Optimizer | None, schedule: LRScheduler | None, counts: Mapping[str, int | str]
) -> dict[str, Any]:
    """A copy of the state of an expert with these parts."""
    state: dict[str, Any] = {"module": module.state_dict(), **counts}
    for name, part in {"optimizer": optimizer, "schedule": schedule}.items():
        state[name] = None if part is None else part.state_dict()
        state[_KINDS[name]] = None if part is None else type(part).__name__
    return copy.deepcopy(state)


def check_state(name: str, state: Mapping[str, Any], optimizer: Optimizer | None, schedule: LRScheduler | None) -> None:
    """Raise ``UsageError`` that lists why this is no state of the expert of this name, with these parts."""
    parts = {"optimizer": optimizer, "schedule": schedule}
    with Validator(f"this is no state of expert {name!r}") as check:
        check.add(*(f"{each!r} is missing" for each in sorted((_TABLES | _COUNTS | _WORDS) - state.keys())))
        check.add(*(f"{each!r} is not known" for each in sorted(state.keys() - _TABLES - _COUNTS - _WORDS)))
        for each in sorted(_COUNTS & state.keys()):
            check.count(each, state[each], least=0)
        for each in sorted(_TABLES & state.keys()):
            check.instance(each, state[each], Mapping, "a dict", optional=each != "module")
        check.instance("branch", state.get("branch", ""), str, "a str")
        for each, part in parts.items():
            here, there = state.get(each), state.get(_KINDS[each])
            if each in state and (here is None) != (part is None):
                check.add(
                    f"there is {'no' if here is None else 'a'} state of the {each}, but this expert has "
                    f"{'none' if part is None else 'one'}"
                )
            elif part is not None and there is not None and there != type(part).__name__:
                check.add(f"the state is of {each} {there}, but this expert has {type(part).__name__}")


def load(
    module: nn.Module, optimizer: Optimizer | None, schedule: LRScheduler | None, state: Mapping[str, Any]
) -> None:
    """Load the three parts of ``state``, or none. Raises ``UsageError`` for other parameters, and what they raise."""
    with _undone(module, optimizer, schedule):
        if optimizer is not None:
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            saved = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
            if saved != sizes:
                raise UsageError(
                    f"the state is that of an optimizer with groups of {saved} parameters, but this expert's has "
                    f"{sizes}; make the expert with the same layers and the same optimizer"
                )
            optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            _fit(optimizer)
        if schedule is not None:
            schedule.load_state_dict(copy.deepcopy(state["schedule"]))
        module.load_state_dict(state["module"])


@contextmanager
def _undone(module: nn.Module, optimizer: Optimizer | None, schedule: LRScheduler | None) -> Generator[None]:
    """Whatever is raised, all three are as before."""
    weights = copy.deepcopy(module.state_dict())
    parts = {} if optimizer is None else dict(vars(optimizer))  # a load puts new ones there, and writes to none
    times = None if schedule is None else copy.deepcopy(schedule.state_dict())
    try:
        yield
    except BaseException:
        if optimizer is not None:
            vars(optimizer).clear()
            vars(optimizer).update(parts)
        if schedule is not None:
            schedule.load_state_dict(times or {})
        module.load_state_dict(weights)
        raise


def _fit(optimizer: Optimizer) -> None:
    """Lay the states out in memory as their parameters are: fused steps walk both, and files keep no strides."""
    with Validator("the state of the optimizer is that of other parameters") as check:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name, value in optimizer.state.get(parameter, {}).items():
                    if not isinstance(value, Tensor) or value.layout is not torch.strided:
                        continue
                    if value.shape == parameter.shape:
                        optimizer.state[parameter][name] = laid_out(parameter, value)
                    elif group.get("fused") and value.numel() != 1:
                        check.add(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
