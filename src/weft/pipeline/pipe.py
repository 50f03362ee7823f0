"""Pipe: a sequential model, spread over stages, that trains under a plain ``loss.backward()``.

    pipe = weft.Pipe(model, chunks=8, devices=["cuda:0", "cuda:1"])
    loss = criterion(pipe(x), y)
    loss.backward()

The layers stay where the user can see them: same keys in `state_dict`, same parameters, same hooks. What the
pipe adds, stages, plans and worker threads, is made at the first step and goes when the pipe goes.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import nn

from weft.core.autograd import forbid_exporting, forbid_tracing, graph_break
from weft.core.errors import SpecError, UsageError, WeightsError, listed, shorten_traceback
from weft.core.validation import Validator
from weft.pipeline.batchnorm import convert_deferred_batch_norm
from weft.pipeline.config import (
    BatchDim,
    BatchDims,
    Checkpoint,
    CheckpointRule,
    OutputBatchDim,
    check_batch_dims,
    check_settings,
    checked_layout,
    layers_of,
    places_of,
    reduction_of,
    resolve_layout,
    sizes_of,
)
from weft.pipeline.loss import LossFunction, LossScale, LossWeight
from weft.pipeline.microbatch import micro_sizes
from weft.pipeline.pipe_runtime import PipeCall, PipeRuntime, on_meta
from weft.pipeline.pipeline_plan import Crossing, build_stages
from weft.pipeline.schedule import SCHEDULES, Schedule, ScheduleFunction, build
from weft.pipeline.skip import verify_skippables
from weft.pipeline.stage import CallArguments, Stage
from weft.pipeline.tracing import Observer
from weft.pipeline.weights import Initialize, WeightFiles, allocate, find_uninitializable, initialize_modules

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NO_LOSS = (
    "target= was given, but the pipe has no loss to give it to; give it one, Pipe(..., loss=fn), or compute the loss "
    "from what the pipe returns"
)


class Pipe(nn.Module):
    """A model cut into stages; micro-batches of one mini-batch are in different stages at one time.

    Args:
        module: the model. Of an `nn.Sequential` the layers become the pipe's own children, under the same names; a
            skippable layer may hand tensors to layers further on (see `weft.skippable`). Any other model is cut by
            `split`; then parameters, keys, ties and hooks stay the model's own, and the pipe has its attributes too.
        chunks: into how many micro-batches a mini-batch is cut (fewer when it has fewer rows).
        batch_dim: the axis of the rows, 0 where nothing is said: an int for all tensors that go in and come out; or
            for what goes in a tuple with one entry per positional argument, or a dict by position and by keyword
            (``"target"`` is one). An entry is an int, nested as the argument is, or ``None`` for what every
            micro-batch needs whole.
        output_batch_dim: the axis of the rows of what comes out: an int, or nested as the output is. Default: as
            `batch_dim`, if that is an int. Modules that are known to have their rows on another axis are refused.
        devices: one per stage; may repeat, also ``["cpu", "cpu"]``, which really runs two workers. Default:
            all CUDA devices, else the CPU twice. Layers are moved there, but for those on the meta device. Of an
            `nn.Sequential` with fewer layers than devices the first devices get one layer each.
        balance: how many layers each stage has. Default: as many stages as devices (at most as many as layers), as
            even as possible by the time that each layer takes for `sample`, or without a sample by the number of
            parameters, which is a rough guess; see `weft.pipeline.partition` for measured balances.
        checkpoint: what is recomputed in backward instead of kept, which saves memory and costs a second forward:
            ``"never"``, ``"except_last"`` (all but the last micro-batch, whose backward comes at once) or
            ``"always"``; a list of these, one per stage; or a function ``(stage, micro_batch, micro_batches) ->
            bool``. Where a schedule with the loss inside has a backward right after its forward, as the last stage of
            1F1B has, nothing is recomputed, since nothing would be saved.
        deferred_batch_norm: turn batch norms into `DeferredBatchNorm`, whose running statistics are those of
            the undivided mini-batch.
        schedule: a name (``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"looped_bfs"``, ``"zero_bubble"``, ``"zbv"``,
            ``"dualpipev"``), a table as text (see `weft.Schedule.parse`), a `weft.Schedule`, or a function (stages,
            micro_batches) -> `weft.Schedule`, such as a `functools.partial` of `weft.pipeline.interleaved`.
        loss: a function ``(output, target) -> number``. With it, ``pipe(x, target=y)`` returns the loss, and
            schedules that begin backward early (1F1B) can run; without a target, the pipe returns the output.
            What it has to learn itself is found when it is a module. It must not read the layers' parameters.
            It may return a pair (number, extras); then ``pipe(x, target=y)`` returns (loss, extras). Extras are nested,
            and have no graph. Tensors are joined along the axis of the rows; whole numbers, Python's or tensors
            without axes, are added up; other numbers are combined as the losses are (mean or sum).
        loss_reduction: how the loss function sums over rows, ``"mean"`` or ``"sum"``: the mini-batch's loss is
            the mean of the micro-batches' losses by weights, or their sum. Default: the loss's own ``reduction``
            (a module's, or a keyword of a `functools.partial`), else ``"mean"``. With `split` and without a loss: how
            numbers in the model's output, such as a loss of its own, are combined. Default: the one of both that makes
            the model's numbers for all rows, which is found by comparing; if neither does, the step is refused.
        loss_weight: a function ``target -> number``, called with the target of each micro-batch: what the loss, a
            mean, divides by, and so its weight. Default: for `nn.CrossEntropyLoss`, `nn.NLLLoss` and their functional
            forms what PyTorch divides by (class weights of the targets, without ``ignore_index``); for another loss
            the number of rows, and a target with padding (-100, or a mask beside other tensors) is refused.
        loss_scale: what the loss is multiplied by before ``backward()``, a number or a function that returns it, such
            as the ``get_scale`` of a `torch.amp.GradScaler`. Schedules that begin backward early begin with it, rounded
            down to a power of two, and rescale exactly; default: with the loss gradient of the last step.
        executor: ``"threads"`` (one worker per stage), ``"serial"``, ``"auto"`` (measures both on the first
            steps and keeps the faster) or ``"graph"`` (plain autograd, for gradients of gradients).
        sample: an input, only to balance by. With `split`: a micro-batch, as a dict of named arguments, a tuple of
            positional ones, or the only one.
        split: names of submodules; the model is cut before the first call of each (see docs/which_models.md). Or
            ``"auto"``: a cut into one stage per device, by measured time for `sample`, or by parameters without one.
        verify: compare every program that is recorded of the model's forward() once with forward() itself.
        group: a process group, or a one-dimensional `DeviceMesh`, of `torch.distributed`. Its ranks run the stages,
            rank k those of worker k of the schedule, and every rank runs the same script. The input counts on the rank
            of the first stage, the target on that of the last one. Each rank keeps the parameters of its own stages;
            with `split`, those of the blocks that `sample` shows to be its own, else by the order of registration.
            `devices` is then the device of this rank, or a list with the device of every stage.
        output: with `group`, which ranks get the output of ``pipe(x)``: ``"all"``, or ``"last"``, the rank of the last
            stage. The others then get a zero, to call ``backward()`` on. A loss is always on all ranks.

    `chunks`, `balance`, `split`, `devices`, `checkpoint`, `schedule` and `executor` are attributes too, which each step
    reads anew; a step raises what is wrong with them. Layers stay where they are when `balance` or `devices` change.
    With `group`, a `batch_tag` can be set before each call, such as the number of the batch. A call whose tag differs
    between ranks raises UsageError.

    All executors and schedules give the same gradients as the undivided model, to rounding. A layer's random numbers
    depend on its place in the model and the micro-batch only (with hooks on `partitions`, also on the cut). Raises
    SpecError, SkipWiringError, PartitionError, ScheduleError or UsageError for arguments that do not fit.

    The design is GPipe's (Huang et al., arXiv 1811.06965) as torchgpipe brought it to PyTorch (Kim et al.,
    arXiv 2004.09910); 1F1B is PipeDream-Flush's (Narayanan et al., arXiv 2104.04473).

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        >>> pipe = weft.Pipe(model, chunks=4, balance=[2, 1], devices=["cpu", "cpu"])
        >>> pipe(torch.randn(16, 8)).square().mean().backward()
        >>> model[0].weight.grad.shape
        torch.Size([32, 8])
    """

    _stage_type: type[Stage] = Stage

    def __new__(cls, *args: Any, **settings: Any) -> "Pipe":
        grouped, split = settings.get("group") is not None, settings.get("split") is not None
        # Imported here because most programs have no use for them.
        if cls is Pipe and grouped and split:
            from weft.pipeline.processes.split_process_pipe import ProcessSplitPipe as kind  # noqa: PLC0415
        elif cls is Pipe and grouped:
            from weft.pipeline.processes.process_pipe import ProcessPipe as kind  # noqa: PLC0415
        elif cls is Pipe and split:
            from weft.pipeline.split.split_pipe import SplitPipe as kind  # noqa: PLC0415
        else:
            kind = cls
        return super().__new__(cast("type[Any]", kind))

    def __init__(
        self,
        module: nn.Module,
        *,
        chunks: int,
        batch_dim: BatchDim | None = None,
        output_batch_dim: OutputBatchDim | None = None,
        devices: Sequence[str | int | torch.device] | str | int | torch.device | None = None,
        balance: Sequence[int] | None = None,
        checkpoint: Checkpoint | Sequence[Checkpoint | CheckpointRule] | CheckpointRule = "never",
        deferred_batch_norm: bool = False,
        schedule: str | Schedule | ScheduleFunction = "gpipe",
        loss: LossFunction | None = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
        loss_weight: LossWeight | None = None,
        loss_scale: int | float | Callable[[], float] | None = None,
        executor: Literal["auto", "serial", "threads", "graph"] = "auto",
        sample: Any = None,
        split: Sequence[str] | Literal["auto"] | None = None,
        verify: bool = True,
        group: "ProcessGroup | DeviceMesh | None" = None,
        output: Literal["all", "last"] = "all",
    ) -> None:
        super().__init__()
        reduction = None
        _forbid_pipes(module, split)
        with Validator("this Pipe cannot be used") as check:
            dims = check.call(BatchDims, batch_dim, output_batch_dim)
            stages = self._lay_out(
                check,
                module,
                dims,
                balance=balance,
                devices=devices,
                sample=sample,
                split=split,
                verify=verify,
                group=group,
                executor=executor,
                schedule=schedule,
                chunks=chunks,
                loss_scale=loss_scale,
            )
            check.choice("output", output, ("all", "last"))
            check.that(group is not None or output == "all", "output='last' is for a pipe over processes (group=)")
            check_settings(
                check, stages, chunks, executor, loss, loss_reduction, schedule, checkpoint, deferred_batch_norm
            )
            of_numbers = loss_reduction if loss is None and split is not None else None
            if loss_reduction in (None, "mean", "sum"):
                of_loss = None if of_numbers else loss_reduction
                reduction = check.call(reduction_of, loss, of_loss, loss_weight)
            scale = check.call(LossScale, loss_scale, loss)
        assert dims is not None and reduction is not None and scale is not None  # else there was a fault
        self._dims = dims
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.schedule: Any = schedule  # assigned by users too, so each step validates it
        self.executor = executor
        self.output = output
        self.batch_tag: str | int | None = None
        # Not a child: a loss module's parameters are the user's to save, and the keys stay those of the model.
        self._loss = (loss, reduction)
        self._loss_weight = loss_weight
        self._loss_scale = scale
        self._number_reduction: Literal["mean", "sum"] | None = (
            of_numbers  # of numbers in the output of a model that is split
        )
        self._observer: Observer | None = None
        self._runtime: PipeRuntime | None = None
        self._checked: Any = None  # the settings as they were when they were found to fit
        self._recipe: Any = None  # what the runtime was made of
        self._adopt(module, sample, deferred_batch_norm=deferred_batch_norm)
        self.training = module.training  # its own: each layer may have another

    def _lay_out(self, check: Validator, module: Any, dims: BatchDims | None, **given: Any) -> int:
        """Set `balance` and `devices`, and note what is wrong with what was `given` for them, or with the model. How
        many stages there are, 0 if that is not known."""
        balance, devices = given["balance"], given["devices"]
        layers = check.call(layers_of, module)
        if layers is not None:
            check.call(verify_skippables, module)
            if dims is not None:
                check.call(check_batch_dims, layers, dims)
        sizes = None if balance is None else check.call(sizes_of, balance)
        places = None if devices is None else check.call(places_of, devices)
        layout = None
        if layers is not None and (sizes is None) == (balance is None) and (places is None) == (devices is None):
            layout = check.call(resolve_layout, module, sizes, places, given["sample"])
        self.balance, self.devices = layout or ([], [])
        return len(self.balance or sizes or places or ())

    def _adopt(self, module: nn.Module, sample: Any, *, deferred_batch_norm: bool) -> None:
        """Take over the layers of the model."""
        self._partitions: tuple[Any, list[nn.Sequential]] = (None, [])
        where = [device for device, size in zip(self.devices, self.balance, strict=True) for _ in range(size)]
        for (name, layer), device in zip(layers_of(module), where, strict=True):
            converted = convert_deferred_batch_norm(layer) if deferred_batch_norm else layer
            # Straight into the table: a layer may be called as one of the pipe's attributes.
            self._modules[name] = converted if on_meta(converted) else converted.to(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output for a mini-batch, or with a `loss` and ``target=`` its loss.

        Tensors of the arguments are cut along axis 0, or `batch_dim`, and must agree in length; wrap in `weft.NoChunk`
        what every micro-batch needs whole. The first layer gets the arguments as they are, each other layer what the
        one before it returned. Outputs are joined along axis 0, or `output_batch_dim`.

        Raises BatchError when the mini-batch cannot be cut or the outputs cannot be joined, SpecError or UsageError
        when `batch_dim` does not fit the arguments, DeviceError when a layer is not where its stage runs. An exception
        of a layer passes through, with a note of where it was.
        """
        forbid_exporting()
        if torch.compiler.is_dynamo_compiling():
            return graph_break(self._forward, args, kwargs)
        try:
            return self._forward(args, kwargs)
        except Exception as error:
            shorten_traceback(error)
            raise

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forbid_tracing(args, kwargs)
        runtime = self._made_runtime()
        targets = self._targets(kwargs)
        main = args[0] if len(args) == 1 and not kwargs else CallArguments(args, kwargs)
        axis = self._axes_of(args, kwargs, target=bool(targets))
        request = PipeCall(
            main,
            targets,
            axis,
            self.chunks,
            self.schedule,
            self._observer,
            self._loss_scale,
            batch_tag=self.batch_tag,
        )
        try:
            return runtime.serve(request, training=self.training)
        except TypeError as error:
            if self._loss[0] is None and "unexpected keyword argument 'target'" in str(error):
                raise UsageError(NO_LOSS) from None
            if self._loss[0] is not None and not targets and len(args) > 1:
                error.add_note("weft: the pipe has a loss; its target is given by name: pipe(x, target=y)")
            raise

    def _axes_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, target: bool) -> Any:
        """The axis of the rows of every argument, as `MiniBatch` takes it."""
        whole = self._dims.whole
        return self._dims.of_call(len(args), kwargs.keys(), target=target) if whole is None else whole

    def _targets(self, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The target, taken out of the arguments if the loss is inside; else nothing."""
        return (kwargs.pop("target"),) if self._loss[0] is not None and "target" in kwargs else ()

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The stages as `nn.Sequential` of the very same layers, under the same names.

        They are the same until layers or `balance` change. Hooks on one fire for every micro-batch.
        """
        made_of = (self._layers(), list(self.balance))
        if self._partitions[0] != made_of:
            layers = iter(made_of[0])
            self._partitions = made_of, [nn.Sequential(OrderedDict(islice(layers, size))) for size in made_of[1]]
        return self._partitions[1]

    def schedule_for(self, rows: int) -> Schedule:
        """The table that a mini-batch of so many rows is run by, all stages apart."""
        return build(self.schedule, len(self.balance), len(micro_sizes(rows, self.chunks)))

    @contextmanager
    def observed_by(self, observer: Observer) -> Generator[None]:
        """Let a watcher, such as `weft.Recorder`, see what runs inside; stages run apart meanwhile.

        Raises UsageError for what is no watcher, and under ``executor="graph"``, which has no stages to see.
        """
        if isinstance(observer, type) or not isinstance(cast(Any, observer), Observer):
            raise UsageError(f"an observer of a pipe is a weft.Recorder or the like, but this is {observer!r}")
        if self.executor == "graph":
            raise UsageError(
                "executor='graph' leaves backward to autograd, where nobody can see stages and micro-batches; set "
                "pipe.executor to 'serial' or 'threads' for the steps that are watched"
            )
        before, self._observer = self._observer, observer
        try:
            yield
        finally:
            self._observer = before

    def materialize(
        self, source: str | PathLike[str] | Initialize | None = None, initialize: Initialize | None = None
    ) -> "Pipe":
        """Give storage to parameters and buffers on the meta device, each on the device of its stage.

        Args:
            source: a safetensors file, its index (``model.safetensors.index.json``), or a folder with either. The whole
                state_dict is read from there. A tied weight can be in the file under any of its names. With `group`,
                each rank reads its own tensors only. Values are cast to the dtype of the model.
            initialize: without a source, a function that is called with every module that got storage; by default its
                ``reset_parameters()``. Can be given as the only argument. Each module is initialised from a seed of its
                own, which depends on PyTorch's generator (with `group`, that of the first rank) and the place of the
                module only.

        Parameters are then new objects: make the optimizer afterwards. Raises WeightsError that lists all missing or
        unexpected keys and wrong shapes, and UsageError if there is no way to initialise a module.
        """
        if callable(source):
            source, initialize = None, source
        files, chosen, faults = None, {}, []
        with self._showing_hidden():
            known = set(self.state_dict())
        if source is None:
            faults = find_uninitializable(self._roots()) if initialize is None else []
        elif initialize is not None:
            raise UsageError("give materialize() either source, or initialize")
        else:
            try:
                files = WeightFiles(source)
                chosen, faults = files.match(self, known)
            except ModuleNotFoundError:
                raise
            except Exception as error:  # of a damaged file as well; all ranks raise together
                faults = [f"{type(error).__name__}: {error}"]
        reports = self._agree("materialize()", [int(torch.randint(1 << 62, (), device="cpu")), faults])
        if all_faults := list(dict.fromkeys(fault for _, of_rank in reports for fault in of_rank)):
            if source is None:
                raise UsageError(
                    listed("materialize() needs initialize=, a function of a module, because:", all_faults)
                )
            raise WeightsError(listed(f"the weights of {source} do not fit the model:", all_faults))
        fresh = allocate(self._roots(), self._device_of())
        if files is not None:
            files.fill(self, chosen)
        else:
            with self._showing_hidden():
                initialize_modules(self._roots(), fresh, initialize, reports[0][0], self.devices[0])
        return self

    def _roots(self) -> list[nn.Module]:
        """The modules of the model, from the outside."""
        return list(self)

    def _device_of(self) -> dict[int, torch.device]:
        """The device of each tensor, by its id()."""
        found: dict[int, torch.device] = {}
        where = [device for device, size in zip(self.devices, self.balance, strict=True) for _ in range(size)]
        for layer, device in zip(self, where, strict=True):
            for tensor in (*layer.parameters(), *layer.buffers()):
                found.setdefault(id(tensor), device)
        return found

    @property
    def group(self) -> "ProcessGroup | None":
        """The process group whose ranks run the stages; None in a single process."""
        return None

    def _showing_hidden(self) -> AbstractContextManager[None]:
        """Inside, tensors of other ranks are there as placeholders on the meta device."""
        return nullcontext()

    def _agree(self, what: str, report: Any) -> list[Any]:
        """The plain reports of all ranks, which call this together. `what` names the occasion in errors."""
        return [report]

    def statistics(self) -> dict[str, Any]:
        """Numbers about this pipe: layers per stage, worker threads alive, and what ``executor="auto"`` chose for each
        kind of step, which is told in words."""
        runtime = self._runtime
        return {
            "balance": list(self.balance),
            "devices": [str(device) for device in self.devices],
            "threads": 0 if runtime is None else runtime.plans.threads,
            "chosen": {} if runtime is None else runtime.layouts.chosen(),
        }

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([layer for _, layer in self._layers()])

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...
    def __getitem__(self, index: int | slice) -> nn.Module:
        """A layer; of a slice an `nn.Sequential` of the very same layers, under the same names."""
        layers = self._layers()[index]
        return layers[1] if isinstance(layers, tuple) else nn.Sequential(OrderedDict(layers))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runtime": None, "_checked": None, "_recipe": None, "_observer": None}

    def extra_repr(self) -> str:
        """What stands behind the class name when the pipe is printed."""
        stages = ", ".join(f"{size} on {device}" for size, device in zip(self.balance, self.devices, strict=True))
        unnamed = "a function" if callable(self.schedule) else "a table"
        schedule = self.schedule if self.schedule in SCHEDULES else unnamed
        loss = None if self._loss[0] is None else getattr(self._loss[0], "__name__", type(self._loss[0]).__name__)
        words = f"chunks={self.chunks}, schedule={schedule!r}, loss={loss}, checkpoint={self.checkpoint!r}"
        return f"stages: {stages}; {words}, executor={self.executor!r}"

    def _layers(self) -> list[tuple[str, nn.Module]]:
        return [(name, layer) for name, layer in self._modules.items() if layer is not None]

    def _settings(self) -> tuple[Any, ...]:
        """All that a user may have set anew since the last step, with copies of the lists."""
        lists = map(frozen, (self.balance, self.devices, self.checkpoint))
        return (type(self.chunks), self.chunks), self._layers(), self.executor, self.schedule, *lists

    def _made_runtime(self) -> PipeRuntime:
        """The runtime for the settings as they are now. Raises what the constructor raises if they do not fit."""
        if self._runtime is not None and self._checked == self._settings():
            return self._runtime
        with Validator("this Pipe cannot be used") as check:
            stages = self._check_layout(check)
            check_settings(check, stages, self.chunks, self.executor, *self._loss, self.schedule, self.checkpoint)
        settings = self._settings()
        allows_external_loss = build(self.schedule, stages, self.chunks).allows_external_loss
        recipe = (*settings[1:], allows_external_loss)  # another number of chunks needs no other threads
        if self._runtime is None or self._recipe != recipe:  # such as another module in the place of a layer
            self._runtime = self._new_runtime(allows_external_loss)
        self._checked, self._recipe = settings, recipe
        return self._runtime

    def _new_runtime(self, allows_external_loss: bool) -> PipeRuntime:
        built = self._built_stages()
        return PipeRuntime(
            *built,
            self.checkpoint,
            self.executor,
            *self._loss,
            self._loss_weight,
            self._dims,
            allows_external_loss=allows_external_loss,
        )

    def _check_layout(self, check: Validator) -> int:
        """Note what is wrong with `balance` and `devices` as they are now; the number of stages."""
        sizes, places = check.call(sizes_of, self.balance), check.call(places_of, self.devices)
        if sizes is not None and places is not None:
            layout = check.call(checked_layout, sizes, places, len(self._layers()))
            self.balance, self.devices = layout or (self.balance, self.devices)
        return len(sizes or ())

    def _built_stages(self) -> tuple[list[Stage], Crossing]:
        """The stages, and what crosses between them."""
        return build_stages(self._layers(), self.balance, self.devices, self._stage_type, self.partitions)


def _forbid_pipes(module: Any, split: Any) -> None:
    """Raise SpecError for a model that is a pipe, or has one around a split point, or one over processes inside."""
    points = [str(point) for point in cast("list[Any]", split)] if isinstance(split, list | tuple) else []
    for name, each in cast(Any, module).named_modules() if isinstance(module, nn.Module) else ():
        if isinstance(each, Pipe) and (not name or any(point.startswith(f"{name}.") for point in points)):
            raise SpecError(
                f"{name or 'the model'} is a Pipe already, which cannot be cut again; give the model itself"
            )
        if isinstance(each, Pipe) and each.group is not None:
            raise SpecError(
                f"{name} is a Pipe over processes, which all ranks must call, but a stage runs on one rank; "
                "call that Pipe before or after this one"
            )


def frozen(value: Any) -> Any:
    """A copy of a list, which may be changed in place."""
    lists = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(cast("Iterable[Any]", value)) if lists else cast(Any, value)
