"""Registry of kinds of experts by name, so that a command line or a configuration file can refer to them.

    @register_expert("ffn")                       make_expert("ffn", hidden=512)
    def ffn(hidden: int) -> ExpertFactory             -> ExpertFactory: the module, and the schemas of its call

Two kinds are built in, ``ffn`` and ``transformer``. They use `register_expert` like any other.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchweft.core.errors import UsageError
from torchweft.core.spec import TensorSpec
from torchweft.core.validation import Validator, suggest
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.optimizer_state import OptimizerLike


@dataclass(frozen=True)
class ExpertFactory:
    """A module and the schemas of its call, as `ExpertBackend` takes them.

    Example:
        >>> from torchweft.experts import ExpertFactory
        >>> factory = ExpertFactory(nn.Linear(8, 8), args_schema=(weft.TensorSpec((None, 8), torch.float32),))
        >>> factory.backend("ffn.0", torch.optim.SGD).name
        'ffn.0'
    """

    module: nn.Module
    args_schema: Any = None
    kwargs_schema: Any = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def backend(self, name: str, optimizer: OptimizerLike | None = None, **options: Any) -> ExpertBackend:
        defaults = {"args_schema": self.args_schema, "kwargs_schema": self.kwargs_schema, **self.options}
        return ExpertBackend(name, self.module, optimizer, **{**defaults, **options})


Kind = TypeVar("Kind", bound=Callable[..., ExpertFactory])
_kinds: dict[str, Callable[..., ExpertFactory]] = {}


def register_expert(name: str) -> Callable[[Kind], Kind]:
    """A decorator for functions that return an `ExpertFactory`. Raises ``UsageError`` if the name is taken.

    Example:
        >>> from torchweft.experts import ExpertFactory, make_expert, register_expert
        >>> @register_expert("square")
        ... def square(hidden: int) -> ExpertFactory:
        ...     return ExpertFactory(nn.Linear(hidden, hidden), (weft.TensorSpec((None, hidden), torch.float32),))
        >>> make_expert("square", hidden=8).module
        Linear(in_features=8, out_features=8, bias=True)
    """

    def register(kind: Kind) -> Kind:
        if name in _kinds:
            raise UsageError(f"there is a kind of expert called {name!r} already; choose another name")
        _kinds[name] = kind
        return kind

    return register


def make_expert(kind: str, **arguments: Any) -> ExpertFactory:
    """A new expert of a registered kind. Raises ``UsageError`` for an unknown kind or wrong arguments.

    Example:
        >>> weft.experts.make_expert("ffn", hidden=8).module(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """
    if kind not in _kinds:
        known = ", ".join(expert_kinds())
        raise UsageError(f"there is no kind of expert called {kind!r}; known are {known}{suggest(kind, _kinds)}")
    make = _kinds[kind]
    signature = inspect.signature(make)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        # `bind` reports a missing argument before a misspelt one, which is often the reason.
        unknown = [name for name in arguments if name not in signature.parameters]
        why = f"it has no argument {unknown[0]!r}{suggest(unknown[0], signature.parameters)}" if unknown else error
        raise UsageError(f"an expert of kind {kind!r} is made by {kind}{signature}, but {why}") from None
    return make(**arguments)


def expert_kinds() -> list[str]:
    """The names of all registered kinds, sorted.

    Example:
        >>> "ffn" in weft.experts.expert_kinds()
        True
    """
    return sorted(_kinds)


class FeedForward(nn.Module):
    """The position-wise layer of a transformer: N x hidden to N x hidden, ``x + W2 gelu(W1 norm(x))``.

    Example:
        >>> weft.experts.FeedForward(hidden=8, inner=32)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, inner)
        self.contract = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(nn.functional.gelu(self.expand(self.norm(x))))


@register_expert("ffn")
def feed_forward(hidden: int, inner: int | None = None) -> ExpertFactory:
    """Rows x ``hidden``, float32. ``inner``: 4 times ``hidden`` by default."""
    with Validator("invalid arguments of kind 'ffn'") as check:
        check.count("hidden", hidden)
        check.count("inner", inner, optional=True)
    return ExpertFactory(FeedForward(hidden, inner or 4 * hidden), (TensorSpec((None, hidden), torch.float32),))


@register_expert("transformer")
def transformer(hidden: int, heads: int = 8, inner: int | None = None, dropout: float = 0.0) -> ExpertFactory:
    """Rows x length x ``hidden``, float32, any length. ``src_key_padding_mask``: bool, True at padding."""
    with Validator("invalid arguments of kind 'transformer'") as check:
        sizes = [check.count("hidden", hidden), check.count("heads", heads)]
        if all(sizes):
            check.require(hidden % heads == 0, f"heads is {heads}, wanted a divisor of hidden, {hidden}")
        check.count("inner", inner, optional=True)
        check.number("dropout", dropout, most=1.0)
    layer = nn.TransformerEncoderLayer(
        hidden, heads, inner or 4 * hidden, dropout, activation="gelu", batch_first=True, norm_first=True
    )
    mask = {"src_key_padding_mask": TensorSpec((None, None), torch.bool)}
    return ExpertFactory(layer, (TensorSpec((None, None, hidden), torch.float32),), mask)
