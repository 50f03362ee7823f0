"""Help a pipe to look like its model to the libraries of Hugging Face.

Trainer depends on the class of its model: on its name (labels of causal models are shifted), on the signature of its
``forward`` (which columns are inputs or labels), and on ``isinstance`` (a `PreTrainedModel` saves itself). A class that
inherits from both would run the model's methods on the pipe, where the model's attributes are missing. `Pipe` therefore
reports the model's class as its ``__class__``, as `unittest.mock` does with ``spec=``: ``isinstance`` accepts both.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from torch import nn


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
    """The arguments, with ``use_cache=False`` if forward() would pass keys and values between blocks."""
    # The config can be nested, and the argument can be one of ``**kwargs``.
    config: Any = getattr(model, "config", None)
    configs, of_text = [config], getattr(config, "get_text_config", None)
    with suppress(ValueError):  # several text configs
        configs += [of_text()] if of_text else []
    caches = any(getattr(config, "use_cache", False) is True for config in configs)
    if caches and accepts(model, "use_cache", by_name=of_text is None):
        kwargs = {"use_cache": False, **kwargs}
    return args, kwargs


def accepts(model: nn.Module, name: str, *, by_name: bool = False) -> bool:
    """Whether forward() takes that keyword; `by_name`: not as one of ``**kwargs``."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or (not by_name and any(item.kind is item.VAR_KEYWORD for item in parameters.values()))
