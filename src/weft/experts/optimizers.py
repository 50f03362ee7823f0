"""Optimizers and schedules out of what a user gives: the thing itself, or how to make it.

    torch.optim.Adam                       a factory: called with the parameters, and fused=True where that can work
    partial(torch.optim.AdamW, lr=1e-3)    the same; what is bound stays as it is, also fused=False
    lambda parameters: SGD(parameters, .1) a factory that takes no ``fused``
    torch.optim.Adam(module.parameters())  an optimizer: used as it is

A fused step is one kernel over all parameters: for an Adam step on two layers of 1024 x 4096 it takes a tenth of
the time, and the time of a step is what small batches wait for. PyTorch refuses complex parameters and sparse gradients
only in the step itself, when a part of the weights has changed already. So the former are not asked to be fused, and at
the first of the latter, which nobody can foresee, the optimizer goes on without, before it has changed anything.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
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
    if _takes_fused(given) and all(_may_fuse(parameter) for parameter in parameters):
        try:
            made = given(list(parameters), fused=True)
            if isinstance(made, Optimizer):
                made.register_step_pre_hook(_fused_no_more)
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


def _may_fuse(parameter: nn.Parameter) -> bool:
    """Whether a fused step can be right: it walks the raw memory of real numbers."""
    dense = torch.empty_like(parameter, device="meta")
    return not parameter.is_complex() and parameter.stride() == dense.stride()


def _fused_no_more(optimizer: Optimizer, *_: object) -> None:
    """Before a step: give up the fused one for good where it would refuse. The states of both kinds are alike."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            gradients = [(each, each.grad) for each in group["params"]]
            if any([grad is not None and (grad.is_sparse or each.is_complex()) for each, grad in gradients]):
                for other in optimizer.param_groups:
                    other["fused"] = None
                return


def _takes_fused(factory: Callable[..., Optimizer]) -> bool:
    """Whether a factory has a keyword ``fused`` by name that is not bound yet."""
    if isinstance(factory, partial) and "fused" in factory.keywords:
        return False
    try:
        return "fused" in inspect.signature(cast("Callable[..., Any]", factory)).parameters
    except (TypeError, ValueError):
        return False
