"""The loss that a model computes itself, as the loss function of a pipe."""

from typing import Any

from torch import Tensor

from torchweft.core.errors import SpecError
from torchweft.core.pytree import flatten, structure_paths, unflatten


class OwnLoss:
    """The loss function of a model that computes its loss itself, for schedules that begin backward early. The loss of
    an output is what it has under the name ``loss``, or else the first number in it."""

    def __call__(self, output: Any, _: Any) -> Any:
        return flatten(output)[0][_find_loss(output)], output

    @staticmethod
    def put_back(loss: Tensor, output: Any) -> Any:
        """The joined output, with the loss that has a graph."""
        leaves, structure = flatten(output)
        leaves[_find_loss(output)] = loss
        return unflatten(structure, leaves)


def _find_loss(output: Any) -> int:
    """The number of the leaf that is the loss. Raises SpecError."""
    leaves, structure = flatten(output)
    numbers = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and not x.dim() and x.is_floating_point()]
    named = [k for k in numbers if structure_paths(structure)[k].endswith(("['loss']", ".loss"))]
    if not numbers:
        raise SpecError(
            "loss_reduction= is given with a schedule that begins backward early, but the output of forward() has no "
            "number that could be its loss; let it return one, or give loss= and target="
        )
    return (named or numbers)[0]
