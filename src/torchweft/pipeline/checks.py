"""Rejection of models that would train wrongly without notice: foreign parameters, collectives, cached weights.

A segment asks autograd for the gradients of the parameters of its layers and of a loss module. Its code can use other
parameters as well, such as a loss function with a penalty on weights. These are in the graph, too:

    own parameter ------> [ graph of the segment ] ---> output
    another stage's ----> [                      ]             autograd is not asked for its gradient: it is lost

A list of allowed layers would not show this, because any code can hold a parameter. So the graphs of every segment are
searched in steps 1, 2, 4, 8 and so on.

Layers with tensor-parallel weights and `nn.SyncBatchNorm` communicate with other processes, which must call the
collectives of a group in one order. With a worker per stage the order depends on timing:

    process 0    stage 0 for micro-batch 1, then stage 1 for micro-batch 0  --+
    process 1    stage 1 for micro-batch 0, then stage 0 for micro-batch 1  --+--> each gets a sum of both
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

from torchweft.core.autograd import StepsInBackward
from torchweft.core.errors import UsageError, join_faults
from torchweft.core.pytree import flatten
from torchweft.core.segment import MicroBatchContext, SegmentFunction, children_first
from torchweft.pipeline.stage import Stage


class ForeignParameterCheck:
    """The function of segment `number` with a search of its graph for foreign parameters. `more` is a loss function
    that runs after the layers. Raises UsageError for a parameter of another segment, and for a layer that shards its
    own. Warns about a trainable tensor that belongs to no segment, because it can be intentional."""

    def __init__(
        self, function: SegmentFunction, layers: Sequence[Sequence[tuple[str, nn.Module]]], number: int, more: Any
    ) -> None:
        self._function, self._layers, self._number, self._more = function, layers, number, more
        self._fresh: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._reported: set[int] = set()
        self.has_python_functions = False  # whether a graph that was searched has autograd functions written in Python

    def __call__(self, context: MicroBatchContext, *values: Any) -> tuple[Any, ...]:
        outputs = self._function(context, *values)
        if torch.is_grad_enabled():
            inputs = flatten(values)[0]
            inputs += [copy for x in inputs for copy in getattr(x, "lent", ())]
            inputs += context.borrowed.values()
            nodes, leaves = _search_graph(outputs)
            self.has_python_functions |= any(isinstance(node, BackwardCFunction) for node in nodes)
            self._check(leaves, {id(x) for x in inputs})
        return outputs

    def _check(self, leaves: Sequence[Tensor], inputs: set[int]) -> None:
        modules = [module for _, layer in self._layers[self._number] for module in layer.modules()]
        if sharded := [type(module).__name__ for module in modules if shards(module)]:
            # FSDP swaps parameters around the layer's call, and waits for gradients where no stage's graph ends.
            raise UsageError(
                f"a layer of stage {self._number} shards its own parameters ({sharded[0]}), and their gradients would "
                "be lost; shard the pipe as a whole, fully_shard(pipe), or use executor='graph'"
            )
        own = {id(parameter) for module in modules for parameter in module._parameters.values()}
        if isinstance(self._more, nn.Module):
            own.update(id(parameter) for parameter in self._more.parameters())
        foreign = [leaf for leaf in leaves if id(leaf) not in own and id(leaf) not in inputs]
        names = {
            id(parameter): f"{name}.{key} of stage {stage}"
            for stage, layers in enumerate(self._layers)
            for name, layer in layers
            for key, parameter in (layer.named_parameters() if foreign else ())
        }
        if of_others := [names[id(leaf)] for leaf in foreign if id(leaf) in names]:
            raise UsageError(
                join_faults(
                    f"stage {self._number} computes with parameters of other stages, and their gradients would be "
                    "lost; put such layers into one stage (balance=), take a penalty on weights out of the loss "
                    "function and add it to the pipe's loss, or use executor='graph':",
                    of_others,
                )
            )
        unreported = [leaf for leaf in foreign if self._outlives_call(leaf) and id(leaf) not in self._reported]
        self._reported.update(id(leaf) for leaf in unreported)
        if unreported:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in unreported)
            warnings.warn(
                f"stage {self._number} computes with trainable tensors that are parameters neither of its layers nor "
                f"of the loss module (shapes {shapes}), so they get no gradient. Register them as nn.Parameter in a "
                "layer, or give a loss that is an nn.Module with these parameters. If they are not to be trained, call "
                "requires_grad_(False) on them",
                stacklevel=2,
            )

    def _outlives_call(self, tensor: Tensor) -> bool:
        # A layer can make a tensor in every call in order to differentiate by it. Such a tensor is new each time.
        if isinstance(tensor, nn.Parameter) or self._fresh.get(id(tensor)) is tensor:
            return True
        self._fresh[id(tensor)] = tensor
        return False


def shards(module: nn.Module) -> bool:
    # By name, because the import of FSDP takes long.
    return any(
        kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") and kind.__module__.startswith("torch.distributed.")
        for kind in type(module).__mro__
    )


def _search_graph(outputs: Iterable[Any]) -> tuple[list[Any], list[Tensor]]:
    leaves = [x for value in outputs for x in flatten(value)[0] if isinstance(x, Tensor)]
    nodes = children_first([x.grad_fn for x in leaves if x.grad_fn is not None])
    reached = [*(getattr(node, "variable", None) for node in nodes), *leaves]
    by_id = {id(x): x for x in reached if isinstance(x, Tensor) and x.is_leaf and x.requires_grad}
    return nodes, list(by_id.values())


def reject_cached_weights(stages: Iterable[Stage]) -> None:
    """Raise UsageError for a layer that is parametrized. Called only inside of ``parametrize.cached()``."""
    # The whole process shares that cache. A forward that will be recomputed puts weights without a graph into it, and
    # another forward would use them although it needs their gradient.
    for stage in stages:
        for name, layer in stage.layers:
            if any(parametrize.is_parametrized(module) for module in layer.modules()):
                raise UsageError(
                    f"layer {name!r} of stage {stage.index} has parametrized weights, and the pipe was called inside "
                    "torch.nn.utils.parametrize.cached(): micro-batches cannot share such a cache, since their graphs "
                    "are apart. Call the pipe outside of it, or use executor='graph'"
                )


def reject_steps(modules: Iterable[tuple[str, StepsInBackward]]) -> None:
    faults = [
        f"{where} ({type(module).__name__}): {module.steps_in_backward}"
        for where, module in modules
        if module.steps_in_backward
    ]
    if faults:
        raise UsageError(
            join_faults("these would take an optimizer step per micro-batch, and not one per mini-batch:", faults)
        )


class CollectiveLayer(NamedTuple):
    stage: int
    layer: str
    module: nn.Module
    group: str


def collective_layers(stages: Iterable[Sequence[tuple[str, nn.Module]]]) -> list[CollectiveLayer]:
    # Layers that call torch.distributed in their own code are not recognised.
    if not (dist.is_available() and dist.is_initialized()):
        return []
    return [
        CollectiveLayer(stage, name, module, group)
        for stage, layers in enumerate(stages)
        for name, layer in layers
        if not any(map(shards, layer.modules()))  # these are rejected with an error of their own
        for module in layer.modules()
        for group in dict.fromkeys(_group_names(module))
    ]


def reject_workers(layers: Iterable[CollectiveLayer]) -> None:
    by_group: dict[str, list[CollectiveLayer]] = {}
    for layer in layers:
        # SyncBatchNorm does not communicate in evaluation.
        if layer.module.training or not isinstance(layer.module, nn.SyncBatchNorm):
            by_group.setdefault(layer.group, []).append(layer)
    for group in by_group.values():
        if len({layer.stage for layer in group}) > 1:
            names = [f"layer {layer.layer!r} of stage {layer.stage} ({type(layer.module).__name__})" for layer in group]
            raise UsageError(
                join_faults(
                    "layers of several stages communicate in one process group. With a worker per stage "
                    "(executor='threads') each process would do so in another order, so that they hang or get each "
                    "other's numbers. Use executor='serial' or 'auto', put such layers into one stage (balance=), or "
                    "give the layers of each stage a process group of their own:",
                    names,
                )
            )


def _group_names(module: nn.Module) -> Iterator[str]:
    groups: list[Any] = []
    for tensor in chain(module._parameters.values(), module._buffers.values()):
        mesh = getattr(tensor, "device_mesh", None)  # only a DTensor has one, and its module need not be imported
        groups += mesh.get_all_groups() if mesh is not None else ()
    if isinstance(module, nn.SyncBatchNorm):
        groups.append(cast(Any, module).process_group or dist.group.WORLD)
    return (group.group_name for group in groups if group.size() > 1)
