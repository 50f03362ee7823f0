"""Let the libraries of Hugging Face see the model in a pipe.

Trainer goes by the class of its model: by its name (labels of causal models are shifted), by the signature of its
``forward`` (which columns are inputs or labels), and by ``isinstance`` (a `PreTrainedModel` saves itself). A class that
inherits from both would run the model's methods on the pipe, where the model's attributes are missing. So the pipe
reports the model's class as its ``__class__``, as `unittest.mock` does with ``spec=``: ``isinstance`` accepts both.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from weft.pipeline.pipe import Pipe

_set_class: Callable[[object, type[Any]], None] = vars(object)["__class__"].__set__


class _Forward:
    """`Pipe.forward` with the model's signature. An attribute can replace it, as accelerate's mixed precision does."""

    def __get__(self, pipe: Any, owner: type[Any]) -> Callable[..., Any]:
        if pipe is None:
            return Pipe.forward
        if pipe.__dict__.get("_signed_forward") is None:
            pipe.__dict__["_signed_forward"] = _forward_like(cast("type[nn.Module]", type(pipe.module)))
        return MethodType(pipe.__dict__["_signed_forward"], pipe)


def _forward_like(kind: type[nn.Module]) -> Callable[..., Any]:
    def forward(pipe: Pipe, *args: Any, **kwargs: Any) -> Any:
        return Pipe.forward(pipe, *args, **kwargs)

    # Not `functools.wraps`: accelerate follows __wrapped__, and would call the model instead of the pipe.
    cast(Any, forward).__signature__ = inspect.signature(kind.forward)
    return forward


class ModelFacade(Pipe):
    """A pipe that has the class and the signature of its model for others. `module` is the model."""

    module: Any
    split: Any
    devices: list[torch.device]
    forward: Any = _Forward()

    @property
    def __class__(self) -> type[Any]:
        return cast("type[Any]", type(self.__dict__.get("module", self)))

    @__class__.setter
    def __class__(self, kind: type[Any]) -> None:
        # `fully_shard` sets a class that inherits from FSDPModule and the reported class. The pipe has to stay a pipe.
        bases = tuple(type(self) if base is self.__class__ else base for base in kind.__bases__)
        _set_class(self, type(kind.__name__, bases, dict(vars(kind))))

    @property
    def hf_device_map(self) -> dict[str, str]:
        """The device of each stage, if there are several: then Trainer and accelerate do not move the pipe."""
        names: list[str] = ["", *self.split]
        return dict(zip(names, map(str, self.devices), strict=True)) if len(set(self.devices)) > 1 else {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_signed_forward": None}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The default fails, because pickle compares the class of what it rebuilds with __class__.
        return object.__new__, (type(self),), self.__getstate__()

    def __repr__(self) -> str:
        return f"Pipe of {super().__repr__()}"


def without_cache(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with ``use_cache=False`` where forward() would hand a cache of keys and values from block to
    block. The config can be nested, and the argument can be one of ``**kwargs``."""
    config: Any = getattr(model, "config", None)
    configs, of_text = [config], getattr(config, "get_text_config", None)
    with suppress(ValueError):  # several text configs
        configs += [of_text()] if of_text else []
    caches = any(getattr(each, "use_cache", False) is True for each in configs)
    if caches and accepts(model, "use_cache", by_name=of_text is None):
        kwargs = {"use_cache": False, **kwargs}
    return args, kwargs


def accepts(model: nn.Module, name: str, *, by_name: bool = False) -> bool:
    """Whether forward() takes that keyword; `by_name`: not as one of ``**kwargs``."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or (not by_name and any(each.kind is each.VAR_KEYWORD for each in parameters.values()))
