"""The layout of an ordinary model: ``weft.Pipe(model, chunks=8, devices=[...], split=["transformer.h.6"])``.

One program per model would be wrong, because Python in forward() can branch on shapes and flags. Stages keep one wiring
for all programs: all values that go from stage s to stage t for one micro-batch are one bundle.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from torchweft.core.errors import PartitionError, SpecError, UsageError
from torchweft.core.validation import Validator
from torchweft.pipeline.actions import Action
from torchweft.pipeline.batchnorm import convert_deferred_batch_norm
from torchweft.pipeline.config import BatchDims, Layers, reject_lazy, reject_other_axes
from torchweft.pipeline.devices import cuda_devices, places_of
from torchweft.pipeline.own_loss import OwnLoss
from torchweft.pipeline.pipe_runtime import NO_LOSS, PipeCall
from torchweft.pipeline.pipeline_plan import Crossing
from torchweft.pipeline.schedule import build
from torchweft.pipeline.sequential import (
    CurrentRuntime,
    Cuts,
    FixedSettings,
    LayoutArguments,
    MakePipe,
    PipeLayout,
    PipeSettings,
)
from torchweft.pipeline.split.auto import Arguments, automatic_split
from torchweft.pipeline.split.expected import TailNeedsMore
from torchweft.pipeline.split.huggingface import COUNT, accepts, without_cache
from torchweft.pipeline.split.model_programs import SplitModel, StepChoice
from torchweft.pipeline.split.modules import check_names, suggest_split
from torchweft.pipeline.split.program import (
    CrossingValue,
)
from torchweft.pipeline.split.program_cache import Trials
from torchweft.pipeline.split.stated_rule import Reduction
from torchweft.pipeline.split.whole_forward import ForwardChanged
from torchweft.pipeline.stage import Stage
from torchweft.pipeline.tracing import Observer, Recorder

NOT_STATED = (
    "the schedule starts backward before all forwards have ended, and nothing states how the losses of micro-batches "
    f"combine: pass {COUNT}= (then they are added), or make the Pipe with loss_reduction='mean' or 'sum', with "
    "schedule='gpipe', or with loss= and target="
)


class SplitLayout(PipeLayout):
    """The layout of a model that `split` cuts. The pipe has the model's own tables."""

    _model: nn.Module

    def __init__(self) -> None:
        self._split_model: SplitModel | None = None

    def resolve(self, check: Validator, module: Any, dims: BatchDims | None, given: LayoutArguments) -> Cuts:
        split = given.split
        if check.call(_checked_model, module, split, given.balance, given.verify) is None:
            return Cuts(0, [], [])
        if dims is not None:
            check.call(reject_other_axes, list(module.named_children()), dims)
        auto = split == "auto"
        available = cuda_devices() or [torch.device("cpu")] * (2 if auto else len(split) + 1)
        available = available if auto else available[: len(split) + 1]
        places = check.call(places_of, available if given.devices is None else given.devices)
        if auto:
            return Cuts(len(places or ()), [], places or [])
        check.call(check_names, module, split)
        return Cuts(len(split) + 1, [], []) if places is None else _cuts(check, len(split) + 1, places)

    def check_cuts(self, check: Validator, settings: PipeSettings, layers: Layers) -> Cuts:
        stages = len(split_of(settings)) + 1
        places = check.call(places_of, settings.devices)
        return Cuts(stages, [1] * stages, settings.devices) if places is None else _cuts(check, stages, places)

    def take_model(self, fixed: FixedSettings, settings: PipeSettings, model: nn.Module, *, deferred: bool) -> Layers:
        """See `PipeLayout.take_model`. There are no layers, because the model keeps its own children."""
        self._fixed, self._model = fixed, model
        if deferred:
            convert_deferred_batch_norm(model)
        return ()

    def split_points(self, settings: PipeSettings, sample: Any, make_pipe: MakePipe) -> list[str]:
        split = split_of(settings)
        return self._automatic_split(settings, sample, make_pipe) if split == "auto" else list(split)

    def _automatic_split(self, settings: PipeSettings, sample: Any, make_pipe: MakePipe) -> list[str]:
        call = self._sample_call(sample)
        return automatic_split(self._model, settings.devices, call, self._fixed.dims, make_pipe)

    def _sample_call(self, sample: Any) -> Arguments | None:
        if sample is None:
            return None
        if isinstance(sample, Mapping):
            return without_cache(self._model, (), dict(cast("Mapping[str, Any]", sample)))
        return without_cache(self._model, cast(Any, sample) if isinstance(sample, tuple) else (sample,), {})

    def place(self, settings: PipeSettings, current_runtime: CurrentRuntime, sample: Any) -> None:
        """See `PipeLayout.place`. Records the sample first, which shows the first stage of each parameter."""
        current_runtime()
        self._current_model(settings).place()
        if (call := self._sample_call(sample)) is not None:
            self._record_sample(self._current_model(settings), call)

    def _record_sample(self, model: SplitModel, call: Arguments) -> None:
        rows = self._fixed.dims.of_call(len(call[0]), call[1].keys(), target=False, nested=True)
        model.choose(*call, 1, rows, Trials(), check=False, graph=False, outputs=False)

    def key(self, settings: PipeSettings) -> tuple[Any, ...]:
        return tuple(split_of(settings)), None if self._split_model is None else self._split_model.members.version

    def stages(self, settings: PipeSettings, layers: Layers) -> tuple[list[Stage], Crossing]:
        return self._current_model(settings).stages()

    def _current_model(self, settings: PipeSettings) -> SplitModel:
        model = self._split_model
        if model is None or model.split != list(split_of(settings)) or model.devices != settings.devices:
            self._split_model = model = self._new_model(settings)
        return model

    def _new_model(self, settings: PipeSettings) -> SplitModel:
        return SplitModel(self._model, split_of(settings), settings.devices, self._fixed.dims)

    def run_step(
        self,
        settings: PipeSettings,
        current_runtime: CurrentRuntime,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...],
        observer: Observer | None,
        /,
    ) -> Any:
        """Choose or record programs for one step, and run it. `targets` is empty, or holds the target of the loss."""
        current_runtime()  # ranks compare their settings before they record, because recordings depend on them
        if "target" in kwargs and not accepts(self._model, "target"):
            raise UsageError(NO_LOSS)
        args, kwargs = without_cache(self._model, args, kwargs)
        # A stated rule for the numbers of micro-batches makes the model's own loss one that begins backward early.
        table = build(settings.schedule, len(settings.devices), settings.chunks)
        stated, mixed = self._fixed.number_reduction, not table.allows_external_loss
        if self._fixed.counts_items and (not mixed or kwargs.get(COUNT) is None):
            if mixed and not targets and self._model.training and torch.is_grad_enabled():
                raise UsageError(NOT_STATED)
            stated = None
        run = partial(self._run, settings, current_runtime, args, kwargs)
        if not targets and stated is not None and mixed:
            return OwnLoss.put_back(*run((None,), observer, stated, outputs=True))
        return run(targets, observer, stated, outputs=not targets)

    def _run(
        self,
        settings: PipeSettings,
        current_runtime: CurrentRuntime,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...],
        observer: Observer | None,
        stated: Reduction | None,
        *,
        outputs: bool,
    ) -> Any:
        axis = self.axes(args, kwargs, target=bool(targets))
        of_input = axis[0] if targets and not isinstance(axis, int) else axis
        rows = of_input if of_input is None or isinstance(of_input, int) else of_input[1:]
        model = self._current_model(settings)
        how = {"check": cast(Any, settings).verify, "graph": settings.executor == "graph", "outputs": outputs}
        trials = Trials()
        if isinstance(observer, Recorder):
            observer = observer.one_step()
        tail = ExitStack()  # the observed time of the tail

        def serve(choice: StepChoice, joined_axes: Any) -> Any:
            # A new program can need stages with more blocks or crossings than the earlier ones. Ranks do not compare
            # their settings for it, because no setting has changed.
            runtime = current_runtime(compare=False)
            owners = model.members.set_copies(runtime.stages, choice.call.choice)
            request = PipeCall(
                choice.call, targets, axis, settings.chunks, settings.schedule, observer, self._fixed.loss_scale,
                choice.scalars, owners, settings.batch_tag, (args, kwargs), joined_axes,
            )  # fmt: skip
            result = runtime.serve(request, training=self._model.training)
            if joined_axes is not None and observer is not None and model.runs_tail:
                tail.enter_context(observer.action_scope("T", Action(len(settings.devices) - 1, "T", -1)))
            return result

        while True:
            choice = model.choose(args, kwargs, settings.chunks, rows, trials, stated=stated, **how)
            try:
                with tail:
                    return model.run(choice, partial(serve, choice))
            except ForwardChanged as change:
                model.note_change(trials, change)
            except TailNeedsMore:
                pass  # the program keeps that value from now on

    def axes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, target: bool) -> Any:
        """See `PipeLayout.axes`, for a `SplitCall`."""
        dims = self._fixed.dims
        if dims.whole is not None:
            return dims.whole
        axes = dims.of_call(len(args), kwargs.keys(), target=target, nested=True)
        return ((None, *axes[0]), axes[1]) if target else (None, *axes)

    @property
    def routes(self) -> list[CrossingValue]:
        if self._split_model is None or self._split_model.latest is None:
            raise UsageError("nothing was recorded yet, so what crosses is not known; call the pipe, or give sample=")
        return self._split_model.latest.routes

    def partitions(self, settings: PipeSettings, layers: Layers) -> list[nn.Sequential]:
        raise UsageError("a pipe with split= has no partitions; see its statistics()['blocks'] and routes")

    def statistics(self, settings: PipeSettings) -> dict[str, Any]:
        model = self._current_model(settings)
        blocks = [list(of_stage.values()) for of_stage in model.members.blocks]
        joined = [] if model.latest is None else model.latest.joined
        tail = list(model.members.in_tail.values())
        return {"blocks": blocks, "tail": tail, "joined": joined, "recordings": model.recordings}

    def devices_by_tensor(self, settings: PipeSettings, layers: Layers) -> dict[int, torch.device]:
        """See `PipeLayout.devices_by_tensor`, and `SplitModel.homes`."""
        return {key: settings.devices[stage] for key, stage in self._current_model(settings).homes().items()}

    def __getstate__(self) -> dict[str, Any]:
        # Without programs, whose keys hold ids of objects. A copy of the pipe records again.
        return {**self.__dict__, "_split_model": None}


def split_of(settings: PipeSettings) -> Any:
    """The split points. Only a pipe with a wrapped model has them, because a layer can be named ``split``."""
    return cast(Any, settings).split


def _cuts(check: Validator, stages: int, places: list[torch.device]) -> Cuts:
    if len(places) != stages:
        points = "1 split point makes" if stages == 2 else f"{stages - 1} split points make"
        check.errors.append(
            PartitionError(
                f"{points} {stages} stages, but there are {len(places)} devices; give {stages} devices, one for each "
                f"stage (one can repeat: devices=['cpu'] * {stages}), or name {len(places) - 1} split points in split="
            )
        )
    return Cuts(stages, [1] * stages, places)


def _checked_model(module: Any, split: Any, balance: Any, verify: Any) -> nn.Module:
    """Return `module`. Raises SpecError if it is not an `nn.Module`, UsageError that lists every invalid argument."""
    if not isinstance(module, nn.Module):
        raise SpecError(f"Pipe takes a model, an nn.Module, but this is {type(module).__name__}")
    reject_lazy(module)
    names = cast("list[Any]", split) if isinstance(split, list | tuple) else []
    named = bool(names) and all(isinstance(name, str) for name in names)
    with Validator("these arguments of Pipe do not fit together") as check:
        if not named and split != "auto":
            meant = suggest_split(module, split)
            check.add(f"split is {split!r:.200}; give 'auto', or a list of names of submodules{meant}")
        check.require(not named or len(set(names)) == len(names), f"split is {split!r}, with a name twice")
        check.require(balance is None, "balance cannot be given with split; it counts the layers of an nn.Sequential")
        check.boolean("verify", verify)
    return module
