"""The one door between PyTorch's autograd and a run.

For autograd a whole step is a single node, whose inputs are the tensors that go in and *all parameters*:

    inputs, parameters --> [ Boundary: journey.forward ] --> outputs --> the user's loss
    their gradients    <-- [           journey.backward ] <-- gradients of the outputs

So ``loss.backward()`` stays plain, every parameter gets its gradient once per step (its hooks fire once, which
DistributedDataParallel relies on), and ``torch.autograd.grad(loss, parameters)`` works whatever the stages keep.
The price: no gradient of a gradient, unless the journey knows another way to its gradients (`TwiceDifferentiable`).
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from weft.core.errors import DoubleBackwardError
from weft.core.transforms import forbid_batched

_CUT_OUT = (
    "the model ran cut out of autograd; use executor='graph' for a Pipe, and no wavefront for a Stack: then the whole "
    "graph is visible"
)
# The only way to know of ``retain_graph=True`` from inside a backward; AOTAutograd asks it as well.
_autograd = cast(Any, torch._C)._autograd


@runtime_checkable
class Journey(Protocol):
    """One step: from the tensors that go in to those that come out, and their gradients the same way back."""

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """The tensors that come out, and which of them have a gradient."""
        ...

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """One gradient per tensor that went in, in their order. With `retain` it may be called again."""
        ...


@runtime_checkable
class TwiceDifferentiable(Protocol):
    """A journey that can also make its gradients in sight of autograd, for a gradient of a gradient."""

    def differentiable_backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """As `Journey.backward`, under grad mode; autograd can differentiate what it returns."""
        ...


@runtime_checkable
class OnceDifferentiable(Protocol):
    """A journey that knows better words for why its gradients have no gradient, and what to do."""

    @property
    def only_once(self) -> str:
        """They go on after "a gradient of a gradient was asked for, but"."""
        ...


class Boundary(torch.autograd.Function):
    """Use `cross`; this is its autograd node."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, tracked = journey.forward()
        ctx.journey = journey
        ctx.mark_non_differentiable(*(out for out, wanted in zip(outputs, tracked, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        forbid_batched(gradients)
        if torch.is_grad_enabled() and isinstance(ctx.journey, TwiceDifferentiable):
            return (None, *ctx.journey.differentiable_backward(gradients, retain=keeps_graph()))
        forbid_double(ctx.journey)
        return (None, *ctx.journey.backward(gradients, retain=keeps_graph()))


def forbid_double(journey: object = None) -> None:
    """Inside a backward: raise DoubleBackwardError if it is to be differentiated itself."""
    if torch.is_grad_enabled():
        why = journey.only_once if isinstance(journey, OnceDifferentiable) else _CUT_OUT
        raise DoubleBackwardError(f"a gradient of a gradient (create_graph=True) was asked for, but {why}")


def keeps_graph() -> bool:
    """Inside a backward: whether it was called with ``retain_graph=True``."""
    return bool(_autograd._get_current_graph_task_keep_graph())


def current_task() -> int:
    """Inside a backward: a number that no other call of backward has."""
    return int(cast(Any, torch._C)._current_graph_task_id())


def cross(journey: Journey, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Take the journey as one node of autograd; `tensors` are all that it may have gradients for."""
    for held in list(_held):
        held.give_back()
    return cast("tuple[Tensor, ...]", Boundary.apply(journey, *tensors))


def without_gradient(parameters: Iterable[Tensor]) -> None:
    """Inside a backward: these get no gradient. Their hooks stay quiet until this backward is over.

    In plain autograd a parameter that a step did not use is not in its graph, and its hooks do not fire. Here it is
    an input of the node like all others, and its hooks would be called with None.
    """
    tables = [table for each in parameters for table in _hook_tables(each) if table]
    if not tables:
        return
    held = _Held([(table, dict(table)) for table in tables])
    _held.append(held)
    for table in tables:
        table.clear()
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(held.give_back)


class _Held:
    """Hooks that were taken from their tensors for a while."""

    def __init__(self, hooks: list[tuple[dict[int, Any], dict[int, Any]]]) -> None:
        self._hooks = hooks

    def give_back(self) -> None:
        for table, before in self._hooks:
            table.update({**before, **table})
        self._hooks = []
        if self in _held:
            _held.remove(self)


_held: list[_Held] = []  # a backward that fails does not call back: then the next step gives the hooks back


def _hook_tables(tensor: Tensor) -> list[dict[int, Any]]:
    return [each for each in (tensor._backward_hooks, cast(Any, tensor)._post_accumulate_grad_hooks) if each]


@contextmanager
def quiet_hooks(parameters: Iterable[Tensor]) -> Generator[None]:
    """Keep the parameters' own gradient hooks from firing inside.

    `torch.autograd.grad` fires the hooks of the tensors that it is asked about. The stages ask once per
    micro-batch, but a hook belongs to the whole step: it fires when the node hands the gradient on.
    """
    hooks: list[Any] = [each._backward_hooks for each in parameters if each._backward_hooks]
    saved = [dict(each) for each in hooks]
    try:
        for each in hooks:
            each.clear()
        yield
    finally:
        for each, before in zip(hooks, saved, strict=True):
            each.update(before)
