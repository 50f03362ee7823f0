"""The modules of a model by name."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, cast

from torch import nn

from weft.core.errors import SplitError, listed


def check_names(model: nn.Module, split: Sequence[str]) -> None:
    """Raise SplitError that lists the split points which are no modules of the model."""
    known = [name for name, _ in named_modules(model, again=True) if name]
    if wrong := [name for name in split if name not in known]:
        near = [f"{name!r}; near it: {get_close_matches(name, known, 3, 0.0)}" for name in wrong]
        raise SplitError(listed(f"split names what is no module of {type(model).__name__}:", near))


def named_modules(model: nn.Module, *, again: bool = False) -> "Iterable[tuple[str, nn.Module]]":
    """All modules with their names, and with all their names `again`, if they have several."""
    return cast(Any, model).named_modules(remove_duplicate=not again)
