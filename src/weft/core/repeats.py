"""Layers that run again inside of a backward, because they checkpoint themselves.

    forward     torch.utils.checkpoint: hooks pack what operators save, the state of the generators is kept
    backward    the first hook that unpacks puts the generators into that state, and runs the layers again

No state of a generator tells of it: it is put back afterwards. So one looks for such hooks in the graph.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from weft.core.split_backward import children_first


def repeats_layers(roots: Sequence[Node]) -> bool:
    """Whether the backward of the graph that begins at `roots` asks hooks for what was saved, as a layer that
    checkpoints itself makes it do. Looks at every node once; the graph must not have been walked yet."""
    return any(not isinstance(data, Tensor | None) for node in children_first(roots) for data in _saved(node))


def _saved(node: Node) -> Iterator[Any]:
    """What the node saved: tensors, or what hooks have made of them."""
    for name in _names(type(node)):
        found = getattr(node, name)
        several = cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found,)
        yield from (getattr(each, "data", None) for each in several)


@lru_cache(1024)
def _names(kind: type[Node]) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
