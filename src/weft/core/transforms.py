"""Ways to differentiate that PyTorch puts around a call, and that see nothing of what is cut out of autograd.

forward mode (dual numbers)          a tangent of an input, or of a parameter, would be dropped in silence
torch.func: grad, vjp, jvp, vmap     a cut detaches from the graph that the transform follows
batched gradients                    ``jacobian(vectorize=True)`` sends a stack of gradients back as one

So do programs that record a call, to run it elsewhere (`forbid_tracing`, `forbid_exporting`).
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from weft.core.errors import UsageError

_forward_ad = cast(Any, forward_ad)
_functorch = cast(Any, torch._C)._functorch


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether forward-mode differentiation goes through any of these. They are looked at only inside a dual level."""
    return _forward_ad._current_level >= 0 and any(_forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def forbid_transforms(tensors: Iterable[Tensor]) -> None:
    """Raise UsageError where a step that is cut would lose derivatives: of these tensors, or of the call itself."""
    if _functorch.peek_interpreter_stack() is not None:
        raise UsageError(f"the pipe was called inside a transform of torch.func (grad, vjp, jvp, vmap), {_WHY}")
    if has_tangent(tensors):
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
    if any(x is not None and _batched(x) for x in gradients):
        raise UsageError(
            f"several gradients were asked for at once (is_grads_batched, jacobian(vectorize=True), vmap), {_WHY}; or "
            "ask for one after the other"
        )


def _batched(tensor: Tensor) -> bool:
    return bool(_functorch.is_legacy_batchedtensor(tensor) or _functorch.is_batchedtensor(tensor))


_RECORDED = (
    "a Pipe cannot be traced (torch.jit.trace, make_fx, torch.fx.symbolic_trace) or exported (torch.export): how a "
    "mini-batch is cut is decided at every call; trace or export the nn.Sequential that it was made of, or "
    "nn.Sequential(*pipe), which has the same layers and parameters"
)
_WHY = (
    "of which a model that is cut out of autograd knows nothing; use executor='graph' for a Pipe: then the whole graph "
    "is visible"
)


@contextmanager
def outside_transforms() -> Generator[None]:
    """What concerns no tensor of the user, such as drawing a seed, runs outside of transforms around the call."""
    if _functorch.peek_interpreter_stack() is None:
        yield
        return
    with cast(Any, pyfunctorch).temporarily_clear_interpreter_stack():
        yield
