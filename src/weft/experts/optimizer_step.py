"""Optimizer of an expert: it is made, steps with gradients in memory of their own, is logged, saved and loaded.

gradients ── private ──> .grad ── hooks ── apply_gradients ──> weights, steps + 1    .grad is empty before and after,
                                 '────────raises──> StepError                    whatever happens

A fused step is one kernel over all parameters, and takes a tenth of the time. PyTorch refuses complex parameters and
sparse gradients only in the step itself, when a part of the weights has changed already. So the former are not asked to
be fused, and at the first of the latter the optimizer goes on without, before it has changed anything.

`torch.autograd.grad` returns gradients that autograd would have copied before putting them into ``.grad``:

    y = x @ (a + b)                  one gradient, and it is that of a and that of b
    y = (x + p) * 2, one row         the gradient of p is the answer to the client as well
    y = x + p.sum()                  one number, expanded: its strides are 0
    y = x @ torch.cat([q, k], 1)     the gradients of q and k are columns of one matrix

Clipping would scale the first twice and the client's own numbers, and fused steps walk raw memory, and so past the end
of the others. What fits already is not copied: on the CPU a copy of all gradients takes as long as a step.
"""

import copy
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from secrets import token_hex
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.core.errors import UsageError
from weft.core.validation import Validator
from weft.experts.errors import StepError
from weft.experts.journal import Entry, Journal, Member
from weft.experts.task import Task


def private_gradients(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], held: set[int]
) -> list[Tensor | None]:
    """The gradients, each in private memory; ``held``: the addresses of storages that are shared."""
    seen, found = set(held), list[Tensor | None]()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = gradient.clone()
        elif gradient is not None:
            address = gradient.untyped_storage().data_ptr()
            gradient = laid_out(parameter, gradient, copy=address in seen)
            seen.add(address)
        found.append(gradient)
    return found


def laid_out(parameter: Tensor, tensor: Tensor, *, copy: bool = False) -> Tensor:
    """A tensor of the shape of a parameter; or a copy where its memory is in another order, or ``copy`` says so."""
    if not copy and fits(parameter, tensor):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def fits(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether a kernel that walks both memories from end to end meets the same elements, and all of them."""
    if parameter.is_contiguous():
        return gradient.is_contiguous()
    dense = torch.empty_like(parameter, device="meta")  # the layout of optimizer states
    return gradient.stride() == dense.stride()


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
    """An optimizer of these parameters and its schedule. Raises ``UsageError`` that lists why they can never step.

    ``plainly``: whether both are stepped without arguments; an overridden ``apply_gradients`` may give them some.
    """
    could = [parameter for parameter in parameters if parameter.is_floating_point() or parameter.is_complex()]
    made = None if optimizer is None else make_optimizer(optimizer, could)
    steered = make_schedule(schedule, made)
    with Validator(f"expert {name!r} cannot take steps") as check:
        own = {id(parameter) for parameter in parameters}
        if made is not None and not any(id(each) in own for group in made.param_groups for each in group["params"]):
            check.add("optimizer has none of the module's parameters; make it of module.parameters()")
        for word, part in (("optimizer", made), ("schedule", steered)):
            # Of the class: schedules wrap the method of the instance.
            known = [] if part is None or not plainly else [*inspect.signature(type(part).step).parameters.values()][1:]
            free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            wanted = [each.name for each in known if each.default is each.empty and each.kind not in free]
            check.that(
                not wanted,
                f"{word} is a {type(part).__name__}, whose step wants {', '.join(wanted)}, and nobody gives that; take "
                "another, or override apply_gradients in a class of your own",
            )
    return made, steered


def make_optimizer(given: OptimizerLike, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The optimizer that was given, or that the factory makes of these parameters. Raises ``UsageError`` for others."""
    if isinstance(given, Optimizer):
        return given
    could = _takes_fused(given) and all(not each.is_complex() and fits(each, each) for each in parameters)
    fused = {"fused": True} if could else {}  # which walks the raw memory of real numbers
    try:
        made: Any = given(list(parameters), **fused)
    except RuntimeError:  # this device, dtype or option has no fused step
        if not fused:
            raise
        made, fused = given(list(parameters)), {}
    if not isinstance(made, Optimizer):
        raise UsageError(
            f"optimizer made a {type(made).__name__}, wanted a torch.optim.Optimizer, or a function that makes one of "
            "a list of parameters"
        )
    if fused:
        _watch(made)
    return made


def make_schedule(given: ScheduleLike | None, optimizer: Optimizer | None) -> LRScheduler | None:
    """The schedule that was given, or that the factory makes for this optimizer. Raises ``UsageError``."""
    if given is None:
        return None
    if optimizer is None:
        raise UsageError("a schedule was given, but no optimizer that it could steer")
    made: Any = given if isinstance(given, LRScheduler) else given(optimizer)
    if not isinstance(made, LRScheduler):
        raise UsageError(f"schedule made a {type(made).__name__}, wanted an LRScheduler")
    if made.optimizer is not optimizer:
        raise UsageError("the schedule steers another optimizer; pass a function that makes it of one")
    return made


def _watch(optimizer: Optimizer) -> None:
    """Give up the fused step where it would refuse: at a sparse gradient, and where momentum begins for some parameters
    later than for others. The states of both kinds are alike."""

    def before(*_: object) -> None:
        for group in optimizer.param_groups:
            stepped = [each for each in group["params"] if each.grad is not None] if group.get("fused") else []
            moving = {optimizer.state.get(each, {}).get("momentum_buffer") is None for each in stepped}
            if any([each.grad.is_sparse for each in stepped]) or (group.get("momentum") and len(moving) == 2):
                for other in optimizer.param_groups:
                    other["fused"] = None

    optimizer.register_step_pre_hook(before)


def _takes_fused(factory: Callable[..., Optimizer]) -> bool:
    """Whether a factory has a keyword ``fused`` by name that is not bound yet."""
    if isinstance(factory, partial) and "fused" in factory.keywords:
        return False
    with suppress(TypeError, ValueError):
        return "fused" in inspect.signature(cast("Callable[..., Any]", factory)).parameters
    return False


class OptimizerStep:
    """Steps of one expert and their log. Guarded by the expert's lock."""

    def __init__(self, name: str, apply: Callable[[], None] | None, journal: Journal | None) -> None:
        self.steps = self.batches = 0
        self.branch = self._next_branch = ""
        self.journal_failures = 0
        self._name = name
        self._apply = apply
        self.trains = apply is not None
        self.journal = journal
        if journal is not None:
            journal.own(name)
        self.restored(0, "")

    def step(
        self,
        every: Sequence[nn.Parameter],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        held: set[int],
    ) -> None:
        """One optimizer step. Raises `StepError` if the optimizer does, or a hook; then it does not count.

        ``every``: all parameters of the module; ``parameters``: those that have these ``gradients``; ``held``: the
        addresses of the storages that others go on using. What looks into them is not written to.
        """
        for parameter in every:  # what others left there: the optimizer may hold parameters that are frozen now
            parameter.grad = None
        try:
            for parameter, gradient in zip(parameters, private_gradients(parameters, gradients, held), strict=True):
                parameter.grad = gradient
                if gradient is not None and parameter._post_accumulate_grad_hooks:  # autograd itself calls them only
                    hooks: Any = parameter._post_accumulate_grad_hooks  # where it puts the gradient there
                    with torch.no_grad():
                        for hook in list(hooks.values()):
                            hook(parameter)
            if self._apply is not None:
                self._apply()
        except Exception as error:
            raise StepError(
                f"applying the gradients of expert {self._name!r} raised {type(error).__name__}: {error}. The weights "
                "may have changed in part; load a checkpoint"
            ) from error
        finally:
            for parameter in every:
                parameter.grad = None
        self.steps += 1

    def restored(self, batches: int, branch: str) -> None:
        """The expert goes on after so many backward batches, the last of this branch, and now from there."""
        self.batches, self.branch, self._next_branch = batches, branch, token_hex(8)
        if self.journal is not None:
            self.journal.restored(self.steps, batches, branch)

    @contextmanager
    def replaying(self, branch: str) -> Generator[None]:
        """What runs within is of this branch, which ran before."""
        self._next_branch = branch
        try:
            yield
        finally:
            self._next_branch = token_hex(8)

    def log(
        self,
        kind: Literal["backward", "commit", "dropped"],
        tasks: Sequence[Task],
        seed: int = 0,
        *,
        failed: bool = False,
        terms: int = 0,
    ) -> None:
        """Put a batch into the journal, or a mini-batch that was dropped. ``terms``: of the sum that a commit applied.

        Failures are counted and not raised: a full disk must not make a step look as if it had failed.
        """
        if failed:  # a commit does not move the place, so the branch must tell states before and after it apart
            self._next_branch = token_hex(8)
        self.branch = self._next_branch
        if self.journal is None:
            return
        members = tuple([Member(task.client, task.key, task.rows, task.number) for task in tasks])
        more = (torch.get_num_threads(), failed, self.batches, tasks[0].evaluation, self.branch, terms)
        try:
            self.journal.write(Entry(kind, self.steps, seed, tasks[0].mini_batch, members, *more), tasks)
        except Exception:
            self.journal_failures += 1


_KINDS = {"optimizer": "optimizer_class", "schedule": "schedule_class"}  # by part; torch would load another's state
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
    fields = {"module", "branch", *_COUNTS, *_KINDS, *_KINDS.values()}
    with Validator(f"this is no state of expert {name!r}") as check:
        check.add(*(f"{each!r} is missing" for each in sorted(fields - state.keys())))
        check.add(*(f"{each!r} is not known" for each in sorted(state.keys() - fields)))
        for each in sorted(_COUNTS & state.keys()):
            check.count(each, state[each], least=0)
        for each, part in {"optimizer": optimizer, "schedule": schedule}.items():
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
    weights = copy.deepcopy(module.state_dict())
    parts = {} if optimizer is None else dict(vars(optimizer))  # a load puts new ones there, and writes to none
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
            vars(optimizer).update(parts)
        if schedule is not None:
            schedule.load_state_dict(times)
        module.load_state_dict(weights)
        raise


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load it, and lay its states out as their parameters are: fused steps walk both, and files keep no strides."""
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
                    if value.shape == parameter.shape:
                        optimizer.state[parameter][name] = laid_out(parameter, value)
                    elif group.get("fused") and value.numel() != 1:
                        check.add(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
