"""A layer keeps its state-dict keys when it becomes skippable.

The user's module hangs below the skippable layer as ``.module``, which would put ``module.`` into every
key. Two hooks take it out on saving and put it in on loading, so the wrapped and the bare model load into
each other:

    bare model          0.weight     <──load──>     wrapped model    0.weight
    older checkpoint    0.module.weight  ──load──>  wrapped model

Only state dicts are changed. `named_parameters` tells where the parameters really are (``0.module.weight``).
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import nn

INNER = "module."


def shorten(layer: nn.Module, state: MutableMapping[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """After saving: ``<prefix>module.weight`` becomes ``<prefix>weight``, in place and in order."""
    long = prefix + INNER
    for key in [key for key in state if key.startswith(long)]:
        state[prefix + key.removeprefix(long)] = state.pop(key)
    versions: dict[str, dict[str, Any]] | None = getattr(state, "_metadata", None)
    if versions is None:
        return
    # Layers read their format version under their own name. A bare model looks for the short one, a wrapped
    # model for the long one, so both are written.
    for name in [name for name in versions if f"{name}.".startswith(long)]:
        short = prefix + f"{name}.".removeprefix(long)
        versions[short.removesuffix(".")] = dict(versions[name])


def lengthen(layer: nn.Module, state: MutableMapping[str, Any], prefix: str, *lists: Any) -> None:
    """Before loading: ``<prefix>weight`` becomes ``<prefix>module.weight``, in place; long keys stay."""
    layer.__dict__["_loading"] = (prefix, lists[-1])
    inner = layer.get_submodule("module")
    owns_module = any(name == "module" for name, _ in inner.named_children())
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if owns_module or not name.startswith(INNER):
            state[prefix + INNER + name] = state.pop(key)


def shorten_faults(layer: nn.Module, faults: Any) -> None:
    """After loading: what is wrong is told of ``<prefix>weight``, as `state_dict` names it.

    `faults` has the missing and the unexpected keys, without a prefix, and not the messages: `lengthen` has noted both.
    """
    prefix, messages = layer.__dict__.pop("_loading")
    long = prefix + INNER
    for keys in (faults.missing_keys, faults.unexpected_keys):
        keys[:] = [prefix + key.removeprefix(long) if key.startswith(long) else key for key in keys]
    for quote in (" ", '"'):
        messages[:] = [each.replace(quote + long, quote + prefix) for each in messages]
