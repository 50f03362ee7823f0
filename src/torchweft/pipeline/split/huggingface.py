"""Help a pipe to look like its model to the libraries of Hugging Face.

Trainer depends on the class of its model: on its name (labels of causal models are shifted), on the signature of its
``forward`` (which columns are inputs or labels), and on ``isinstance`` (a `PreTrainedModel` saves itself). A class that
inherits from both would run the model's methods on the pipe, where the model's attributes are missing. `Pipe` therefore
reports the model's class as its ``__class__``, as `unittest.mock` does with ``spec=``: ``isinstance`` accepts both.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn

from torchweft.core.errors import UsageError

# The argument by which models divide the sum of the losses of tokens, so that parts of a batch can be added.
COUNT = "num_items_in_batch"


def forward_like(function: Callable[..., Any], kind: type[nn.Module]) -> Callable[..., Any]:
    """A copy of `function`, the forward of a pipe, that has the signature of the forward of this class."""

    def forward(pipe: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(pipe, *args, **kwargs)

    # Not `functools.wraps`: accelerate follows __wrapped__, and would call the model instead of the pipe.
    cast(Any, forward).__signature__ = inspect.signature(kind.forward)
    return forward


def without_cache(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with ``use_cache=False`` if forward() could pass keys and values between blocks."""
    # The config can be nested, and the argument can be one of ``**kwargs``.
    config: Any = getattr(model, "config", None)
    configs, of_text = [config], getattr(config, "get_text_config", None)
    with suppress(ValueError):  # several text configs
        configs += [of_text()] if of_text else []
    settings = [getattr(config, "use_cache", None) for config in configs]
    if "use_cache" in kwargs or kwargs.get("past_key_values") is not None:
        return args, kwargs
    # Also if the setting is False: the decoder of T5 has a config of its own, which Trainer does not change.
    caches = True in settings or (False in settings and accepts(model, "use_cache", by_name=True))
    if caches and accepts(model, "use_cache", by_name=of_text is None):
        kwargs = {"use_cache": False, **kwargs}
    return args, kwargs


def accepts(model: nn.Module, name: str, *, by_name: bool = False) -> bool:
    """Whether forward() takes that keyword; `by_name`: not as one of ``**kwargs``."""
    parameters = _parameters_of(cast(Any, getattr(model.forward, "__func__", model.forward)))
    return name in parameters or (not by_name and any(item.kind is item.VAR_KEYWORD for item in parameters.values()))


def takes_count(model: Any) -> bool:
    """Whether forward() divides a sum of losses by its argument `COUNT`, if it is given."""
    if not isinstance(model, nn.Module):
        return False  # another check tells
    return accepts(model, COUNT, by_name=True) or (hasattr(model, "loss_function") and accepts(model, COUNT))


@lru_cache(maxsize=64)  # a signature takes 20 us or more, and a pipe asks for it at each step
def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def split_by_device_map(model: nn.Module) -> tuple[list[str], list[torch.device]]:
    """The split points and the devices of a model that was loaded with ``device_map=``. A stage begins where the map
    goes on to another device."""
    device_map: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    if len(device_map) < 2:
        raise UsageError(
            "split='device_map' is for a model that from_pretrained(device_map=...) has put on several devices; this "
            f"{type(model).__name__} has {device_map or 'no hf_device_map'}"
        )
    if offloaded := [name for name, device in device_map.items() if str(device) in ("cpu", "disk")]:
        raise UsageError(
            f"device_map has put {', '.join(offloaded)} on the CPU or the disk, to be copied from there at each step; "
            "give from_pretrained() a max_memory with which all fits on the devices"
        )
    modules: dict[str, nn.Module] = dict(cast(Any, model).named_modules())
    points: list[str] = []
    devices: list[torch.device] = []
    for name, device in device_map.items():
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if devices and place == devices[-1]:
            continue
        if devices:
            if name not in modules:
                raise UsageError(f"device_map begins a device at {name}, which is not a module; give split= by name")
            points.append(name)
        devices.append(place)
    # The hooks of accelerate would move tensors inside of the blocks. The pipe moves them itself.
    if (hooks := sys.modules.get("accelerate.hooks")) is not None:
        hooks.remove_hook_from_submodules(model)
    return points, devices
