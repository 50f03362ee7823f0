"""Tensors that a layer computes with and does not own.

    own parameter ----> [ graph of one chunk ] ---> output         asked for its gradient
    closed over ------> [                    ]                     not asked for: its gradient would be lost in silence

In plain autograd both get their gradient. A wavefront cuts layers out of autograd, so it has to know all that learns.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.core.errors import UsageError
from weft.core.split_backward import children_first
from weft.core.tree import flatten


class BorrowedError(UsageError):
    """A layer computes with tensors that are no parameters of it, in a way that would lose their gradients."""


def check_owned(layer: int, outputs: Any, given: Any, parameters: Sequence[Tensor]) -> None:
    """Raise BorrowedError if the graph of `outputs` leads to others than what was `given` and the `parameters`."""
    own = {id(each) for each in (*parameters, *flatten(given)[0])}
    leaves = [leaf for leaf in flatten(outputs)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    nodes = children_first([leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None])
    behind = [getattr(node, "variable", None) for node in nodes]
    reached = [*behind, *(leaf for leaf in leaves if leaf.grad_fn is None)]
    strange = [each for each in reached if isinstance(each, Tensor) and id(each) not in own]
    if strange:
        shapes = ", ".join(str(tuple(each.shape)) for each in strange)
        raise BorrowedError(
            f"layer {layer} computes with tensors that want a gradient and are no parameters of it (shapes {shapes}); "
            "in a wavefront that gradient would be lost: make the cell a module that has them, or use wavefront=None"
        )
