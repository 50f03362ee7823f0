"""A stage: consecutive layers on one device, as a function that a segment can run.

    values in:   main, then one per skip that is popped here and was stashed in another stage
    values out:  main, then one per skip that is stashed here and popped in another stage

Skips that begin and end in the stage never leave it. A stage without skips runs without a tracker.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import modules

from torchweft.core.errors import UsageError
from torchweft.core.pytree import map_leaves
from torchweft.core.rng import NextLayer, RngStreams
from torchweft.core.segment import MicroBatchContext
from torchweft.pipeline.batchnorm import DeferredBatchNorm, gathering
from torchweft.pipeline.recompute import StageReplay, only_writes
from torchweft.pipeline.routing import StreamLock
from torchweft.pipeline.skip import Namespace, Skippable, SkipTracker, use_skip_tracker

Skip = tuple[Namespace | None, str]


class CallArguments(NamedTuple):
    """The main value of the first stage when it is more than one positional argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ModuleScan(NamedTuple):
    """The present state of a stage. Layers can be frozen, moved or replaced between two steps."""

    parameters: list[Tensor]  # torch.func.functional_call puts plain tensors in the place of parameters
    configuration: Hashable
    deferred: list[DeferredBatchNorm]
    misplaced: list[str]


_SETTINGS = frozenset((bool, float))
# The number of attributes that every new module has. A scan skips them, because reading them would take memory accesses
# that miss every cache after a step.
TABLES = len(vars(nn.Module()))
_NO_SKIPS: dict[Skip, Any] = {}
_hooks_of_all_modules = cast("dict[int, Any]", cast(Any, modules.module)._global_forward_pre_hooks)
has_global_hooks = cast("Callable[[], Any]", cast(Any, modules.module)._has_any_global_hook)


class StageTracker(SkipTracker):
    def __init__(self, arrived: Mapping[Skip, Tensor | None]) -> None:
        super().__init__()
        self.values: dict[Skip, Tensor | None] = dict(arrived)

    def save(self, ns: Namespace | None, name: str, value: Tensor | None) -> None:
        self.values[ns, name] = value

    def load(self, ns: Namespace | None, name: str) -> Tensor | None:
        if (ns, name) not in self.values:
            return super().load(ns, name)  # raises an error that names the missing skip
        return self.values[ns, name]


class Stage:
    """Consecutive layers with their names in the whole model, and the skips that enter or leave the stage."""

    def __init__(
        self,
        index: int,
        layers: Sequence[tuple[str, nn.Module]],
        device: torch.device,
        popped: Sequence[Skip],
        stashed: Sequence[Skip],
        first: int = 0,  # the number of the first layer in the model
        partition: nn.Module | None = None,  # the same layers, for hooks of the user
    ) -> None:
        self.index, self.first, self.device = index, first, device
        self.layers = list(layers)
        self.popped, self.stashed = tuple(popped), tuple(stashed)
        modules = [module for _, layer in layers for module in layer.modules()]
        self._skips = any(isinstance(module, Skippable) for module in modules)
        self._copies_input = _writes_early(modules)
        self._partition = partition
        self._deferred = self.hooked = False
        self.replay = StageReplay(index, self.layers, device)

    def __call__(self, context: MicroBatchContext, main: Any, *skips: Any) -> tuple[Any, ...]:
        result, stashed = self.run(context, main, dict(zip(self.popped, skips, strict=True)))
        return (result, *[stashed[skip] for skip in self.stashed]) if self.stashed else (result,)

    def run(self, context: MicroBatchContext, main: Any, skips: Mapping[Skip, Any]) -> tuple[Any, dict[Skip, Any]]:
        """Run like `__call__`, with the skips by name. The result also holds the skips that stay inside."""
        # Each micro-batch gets a view of the mini-batch. A write into it would change the tensor of the caller.
        if self._copies_input:
            main = map_leaves(_copied, main)
        if _hooks_of_all_modules:
            main = map_leaves(_no_leaf, main)
            skips = {skip: map_leaves(_no_leaf, value) for skip, value in skips.items()}
        rng: RngStreams = context.random
        around = None if self.replay.idle else self.replay.around(context)
        # Most stages draw nothing and have no buffers to restore. They are spared three context managers.
        if rng.quiet and around is None and not self._deferred:
            return self._tracked(context, main, skips, None)
        draws = nullcontext() if rng.quiet else rng.scope(self.index, context.micro_batch)
        with around or nullcontext(), gathering(rng) if self._deferred else nullcontext(), draws as next_layer:
            return self._tracked(context, main, skips, next_layer)

    def scan(self) -> ModuleScan:  # noqa: PLR0912 - one walk over the modules, at every step
        parameters: dict[int, nn.Parameter] = {}
        settings: list[bool | float] = []
        deferred: list[DeferredBatchNorm] = []
        norms: list[nn.Module] = []
        holders: list[nn.Module] = []
        sources: list[torch.Generator] = []
        at_home, home = True, self.device
        # `named_modules` takes three times as long, and this runs at every step.
        stack: list[nn.Module | None] = [layer for _, layer in reversed(self.layers)]
        while stack:
            module = stack.pop()
            if module is None:
                continue
            settings.append(module.training)
            # Dropout rates, momentum and the like: with other settings, the layers can draw differently.
            for attribute in islice(vars(module).values(), TABLES, None):
                if type(attribute) in _SETTINGS:
                    settings.append(attribute)
                elif type(attribute) is torch.Generator:
                    sources.append(attribute)
            stack += reversed(module._modules.values())
            for parameter in module._parameters.values():
                if parameter is not None:
                    at_home = at_home and parameter.device == home
                    if parameter.requires_grad:
                        parameters[id(parameter)] = parameter
            if isinstance(module, DeferredBatchNorm):
                deferred.append(module)
            buffers = [buffer for buffer in module._buffers.values() if buffer is not None] if module._buffers else ()
            if buffers:
                at_home = at_home and all(buffer.device == home for buffer in buffers)
                if only_writes(module):
                    norms.append(module)
                # A deferred norm in training keeps its buffers itself.
                elif not module.training or not isinstance(module, DeferredBatchNorm):
                    holders.append(module)
        self._deferred = bool(deferred)
        self.find_hooks()
        if norms or holders or sources or not self.replay.idle:
            self.replay.scan(norms, holders, sources)
        return ModuleScan(list(parameters.values()), tuple(settings), deferred, [] if at_home else self._misplaced())

    def find_hooks(self) -> None:
        # Once per step, and not per micro-batch.
        self.hooked = self._partition is not None and any(getattr(self._partition, table) for table in HOOKS)

    def _misplaced(self) -> list[str]:
        return [
            f"{name}.{key} is on {tensor.device}, stage {self.index} on {self.device}"
            for name, layer in self.layers
            for key, tensor in chain(layer.named_parameters(), layer.named_buffers())
            if tensor.device != self.device
        ]

    def _tracked(
        self, context: MicroBatchContext, main: Any, skips: Mapping[Skip, Any], next_layer: NextLayer
    ) -> tuple[Any, dict[Skip, Any]]:
        if not self._skips:
            return self._layers(main, next_layer), _NO_SKIPS
        tracker = StageTracker(skips)
        with use_skip_tracker(tracker):
            return self._layers(main, next_layer), tracker.values

    def _layers(self, value: Any, next_layer: NextLayer) -> Any:
        if self.hooked and self._partition is not None:
            if next_layer is not None:
                next_layer(self.first)  # once for all layers, because the partition calls them itself
            return self._by_partition(self._partition, value)
        name, layer = self.layers[0]
        try:
            for number, (name, layer) in enumerate(self.layers, self.first):  # noqa: B007 - the note below reads name
                if next_layer is not None:
                    next_layer(number)
                value = layer(*value.args, **value.kwargs) if type(value) is CallArguments else layer(value)
        except BaseException as error:
            error.add_note(f"torchweft: in layer {name!r} ({type(layer).__name__}) of stage {self.index}")
            raise
        return value

    def _by_partition(self, partition: nn.Module, value: Any) -> Any:
        if type(value) is CallArguments:
            raise UsageError(
                "pipe.partitions[0] has hooks, so it is called as an nn.Sequential with one argument, but the pipe got "
                "several. Give the pipe one argument (a tuple, for example), or attach the hooks to its first layer"
            )
        try:
            return partition(value)
        except BaseException as error:
            error.add_note(f"torchweft: in a layer of stage {self.index}")
            raise


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _no_leaf(value: Any) -> Any:
    # Global module hooks, such as those of FlopCounterMode, attach tensor hooks to the inputs of a layer. On a leaf,
    # where the backward of the stage ends, these would not run.
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return torch.ops.aten.alias(value) if torch.is_grad_enabled() else value.detach()


def _writes_early(modules: Sequence[nn.Module]) -> bool:
    """Whether an in-place module can receive the stage's input itself, because no module with weights precedes it."""
    for module in modules:
        if getattr(module, "inplace", False) is True:
            return True
        # Its output is a new tensor, so later modules cannot write into the input.
        if module._parameters and not list(module.children()):
            return False
    return False


def serialize_shared(stages: Sequence[Stage]) -> None:
    """Make stages that have modules or generators in common write to their buffers one after another."""
    owners: Counter[object] = Counter()
    for stage in stages:
        modules = {module for _, layer in stage.layers for module in layer.modules()}
        owners.update(modules)
        owners.update({x for module in modules for x in vars(module).values() if type(x) is torch.Generator})
    shared = [owner for owner, count in owners.items() if count > 1]
    # One lock for all of them. With several, two stages could each hold one and wait for the other.
    lock = StreamLock()
    for stage in stages:
        stage.replay.serialize(shared, lock)
