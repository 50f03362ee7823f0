"""Refusals of what a cut model would get wrong in silence: foreign parameters, collectives, cached weights.

A segment asks autograd for the gradients of its own parameters, those of its layers and of a loss module. What else its
code uses, as a penalty on weights in a loss function does, is in the graph all the same:

    own parameter ------> [ graph of the segment ] ---> output
    another stage's ----> [                      ]             never asked for: its gradient would be lost in silence

So the graphs of every segment are searched for them in steps 1, 2, 4, 8 and so on.

Layers with tensor-parallel weights and `nn.SyncBatchNorm` communicate with other processes. All processes must ask for
the collectives of a group in one order; else they hang, or get the numbers of another layer. In the caller's thread the
schedule says that order. With a worker per stage the clock does:

    process 0    stage 0 for micro-batch 1, then stage 1 for micro-batch 0  --+
    process 1    stage 1 for micro-batch 0, then stage 0 for micro-batch 1  --+--> each gets a sum of both

So "auto", which goes by the clock as well, runs such layers in the caller's thread.
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.utils import parametrize

from weft.core.autograd import StepsInBackward
from weft.core.errors import UsageError, listed
from weft.core.pytree import flatten
from weft.core.segment import Function, MicroBatchContext, children_first
from weft.pipeline.stage import Stage


class ForeignParameterCheck:
    """A segment's function, with a search for what does not belong to it; in its place at the steps that are due.

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
        self._fresh: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._told: set[int] = set()
        self.has_python_functions = False
        """Whether a graph that was searched has autograd functions written in Python."""

    def __call__(self, context: MicroBatchContext, *values: Any) -> tuple[Any, ...]:
        """Run the function, and search its graph. Raises what the class says."""
        outputs = self._function(context, *values)
        if torch.is_grad_enabled():
            given = flatten(values)[0]
            given += [copy for x in given for copy in getattr(x, "lent", ())]
            given += context.borrowed.values()
            nodes, leaves = _behind(outputs)
            self.has_python_functions |= any(isinstance(node, BackwardCFunction) for node in nodes)
            self._check(leaves, {id(x) for x in given})
        return outputs

    def _check(self, found: Sequence[Tensor], given: set[int]) -> None:
        modules = [module for _, layer in self._layers[self._number] for module in layer.modules()]
        if sharded := [type(module).__name__ for module in modules if shards(module)]:
            # FSDP swaps parameters around the layer's call, and waits for gradients where no stage's graph ends.
            raise UsageError(
                f"a layer of stage {self._number} shards its own parameters ({sharded[0]}), and their gradients would "
                "be lost; shard the pipe as a whole, fully_shard(pipe), or use executor='graph'"
            )
        own = {id(each) for module in modules for each in module._parameters.values()}
        if isinstance(self._more, nn.Module):
            own.update(id(each) for each in self._more.parameters())
        foreign = [each for each in found if id(each) not in own and id(each) not in given]
        names = {
            id(each): f"{name}.{key} of stage {stage}"
            for stage, layers in enumerate(self._layers)
            for name, layer in layers
            for key, each in (layer.named_parameters() if foreign else ())
        }
        if borrowed := [names[id(each)] for each in foreign if id(each) in names]:
            raise UsageError(
                listed(
                    f"stage {self._number} computes with parameters of other stages, and their gradients would be "
                    "lost; put such layers into one stage (balance=), take a penalty on weights out of the loss "
                    "function and add it to the pipe's loss, or use executor='graph':",
                    borrowed,
                )
            )
        news = [each for each in foreign if self._stays(each) and id(each) not in self._told]
        self._told.update(id(each) for each in news)
        if news:
            shapes = ", ".join(str(tuple(each.shape)) for each in news)
            warnings.warn(
                f"stage {self._number} computes with trainable tensors that neither its layers nor the loss module "
                f"have as parameters (shapes {shapes}), and they get no gradient; register them as nn.Parameter in a "
                "layer, or give the loss as an nn.Module that has them. If they are not to learn, "
                "requires_grad_(False) says so",
                stacklevel=2,
            )

    def _stays(self, tensor: Tensor) -> bool:
        """Whether it outlives a call. A tensor that is no parameter may have been made by a layer for itself, to
        differentiate by; that one does not come again."""
        if isinstance(tensor, nn.Parameter) or self._fresh.get(id(tensor)) is tensor:
            return True
        self._fresh[id(tensor)] = tensor
        return False


def shards(module: nn.Module) -> bool:
    """Whether it is an FSDP module, of either version; known by name, so that nothing has to be imported."""
    return any(
        each.__name__ in ("FSDPModule", "FullyShardedDataParallel") and each.__module__.startswith("torch.distributed.")
        for each in type(module).__mro__
    )


def _behind(outputs: Iterable[Any]) -> tuple[list[Any], list[Tensor]]:
    """The nodes of the graph of these values, and its leaves that want a gradient."""
    leaves = [x for value in outputs for x in flatten(value)[0] if isinstance(x, Tensor)]
    nodes = children_first([x.grad_fn for x in leaves if x.grad_fn is not None])
    reached = [*(getattr(node, "variable", None) for node in nodes), *leaves]
    found = {id(x): x for x in reached if isinstance(x, Tensor) and x.is_leaf and x.requires_grad}
    return nodes, list(found.values())


def refuse_cached_weights(stages: Iterable[Stage]) -> None:
    """Raise UsageError for a layer that is parametrized; called inside of ``parametrize.cached()``.

    The cache is the process's. A weight that it kept without a graph, from a forward that will be recomputed, would be
    handed to one that needs its gradient; and a graph that it kept would be walked once per micro-batch.
    """
    for stage in stages:
        for name, layer in stage.layers:
            if any(parametrize.is_parametrized(module) for module in layer.modules()):
                raise UsageError(
                    f"layer {name!r} of stage {stage.index} has parametrized weights, and the pipe was called inside "
                    "torch.nn.utils.parametrize.cached(): micro-batches cannot share such a cache, since their graphs "
                    "are apart. Call the pipe outside of it, or use executor='graph'"
                )


def forbid_steps(found: Iterable[tuple[str, StepsInBackward]]) -> None:
    """Raise UsageError that lists every module which would take an optimizer step in the backward of a micro-batch."""
    faults = [
        f"{where} ({type(each).__name__}): {each.steps_in_backward}" for where, each in found if each.steps_in_backward
    ]
    if faults:
        raise UsageError(
            listed("these would take an optimizer step per micro-batch, and not one per mini-batch:", faults)
        )


class CollectiveLayer(NamedTuple):
    """A module of a stage that talks within a group of several processes."""

    stage: int
    layer: str
    module: nn.Module
    group: str


def collective_layers(stages: Iterable[Sequence[tuple[str, nn.Module]]]) -> list[CollectiveLayer]:
    """The modules that talk, as far as one can see; a layer that calls `torch.distributed` itself cannot be seen."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    return [
        CollectiveLayer(stage, name, module, group)
        for stage, layers in enumerate(stages)
        for name, layer in layers
        if not any(map(shards, layer.modules()))  # which is refused in other words
        for module in layer.modules()
        for group in dict.fromkeys(_groups(module))
    ]


def forbid_workers(found: Iterable[CollectiveLayer]) -> None:
    """Raise UsageError if stages that are to run in threads of their own talk within one group."""
    by_group: dict[str, list[CollectiveLayer]] = {}
    for each in found:
        if each.module.training or not isinstance(each.module, nn.SyncBatchNorm):  # which is quiet in evaluation
            by_group.setdefault(each.group, []).append(each)
    for group in by_group.values():
        if len({each.stage for each in group}) > 1:
            names = [f"layer {each.layer!r} of stage {each.stage} ({type(each.module).__name__})" for each in group]
            raise UsageError(
                listed(
                    "layers of several stages talk to other processes in one process group, and with a worker per "
                    "stage (executor='threads') each process would do so in another order, so that they hang or get "
                    "each other's numbers; use executor='serial' or 'auto', put such layers into one stage "
                    "(balance=), or give those of each stage a process group of their own:",
                    names,
                )
            )


def _groups(module: nn.Module) -> Iterator[str]:
    """The names of the groups of several processes in which a module talks by itself."""
    groups: list[Any] = []
    for each in chain(module._parameters.values(), module._buffers.values()):
        mesh = getattr(each, "device_mesh", None)  # of a DTensor, which is not imported for this
        groups += mesh.get_all_groups() if mesh is not None else ()
    if isinstance(module, nn.SyncBatchNorm):
        groups.append(cast(Any, module).process_group or dist.group.WORLD)
    return (each.group_name for each in groups if each.size() > 1)
