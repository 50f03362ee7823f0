"""Puts a saved state into a module, its optimizer and its schedule: all of it, or, where that fails, nothing.

optimizer, schedule ── module        the module last: only it is written to in place
     '──── any raises ────> all three as before
"""

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.core.errors import UsageError, listed
from weft.experts.gradients import laid_out


def load(
    module: nn.Module,
    optimizer: Optimizer | None,
    schedule: LRScheduler | None,
    state: Mapping[str, Any],
    first: Sequence[Tensor],
) -> None:
    """Load ``state["module"]``, ``state["optimizer"]`` and ``state["schedule"]``, which is left alone.

    ``first``: the parameters that were trained when the optimizer was made. Older states know of those only.
    Raises ``UsageError`` where the optimizer's state cannot be that of these parameters, and what the three raise.
    """
    with _undone(module, optimizer, schedule):
        if optimizer is not None:
            optimizer.load_state_dict(_widened(copy.deepcopy(state["optimizer"]), optimizer, first))
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


def _widened(state: dict[str, Any], optimizer: Optimizer, first: Sequence[Tensor]) -> dict[str, Any]:
    """The state of an optimizer of all parameters, also out of that of one that had the trained ones alone."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved == sizes:
        return state
    trained = {id(parameter) for parameter in first}
    places = [i for i, each in enumerate(optimizer.param_groups[0]["params"]) if id(each) in trained]
    if len(sizes) != 1 or saved != [len(places)]:
        raise UsageError(
            f"the state is that of an optimizer with groups of {saved} parameters, but this expert's has {sizes}; "
            "make the expert with the same layers, frozen ones frozen as they were, and the same optimizer"
        )
    moved = dict(zip(state["param_groups"][0]["params"], places, strict=True))
    here = optimizer.state_dict()["state"]  # some make a state when they are made, and want one for whoever is freed
    kept = {i: one for i, one in here.items() if i not in places}
    states = {**kept, **{moved.get(i, i): one for i, one in state["state"].items()}}
    group = {**state["param_groups"][0], "params": list(range(sizes[0]))}
    return {**state, "state": states, "param_groups": [group]}


def _fit(optimizer: Optimizer) -> None:
    """Lay the states out in memory as their parameters are: fused steps walk both, and files keep no strides."""
    faults: list[str] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or value.layout is not torch.strided:
                    continue
                if value.shape == parameter.shape:
                    optimizer.state[parameter][name] = laid_out(parameter, value)
                elif group.get("fused") and value.numel() != 1:
                    faults.append(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
    if faults:
        raise UsageError(listed("the state of the optimizer is that of other parameters:", faults))
