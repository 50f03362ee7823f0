"""Layouts cut the model of a pipe into stages. Here: that of an `nn.Sequential`, and the interface of the others.

    Pipe --has--> PipeLayout          here
                  SplitLayout         split/split_pipe.py                 with split=
                  ProcessLayout       processes/process_pipe.py           with group=
                  ProcessSplitLayout  processes/split_process_pipe.py     with both

A pipe could be one of several subclasses instead. Then `Pipe` would have to import them to choose one, while they
import `Pipe` to inherit from it. A layout does not know its pipe: it gets the settings with each call, so that a pipe
and its layout are freed without the garbage collector.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import nn

from torchweft.core.errors import UsageError
from torchweft.core.validation import Validator
from torchweft.pipeline.batchnorm import convert_deferred_batch_norm
from torchweft.pipeline.config import (
    BatchDims,
    Layers,
    check_batch_dims,
    checked_layout,
    layers_of,
    resolve_layout,
    sizes_of,
)
from torchweft.pipeline.devices import places_of
from torchweft.pipeline.loss import LossFunction, LossScale, LossWeight
from torchweft.pipeline.own_loss import OwnLoss
from torchweft.pipeline.pipe_runtime import PipeRuntime, on_meta
from torchweft.pipeline.pipeline_plan import Crossing, build_stages
from torchweft.pipeline.skip import verify_skippables
from torchweft.pipeline.stage import Stage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@runtime_checkable
class PipeSettings(Protocol):
    """The attributes of a pipe that a user can assign, and that every kind of pipe has."""

    chunks: Any
    schedule: Any
    checkpoint: Any
    executor: Any
    output: Any
    batch_tag: Any
    balance: list[int]
    devices: list[torch.device]


NO_ROUTES = (
    "pipe.routes lists what crosses between the stages of a model that is cut by split=. This pipe has the layers of "
    "an nn.Sequential: the output of each stage goes to the next one, and a skip from its stash to its pops (see "
    "pipe.partitions). weft.pipeline.MemoryRecorder counts their bytes"
)


class FixedSettings(NamedTuple):
    """The settings of a pipe that never change. `number_reduction` is that of numbers in a split model's output. With
    `counts_items`, only the argument num_items_in_batch states it, so it counts where a schedule needs it."""

    dims: BatchDims
    loss: LossFunction | None
    reduction: str
    loss_weight: LossWeight | None
    loss_scale: LossScale
    number_reduction: Literal["mean", "sum"] | None
    counts_items: bool

    def of_runtime(self, *, mixed: bool) -> tuple[LossFunction | None, str, LossWeight | None, BatchDims]:
        """The loss and how it is joined. `mixed` tells whether the schedule begins backward early."""
        if self.number_reduction is not None and (mixed or not self.counts_items):
            return OwnLoss(), self.number_reduction, None, self.dims
        return self.loss, self.reduction, self.loss_weight, self.dims

    @property
    def inside(self) -> LossFunction | None:
        """The loss that can be computed in a step. With a stated reduction, the model computes it itself."""
        return self.of_runtime(mixed=True)[0]


class LayoutArguments(NamedTuple):
    balance: Any
    devices: Any
    sample: Any
    split: Any
    verify: Any
    group: Any
    executor: Any
    schedule: Any
    chunks: Any
    loss_scale: Any
    check_batches: Any


class Cuts(NamedTuple):
    """The number of stages (0: unknown), the number of layers of each, and their devices."""

    stages: int
    balance: list[int]
    devices: list[torch.device]


MakePipe = Callable[..., Any]
# Builds the runtime again if settings have changed. With compare=False, ranks do not compare them.
CurrentRuntime = Callable[..., PipeRuntime]


class PipeLayout:
    """The layers of an `nn.Sequential` in a single process, and the base of the other layouts, which override it."""

    _stage_type: type[Stage] = Stage
    _fixed: FixedSettings
    hides_tensors = False  # whether tensors of other ranks are hidden

    def __init__(self) -> None:
        self._partitions: tuple[Any, list[nn.Sequential]] = (None, [])
        self._source: tuple[nn.Sequential, list[nn.Module]] | None = None

    def resolve(self, check: Validator, module: Any, dims: BatchDims | None, given: LayoutArguments) -> Cuts:
        """Return the stages for the arguments of a pipe. Notes all faults of the arguments and the model in `check`."""
        balance, devices = given.balance, given.devices
        layers = check.call(layers_of, module)
        if layers is not None:
            check.call(verify_skippables, module)
            if dims is not None:
                check.call(check_batch_dims, layers, dims)
        sizes = None if balance is None else check.call(sizes_of, balance)
        places = None if devices is None else check.call(places_of, devices)
        layout = None
        # Only if all parts are valid. A default in the place of an invalid part would be a fault of its own.
        if layers is not None and (sizes is None) == (balance is None) and (places is None) == (devices is None):
            layout = check.call(resolve_layout, module, sizes, places, given.sample)
        resolved_sizes, resolved_places = layout or ([], [])
        return Cuts(len(resolved_sizes or sizes or places or ()), resolved_sizes, resolved_places)

    def check_cuts(self, check: Validator, settings: PipeSettings, layers: Layers) -> Cuts:
        sizes, places = check.call(sizes_of, settings.balance), check.call(places_of, settings.devices)
        layout = None
        if sizes is not None and places is not None:
            layout = check.call(checked_layout, sizes, places, len(layers))
        return Cuts(len(sizes or ()), *(layout or (settings.balance, settings.devices)))

    def take_model(self, fixed: FixedSettings, settings: PipeSettings, model: nn.Module, *, deferred: bool) -> Layers:
        """Return the layers that become children of the pipe. `deferred`: convert their batch norms."""
        self._fixed = fixed
        layers = cast("nn.Sequential", model)
        self._source = layers, list(layers)
        pairs = zip(layers_of(layers), _device_per_layer(settings), strict=True)
        converted = [
            (name, convert_deferred_batch_norm(layer) if deferred else layer, device) for (name, layer), device in pairs
        ]
        return [(name, layer if on_meta(layer) else layer.to(device)) for name, layer, device in converted]

    def reject_other_source(self) -> None:
        """Raise UsageError if the `nn.Sequential` has other layers than when the pipe was made from it."""
        if self._source is not None and list(self._source[0]) != self._source[1]:
            raise UsageError(
                "layers of the nn.Sequential were replaced after the Pipe was made from it, and the pipe still has the "
                "former ones; make the Pipe again"
            )

    def stages(self, settings: PipeSettings, layers: Layers) -> tuple[list[Stage], Crossing]:
        partitions = self.partitions(settings, layers)
        return build_stages(layers, settings.balance, settings.devices, self._stage_type, partitions)

    def axes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, target: bool) -> Any:
        return self._fixed.dims.of_call(len(args), kwargs.keys(), target=target)

    def partitions(self, settings: PipeSettings, layers: Layers) -> list[nn.Sequential]:
        source = (layers, list(settings.balance))
        # The same objects until something changes, because users attach hooks to them.
        if self._partitions[0] != source:
            rest = iter(layers)
            self._partitions = source, [nn.Sequential(OrderedDict(islice(rest, size))) for size in source[1]]
        return self._partitions[1]

    @property
    def routes(self) -> Any:
        raise AttributeError(NO_ROUTES)

    def devices_by_tensor(self, settings: PipeSettings, layers: Layers) -> dict[int, torch.device]:
        devices: dict[int, torch.device] = {}
        for (_, layer), device in zip(layers, _device_per_layer(settings), strict=True):
            for tensor in (*layer.parameters(), *layer.buffers()):
                # The first stage counts, as it does for a layer that occurs twice.
                devices.setdefault(id(tensor), device)
        return devices

    def new_runtime(self, settings: PipeSettings, layers: Layers, *, allows_external_loss: bool) -> PipeRuntime:
        built, options = self.stages(settings, layers), (settings.checkpoint, settings.executor)
        loss = self._fixed.of_runtime(mixed=not allows_external_loss)
        return PipeRuntime(*built, *options, *loss, allows_external_loss=allows_external_loss)

    def key(self, settings: PipeSettings) -> tuple[Any, ...]:
        return ()

    def statistics(self, settings: PipeSettings) -> dict[str, Any]:
        return {"balance": list(settings.balance)}

    @property
    def group(self) -> "ProcessGroup | None":
        return None

    def with_placeholders(self) -> AbstractContextManager[None]:
        """Inside, tensors of other ranks are there as placeholders on the meta device."""
        return nullcontext()

    def exchange_reports(self, occasion: str, report: Any) -> list[Any]:
        """The reports of all ranks, which call this together. A report is plain data."""
        return [report]

    def telling(self) -> AbstractContextManager[None]:
        """Inside of it, all ranks make one call. An exception of one rank is raised on all of them."""
        return nullcontext()

    def lost_ranks(self) -> list[str]:
        """The ranks that are known to be gone, in words."""
        return []

    def compare_settings(self, settings: PipeSettings, layers: Layers, state: Any, *, compare: bool) -> None:
        """Raise UsageError on all ranks if their settings differ. `state` identifies the settings."""

    def split_points(self, settings: PipeSettings, sample: Any, make_pipe: MakePipe) -> list[str]:
        """The names of the submodules before which the model is cut. `make_pipe` makes a pipe to measure the model."""
        raise NotImplementedError

    def place(self, settings: PipeSettings, current_runtime: CurrentRuntime, sample: Any) -> None:
        """Bring the tensors of a wrapped model to their stages."""

    def introduce(self, pipe: nn.Module) -> None:
        """Make the finished pipe known to libraries that have to know about its ranks."""


def _device_per_layer(settings: PipeSettings) -> Iterator[torch.device]:
    for device, size in zip(settings.devices, settings.balance, strict=True):
        yield from [device] * size
