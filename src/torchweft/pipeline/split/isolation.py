"""Run a model without side effects on it or on the caller: for recording, comparing and measuring.

A deep copy of the model would need twice the memory, and code that holds references would still use the original.
"""

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from torchweft.core.rng import generators_of, get_states, set_states
from torchweft.pipeline.weights import Slot, map_tensors, replaced_in

_c = cast(Any, torch._C)
_CONTAINERS: tuple[type[Any], ...] = (list, dict, set, deque)
_OF_MODULES = frozenset(vars(nn.Module()))
_GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("_hooks")]


@contextmanager
def _unseen() -> Generator[None]:
    """Context without the caller's modes (except a default device), hooks on saved tensors and hooks of all modules."""
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
        # Hooks that change nothing hide the caller's, which would get the tensors that this run saves.
        saved = saved_tensors_hooks(lambda x: x, lambda x: x) if hidden else nullcontext()
        with _disable_current_modes(), saved:
            yield
    finally:
        for _ in devices:
            _c._pop_torch_function_stack()
        for mode in reversed(modes):
            _c._push_on_torch_function_stack(mode)
        for table, before in zip(tables, hooks, strict=True):
            table.update(before)


@contextmanager
def undisturbed(
    model: nn.Module, devices: Iterable[torch.device] = (), open_modules: Collection[nn.Module] = ()
) -> Generator[None]:
    """Context in which a run leaves no trace in the model and in PyTorch's generators.

    The model has copies of its buffers inside. Numbers and tensors that modules store are restored at the end, and the
    contents of lists, dicts and sets of `open_modules`, because their forward() adds to these in the step itself. Flags
    stay, because what they stand for, such as hooks that a library has installed, stays too. The caller's
    modes and hooks do not see the run. Inference mode is off inside, so set the grad mode after entering.
    """
    before = [(m, dict(m._parameters), dict(m._buffers), dict(vars(m))) for m in model.modules()]
    of_modules = [value for *_, held in before for value in held.values() if type(value) is torch.Generator]
    sources = [*generators_of(devices), *of_modules]
    drawn = get_states(sources)
    # For all modules, because a run can open some.
    contents = {m: _containers(m) for m, *_ in before}
    try:
        # Inference mode ends before buffers are copied. Copies made in it could not be written to under autograd.
        with torch.inference_mode(False), _unseen():
            map_tensors(model, lambda x: x if isinstance(x, nn.Parameter) else x.detach().clone())
            yield
    finally:
        set_states(sources, drawn)
        for module, parameters, buffers, held in before:
            # The tables are changed in place, because user code and scans can hold references to them.
            module._buffers.clear()
            module._buffers.update(buffers)
            module._parameters.update(parameters)
            now = vars(module)
            # Tensors too: the next step would take a tensor that this run has stored for its own.
            stored = [key for key, value in now.items() if isinstance(value, Tensor) and held.get(key) is not value]
            for key in stored:
                del now[key]
            now.update({k: value for k, value in held.items() if k in stored or type(value) in (int, float)})
        for module in open_modules:
            _restore(contents.get(module, ()))


def keep_attributes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Note the attributes of modules. Returns a function that restores them, and the contents of their containers."""
    noted = [
        (vars(m), dict(vars(m)), [(x, x.copy()) for x in vars(m).values() if type(x) in _CONTAINERS]) for m in modules
    ]

    def restore() -> None:
        for now, before, containers in noted:
            now.clear()
            now.update(before)
            _restore(containers)

    return restore


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """The containers among the attributes of a module, with copies of them."""
    attributes = vars(module).items()
    return [(x, x.copy()) for name, x in attributes if type(x) in _CONTAINERS and name not in _OF_MODULES]


def _restore(containers: Iterable[tuple[Any, Any]]) -> None:
    for container, contents in containers:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(contents)


def parameter_slots(modules: Iterable[nn.Module]) -> Iterator[tuple[Slot, nn.Parameter]]:
    """The places of all parameters. A place that is replaced while this runs shows its new parameter from then on."""
    for module in modules:
        for inner in module.modules():
            table = cast("dict[str, Any]", inner._parameters)
            yield from (((table, key), parameter) for key, parameter in table.items() if parameter is not None)


def moved_to_device(modules: Iterable[nn.Module], device: torch.device | None) -> AbstractContextManager[None]:
    """Context in which modules have copies of parameters on other devices. Does nothing if `device` is None."""
    slots = () if device is None else parameter_slots(modules)
    return replaced_in((slot, p.to(device)) for slot, p in slots if p.device != device and not p.is_meta)


def place_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on this device, unless it is on the meta device."""
    if tensor.is_meta or tensor.device == device:
        return tensor
    if not isinstance(tensor, nn.Parameter):
        return tensor.to(device)
    # The parameter stays the same object, because optimizers refer to it.
    tensor.data = tensor.data.to(device)
    return tensor


def copies(leaves: Sequence[Any]) -> list[Any]:
    """Copies of the inputs, so that writes do not reach the caller's tensors. Equal objects have one copy."""
    clones: dict[int, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for x in leaves:
            if isinstance(x, Tensor) and id(x) not in clones:
                clones[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return [clones[id(x)] if isinstance(x, Tensor) else x for x in leaves]
