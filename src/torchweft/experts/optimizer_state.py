"""Optimizer and schedule of an expert: made, saved and loaded. `gradients` has the step."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchweft.core.errors import UsageError
from torchweft.core.validation import Validator, suggest
from torchweft.experts.gradients import has_same_layout, match_layout, unfuse_on_demand

# An optimizer, or a function that makes one for a list of parameters.
OptimizerLike = Optimizer | Callable[..., Optimizer]
# A schedule, or a function that makes one for an optimizer.
ScheduleLike = LRScheduler | Callable[[Optimizer], LRScheduler]


def make_stepping(
    name: str,
    parameters: Sequence[nn.Parameter],
    optimizer: OptimizerLike | None,
    schedule: ScheduleLike | None,
    *,
    without_arguments: bool,
) -> tuple[Optimizer | None, LRScheduler | None]:
    """An optimizer of these parameters and its schedule. Raises ``UsageError`` that lists why they can never step."""
    trainable = [parameter for parameter in parameters if parameter.is_floating_point() or parameter.is_complex()]
    with Validator(f"expert {name!r} cannot be made") as check:
        for word, factory in (("optimizer", optimizer), ("schedule", schedule)):
            if factory is not None and not isinstance(factory, Optimizer | LRScheduler):
                check.add(*_factory_fault(word, factory))
    made = None if optimizer is None else make_optimizer(optimizer, trainable)
    made_schedule = make_schedule(schedule, made)
    with Validator(f"expert {name!r} cannot take steps") as check:
        own = {id(parameter) for parameter in parameters}
        if made is not None and not any(id(p) in own for group in made.param_groups for p in group["params"]):
            check.add("optimizer has none of the module's parameters; make it of module.parameters()")
        for word, part in (("optimizer", made), ("schedule", made_schedule)):
            # Only an overridden ``apply_gradients`` can pass arguments to a step.
            if part is None or not without_arguments:
                continue
            # Read from the class, because schedules wrap the method of the instance.
            arguments = [*inspect.signature(type(part).step).parameters.values()][1:]
            free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            required = [arg.name for arg in arguments if arg.default is arg.empty and arg.kind not in free]
            check.require(
                not required,
                f"{word} is a {type(part).__name__}, whose step requires {', '.join(required)}, which it does not get; "
                "use another, or override apply_gradients in a subclass",
            )
    return made, made_schedule


def _factory_fault(word: str, factory: Callable[..., Any]) -> list[str]:
    bound: partial[Any] = cast("partial[Any]", factory) if isinstance(factory, partial) else partial(factory)
    with suppress(ValueError):  # raised for a function that has no signature
        signature = inspect.signature(bound.func)
        try:
            signature.bind(*bound.args, None, **bound.keywords)
        except TypeError as error:
            known = list(signature.parameters)
            hint = "".join(suggest(key, known) for key in bound.keywords if key not in known)
            function: Any = bound.func
            called = getattr(function, "__name__", repr(function))
            return [f"{word} cannot be made by {called}: {error}; its arguments are {', '.join(known)}{hint}"]
    return []


def make_optimizer(optimizer: OptimizerLike, parameters: Sequence[nn.Parameter]) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        return optimizer
    # Fused kernels walk raw memory of real numbers, so all parameters must be dense.
    dense = all(not p.is_complex() and has_same_layout(p, p) for p in parameters)
    fused = {"fused": True} if dense and _accepts_fused(optimizer) else {}
    # Trying it is the only test: support depends on device, dtype, options and the version of PyTorch.
    try:
        made: Any = optimizer(list(parameters), **fused)
    except RuntimeError:  # this device, dtype or option has no fused step
        if not fused:
            raise
        made, fused = optimizer(list(parameters)), {}
    if not isinstance(made, Optimizer):
        raise UsageError(
            f"optimizer made a {type(made).__name__}, wanted a torch.optim.Optimizer, or a function that makes one of "
            "a list of parameters"
        )
    if fused:
        unfuse_on_demand(made)
    return made


def make_schedule(schedule: ScheduleLike | None, optimizer: Optimizer | None) -> LRScheduler | None:
    if schedule is None:
        return None
    if optimizer is None:
        raise UsageError("a schedule was given, but no optimizer that it could adjust")
    made: Any = schedule if isinstance(schedule, LRScheduler) else schedule(optimizer)
    if not isinstance(made, LRScheduler):
        raise UsageError(f"schedule made a {type(made).__name__}, wanted an LRScheduler")
    if made.optimizer is not optimizer:
        raise UsageError("the schedule adjusts another optimizer; pass a function that makes it for one")
    return made


def _accepts_fused(factory: Callable[..., Optimizer]) -> bool:
    if isinstance(factory, partial) and "fused" in factory.keywords:
        return False
    with suppress(TypeError, ValueError):
        return "fused" in inspect.signature(cast("Callable[..., Any]", factory)).parameters
    return False


# Names of classes by part. Without them, torch would load the state of another class of optimizer.
_CLASS_KEYS = {"optimizer": "optimizer_class", "schedule": "schedule_class"}
_OPTIONAL = {"changes", "branch"}  # since they are newer than some states; of those with a journal
_COUNTS = {"steps", "seed", "forward_batches", "backward_batches"}


def copy_state(
    module: nn.Module, optimizer: Optimizer | None, schedule: LRScheduler | None, counts: Mapping[str, int]
) -> dict[str, Any]:
    state: dict[str, Any] = {"module": module.state_dict(), **counts}
    for name, part in {"optimizer": optimizer, "schedule": schedule}.items():
        state[name] = None if part is None else part.state_dict()
        state[_CLASS_KEYS[name]] = None if part is None else type(part).__name__
    return copy.deepcopy(state)


def check_state(name: str, state: Mapping[str, Any], optimizer: Optimizer | None, schedule: LRScheduler | None) -> None:
    fields = {"module", *_COUNTS, *_CLASS_KEYS, *_CLASS_KEYS.values()}
    with Validator(f"this is not a state of expert {name!r}") as check:
        check.add(*(f"{key!r} is missing" for key in sorted(fields - state.keys())))
        check.add(*(f"{key!r} is not known" for key in sorted(state.keys() - fields - _OPTIONAL)))
        for key in sorted(_COUNTS & state.keys()):
            check.count(key, state[key], least=0)
        for word, part in {"optimizer": optimizer, "schedule": schedule}.items():
            saved, saved_class = state.get(word), state.get(_CLASS_KEYS[word])
            if word in state and (saved is None) != (part is None):
                check.add(
                    f"there is {'no' if saved is None else 'a'} state of the {word}, but this expert has "
                    f"{'none' if part is None else 'one'}"
                )
            elif part is not None and saved_class is not None and saved_class != type(part).__name__:
                check.add(f"the state is of {word} {saved_class}, but this expert has {type(part).__name__}")


def dtype_changes(module: nn.Module, saved: Mapping[str, Any]) -> dict[bool, list[str]]:
    """Tensors of a saved module that change their dtype, in words, by whether the new dtype loses digits."""
    changes: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, own in module.state_dict().items():
        value = saved.get(name)
        if isinstance(own, Tensor) and isinstance(value, Tensor) and value.dtype != own.dtype:
            changes.setdefault((value.dtype, own.dtype), []).append(name)
    texts: dict[bool, list[str]] = {False: [], True: []}
    for (old, new), names in changes.items():
        words = f"{len(names)} tensors ({', '.join(names[:3])}) are {old} in the state, and {new} in this module"
        texts[torch.promote_types(old, new) != new].append(words.replace("torch.", ""))
    return texts


def load_parts(
    module: nn.Module, optimizer: Optimizer | None, schedule: LRScheduler | None, state: Mapping[str, Any]
) -> None:
    """Load the three parts of ``state``, or none. Raises ``UsageError`` for other parameters. Errors of parts pass."""
    weights = copy.deepcopy(module.state_dict())
    # A shallow copy, because loading replaces the optimizer's attributes and does not write into them.
    attributes = {} if optimizer is None else dict(vars(optimizer))
    times = {} if schedule is None else copy.deepcopy(schedule.state_dict())
    try:
        if optimizer is not None:
            _load_optimizer(optimizer, state["optimizer"])
        if schedule is not None:
            schedule.load_state_dict(copy.deepcopy(state["schedule"]))
        module.load_state_dict(state["module"])
    except BaseException:
        if optimizer is not None:
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
        if schedule is not None:
            schedule.load_state_dict(times)
        module.load_state_dict(weights)
        raise


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != sizes:
        raise UsageError(
            f"the state is that of an optimizer with groups of {saved} parameters, but this expert's has {sizes}; make "
            "the expert with the same layers and the same optimizer"
        )
    optimizer.load_state_dict(copy.deepcopy(cast("dict[str, Any]", state)))
    with Validator("the state of the optimizer is that of other parameters") as check:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name, value in optimizer.state.get(parameter, {}).items():
                    if not isinstance(value, Tensor) or value.layout is not torch.strided:
                        continue
                    # A fused step walks parameter and state as raw memory, and files do not store strides.
                    if value.shape == parameter.shape:
                        optimizer.state[parameter][name] = match_layout(parameter, value)
                    elif group.get("fused") and value.numel() != 1:
                        check.add(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
