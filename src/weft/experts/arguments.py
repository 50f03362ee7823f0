"""Reads what `ExpertBackend` was given: two spellings of one thing, options by name, and all faults at once."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from weft.core.errors import UsageError, listed
from weft.experts.checks import is_number
from weft.experts.guards import Guards
from weft.experts.idempotency import IdempotencyOptions
from weft.experts.journal import Journal
from weft.experts.kept import GraphBudget
from weft.experts.limits import PoolOptions
from weft.experts.optimizers import OptimizerLike
from weft.experts.sums import SumsOptions

_PARTS: dict[str, type[Any]] = {
    "guards": Guards,
    "records": IdempotencyOptions,
    "mini_batches": SumsOptions,
    "keep_graphs": GraphBudget,
    "journal": Journal,
}


def one_of(name: Any, given: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[nn.Module, OptimizerLike | None]:
    """The module and the optimizer, by whichever of their names they came.

    Raises ``UsageError`` that lists what is missing, twice there, of a wrong kind, or no option of a pool.
    """
    faults: list[str] = []
    if not isinstance(name, str) or not name:
        seen = "empty" if name == "" else repr(name)
        faults.append(f"name is {seen}, wanted what clients call the expert by")
    for first, second in (("module", "expert"), ("optimizer", "opt")):
        if given[first] is not None and given[second] is not None:
            faults.append(f"{first}= and {second}= are two names of one thing, and both were given; give one")
    module = given["expert"] if given["module"] is None else given["module"]
    optimizer = given["opt"] if given["optimizer"] is None else given["optimizer"]
    if not isinstance(module, nn.Module):
        faults.append(f"module is of type {type(module).__name__}, wanted a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        faults.append(f"optimizer is of type {type(optimizer).__name__}, wanted an optimizer or what makes one")
    clip = given["clip_grad_norm"]
    if clip is not None and not (is_number(clip) and clip > 0):
        faults.append(f"clip_grad_norm is {clip!r}, wanted a number above 0, or None")
    elif clip is not None and optimizer is None:
        faults.append("clip_grad_norm was given, but no optimizer whose steps it would bound")
    faults += [
        f"{part} is of type {type(given[part]).__name__}, wanted a {kind.__name__}, or None"
        for part, kind in _PARTS.items()
        if given[part] is not None and not isinstance(given[part], kind)
    ]
    known = [each.name for each in fields(PoolOptions)]
    faults += [
        f"{option} is no option; those of a pool are {', '.join(known)}" for option in options if option not in known
    ]
    if faults:
        raise UsageError(listed(f"expert {name!r} cannot be made:", faults))
    return cast("nn.Module", module), cast("OptimizerLike | None", optimizer)
