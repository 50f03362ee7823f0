"""A step as a single node of autograd, and the rejection of calls that a single node cannot serve.

    inputs, parameters --> [ Boundary: function.forward ] --> outputs --> the user's loss
    their gradients    <-- [           function.backward ] <-- gradients of the outputs

The node takes the input tensors and *all parameters* as its inputs. Therefore ``loss.backward()`` works unchanged, and
``torch.autograd.grad(loss, parameters)`` works, even if stages recompute. Every parameter gets its gradient once per
step, so its hooks fire once, which DistributedDataParallel relies on. The price: no gradient of a gradient, unless the
function implements `TwiceDifferentiable`.

Other ways to differentiate cannot see into the node, and are rejected:

    forward mode (dual numbers)          the tangent of an input or parameter would be dropped without notice
    torch.func: grad, vjp, jvp, vmap     the stages detach from the graph that the transform follows
    batched gradients                    ``jacobian(vectorize=True)`` sends a stack of gradients back as one

So are programs that record a call to run it elsewhere (`reject_tracing`, `reject_exporting`). `torch.compile` cannot
compile threads and connections: `graph_break` runs them uncompiled, between two compiled graphs.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchweft.core import torch_internals as internals
from torchweft.core.errors import DoubleBackwardError, UsageError, shorten_traceback


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether any of these has a tangent of forward-mode differentiation. They are examined only in a dual level."""
    forward_mode = internals.forward_mode
    return forward_mode._current_level >= 0 and any(forward_mode.unpack_dual(x).tangent is not None for x in tensors)


def reject_transforms(tensors: Callable[[], Iterable[Tensor]]) -> None:
    """Raise UsageError if a step would lose derivatives of these tensors, or runs inside a transform."""
    if internals.transforms() is not None:
        raise UsageError(f"the pipe was called inside a transform of torch.func (grad, vjp, jvp, vmap), {_WHY}")
    if internals.forward_mode._current_level >= 0 and has_tangent(tensors()):
        raise UsageError(f"an input or parameter has a tangent (forward-mode differentiation), {_WHY}")


def reject_exporting() -> None:
    """Raise UsageError if the call is exported. Dynamo can trace this; its own error then contains the message."""
    if torch.compiler.is_exporting():
        raise UsageError(_RECORDED)


def reject_tracing(args: Any, kwargs: Any) -> None:
    """Raise UsageError if the call is recorded for another program, which would see neither sizes nor threads."""
    # Under torch.fx.symbolic_trace the arguments are proxies, or one proxy stands for all of them.
    proxies = isinstance(args, Proxy) or any(isinstance(value, Proxy) for value in (*args, *kwargs.values()))
    if proxies or cast(Any, torch.jit).is_tracing() or get_proxy_mode() is not None:
        raise UsageError(_RECORDED)


def reject_batched(gradients: Iterable[Tensor | None]) -> None:
    """Inside a backward: raise UsageError if it computes several gradients at once."""
    if any(x is not None and (internals.is_legacy_batched(x) or internals.is_batched(x)) for x in gradients):
        raise UsageError(
            f"several gradients were asked for at once (is_grads_batched, jacobian(vectorize=True), vmap), {_WHY}; or "
            "ask for one after the other"
        )


_RECORDED = (
    "a Pipe cannot be traced (torch.jit.trace, make_fx, torch.fx.symbolic_trace) or exported (torch.export): how a "
    "mini-batch is cut is decided at every call; trace or export the nn.Sequential that it was made of, or "
    "nn.Sequential(*pipe), which has the same layers and parameters"
)


@contextmanager
def outside_transforms() -> Generator[None]:
    """Suspend the transforms around the call, for work on tensors that are not the user's, e.g. to draw a seed."""
    if internals.transforms() is None:
        yield
        return
    with internals.suspend_transforms():
        yield


_VISIBLE = "use executor='graph' for a Pipe: then the whole graph is visible"
_WHY = f"which does not reach into a model that is cut out of autograd; {_VISIBLE}"
_CUT_OUT = f"the model ran cut out of autograd; {_VISIBLE}"


@runtime_checkable
class CutFunction(Protocol):
    """One step: from its input tensors to its outputs, and their gradients back."""

    # The outputs, and which of them have a gradient.
    def forward(self) -> tuple[list[Tensor], list[bool]]: ...

    # One gradient per input tensor, in their order. With `retain` it can be called again.
    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]: ...


@runtime_checkable
class TwiceDifferentiable(Protocol):
    """A `CutFunction` that can also compute its gradients through autograd, for a gradient of a gradient."""

    # Its `backward` gets batched gradients as well.

    # `CutFunction.backward` under grad mode, so that autograd can differentiate the result.
    def differentiable_backward(
        self, gradients: Sequence[Tensor | None], *, retain: bool
    ) -> Sequence[Tensor | None]: ...


@runtime_checkable
class OnceDifferentiable(Protocol):
    """A `CutFunction` that explains why its gradients have no gradient, and suggests a remedy."""

    # The text continues the sentence "a gradient of a gradient was asked for, but".

    @property
    def only_once(self) -> str: ...


@runtime_checkable
class StepsInBackward(Protocol):
    """A module that can take an optimizer step elsewhere during its backward, e.g. a remote expert."""

    # Advice to defer that step to the end of a mini-batch of several micro-batches. Empty if it takes none.
    @property
    def steps_in_backward(self) -> str: ...


class Boundary(torch.autograd.Function):
    """The node of autograd, made by `apply_as_node`."""

    @staticmethod
    def forward(ctx: Any, function: CutFunction, *tensors: Tensor) -> tuple[Tensor, ...]:
        # An unused output keeps None as its gradient, instead of zeros that the stages would compute with.
        ctx.set_materialize_grads(False)
        outputs, tracked = function.forward()
        ctx.function = function
        ctx.mark_non_differentiable(*(x for x, is_tracked in zip(outputs, tracked, strict=True) if not is_tracked))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        function: CutFunction = ctx.function
        try:
            if not _is_twice_differentiable(type(function)):
                reject_batched(gradients)
                reject_double(function)
            elif torch.is_grad_enabled():
                twice = cast(TwiceDifferentiable, function)
                return (None, *twice.differentiable_backward(gradients, retain=is_graph_retained()))
            return (None, *function.backward(gradients, retain=is_graph_retained()))
        except Exception as error:
            shorten_traceback(error)
            raise


@lru_cache
def _is_twice_differentiable(kind: type) -> bool:
    # By class, because checking an object against a protocol takes longer than a short backward.
    return issubclass(kind, TwiceDifferentiable)


def reject_double(function: object = None) -> None:
    """Inside a backward: raise DoubleBackwardError if it is to be differentiated itself."""
    if torch.is_grad_enabled():
        why = function.only_once if isinstance(function, OnceDifferentiable) else _CUT_OUT
        raise DoubleBackwardError(f"a gradient of a gradient (create_graph=True) was asked for, but {why}")


def is_graph_retained() -> bool:
    """Inside a backward: whether it was called with ``retain_graph=True``."""
    return bool(internals.backward_keeps_graph())


def backward_number() -> int:
    return int(internals.backward_number())


def apply_as_node(function: CutFunction, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Run the function as one node of autograd. `tensors` are all tensors that it can have gradients for."""
    return cast("tuple[Tensor, ...]", Boundary.apply(function, *tensors))


def silence_unused_hooks(parameters: Iterable[Tensor]) -> None:
    """Inside a backward: silence the hooks of these parameters, which get no gradient, until it ends."""
    # In plain autograd the graph of a step does not contain a parameter that it did not use. Here every parameter is an
    # input of the node, and its hooks would be called with None.
    tables = [table for parameter in parameters for table in _hook_tables(parameter)]
    if tables:
        # Only the engine references this callback. If the backward fails, it is dropped without being called, and
        # `_QuietHooks.__del__` restores the hooks.
        internals.queue_callback(_QuietHooks(tables, backward_number()).end)


def silence_hooks(parameters: Iterable[Tensor]) -> "AbstractContextManager[object]":
    """Silence the gradient hooks of the parameters inside the block."""
    # `torch.autograd.grad` fires the hooks of the tensors that it differentiates by, i.e. once per micro-batch. A hook
    # belongs to the whole step, and fires when the node passes the gradient on.
    tables = [cast("internals.HookTable", x._backward_hooks) for x in parameters if x._backward_hooks]
    return _QuietHooks(tables, None) if tables else nullcontext()


def _hook_tables(tensor: Tensor) -> list[internals.HookTable]:
    return [table for table in (tensor._backward_hooks, cast(Any, tensor)._post_accumulate_grad_hooks) if table]


class _Hook:
    """Replaces a hook in its table, and calls it unless it is silenced."""

    # `quiet` has one entry per active request: the number of a backward, or None for all backwards.

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.quiet: list[int | None] = []

    def __call__(self, *args: Any) -> Any:
        return None if None in self.quiet or backward_number() in self.quiet else self.hook(*args)


class _QuietHooks:
    """A request to silence hooks until its `end`, in one backward or in all. Requests can overlap."""

    def __init__(self, tables: Sequence[internals.HookTable], task: int | None) -> None:
        self._tables, self._task = tables, task
        self._hooks: list[_Hook] = []
        with _hook_lock:
            for table in tables:
                for key, hook in table.items():
                    # An assignment to an existing key is safe during the iteration, because the dict keeps its size.
                    quietable = table[key] = hook if isinstance(hook, _Hook) else _Hook(hook)
                    quietable.quiet.append(task)
                    self._hooks.append(quietable)

    def end(self) -> None:
        with _hook_lock:
            # `__del__` calls this again, so a second call must do nothing.
            hooks, self._hooks = self._hooks, []
            for hook in hooks:
                hook.quiet.remove(self._task)
            for table in self._tables if hooks else ():
                for key, hook in table.items():
                    if isinstance(hook, _Hook) and not hook.quiet:
                        table[key] = hook.hook

    __del__ = end

    def __enter__(self) -> "_QuietHooks":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


# Re-entrant: the garbage collector can call `__del__` in a thread that holds it.
_hook_lock = threading.RLock()


Result = TypeVar("Result")


def graph_break(function: Callable[..., Result], *args: Any) -> Result:
    """Call ``function(*args)`` without Dynamo looking into it."""
    if torch.compiler.is_dynamo_compiling():
        function = cast("Callable[..., Result]", torch.compiler.disable(function))
    return function(*args)
