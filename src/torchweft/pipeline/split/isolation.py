"""Run a model without side effects on it or on the caller: for recording, comparing and measuring."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from torchweft.core.rng import generators_of, get_states, set_states
from torchweft.pipeline.weights import map_tensors, replaced_in

_c = cast(Any, torch._C)
_GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("_hooks")]


@contextmanager
def _unseen() -> Generator[None]:
    """Context without the caller's modes (except a default device), hooks on tensors that autograd saves, and hooks of
    all modules, such as those of a FlopCounterMode."""
    tables = cast("list[dict[int, Any]]", [vars(nn.modules.module)[name] for name in _GLOBAL_HOOKS])
    hooks = [dict(table) for table in tables]
    modes = [_c._pop_torch_function_stack() for _ in range(_c._len_torch_function_stack())]
    # The modes leave the stack from the top, so they go back in reverse order.
    devices = [mode for mode in reversed(modes) if type(mode) is DeviceContext]
    hidden = _c._autograd._top_saved_tensors_default_hooks(True) is not None
    try:
        for table in tables:
            table.clear()
        for mode in devices:
            _c._push_on_torch_function_stack(mode)
        with _disable_current_modes(), saved_tensors_hooks(_identity, _identity) if hidden else nullcontext():
            yield
    finally:
        for _ in devices:
            _c._pop_torch_function_stack()
        for mode in reversed(modes):
            _c._push_on_torch_function_stack(mode)
        for table, before in zip(tables, hooks, strict=True):
            table.update(before)


@contextmanager
def undisturbed(model: nn.Module, devices: Iterable[torch.device] = ()) -> Generator[None]:
    """Context in which a run leaves no trace in the model and in PyTorch's generators.

    The model has copies of its buffers inside. Numbers and tensors that modules store are restored at the end. The
    caller's modes and hooks do not see the run.
    """
    before = [(m, dict(m._parameters), dict(m._buffers), dict(vars(m))) for m in model.modules()]
    of_modules = [value for *_, held in before for value in held.values() if type(value) is torch.Generator]
    sources = [*generators_of(devices), *of_modules]
    drawn = get_states(sources)
    try:
        with _unseen():
            map_tensors(model, lambda x: x if isinstance(x, nn.Parameter) else x.detach().clone())
            yield
    finally:
        set_states(sources, drawn)
        for module, parameters, buffers, held in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._parameters.update(parameters)
            now = vars(module)
            # Tensors too: the next step would take a tensor that this run has stored for its own.
            stored = [key for key, value in now.items() if isinstance(value, Tensor) and held.get(key) is not value]
            for key in stored:
                del now[key]
            now.update({k: value for k, value in held.items() if k in stored or type(value) in (int, float)})


def moved_to_device(modules: Iterable[nn.Module], device: torch.device | None) -> AbstractContextManager[None]:
    """Context in which modules have copies of parameters on other devices. Does nothing if `device` is None."""
    inner = {submodule: None for module in modules for submodule in module.modules()} if device is not None else {}
    tables = cast("list[dict[str, Any]]", [submodule._parameters for submodule in inner])
    slots = [((table, key), p) for table in tables for key, p in table.items() if p is not None]
    return replaced_in((slot, p.to(device)) for slot, p in slots if p.device != device and not p.is_meta)


def copies(leaves: Sequence[Any]) -> list[Any]:
    """Copies of the inputs, so that writes do not reach the caller's tensors. A tensor that occurs twice is copied
    once."""
    clones: dict[int, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for x in leaves:
            if isinstance(x, Tensor) and id(x) not in clones:
                clones[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return [clones[id(x)] if isinstance(x, Tensor) else x for x in leaves]


def _identity(value: Any) -> Any:
    """Replaces the caller's hooks on saved tensors."""
    return value
