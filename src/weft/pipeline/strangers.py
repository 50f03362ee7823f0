"""Parameters that a segment reads and does not have.

A segment asks autograd for the gradients of its own parameters, those of its layers and of a loss module. What else
its code gets hold of, as a penalty on weights in a loss function does, is in the graph all the same:

    own parameter ------> [ graph of the segment ] ---> output
    another stage's ----> [                      ]             never asked for: its gradient would be lost in silence

So the first graph of every segment is searched for them, once.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import UsageError, listed
from weft.core.segment import Function, Visit
from weft.core.split_backward import children_first
from weft.core.tree import flatten


class Searched:
    """A segment's function, which looks once for what does not belong to it.

    `layers` are those of all segments by name, in the order of the segments; `number` is this one, and `more` what
    it has besides them. Raises UsageError for a parameter of another segment; warns of one that nobody has, since
    it may not have to learn.
    """

    def __init__(
        self, function: Function, layers: Sequence[Sequence[tuple[str, nn.Module]]], number: int, more: Any
    ) -> None:
        self._function = function
        self._layers = layers
        self._number = number
        self._more = more
        self._searched = False

    def __call__(self, visit: Visit, *values: Any) -> tuple[Any, ...]:
        """Run the function. See the class for what may be raised."""
        outputs = self._function(visit, *values)
        if not self._searched and torch.is_grad_enabled():
            self._searched = True
            self._check(_parameters_behind(outputs))
        return outputs

    def _check(self, found: Sequence[nn.Parameter]) -> None:
        own = {id(each) for _, layer in self._layers[self._number] for each in layer.parameters()}
        if isinstance(self._more, nn.Module):
            own.update(id(each) for each in self._more.parameters())
        strangers = [each for each in found if id(each) not in own]
        if not strangers:
            return
        names = {
            id(each): f"{name}.{key} of stage {stage}"
            for stage, layers in enumerate(self._layers)
            for name, layer in layers
            for key, each in layer.named_parameters()
        }
        if borrowed := [names[id(each)] for each in strangers if id(each) in names]:
            raise UsageError(
                listed(
                    f"stage {self._number} computes with parameters of other stages, and their gradients would be "
                    "lost; put such layers into one stage (balance=), take a penalty on weights out of the loss "
                    "function and add it to the pipe's loss, or use executor='graph':",
                    borrowed,
                )
            )
        shapes = ", ".join(str(tuple(each.shape)) for each in strangers)
        warnings.warn(
            f"stage {self._number} computes with parameters that neither its layers nor the loss module have (shapes "
            f"{shapes}), and they get no gradient; register them in a layer or give the loss as an nn.Module that "
            "has them. If they are not to learn, requires_grad_(False) says so",
            stacklevel=2,
        )


def _parameters_behind(outputs: Iterable[Any]) -> list[nn.Parameter]:
    """The parameters that the graph of these values leads to."""
    leaves = [x for value in outputs for x in flatten(value)[0] if isinstance(x, Tensor)]
    nodes = children_first([x.grad_fn for x in leaves if x.grad_fn is not None])
    found = [getattr(node, "variable", None) for node in nodes]
    return [x for x in [*found, *leaves] if isinstance(x, nn.Parameter) and x.requires_grad]
