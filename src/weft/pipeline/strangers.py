"""Parameters that a segment reads and does not have.

A segment asks autograd for the gradients of its own parameters, those of its layers and of a loss module. What else
its code gets hold of, as a penalty on weights in a loss function does, is in the graph all the same:

    own parameter ------> [ graph of the segment ] ---> output
    another stage's ----> [                      ]             never asked for: its gradient would be lost in silence

So graphs of every segment are searched for them: the first, second, fourth, eighth and so on.
"""

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import UsageError, listed
from weft.core.segment import Function, Visit
from weft.core.split_backward import children_first
from weft.core.tree import flatten


class Searched:
    """A segment's function, which looks now and then for what does not belong to it.

    `layers` are those of all segments by name, in the order of the segments; `number` is this one, and `more` what
    it has besides them. Raises UsageError for a parameter of another segment, and for a layer that shards its own
    parameters; warns of a trainable tensor that nobody has, since it may not have to learn.
    """

    def __init__(
        self, function: Function, layers: Sequence[Sequence[tuple[str, nn.Module]]], number: int, more: Any
    ) -> None:
        self._function = function
        self._layers = layers
        self._number = number
        self._more = more
        self._graphs = 0
        self._next = 1
        self._fresh: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._told: set[int] = set()

    def __call__(self, visit: Visit, *values: Any) -> tuple[Any, ...]:
        """Run the function. See the class for what may be raised."""
        outputs = self._function(visit, *values)
        if torch.is_grad_enabled():
            self._graphs += 1
            if self._graphs >= self._next:
                given = flatten(values)[0]
                given += [copy for x in given for copy in getattr(x, "lent", ())]
                self._check(_learning_behind(outputs), {id(x) for x in given})
                self._next = 2 * self._graphs  # only after a search that found nothing to refuse: else the next call
        return outputs

    def _check(self, found: Sequence[Tensor], given: set[int]) -> None:
        modules = [module for _, layer in self._layers[self._number] for module in layer.modules()]
        self._refuse_sharded(modules)
        own = {id(each) for module in modules for each in module._parameters.values()}
        if isinstance(self._more, nn.Module):
            own.update(id(each) for each in self._more.parameters())
        strangers = [each for each in found if id(each) not in own and id(each) not in given]
        names = {
            id(each): f"{name}.{key} of stage {stage}"
            for stage, layers in enumerate(self._layers)
            for name, layer in layers
            for key, each in (layer.named_parameters() if strangers else ())
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
        self._warn([each for each in strangers if self._stays(each)])

    def _refuse_sharded(self, modules: Sequence[nn.Module]) -> None:
        """FSDP swaps parameters around the layer's call, and waits for gradients where no stage's graph ends."""
        if sharded := [type(module).__name__ for module in modules if shards(module)]:
            raise UsageError(
                f"a layer of stage {self._number} shards its own parameters ({sharded[0]}), and their gradients would "
                "be lost; shard the pipe as a whole, fully_shard(pipe), or use executor='graph'"
            )

    def _stays(self, stranger: Tensor) -> bool:
        """Whether it outlives a call. A tensor that is no parameter may have been made by a layer for itself, to
        differentiate by; that one does not come again."""
        if isinstance(stranger, nn.Parameter) or self._fresh.get(id(stranger)) is stranger:
            return True
        self._fresh[id(stranger)] = stranger
        return False

    def _warn(self, strangers: Sequence[Tensor]) -> None:
        news = [each for each in strangers if id(each) not in self._told]
        self._told.update(id(each) for each in news)
        if not news:
            return
        shapes = ", ".join(str(tuple(each.shape)) for each in news)
        warnings.warn(
            f"stage {self._number} computes with trainable tensors that neither its layers nor the loss module have "
            f"as parameters (shapes {shapes}), and they get no gradient; register them as nn.Parameter in a layer, or "
            "give the loss as an nn.Module that has them. If they are not to learn, requires_grad_(False) says so",
            stacklevel=3,
        )


def shards(module: nn.Module) -> bool:
    """Whether it is an FSDP module, of either version; known by name, so that nothing has to be imported."""
    return any(
        each.__name__ in ("FSDPModule", "FullyShardedDataParallel") and each.__module__.startswith("torch.distributed.")
        for each in type(module).__mro__
    )


def _learning_behind(outputs: Iterable[Any]) -> list[Tensor]:
    """The leaves that want a gradient to which the graph of these values leads."""
    leaves = [x for value in outputs for x in flatten(value)[0] if isinstance(x, Tensor)]
    nodes = children_first([x.grad_fn for x in leaves if x.grad_fn is not None])
    reached = [*(getattr(node, "variable", None) for node in nodes), *leaves]
    return list({id(x): x for x in reached if isinstance(x, Tensor) and x.is_leaf and x.requires_grad}.values())
