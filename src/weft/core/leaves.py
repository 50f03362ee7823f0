"""The leaves that stand at a cut, where one reader's graph begins.

    [ graph of stage 0 ] --> y   cut   leaf --> [ graph of stage 1 ] --> output
                                        |
                                        +--> a tensor that leaves by another door, and its gradient ends at the leaf

A walk asks `torch.autograd.grad` for the gradient of a leaf, which accumulates nothing into it. Whatever does, came
from a tensor that left the stage in another way than as a result, and would not go on to the stages before. What hides
tensors from `weft.core.tree` would come to its reader uncut, with the same end.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Any, cast

from torch import Tensor, nn

from weft.core.errors import SpecError, UsageError
from weft.core.tree import OPEN, flatten


def leaf_of(tensor: Tensor, wanted: bool) -> Tensor:
    """The same tensor without its graph. If a gradient is `wanted`, nothing may accumulate into it."""
    leaf = tensor.detach()
    if wanted:
        leaf.requires_grad_()
        cast(Any, leaf)._post_accumulate_grad_hooks = _GUARD  # registering it costs three times as much
    return leaf


def _refuse(leaf: Tensor) -> None:
    raise UsageError(
        "a tensor that was made inside a stage is used outside, and is none of its results (a layer kept it, or a hook "
        f"took it): its gradient ends at an input of the stage, shape {tuple(leaf.shape)}, and would be lost for what "
        "is before; return the tensor, stash it (weft.skippable), or use executor='graph'"
    )


_GUARD: "OrderedDict[int, Callable[[Tensor], None]]" = OrderedDict({0: _refuse})


def hidden_tensors(value: Any) -> list[Tensor]:
    """The tensors inside of a value that is no container for PyTorch, such as a dataclass, as far as one can see.

    A module keeps its tensors to itself, and nobody expects it to be cut.
    """
    kind = cast("type[Any]", type(value))
    if (may := _may_hide.get(kind)) is None:
        plain = issubclass(kind, (str, bytes, type, nn.Module)) or callable(value)
        may = not plain and any(hasattr(value, name) for name in ("__dict__", "__dataclass_fields__", "__len__"))
        _may_hide[kind] = may
    return [each for each in flatten(_inside(value))[0] if isinstance(each, Tensor)] if may else []


_COLLECTIONS = (list, tuple, set, frozenset, deque)
_may_hide: dict[type, bool] = {}
"""By type. Nearly everything that is no tensor cannot: None, numbers, strings."""


def _inside(value: Any) -> list[Any]:
    held = [getattr(value, name, None) for name in getattr(value, "__dataclass_fields__", ())]
    held += getattr(value, "__dict__", {}).values()
    if isinstance(value, dict):
        return held + list(cast("dict[Any, Any]", value).values())
    return held + list(cast("Collection[Any]", value)) if isinstance(value, _COLLECTIONS) else held


def forbid_hidden(value: Any, where: str) -> None:
    """Raise SpecError if a value that is no tensor has tensors inside that want a gradient."""
    if any(each.requires_grad for each in hidden_tensors(value)):
        raise SpecError(
            f"{where} is a {type(value).__name__} with tensors inside, whose gradients would be lost, since PyTorch "
            f"does not know it as a container; {OPEN}, or use executor='graph'"
        )
