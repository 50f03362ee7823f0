"""Pipe: a model cut into stages that trains under a plain ``loss.backward()``.

    Pipe       the user's settings, the check of them at each step, the current runtime
    layout     how the model is cut, and where its tensors are (sequential.py lists the kinds)
    runtime    stages, plans and worker threads (pipe_runtime.py)

The layers stay visible to the user: same keys in `state_dict`, same parameters, same hooks. The runtime is built at the
first step and freed with the pipe.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import nn

from torchweft.core.autograd import graph_break, reject_exporting, reject_tracing
from torchweft.core.errors import SpecError, UsageError, WeightsError, join_faults, shorten_traceback
from torchweft.core.rng import new_seed
from torchweft.core.validation import Validator
from torchweft.pipeline.config import (
    NO_GROUP,
    BatchDim,
    BatchDims,
    Checkpoint,
    CheckpointRule,
    OutputBatchDim,
    check_settings,
    reduction_of,
    resolve_group,
    suggest_arguments,
    warn_of_batch_norm,
)
from torchweft.pipeline.devices import reject_absent_cuda, requested_devices
from torchweft.pipeline.loss import LossFunction, LossScale, LossWeight
from torchweft.pipeline.microbatch import micro_sizes
from torchweft.pipeline.own_loss import OwnLoss
from torchweft.pipeline.pipe_runtime import NO_LOSS, NO_TARGET, PipeCall, PipeRuntime
from torchweft.pipeline.schedule import SCHEDULES, Schedule, ScheduleFunction, build
from torchweft.pipeline.sequential import NO_ROUTES, FixedSettings, LayoutArguments, PipeLayout
from torchweft.pipeline.split.huggingface import forward_like, split_by_device_map, takes_count
from torchweft.pipeline.stage import CallArguments
from torchweft.pipeline.tracing import Observer, observer_of_new
from torchweft.pipeline.weights import Initialize, WeightFiles, allocate, find_uninitializable, initialize_modules

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from torchweft.pipeline.split.split_pipe import SplitLayout

_SHARED_TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
_set_class: Callable[[object, type[Any]], None] = vars(object)["__class__"].__set__


class _ModelSignature:
    """A `forward` method with the signature of the wrapped model. An instance attribute can replace it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, pipe: Any, owner: type[Any]) -> Callable[..., Any]:
        if pipe is None:
            return self._function
        state = pipe.__dict__
        if "module" not in state:
            return MethodType(self._function, pipe)
        if state.get("_signed_forward") is None:
            state["_signed_forward"] = forward_like(self._function, cast("type[nn.Module]", type(state["module"])))
        return MethodType(state["_signed_forward"], pipe)


class Pipe(nn.Module):
    """A model cut into stages, which work on different micro-batches of one mini-batch at the same time.

    Args:
        module: the model. The layers of an `nn.Sequential` become children of the pipe, under the same names. Any other
            model is cut by `split`, and keeps its parameters, keys, ties, hooks and attributes.
        chunks: the number of micro-batches per mini-batch (fewer if it has fewer rows).
        batch_dim: the batch axis, 0 by default: an int for all tensors that go in and come out, or a tuple or dict with
            an entry per argument, by position and keyword (``"target"`` is one). An entry is an int, nested as the
            argument is, or ``None`` for an argument that every micro-batch needs whole.
        output_batch_dim: the batch axis of the output, or axes nested as it is. Default: `batch_dim`, if that is an
            int.
        devices: one per stage, with repetitions: ``["cpu", "cpu"]`` runs two workers. Default, also by ``"auto"``: all
            CUDA devices, or else the CPU twice. A number: so many CUDA devices, or the CPU so many times. Layers are
            moved there, except those on the meta device.
        balance: the number of layers of each stage. Default: balanced over the devices by the time of each layer for
            `sample`, or without a sample by the number of parameters, a rough guess.
        checkpoint: the forwards that backward recomputes, to save memory: ``"never"``, ``"except_last"`` (all but the
            last micro-batch), ``"always"``, a list of these with one per stage, or a function ``(stage, micro_batch,
            micro_batches) -> bool``. A forward whose backward follows at once is not recomputed.
        deferred_batch_norm: convert batch norms into `DeferredBatchNorm`, with the statistics of the whole mini-batch.
        schedule: a name of `weft.pipeline.SCHEDULES`, a table as text (see `weft.Schedule.parse`), a `weft.Schedule`,
            or a function (stages, micro_batches) -> `weft.Schedule`.
        loss: a function ``(output, target) -> number``. With it, ``pipe(x, target=y)`` returns the loss, and schedules
            that begin backward early (1F1B) can run. The parameters of an `nn.Module` are trained too. It can return a
            pair (number, extras). Extras have no graph. Their tensors are joined along the batch axis, integers are
            summed, and other numbers are combined as the losses are.
        loss_reduction: how the loss function reduces rows, ``"mean"`` or ``"sum"``. Default: the loss's own
            ``reduction``, else ``"mean"``. With `split` and without a loss: how numbers in the model's output, such as
            its own loss, are combined. Default: the one that gives the model's numbers for all rows.
        loss_weight: a function ``target -> number``, the denominator of a mean loss over a micro-batch. Default: that
            of PyTorch for its cross entropies, and else the number of rows. A target with padding (-100, or a mask
            among other tensors) is then rejected.
        loss_scale: the factor of the loss before ``backward()``, a number or a function such as the ``get_scale`` of a
            `torch.amp.GradScaler`, for schedules that begin backward early. Default: that of the last step.
        executor: ``"threads"`` (one worker per stage), ``"serial"``, ``"auto"`` (measures both on the first steps and
            keeps the faster one), ``"graph"`` (plain autograd, for gradients of gradients) or ``"cuda_graph"`` (after
            two equal steps, the whole step is one recording that the GPU repeats).
        sample: an input, used only for balancing. With `split`: a micro-batch, as a dict of named arguments, a tuple of
            positional arguments, or the only argument.
        split: names of submodules. The model is cut before the first call of each (see docs/which_models.md). Or
            ``"auto"``: one stage per device, by measured time for `sample`, or by parameters without a sample. Or
            ``"device_map"``: a stage for each device of the ``device_map=`` with which the model was loaded.
        verify: compare every recorded program of the model's forward() once with forward() itself.
        group: a process group, or a one-dimensional `DeviceMesh`, of `torch.distributed`. Rank k runs the stages of
            worker k of the schedule, keeps their parameters, and runs the same script. The input counts on the rank of
            the first stage, the target on that of the last. `devices` is then the device of this rank. None is refused
            under torchrun, because the group of a script without ``init_process_group()`` is None.
        output: with `group`, the ranks that get the output of ``pipe(x)``: ``"all"``, or ``"last"``, the rank of the
            last stage. The other ranks then get a zero, so that they can call ``backward()``. All ranks get a loss.
        check_batches: with `group`, compare checksums of the mini-batch where several ranks are given it: in the first
            10 steps, in every 100th, and at each new number of rows. BatchError is raised on all ranks if they differ.

    `chunks`, `balance`, `split`, `devices`, `checkpoint`, `schedule` and `executor` can also be assigned as attributes.
    Each step re-reads and validates them. Layers do not move when `balance` or `devices` change. With `group`,
    UsageError is raised if `batch_tag` (any value, set before each call) differs between ranks.

    All executors and schedules give the same gradients as the undivided model, to rounding. The random numbers of a
    layer depend only on its place in the model and the micro-batch (with hooks on `partitions`, also on the cut).
    Raises SpecError, SkipWiringError, PartitionError, ScheduleError or UsageError for invalid arguments.

    The design is GPipe's (Huang et al., arXiv 1811.06965) as torchgpipe brought it to PyTorch (Kim et al., arXiv
    2004.09910). 1F1B is PipeDream-Flush's (Narayanan et al., arXiv 2104.04473).

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        >>> pipe = weft.Pipe(model, chunks=4, balance=[2, 1], devices=["cpu", "cpu"])
        >>> pipe(torch.randn(16, 8)).square().mean().backward()
        >>> model[0].weight.grad.shape
        torch.Size([32, 8])
    """

    module: Any  # the wrapped model, only with `split`
    split: Any
    verify: Any

    @suggest_arguments
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
        executor: Literal["auto", "serial", "threads", "graph", "cuda_graph"] = "auto",
        sample: Any = None,
        split: Sequence[str] | Literal["auto", "device_map"] | None = None,
        verify: bool = True,
        group: "ProcessGroup | DeviceMesh | None" = NO_GROUP,
        output: Literal["all", "last"] = "all",
        check_batches: bool = True,
    ) -> None:
        super().__init__()
        reduction, group = None, resolve_group(group)
        if split == "device_map":
            split, loaded = split_by_device_map(module)
            devices = loaded if devices is None and group is None else devices
        devices = requested_devices(devices, grouped=group is not None)
        _reject_pipes(module, split)
        self._layout = _new_layout(grouped=group is not None, split=split is not None)
        arguments = LayoutArguments(
            balance, devices, sample, split, verify, group, executor, schedule, chunks, loss_scale, check_batches
        )
        with Validator("this Pipe cannot be used") as check:
            dims = check.call(BatchDims, batch_dim, output_batch_dim)
            cuts = self._layout.resolve(check, module, dims, arguments)
            check.choice("output", output, ("all", "last"))
            alone = group is None
            check.require(not alone or output == "all", "output='last' is for a pipe over processes (group=)")
            check.require(not alone or check_batches is True, "check_batches is for a pipe over processes (group=)")
            of_numbers = loss_reduction if loss is None and split is not None else None
            counts_items = split is not None and loss is None and of_numbers is None and takes_count(module)
            inside = OwnLoss() if of_numbers or counts_items else loss
            check_settings(
                check, cuts.stages, chunks, executor, inside, loss_reduction, schedule, checkpoint, deferred_batch_norm
            )
            if loss_reduction in (None, "mean", "sum"):
                of_loss = None if of_numbers else loss_reduction
                reduction = check.call(reduction_of, loss, of_loss, loss_weight)
            scale = check.call(LossScale, loss_scale, loss)
        assert dims is not None and reduction is not None and scale is not None  # else there was a fault
        self.balance: Any = cuts.balance
        self.devices: Any = cuts.devices
        self.chunks: Any = chunks
        self.checkpoint: Any = checkpoint
        self.schedule: Any = schedule
        self.executor: Any = executor
        self.output: Any = output
        self.batch_tag: Any = None
        # Not a child: the user saves the parameters of a loss module, and the keys stay those of the model.
        self._fixed = FixedSettings(
            dims, loss, reduction, loss_weight, scale, "sum" if counts_items else of_numbers, counts_items
        )
        self._observer: Observer | None = observer_of_new(self)
        self._runtime: PipeRuntime | None = None
        self._checked: Any = None  # the state of the settings when they were last validated
        self._recipe: Any = None  # the part of that state which the runtime was built from
        if split is not None:
            self.split, self.verify = split, verify
            self._wrap_model(module)
        # Straight into the table, because a layer can be named like one of the pipe's attributes.
        self._modules.update(self._layout.take_model(self._fixed, self, module, deferred=deferred_batch_norm))
        if split is not None:
            self.split = self._layout.split_points(self, sample, Pipe)
            with Validator("this Pipe cannot be used") as check:
                _, self.balance, self.devices = self._layout.check_cuts(check, self, ())
        self._layout.place(self, self._current_runtime, sample)
        self.training = module.training  # of the pipe itself: each layer can have another mode
        self._layout.introduce(self)
        warn_of_batch_norm(self, chunks)

    def _wrap_model(self, model: nn.Module) -> None:
        # Not a child, or its keys would get a prefix.
        self.__dict__["module"] = model
        # The model's own tables: same keys, same objects, same ties.
        for table in _SHARED_TABLES:
            self.__dict__[table] = getattr(model, table)

    @cast("Callable[[Any], Any]", _ModelSignature)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output for a mini-batch, or its loss if the pipe has a `loss` and gets ``target=``.

        The first layer gets the arguments, of which tensors are cut along their batch axis. Wrap an argument in
        `weft.NoChunk` if every micro-batch needs it whole.

        Raises BatchError if the mini-batch cannot be cut or the outputs cannot be joined. Raises SpecError or
        UsageError if `batch_dim` does not fit. Raises DeviceError if a layer is not on the device of its stage. An
        exception of a layer passes through, with a note that names the layer.
        """
        reject_exporting()
        if torch.compiler.is_dynamo_compiling():
            return graph_break(self._forward, args, kwargs)
        try:
            with self._layout.telling():
                return self._forward(args, kwargs)
        except Exception as error:
            shorten_traceback(error)
            raise

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reject_tracing(args, kwargs)
        has_target = self._fixed.loss is not None and "target" in kwargs
        lacks_target = self._fixed.loss is not None and not has_target
        targets = (kwargs.pop("target"),) if has_target else ()
        try:
            result = self._step(args, kwargs, targets)
        except TypeError as error:
            unknown = "unexpected keyword argument" in str(error)
            if self._fixed.loss is None and unknown and "'target'" in str(error):
                raise UsageError(NO_LOSS) from None
            if lacks_target and (unknown or len(args) > 1):
                error.add_note("torchweft: the pipe has a loss; did you mean target=? As in pipe(x, target=y)")
            raise
        if lacks_target and self.training and torch.is_grad_enabled():
            warnings.warn(NO_TARGET, stacklevel=5)
        return result

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> Any:
        if self._wraps_model:
            layout = cast("SplitLayout", self._layout)
            return layout.run_step(self, self._current_runtime, args, kwargs, targets, self._observer)
        self._layout.reject_other_source()
        runtime, fixed = self._current_runtime(), self._fixed
        axes = fixed.dims.whole
        request = PipeCall(
            args[0] if len(args) == 1 and not kwargs else CallArguments(args, kwargs),
            targets,
            self._layout.axes(args, kwargs, target=bool(targets)) if axes is None else axes,
            self.chunks,
            self.schedule,
            self._observer,
            fixed.loss_scale,
            batch_tag=self.batch_tag,
            given=(args, kwargs),
        )
        return runtime.serve(request, training=self.training)

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The stages as `nn.Sequential` of the very same layers. Hooks on one run for every micro-batch. They are the
        same objects until layers or `balance` change. Raises UsageError with `split`."""
        return self._layout.partitions(self, self._layers())

    @property
    def routes(self) -> Any:
        """With `split`, the values that cross between stages in the last step, or for `sample`: name, bytes per
        micro-batch, source, readers. Raises UsageError before either, and AttributeError without `split`."""
        return self._layout.routes

    def schedule_for(self, rows: int) -> Schedule:
        """The schedule of a mini-batch with this number of rows, with all stages separate."""
        return build(self.schedule, len(self.balance), len(micro_sizes(rows, self.chunks)))

    @contextmanager
    def observed_by(self, observer: Observer) -> Generator[None]:
        """Report every action to `observer`, e.g. a `weft.Recorder`. While it is attached, stages run as separate
        segments. Raises UsageError for other objects, and under ``executor="graph"``, which has no stages to observe.
        """
        if isinstance(observer, type) or not isinstance(cast(Any, observer), Observer):
            raise UsageError(f"an observer of a pipe is a weft.Recorder or the like, but this is {observer!r}")
        if self.executor == "graph":
            raise UsageError(
                "executor='graph' leaves backward to autograd, which does not know stages and micro-batches; set "
                "pipe.executor to 'serial' or 'threads' for the steps to observe"
            )
        before, self._observer = self._observer, observer
        try:
            yield
        finally:
            self._observer = before

    def materialize(
        self, source: str | PathLike[str] | Initialize | None = None, initialize: Initialize | None = None
    ) -> "Pipe":
        """Allocate parameters and buffers on the meta device, each on the device of its stage.

        Args:
            source: a safetensors file, its index (``model.safetensors.index.json``), or a folder with either. It must
                have the whole state_dict. With `group`, each rank reads its own tensors only.
            initialize: without a source, a function that is called with every module that was allocated. Default: its
                ``reset_parameters()``. Each module has its own seed, by its place and PyTorch's generator (with
                `group`, that of the first rank).

        Parameters are then new objects, so create the optimizer afterwards. Raises WeightsError that lists all missing
        keys, unexpected keys and wrong shapes, and UsageError if a module cannot be initialized.
        """
        if callable(source):
            source, initialize = None, source
        with self._layout.telling():
            self._materialize(source, initialize)
            # All ranks leave together: one that fails while it reads is an error of this call on all of them.
            self._exchange_reports("the end of materialize()", None)
        return self

    def _materialize(self, source: str | PathLike[str] | None, initialize: Initialize | None) -> None:
        files, chosen, faults = None, {}, []
        roots = [self.module] if self._wraps_model else list(self)
        with self._with_placeholders():
            known = set(self.state_dict())
        if source is None:
            faults = find_uninitializable(roots) if initialize is None else []
        elif initialize is not None:
            raise UsageError("give materialize() either source, or initialize")
        else:
            try:
                files = WeightFiles(source)
                chosen, faults = files.match(self, known)
            except ModuleNotFoundError:
                raise
            except Exception as error:  # of a damaged file too, because all ranks must raise together
                faults = [f"{type(error).__name__}: {error}"]
        # All ranks raise together. One that went on alone would wait for the others.
        reports = self._exchange_reports("materialize()", [new_seed(), faults])
        if all_faults := list(dict.fromkeys(fault for _, of_rank in reports for fault in of_rank)):
            if source is None:
                raise UsageError(
                    join_faults("materialize() needs initialize=, a function of a module, because:", all_faults)
                )
            raise WeightsError(join_faults(f"the weights of {source} do not fit the model:", all_faults))
        allocated = allocate(roots, self._layout.devices_by_tensor(self, self._layers()))
        if files is not None:
            files.fill(self, chosen)
        else:
            with self._with_placeholders():
                initialize_modules(roots, allocated, initialize, reports[0][0], self.devices[0])
        if self._wraps_model:
            self._runtime = None  # its stages refer to the tensors that were replaced

    @property
    def group(self) -> "ProcessGroup | None":
        """The process group of the ranks that run the stages, or None in a single process."""
        return self._layout.group

    def _with_placeholders(self) -> AbstractContextManager[None]:
        return self._layout.with_placeholders()

    def _telling(self) -> AbstractContextManager[None]:
        return self._layout.telling()

    def _lost_ranks(self) -> list[str]:
        return self._layout.lost_ranks()

    def _exchange_reports(self, occasion: str, report: Any) -> list[Any]:
        return self._layout.exchange_reports(occasion, report)

    def statistics(self) -> dict[str, Any]:
        """Figures of this pipe: layers per stage, devices, live worker threads, and the choices of
        ``executor="auto"``; steps that were replayed as CUDA graphs, and why others were not. With `split`: the blocks
        of each stage, and how often forward() was recorded. With `group`: also the bytes sent."""
        of_layout, runtime = self._layout.statistics(self), self._runtime
        return {
            **of_layout,
            "devices": [str(device) for device in self.devices],
            "threads": 0 if runtime is None else runtime.plans.threads,
            "chosen": {} if runtime is None else runtime.layouts.chosen(),
            **({} if runtime is None else runtime.graphs.statistics()),
        }

    def train(self, mode: bool = True) -> "Pipe":
        if not self._wraps_model:
            return super().train(mode)
        self.module.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Pipe":
        try:
            return super()._apply(fn, recurse)
        except (AssertionError, RuntimeError) as error:
            reject_absent_cuda(error)
            raise

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        of_pipe = cast(Any, super()).state_dict
        return (self.module.state_dict if self._wraps_model else of_pipe)(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load like `nn.Module`. With `group`, keys of other ranks are ignored, so a rank can load the whole state."""
        load = self.module.load_state_dict if self._wraps_model else super().load_state_dict
        if not self._layout.hides_tensors:
            return load(state_dict, strict, assign)
        with self._with_placeholders():
            hidden = set(self.state_dict())
        hidden -= set(self.state_dict())
        # Not strict here: PyTorch would call the keys of other ranks unexpected. Strictness is checked below.
        result: Any = load(state_dict, False, assign)
        unexpected: list[str] = [key for key in result.unexpected_keys if key not in hidden]
        missing: list[str] = result.missing_keys
        faults = [f"{key}: missing" for key in missing] + [f"{key}: unexpected" for key in unexpected]
        if strict and faults:
            raise WeightsError(join_faults("the state_dict does not fit the part of the model on this rank:", faults))
        return type(result)(missing, unexpected)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([layer for _, layer in self._layers()])

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...
    def __getitem__(self, index: int | slice) -> nn.Module:
        """A layer. For a slice, an `nn.Sequential` of the very same layers, under the same names."""
        layers = self._layers()[index]
        return layers[1] if isinstance(layers, tuple) else nn.Sequential(OrderedDict(layers))

    @property
    def _wraps_model(self) -> bool:
        return "module" in self.__dict__

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # The property raised this. Python discards its message, and torch.jit.trace allows no other class of error.
            if name == "routes" and "module" not in self.__dict__:
                raise AttributeError(NO_ROUTES) from None
            if name.startswith("__") or "module" not in self.__dict__:
                raise
            return getattr(self.module, name)

    # Hugging Face: see split/huggingface.py for the reason of these.
    @property
    def __class__(self) -> type[Any]:
        return cast("type[Any]", type(self.__dict__.get("module", self)))

    @__class__.setter
    def __class__(self, kind: type[Any]) -> None:
        # `fully_shard` assigns a class that inherits from FSDPModule and the reported class. The pipe must stay a pipe.
        if self._wraps_model:
            bases = tuple(type(self) if base is self.__class__ else base for base in kind.__bases__)
            kind = type(kind.__name__, bases, dict(vars(kind)))
        _set_class(self, kind)

    @property
    def hf_device_map(self) -> dict[str, str]:
        """With `split`, the device of each stage if there are several, so that Trainer does not move the pipe."""
        if not self._wraps_model:
            raise AttributeError("hf_device_map")
        names: list[str] = ["", *self.split]
        return dict(zip(names, map(str, self.devices), strict=True)) if len(set(self.devices)) > 1 else {}

    @hf_device_map.setter
    def hf_device_map(self, device_map: dict[str, Any]) -> None:
        # By accelerate.dispatch_model(). If it moved a block, the next step raises DeviceError.
        self.module.hf_device_map = device_map

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the layout, because a shallow copy of the pipe must not share it.
        fresh = {"_runtime": None, "_checked": None, "_recipe": None, "_observer": None, "_signed_forward": None}
        return {**self.__dict__, **fresh, "_layout": copy.copy(self._layout)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._wraps_model:
            return super().__reduce_ex__(protocol)
        # The default fails, because pickle compares the class of the rebuilt object with __class__.
        return object.__new__, (type(self),), self.__getstate__()

    def __repr__(self) -> str:
        return f"Pipe of {super().__repr__()}" if self._wraps_model else super().__repr__()

    def extra_repr(self) -> str:
        stages = ", ".join(f"{size} on {device}" for size, device in zip(self.balance, self.devices, strict=True))
        unnamed = "a function" if callable(self.schedule) else "a table"
        schedule = self.schedule if self.schedule in SCHEDULES else unnamed
        function = self._fixed.loss
        loss = None if function is None else getattr(function, "__name__", type(function).__name__)
        words = f"chunks={self.chunks}, schedule={schedule!r}, loss={loss}, checkpoint={self.checkpoint!r}"
        split = f"split={self.split}, " if self._wraps_model else ""
        return f"{split}stages: {stages}; {words}, executor={self.executor!r}"

    def _layers(self) -> list[tuple[str, nn.Module]]:
        return [(name, layer) for name, layer in self._modules.items() if layer is not None]

    def _settings_state(self) -> tuple[Any, ...]:
        lists = map(frozen, (self.balance, self.devices, self.checkpoint))
        of_layout = self._layout.key(self) if self._wraps_model else ()
        return (type(self.chunks), self.chunks), self._layers(), self.executor, self.schedule, *lists, *of_layout

    def _current_runtime(self, *, compare: bool = True) -> PipeRuntime:
        """Return the runtime for the current settings. Raises the errors of the constructor if they do not fit."""
        if self._runtime is not None and self._checked == self._settings_state():
            return self._runtime
        fixed, layers = self._fixed, self._layers()
        with Validator("this Pipe cannot be used") as check:
            stages, self.balance, self.devices = self._layout.check_cuts(check, self, layers)
            of_loss = fixed.inside, fixed.reduction
            check_settings(check, stages, self.chunks, self.executor, *of_loss, self.schedule, self.checkpoint)
        state = self._settings_state()
        allows_external_loss = build(self.schedule, stages, self.chunks).allows_external_loss
        recipe = (*state[1:], allows_external_loss)  # another number of chunks needs no other threads
        if self._runtime is None or self._recipe != recipe:
            self._runtime = self._layout.new_runtime(self, layers, allows_external_loss=allows_external_loss)
            self._recipe = recipe
        self._layout.compare_settings(self, layers, state, compare=compare)
        self._checked = state  # only now, so that a failed comparison is repeated
        return self._runtime


def _new_layout(*, grouped: bool, split: bool) -> PipeLayout:
    # Imported here because most programs need only the first kind.
    if grouped and split:
        from torchweft.pipeline.processes.split_process_pipe import ProcessSplitLayout as kind  # noqa: PLC0415
    elif grouped:
        from torchweft.pipeline.processes.process_pipe import ProcessLayout as kind  # noqa: PLC0415
    elif split:
        from torchweft.pipeline.split.split_pipe import SplitLayout as kind  # noqa: PLC0415
    else:
        kind = PipeLayout
    return kind()


def frozen(value: Any) -> Any:
    # A copy, because the owner can change a list in place.
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(cast("Iterable[Any]", value)) if is_list else cast(Any, value)


def _reject_pipes(module: Any, split: Any) -> None:
    points = [str(point) for point in cast("list[Any]", split)] if isinstance(split, list | tuple) else []
    for name, child in cast(Any, module).named_modules() if isinstance(module, nn.Module) else ():
        if isinstance(child, Pipe) and (not name or any(point.startswith(f"{name}.") for point in points)):
            raise SpecError(
                f"{name or 'the model'} is a Pipe already, which cannot be cut again; give the model itself"
            )
        if isinstance(child, Pipe) and child.group is not None:
            raise SpecError(
                f"{name} is a Pipe over processes, which all ranks must call, but a stage runs on one rank; "
                "call that Pipe before or after this one"
            )
