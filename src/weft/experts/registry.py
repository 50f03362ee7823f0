"""Kinds of experts by name, so that a command line or a configuration file can ask for them.

    @register_expert("ffn")                       make_expert("ffn", hidden=512)
    def ffn(hidden: int) -> tuple[module, args]   -> Blueprint: the module, and what a call of it looks like

A kind is a function or class that makes a module of keyword arguments. Its schemas come with it, since who
asks for it by name cannot know them.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import nn

from weft.core.errors import UsageError
from weft.experts.backend import ExpertBackend
from weft.experts.optimizers import OptimizerLike


@dataclass(frozen=True)
class Blueprint:
    """A module and the schemas of its call, as `ExpertBackend` takes them."""

    module: nn.Module
    args_schema: Any = None
    kwargs_schema: Any = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def backend(self, name: str, optimizer: OptimizerLike | None = None, **options: Any) -> ExpertBackend:
        """The expert of this name. ``options`` are those of `ExpertBackend`, before those of the blueprint."""
        mine = {"args_schema": self.args_schema, "kwargs_schema": self.kwargs_schema, **self.options}
        return ExpertBackend(name, self.module, optimizer, **{**mine, **options})


Kind = TypeVar("Kind", bound=Callable[..., Blueprint])
_kinds: dict[str, Callable[..., Blueprint]] = {}


def register_expert(name: str) -> Callable[[Kind], Kind]:
    """A decorator for functions that return a `Blueprint`. Raises ``UsageError`` for a name that is taken."""

    def register(kind: Kind) -> Kind:
        if name in _kinds:
            raise UsageError(
                f"there is a kind of expert called {name!r} already: {_kinds[name]!r}; choose another name"
            )
        _kinds[name] = kind
        return kind

    return register


def make_expert(kind: str, **arguments: Any) -> Blueprint:
    """A new expert of a registered kind.

    Raises ``UsageError`` for an unknown kind, for arguments that the kind does not take or lacks, and for a kind that
    makes something else.
    """
    if kind not in _kinds:
        raise UsageError(f"there is no kind of expert called {kind!r}; known are {', '.join(expert_kinds())}")
    make = _kinds[kind]
    signature = inspect.signature(make)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(f"an expert of kind {kind!r} is made by {kind}{signature}, but {error}") from None
    made = cast("object", make(**arguments))
    if not isinstance(made, Blueprint):
        raise UsageError(
            f"kind {kind!r} made a {type(made).__name__}, wanted a Blueprint: the module, and the schemas of its call"
        )
    return made


def expert_kinds() -> list[str]:
    """The names of all registered kinds, in order of the alphabet."""
    return sorted(_kinds)
