"""Optimizers and schedules out of what a user gives: the thing itself, or how to make it.

    torch.optim.Adam                       a factory: called with the parameters, and fused=True where that works
    partial(torch.optim.AdamW, lr=1e-3)    the same; what is bound stays as it is, also fused=False
    lambda parameters: SGD(parameters, .1) a factory that takes no ``fused``
    torch.optim.Adam(module.parameters())  an optimizer: used as it is

A fused step is one kernel over all parameters: for an Adam step on two layers of 1024 x 4096 it takes a tenth of
the time, and the time of a step is what small batches wait for.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.core.errors import UsageError

OptimizerLike = Optimizer | Callable[..., Optimizer]
"""An optimizer, or what makes one out of a list of parameters."""
ScheduleLike = LRScheduler | Callable[[Optimizer], LRScheduler]
"""A schedule, or what makes one out of an optimizer."""


def make_optimizer(given: OptimizerLike, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The optimizer that was given, or that the factory makes of these parameters.

    Raises ``UsageError`` if it is none; what the factory itself raises comes through.
    """
    if isinstance(given, Optimizer):
        return given
    made: Any = None
    if _takes_fused(given):
        try:
            made = given(list(parameters), fused=True)
        except RuntimeError:  # this device, dtype or option has no fused step
            made = given(list(parameters))
    else:
        made = given(list(parameters))
    if not isinstance(made, Optimizer):
        raise UsageError(
            f"optimizer made a {type(made).__name__}, wanted a torch.optim.Optimizer, or a function that makes one of "
            "a list of parameters"
        )
    return made


def make_schedule(given: ScheduleLike | None, optimizer: Optimizer | None) -> LRScheduler | None:
    """The schedule that was given, or that the factory makes for this optimizer. Raises ``UsageError``."""
    if given is None:
        return None
    if optimizer is None:
        raise UsageError("a schedule was given, but no optimizer that it could steer")
    made: Any = given if isinstance(given, LRScheduler) else given(optimizer)
    if not isinstance(made, LRScheduler):
        raise UsageError(f"schedule made a {type(made).__name__}, wanted a torch.optim.lr_scheduler.LRScheduler")
    if made.optimizer is not optimizer:
        raise UsageError("the schedule steers another optimizer than the one that was given; pass a function of it")
    return made


def _takes_fused(factory: Callable[..., Optimizer]) -> bool:
    """Whether a factory has a keyword ``fused`` by name that is not bound yet."""
    if isinstance(factory, partial) and "fused" in factory.keywords:
        return False
    try:
        return "fused" in inspect.signature(cast("Callable[..., Any]", factory)).parameters
    except (TypeError, ValueError):
        return False
