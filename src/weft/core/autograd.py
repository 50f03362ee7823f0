"""A step as a single node of autograd, and the refusal of what a node cannot do.

    inputs, parameters --> [ Boundary: function.forward ] --> outputs --> the user's loss
    their gradients    <-- [           function.backward ] <-- gradients of the outputs

The inputs of the node are the tensors that go in and *all parameters*. So ``loss.backward()`` stays plain, every
parameter gets its gradient once per step (its hooks fire once, which DistributedDataParallel relies on), and
``torch.autograd.grad(loss, parameters)`` works whatever the stages keep. The price: no gradient of a gradient, unless
the function knows another way to its gradients (`TwiceDifferentiable`).

Other ways to differentiate see nothing of what is cut out, and are refused:

    forward mode (dual numbers)          a tangent of an input, or of a parameter, would be dropped in silence
    torch.func: grad, vjp, jvp, vmap     a cut detaches from the graph that the transform follows
    batched gradients                    ``jacobian(vectorize=True)`` sends a stack of gradients back as one

So are programs that record a call to run it elsewhere (`forbid_tracing`, `forbid_exporting`). Under `torch.compile`
threads and connections cannot be compiled: `graph_break` lets them run as they are, between two compiled graphs.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from weft.core.errors import DoubleBackwardError, UsageError, shorten_traceback

_forward_ad = cast(Any, forward_ad)
_functorch = cast(Any, torch._C)._functorch


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether forward-mode differentiation goes through any of these. They are looked at only inside a dual level."""
    return _forward_ad._current_level >= 0 and any(_forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def forbid_transforms(tensors: Callable[[], Iterable[Tensor]]) -> None:
    """Raise UsageError where a step that is cut would lose derivatives: of these tensors, or of the call itself."""
    if _functorch.peek_interpreter_stack() is not None:
        raise UsageError(f"the pipe was called inside a transform of torch.func (grad, vjp, jvp, vmap), {_WHY}")
    if _forward_ad._current_level >= 0 and has_tangent(tensors()):
        raise UsageError(f"an input or parameter has a tangent (forward-mode differentiation), {_WHY}")


def forbid_exporting() -> None:
    """Raise UsageError where the call is exported; may be in sight of Dynamo, whose own error then shows the words."""
    if torch.compiler.is_exporting():
        raise UsageError(_RECORDED)


def forbid_tracing(args: Any, kwargs: Any) -> None:
    """Raise UsageError where the call is recorded for another program: sizes are no numbers there, threads not seen.

    Under `torch.fx.symbolic_trace` the arguments are proxies, or one proxy stands for all of them.
    """
    proxies = isinstance(args, Proxy) or any(isinstance(each, Proxy) for each in (*args, *kwargs.values()))
    if proxies or cast(Any, torch.jit).is_tracing() or get_proxy_mode() is not None:
        raise UsageError(_RECORDED)


def forbid_batched(gradients: Iterable[Tensor | None]) -> None:
    """Inside a backward: raise UsageError if it is asked for several gradients at once."""
    batched = (_functorch.is_legacy_batchedtensor, _functorch.is_batchedtensor)
    if any(x is not None and (batched[0](x) or batched[1](x)) for x in gradients):
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
    """What concerns no tensor of the user, such as drawing a seed, runs outside of transforms around the call."""
    if _functorch.peek_interpreter_stack() is None:
        yield
        return
    with cast(Any, pyfunctorch).temporarily_clear_interpreter_stack():
        yield


_VISIBLE = "use executor='graph' for a Pipe: then the whole graph is visible"
_WHY = f"of which a model that is cut out of autograd knows nothing; {_VISIBLE}"
_CUT_OUT = f"the model ran cut out of autograd; {_VISIBLE}"
# The only way to know of ``retain_graph=True`` from inside a backward; AOTAutograd asks it as well.
_autograd = cast(Any, torch._C)._autograd


@runtime_checkable
class CutFunction(Protocol):
    """One step: from the tensors that go in to those that come out, and their gradients the same way back."""

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """The tensors that come out, and which of them have a gradient."""
        ...

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """One gradient per tensor that went in, in their order. With `retain` it may be called again."""
        ...


@runtime_checkable
class TwiceDifferentiable(Protocol):
    """A `CutFunction` that can also make its gradients in sight of autograd, for a gradient of a gradient.

    Its `backward` gets batched gradients as well.
    """

    def differentiable_backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """As `CutFunction.backward`, under grad mode; autograd can differentiate what it returns."""
        ...


@runtime_checkable
class OnceDifferentiable(Protocol):
    """A `CutFunction` that knows better words for why its gradients have no gradient, and what to do. They go on after
    "a gradient of a gradient was asked for, but"."""

    @property
    def only_once(self) -> str: ...


@runtime_checkable
class StepsInBackward(Protocol):
    """A module whose backward may take an optimizer step elsewhere, as that of a remote expert does."""

    @property
    def steps_in_backward(self) -> str:
        """What to do so that it takes none before a mini-batch of several micro-batches is over; empty: it does not."""
        ...


class Boundary(torch.autograd.Function):
    """Use `apply`; this is its autograd node."""

    @staticmethod
    def forward(ctx: Any, function: CutFunction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, tracked = function.forward()
        ctx.function = function
        ctx.mark_non_differentiable(*(out for out, wanted in zip(outputs, tracked, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        function: CutFunction = ctx.function
        try:
            if not isinstance(function, TwiceDifferentiable):
                forbid_batched(gradients)
                forbid_double(function)
            elif torch.is_grad_enabled():
                return (None, *function.differentiable_backward(gradients, retain=keeps_graph()))
            return (None, *function.backward(gradients, retain=keeps_graph()))
        except Exception as error:
            shorten_traceback(error)
            raise


def forbid_double(function: object = None) -> None:
    """Inside a backward: raise DoubleBackwardError if it is to be differentiated itself."""
    if torch.is_grad_enabled():
        why = function.only_once if isinstance(function, OnceDifferentiable) else _CUT_OUT
        raise DoubleBackwardError(f"a gradient of a gradient (create_graph=True) was asked for, but {why}")


def keeps_graph() -> bool:
    """Inside a backward: whether it was called with ``retain_graph=True``."""
    return bool(_autograd._get_current_graph_task_keep_graph())


def current_task() -> int:
    """Inside a backward: a number that no other call of backward has."""
    return int(cast(Any, torch._C)._current_graph_task_id())


def apply(function: CutFunction, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Run the function as one node of autograd; `tensors` are all that it may have gradients for."""
    return cast("tuple[Tensor, ...]", Boundary.apply(function, *tensors))


def without_gradient(parameters: Iterable[Tensor]) -> None:
    """Inside a backward: these get no gradient, and their hooks stay quiet until it is over.

    In plain autograd a parameter that a step did not use is not in its graph. Here it is an input of the node, and its
    hooks would be called with None.
    """
    tables = [table for each in parameters for table in _hook_tables(each)]
    if tables:
        # The engine has the only reference. It drops it also when the backward fails, and then calls nobody.
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(_Quiet(tables, current_task()).end)


def quiet_hooks(parameters: Iterable[Tensor]) -> "AbstractContextManager[object]":
    """Keep the parameters' own gradient hooks from firing inside: `torch.autograd.grad` fires those of what it is asked
    about, once per micro-batch. A hook belongs to the whole step, and fires when the node hands the gradient on."""
    tables = [cast("_Table", each._backward_hooks) for each in parameters if each._backward_hooks]
    return _Quiet(tables, None) if tables else nullcontext()


_Table = dict[int, Callable[..., Any]]
"""The hooks of a tensor as PyTorch keeps them, by the number of their handle."""


def _hook_tables(tensor: Tensor) -> list[_Table]:
    return [each for each in (tensor._backward_hooks, cast(Any, tensor)._post_accumulate_grad_hooks) if each]


class _Hook:
    """Stands in a table for one of its hooks, and calls it unless it is to be quiet.

    `quiet` holds, once for everybody who asked for it, the number of a backward, or None for all of them.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.quiet: list[int | None] = []

    def __call__(self, *args: Any) -> Any:
        return None if None in self.quiet or current_task() in self.quiet else self.hook(*args)


class _Quiet:
    """Hooks that are quiet until the `end`, in one backward or in all. Others may ask for the same meanwhile."""

    def __init__(self, tables: Sequence[_Table], task: int | None) -> None:
        self._tables, self._task = tables, task
        self._hooks: list[_Hook] = []
        with _quieting:
            for table in tables:
                for key, hook in table.items():  # a known key: the table does not change its size
                    stands = table[key] = hook if isinstance(hook, _Hook) else _Hook(hook)
                    stands.quiet.append(task)
                    self._hooks.append(stands)

    def end(self) -> None:
        with _quieting:
            hooks, self._hooks = self._hooks, []
            for each in hooks:
                each.quiet.remove(self._task)
            for table in self._tables if hooks else ():
                for key, hook in table.items():
                    if isinstance(hook, _Hook) and not hook.quiet:
                        table[key] = hook.hook

    __del__ = end

    def __enter__(self) -> "_Quiet":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


_quieting = threading.RLock()


Result = TypeVar("Result")


def graph_break(function: Callable[..., Result], *args: Any) -> Result:
    """``function(*args)``, which Dynamo does not look into."""
    if torch.compiler.is_dynamo_compiling():
        function = cast("Callable[..., Result]", torch.compiler.disable(function))
    return function(*args)
