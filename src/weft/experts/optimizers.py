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

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.core.errors import UsageError, listed
from weft.experts.gradients import fits

OptimizerLike = Optimizer | Callable[..., Optimizer]
"""An optimizer, or what makes one out of a list of parameters."""
ScheduleLike = LRScheduler | Callable[[Optimizer], LRScheduler]
"""A schedule, or what makes one out of an optimizer."""


def make_stepping(
    name: str,
    parameters: Sequence[nn.Parameter],
    optimizer: OptimizerLike | None,
    schedule: ScheduleLike | None,
    *,
    plainly: bool,
) -> tuple[Optimizer | None, LRScheduler | None]:
    """An optimizer of these parameters and its schedule, which can do what they are there for.

    Args:
        name: of the expert.
        parameters: of its module, frozen ones too: an optimizer steps those alone that have a gradient.
        optimizer, schedule: see `make_optimizer` and `make_schedule`.
        plainly: whether both are stepped without arguments; who overrides ``apply_gradients`` may give them some.

    Raises ``UsageError`` that lists why they can never do that, and what these two raise.
    """
    could = [parameter for parameter in parameters if parameter.is_floating_point() or parameter.is_complex()]
    made = None if optimizer is None else make_optimizer(optimizer, could)
    steered = make_schedule(schedule, made)
    faults: list[str] = []
    if made is not None:
        own = {id(parameter) for parameter in parameters}
        if not any(id(each) in own for group in made.param_groups for each in group["params"]):
            faults.append("optimizer has none of the module's parameters; make it of module.parameters()")
    for word, part in (("optimizer", made), ("schedule", steered)):
        wanted = _wanted(type(part).step) if part is not None and plainly else []
        if wanted:
            faults.append(
                f"{word} is a {type(part).__name__}, whose step wants {', '.join(wanted)}, and nobody gives that; take "
                "another, or override apply_gradients in a class of your own"
            )
    if faults:
        raise UsageError(listed(f"expert {name!r} cannot take steps:", faults))
    return made, steered


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
                _watch(made)
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


def _wanted(method: Callable[..., Any]) -> list[str]:
    """The names of the arguments that it cannot be called without. Of a class: schedules wrap that of the instance."""
    known = list(inspect.signature(method).parameters.values())[1:]
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in known if each.default is inspect.Parameter.empty and each.kind not in free]


def _may_fuse(parameter: nn.Parameter) -> bool:
    """Whether a fused step can be right: it walks the raw memory of real numbers."""
    return not parameter.is_complex() and fits(parameter, parameter)


def _watch(optimizer: Optimizer) -> None:
    """Before each step, give up the fused one where it would refuse. The states of both kinds are alike.

    For good at a sparse gradient. For once where momentum begins for some parameters, which were frozen or not used
    before, while others have it.
    """
    paused: list[dict[str, Any]] = []

    def before(*_: object) -> None:
        for group in optimizer.param_groups:
            stepped = [each for each in group["params"] if each.grad is not None] if group.get("fused") else []
            if any([each.grad.is_sparse for each in stepped]):
                for other in optimizer.param_groups:
                    other["fused"] = None
            elif group.get("momentum"):
                moving = {optimizer.state.get(each, {}).get("momentum_buffer") is None for each in stepped}
                if len(moving) == 2:
                    group["fused"] = None
                    paused.append(group)

    def after(*_: object) -> None:
        while paused:
            paused.pop()["fused"] = True

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _takes_fused(factory: Callable[..., Optimizer]) -> bool:
    """Whether a factory has a keyword ``fused`` by name that is not bound yet."""
    if isinstance(factory, partial) and "fused" in factory.keywords:
        return False
    try:
        return "fused" in inspect.signature(cast("Callable[..., Any]", factory)).parameters
    except (TypeError, ValueError):
        return False
