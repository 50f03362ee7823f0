"""Every private name of PyTorch that `weft.recurrent` uses, so that a new release of PyTorch breaks one file.

With a private name at each place of use, an upgrade has to find them all. A name that PyTorch moved would fail at the
first call that needs it instead of at import. `Tensor._version`, `UntypedStorage._cdata` and `OpOverload._schema` stay
where they are used, because they are stable and frequent.
"""

import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.nn.utils import parametrize, stateless
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["FakeTensorMode", "TorchDispatchMode", "TracingContext", "tracing"]

_C = cast(Any, torch._C)

# -- read at every call of a network ----------------------------------------------------------------------------------
# These run in C. A Python function here would add a frame to every call.

has_storage = cast("Callable[[Tensor], bool]", _C._has_storage)
dispatch_modes = cast("Callable[[], list[object]]", _get_current_dispatch_mode_stack)
# The innermost transform of `torch.func`, or None.
functorch_interpreter = cast("Callable[[], object | None]", _C._functorch.peek_interpreter_stack)
# -1 outside of forward-mode differentiation.
forward_ad_level = cast("Callable[[], int]", partial(getattr, torch.autograd.forward_ad, "_current_level"))
# How many `parametrize.cached()` are open.
parametrizations_cached = cast("Callable[[], int]", partial(getattr, parametrize, "_cache_enabled"))
is_jit_tracing = cast("Callable[[], bool]", cast(Any, torch.jit).is_tracing)
# The module of Dynamo if something imported it already, else None: its import takes seconds.
loaded_dynamo = cast("Callable[[], Any]", partial(sys.modules.get, "torch._dynamo"))

# -- tracing ----------------------------------------------------------------------------------------------------------

make_fx = cast("Callable[..., Callable[..., fx.GraphModule]]", proxy_tensor.make_fx)
current_tracer = cast("Callable[[], object | None]", proxy_tensor.get_proxy_mode)
# Whether the gradient of a view that is written to repeats the view instead of reading by strides.
replay_views = cast(
    "Callable[[bool], AbstractContextManager[None]]", cast(Any, torch.autograd.grad_mode)._force_original_view_tracking
)
module_hooks = cast("dict[str, Any]", vars(nn.modules.module))
# Swap other tensors in for a module's own, as `torch.func.functional_call` does.
with_tensors = cast("Callable[..., AbstractContextManager[None]]", cast(Any, stateless)._reparametrize_module)


def nonstrict_trace(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo does not look into."""
    import torch._dynamo  # noqa: PLC0415  (takes seconds)

    return cast(Any, torch._dynamo).nonstrict_trace(function)


def saved_tensor_hooks() -> object | None:
    """The innermost hooks on saved tensors, or None."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def outside_vmap() -> Any:
    """Operators inside do not belong to the batch of an enclosing `vmap`."""
    return _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C._dispatch_key_parse("VmapMode")))


# Thread-local, so only a new thread still has the defaults.
with ThreadPoolExecutor(1, "torchweft-dispatch-keys") as _new_thread:
    _DEFAULT_KEYS = [
        _new_thread.submit(read).result()
        for read in (_C._dispatch_tls_local_include_set, _C._dispatch_tls_local_exclude_set)
    ]


@contextmanager
def default_dispatch() -> Generator[None]:
    """Restore the default dispatch keys: inside an operator autograd is off, and under tracing `torch.func` too."""
    include, exclude = _DEFAULT_KEYS
    if torch.is_inference_mode_enabled():
        include = include.remove(_C.DispatchKey.ADInplaceOrView)
    with _C._ForceDispatchKeyGuard(include, exclude):
        yield
