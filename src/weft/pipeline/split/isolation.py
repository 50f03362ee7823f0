"""Run a model without side effects on it or on the caller: for recording, comparing and measuring."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.rng import generators, restore, states
from weft.pipeline.weights import map_tensors, replaced_in

_c = cast(Any, torch._C)
_GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("_hooks")]


@contextmanager
def _unseen() -> Generator[None]:
    """A run inside is seen by none of the caller's modes but that of a default device, by no hooks on what autograd
    saves, and by no hooks of all modules, such as those of a FlopCounterMode."""
    tables = cast("list[dict[int, Any]]", [vars(nn.modules.module)[name] for name in _GLOBAL_HOOKS])
    hooks = [dict(table) for table in tables]
    modes = [_c._pop_torch_function_stack() for _ in range(_c._len_torch_function_stack())]
    devices = [each for each in reversed(modes) if type(each) is DeviceContext]
    hidden = _c._autograd._top_saved_tensors_default_hooks(True) is not None
    try:
        for table in tables:
            table.clear()
        for each in devices:
            _c._push_on_torch_function_stack(each)
        with _disable_current_modes(), saved_tensors_hooks(_same, _same) if hidden else nullcontext():
            yield
    finally:
        for _ in devices:
            _c._pop_torch_function_stack()
        for each in reversed(modes):
            _c._push_on_torch_function_stack(each)
        for table, before in zip(tables, hooks, strict=True):
            table.update(before)


@contextmanager
def undisturbed(model: nn.Module, devices: Iterable[torch.device] = ()) -> Generator[None]:
    """A run inside leaves the model and PyTorch's generators as they were: buffers are copies meanwhile, and numbers
    and tensors that modules store are put back. The caller's modes and hooks do not see it."""
    before = [(m, dict(m._parameters), dict(m._buffers), dict(vars(m))) for m in model.modules()]
    own = [each for *_, held in before for each in held.values() if type(each) is torch.Generator]
    sources = [*generators(devices), *own]
    drawn = states(sources)
    try:
        with _unseen():
            map_tensors(model, lambda each: each if isinstance(each, nn.Parameter) else each.detach().clone())
            yield
    finally:
        restore(sources, drawn)
        for module, parameters, buffers, held in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._parameters.update(parameters)
            now = vars(module)
            # Also tensors: one that the run has stored would look like that of the step which comes.
            stored = [key for key, each in now.items() if isinstance(each, Tensor) and held.get(key) is not each]
            for key in stored:
                del now[key]
            now.update({k: each for k, each in held.items() if k in stored or type(each) in (int, float)})


def moved_to_device(modules: Iterable[nn.Module], device: torch.device | None) -> AbstractContextManager[None]:
    """Let modules have copies, on this device, of parameters that a stage on another device owns (None: there are no
    others)."""
    inner = {each: None for module in modules for each in module.modules()} if device is not None else {}
    tables = cast("list[dict[str, Any]]", [each._parameters for each in inner])
    slots = [((table, key), p) for table in tables for key, p in table.items() if p is not None]
    return replaced_in((slot, p.to(device)) for slot, p in slots if p.device != device and not p.is_meta)


def copies(leaves: Sequence[Any]) -> list[Any]:
    """The inputs again, so that what is written into them is not the caller's; one tensor stays one."""
    made: dict[int, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for x in leaves:
            if isinstance(x, Tensor) and id(x) not in made:
                made[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return [made[id(x)] if isinstance(x, Tensor) else x for x in leaves]


def _same(value: Any) -> Any:
    """In the place of the caller's hooks on what autograd saves."""
    return value
