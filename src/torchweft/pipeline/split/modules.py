"""The modules of a model by name."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, cast

from torch import nn

from torchweft.core.errors import SplitError, join_faults


def check_names(model: nn.Module, split: Sequence[str]) -> None:
    """Raise SplitError that lists the split points that are not modules of the model."""
    known = [name for name, _ in named_modules(model, again=True) if name]
    if wrong := [name for name in split if name not in known]:
        near = [f"{name!r}; near it: {get_close_matches(name, known, 3, 0.0)}" for name in wrong]
        raise SplitError(join_faults(f"these entries of split are not modules of {type(model).__name__}:", near))


def named_modules(model: nn.Module, *, again: bool = False) -> "Iterable[tuple[str, nn.Module]]":
    """All modules with their names. With `again`, a module that has several names is listed under each of them."""
    return cast(Any, model).named_modules(remove_duplicate=not again)
