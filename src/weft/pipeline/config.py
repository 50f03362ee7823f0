"""The arguments of a Pipe: axes, layers, balance, devices, checkpointing, schedule, loss. Checked all at once.

`BatchDims` says which axis holds the rows, where a Pipe cuts its arguments and joins its outputs. A recurrent network
or an attention without ``batch_first=True`` has time on axis 0. Cut there, it would compute something else without any
error, so a Pipe with such a module is refused unless it was told about axes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, combinations, starmap
from operator import index
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from weft.core.errors import PartitionError, ScheduleError, SpecError, UsageError, listed
from weft.core.pytree import flatten
from weft.core.rng import require_supported
from weft.core.validation import Validator, is_whole
from weft.pipeline.loss import own_reduction
from weft.pipeline.partition import balance_by_parameters, balance_by_time
from weft.pipeline.schedule import SCHEDULES, Schedule, ScheduleFunction, build

BatchDim = int | tuple[Any, ...] | dict[int | str, Any]
OutputBatchDim = int | tuple[Any, ...] | list[Any] | dict[Any, Any]
Layers = Sequence[tuple[str, nn.Module]]

_ON_AXIS_0 = (_ConvNd, _NormBase, nn.GroupNorm)
_KEEP_AXES = (nn.Linear, nn.Embedding, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.Dropout)
OTHER_AXES = (
    "these modules have their batch on another axis than batch_dim or output_batch_dim says; change one of them, or if "
    "a module beside them swaps axes, put both into one module:"
)


class BatchDims:
    """The batch axis of every argument and of every output.

    `arguments` and `outputs` are a Pipe's ``batch_dim`` and ``output_batch_dim``. Raises UsageError that lists every
    entry which is no axis.
    """

    def __init__(self, arguments: Any, outputs: Any) -> None:
        self.assumed = arguments is None
        self.whole: int | None = (arguments or 0) if arguments is None or is_whole(arguments) else None
        self._by_name: dict[Any, Any] = {}
        self.outputs: Any = self.whole if outputs is None else outputs
        self.outputs_assumed = outputs is None
        with Validator("these axes make no sense; each is counted from the front") as check:
            if isinstance(arguments, dict):
                self._by_name = dict(cast("dict[Any, Any]", arguments))
            elif isinstance(arguments, list | tuple):
                self._by_name = dict(enumerate(cast("Sequence[Any]", arguments)))
            elif self.whole is None:
                check.add(f"batch_dim is {arguments!r}, wanted an int, a tuple, or a dict by position and keyword")
            _check_axes(check, "batch_dim", self._by_name or self.whole, none=True)
            if self.outputs is None:
                check.add("output_batch_dim is missing; batch_dim is nested, so it does not tell that of the output")
            else:
                _check_axes(check, "output_batch_dim", self.outputs, none=False)

    @property
    def first(self) -> Any:
        """The axis of the first positional argument, or those of what is nested in it."""
        return self._by_name.get(0) if self.whole is None else self.whole

    @property
    def extras(self) -> int:
        """The axis of what a loss returns beside its number."""
        return self.outputs if isinstance(self.outputs, int) else 0

    @property
    def arguments(self) -> Any:
        """The axes of the arguments, as a Pipe's ``batch_dim``."""
        return self._by_name if self.whole is None else self.whole

    def of_call(self, positional: int, keywords: Collection[str], *, target: bool, nested: bool = False) -> Any:
        """The axes of a call, nested as its mini-batch (with the target) is; a single positional argument stands for
        itself, or `nested` in args and kwargs like others. Raises UsageError for what is missing."""
        if self.whole is not None:
            return self.whole
        names: list[int | str] = [*range(positional), *keywords, *(["target"] if target else [])]
        if missing := [name for name in names if name not in self._by_name]:
            raise UsageError(
                listed(
                    "batch_dim says nothing of these arguments; name them all, as in {0: 1, 'mask': 0, 'target': 1}:",
                    [f"argument {name!r}" for name in missing],
                )
            )
        found = [self._by_name[name] for name in names]
        arguments = (tuple(found[:positional]), {name: self._by_name[name] for name in keywords})
        main = found[0] if positional == 1 and not keywords and not nested else arguments
        return (main, found[-1]) if target else main


def _check_axes(check: Validator, name: str, value: Any, *, none: bool) -> None:
    for each in flatten(value)[0]:
        check.that(
            (is_whole(each) and each >= 0) or (each is None and none), f"{name} has {each!r}, wanted an int from 0 up"
        )


def check_batch_dims(layers: Layers, dims: BatchDims) -> None:
    """Raise UsageError that names each module whose batch is known to be on another axis.

    Where nothing was said of axes, that is every module anywhere in the layers with its batch not on axis 0: what is
    around it may swap axes, but nobody can see it. Where it was said, only those that the arguments reach, or that
    the output comes from, through nothing but layers which are known to leave axes as they are. A last layer that
    returns states with their batch on another axis than its output must have them said.
    """
    forbid_other_axes(layers, dims)
    flat = [each for name, layer in layers for each in opened(name, layer)]
    faults: list[str] = []
    for value, ordered, words in (
        (dims.first, flat, "gets the input, cut along"),
        (dims.outputs, flat[::-1], "makes the output, joined along"),
    ):
        if is_whole(value):
            faults += [f"{fault}, but it {words} axis {value}" for fault in _reached(ordered, value)]
    if faults:
        raise UsageError(listed(OTHER_AXES, list(dict.fromkeys(faults))))
    if dims.outputs_assumed and flat:
        forbid_several_axes(*flat[-1])


def forbid_other_axes(layers: Layers, dims: BatchDims) -> None:
    """Raise UsageError that names every module with its batch on axis 1, if nothing was said of axes."""
    if dims.assumed and (found := [each for name, layer in layers for each in _anywhere(name, layer)]):
        headline = (
            "these modules have their batch on axis 1, and a Pipe cuts along axis 0 where nothing is said; make "
            "them with batch_first=True, or give Pipe batch_dim=1 if the rows of the model's input are there, or "
            "batch_dim=0 if its layers swap axes before and after these:"
        )
        raise UsageError(listed(headline, found))


def forbid_several_axes(name: str, layer: nn.Module) -> None:
    """Raise UsageError for a layer, whose result is the output, if that has its batch on several axes."""
    if axes := _several_axes(layer):
        raise UsageError(
            f"{name} ({type(layer).__name__}), the last layer, returns tensors with their batch on different axes; say "
            f"which, as in output_batch_dim={axes}, or let a layer after it return what is wanted"
        )


def batch_axis(module: nn.Module) -> int | None:
    """The axis of the module's input and output that holds the rows, if it is known."""
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        return batch_axis(module.layers[0])
    first = getattr(module, "batch_first", getattr(getattr(module, "self_attn", None), "batch_first", None))
    if isinstance(first, bool):
        return 0 if first else 1
    return 0 if isinstance(module, _ON_AXIS_0) else None


def _several_axes(module: nn.Module) -> str | None:
    """The axes of what the module returns, where they are known to differ, such as those of outputs and states."""
    axis = batch_axis(module)
    if isinstance(module, nn.RNNBase):  # its states have it on axis 1 in any case
        return "(0, 1)" if axis == 0 else None
    if isinstance(module, nn.MultiheadAttention) and axis == 1:
        return "(1, 0)"
    return "(1, 0, 1)" if axis == 1 and type(module).__module__.startswith("weft.recurrent.") else None


def _anywhere(name: str, module: nn.Module) -> Iterator[str]:
    """In words, the outermost modules with their batch on axis 1."""
    axis = batch_axis(module)
    if axis == 1:
        yield axis_in_words(name, module, axis)
    elif axis is None:
        for child, each in module.named_children():
            yield from _anywhere(f"{name}.{child}", each)


def opened(name: str, layer: nn.Module) -> Layers:
    """A layer as the layers that it is a sequence of."""
    if type(layer) is not nn.Sequential:
        return [(name, layer)]
    return [each for child, inner in layer.named_children() for each in opened(f"{name}.{child}", inner)]


def _reached(layers: Layers, axis: int) -> Iterator[str]:
    """In words, the modules with their batch on another axis, as far as axes are known to be left as they are."""
    for name, layer in layers:
        own = batch_axis(layer)
        if own not in (None, axis):
            yield axis_in_words(name, layer, own)
        if own is None and not keeps_axes(layer):
            return


def keeps_axes(module: nn.Module) -> bool:
    """Whether the module is known to leave all axes but the last one where they are."""
    return type(module) in _KEEP_AXES or type(module).__module__ == "torch.nn.modules.activation"


def axis_in_words(name: str, module: nn.Module, axis: int | None) -> str:
    """The batch axis of a module, in words."""
    return f"{name} ({type(module).__name__}) has its batch on axis {axis}"


Checkpoint = Literal["always", "except_last", "never"]
CheckpointRule = Callable[[int, int, int], bool]
"""``rule(stage, micro_batch, micro_batches)``: whether this forward keeps only its inputs and is recomputed."""

_FORWARD = cast(Any, nn.Sequential).forward
EXECUTORS = ("auto", "serial", "threads", "graph")
_RULES: dict[str, CheckpointRule] = {
    "always": lambda stage, micro_batch, micro_batches: True,
    "except_last": lambda stage, micro_batch, micro_batches: micro_batch < micro_batches - 1,
    "never": lambda stage, micro_batch, micro_batches: False,
}


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a sequential model with their names. Raises SpecError if it is something else, or has more."""
    if not isinstance(module, nn.Sequential) or "forward" in vars(module) or type(module).forward is not _FORWARD:
        raise SpecError(
            "Pipe takes an nn.Sequential, whose layers it can spread over stages, but this is "
            f"{type(module).__name__}, which is none or has a forward of its own; say where to cut it "
            "(split=['name of a submodule', ...] or split='auto'), or list its layers in an nn.Sequential, and use "
            "skippable layers for long connections"
        )
    if not len(module):
        raise SpecError("Pipe takes an nn.Sequential with at least one layer, but this one is empty")
    title = f"Pipe leaves the {type(module).__name__} itself behind, so what none of its layers has would be lost"
    with Validator(title, SpecError) as check:
        for name, each in chain(module._parameters.items(), module._buffers.items()):
            check.that(each is None, f"parameter or buffer {name!r}; put it into a layer")
        for name, table in vars(module).items():
            hooks = name.startswith("_") and name.endswith("_hooks") and bool(table)
            check.that(not hooks, f"{name[1:]}; register them with the pipe, for whole mini-batches, or with a layer")
    forbid_lazy(module)
    return list(module._modules.items())  # named_children would leave out a layer that stands there twice


def forbid_lazy(module: nn.Module) -> None:
    """Raise SpecError that lists parameters and buffers without a size."""
    if lazy := [name for name, each in chain(module.named_parameters(), module.named_buffers()) if is_lazy(each)]:
        raise SpecError(
            listed("lazy layers have no sizes yet, and cannot be spread; run the model once before Pipe gets it:", lazy)
        )


def checkpoint_rules(checkpoint: Any, stages: int) -> list[CheckpointRule]:
    """One rule per stage. Raises UsageError that lists every entry which is no mode."""
    wanted = f"checkpoint is one of {', '.join(_RULES)}, a list of them with one per stage, or a function"
    with Validator(f"{wanted} (stage, micro_batch, micro_batches) -> bool; but") as check:
        modes: list[Any] = []
        if isinstance(checkpoint, str) or callable(checkpoint):
            modes = [checkpoint] * stages
        elif check.that(isinstance(checkpoint, Iterable), f"it is {checkpoint!r}"):
            modes = list(cast("Iterable[Any]", checkpoint))
            check.that(len(modes) == stages, f"it has {len(modes)} entries for {stages} stages")
        for i, mode in enumerate(modes):
            check.that(callable(mode) or (isinstance(mode, str) and mode in _RULES), f"entry {i} is {mode!r}")
    return [_RULES[mode] if isinstance(mode, str) else mode for mode in modes]


def never_recomputes(checkpoint: Any) -> bool:
    """Whether no forward is recomputed, as far as the argument itself says so."""
    modes = [checkpoint] if isinstance(checkpoint, str) or callable(checkpoint) else checkpoint
    return all(mode == "never" for mode in modes)


def check_settings(
    check: Validator,
    stages: int,
    chunks: Any,
    executor: Any,
    loss: Any,
    reduction: Any,
    schedule: Any,
    checkpoint: Any,
    deferred_batch_norm: Any = False,
) -> None:
    """Note all that is wrong with these, as far as it can be told; `stages` is 0 where their number is not known."""
    counted = check.count("chunks", chunks)
    check.choice("executor", executor, EXECUTORS)
    fault = f"loss is {type(loss).__name__}; give a function or module (output, target) -> number"
    check.that(loss is None or callable(loss), fault)
    check.choice("loss_reduction", reduction, ("mean", "sum"), optional=True)
    names = ", ".join(map(repr, SCHEDULES))
    wanted = f"one of {names}, a table as text, a weft.Schedule, or a function (stages, micro_batches) -> Schedule"
    known = callable(schedule) or check.instance("schedule", schedule, (str, Schedule), wanted)
    check.boolean("deferred_batch_norm", deferred_batch_norm)
    if stages:
        check.call(checkpoint_rules, checkpoint, stages)
        if known:
            check.call(check_schedule, schedule, stages, chunks if counted else 1, loss)


def check_schedule(schedule: str | Schedule | ScheduleFunction, stages: int, chunks: int, loss: Any) -> None:
    """Raise ScheduleError if the schedule does not fit, UsageError if it needs a loss inside and has none."""
    table = build(schedule, stages, chunks)
    if not any(table.backward_only.workers):
        raise ScheduleError(
            "the schedule has no backward, so nothing could be trained by it; add B, or I and W, for every F "
            "(a pipe that is only evaluated leaves them out by itself)"
        )
    if loss is None and not table.splits:
        name = schedule if schedule in SCHEDULES else "this function" if callable(schedule) else "this table"
        raise UsageError(
            f"schedule {name!r} begins backward before forward has ended, but the loss is computed outside, after "
            "forward; give the Pipe a loss (loss=fn, then pipe(x, target=y)), or use schedule='gpipe'"
        )


def reduction_of(loss: Any, reduction: str | None, weight: Any = None) -> str:
    """How the losses of the micro-batches make that of the mini-batch: as said, or as the loss itself says.

    Raises UsageError if that is neither a mean nor a sum, and for a `weight` (``loss_weight=``) without a mean.
    """
    if loss is None:
        for name, value in (("loss_reduction", reduction), ("loss_weight", weight)):
            if value is not None:
                raise UsageError(f"{name} is {value!r}, but there is no loss; give the pipe one, or leave it out")
        return "mean"
    found = reduction or own_reduction(loss)
    if found not in ("mean", "sum"):
        raise UsageError(
            f"the loss has reduction {found!r}, but the loss of a micro-batch must be one number; "
            "use reduction 'mean' or 'sum'"
        )
    if weight is not None and (found == "sum" or not callable(weight)):
        raise UsageError(
            f"loss_weight is {weight!r}, wanted a function target -> number: what the mean over a micro-batch divides "
            f"by{', and no weights for losses that are added up (reduction sum)' * (found == 'sum')}"
        )
    return found


def cuda_devices() -> list[torch.device]:
    """Every CUDA device of this machine."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def resolve_layout(
    module: nn.Sequential,
    balance: Sequence[int] | None,
    devices: Sequence[str | int | torch.device] | str | int | torch.device | None,
    sample: Any,
) -> tuple[list[int], list[torch.device]]:
    """Layers per stage and one device per stage. Raises PartitionError that lists all faults.

    Without devices: every CUDA device if there are any, else the CPU. Without a balance: by measured time if
    there is a sample, else by the number of parameters; as many stages as devices (two on the CPU).
    """
    cuda = cuda_devices()
    sizes = None if balance is None else sizes_of(balance)
    here = cuda[: None if sizes is None else len(sizes)]
    here = here or [torch.device("cpu")] * (min(2, len(module)) if sizes is None else len(sizes))
    places = places_of(here if devices is None else devices)
    if sizes is not None:
        return checked_layout(sizes, places, len(module))
    stages = min(len(places), len(module))
    if sample is None:
        return balance_by_parameters(stages, module), places[:stages]
    return balance_by_time(stages, module, sample), places[:stages]


def checked_layout(
    sizes: Sequence[int], places: Sequence[torch.device], layers: int
) -> tuple[list[int], list[torch.device]]:
    """Layers per stage and one device per stage. Raises PartitionError that lists all faults."""
    stages = len(sizes)
    with Validator("these layers cannot be spread as asked", PartitionError) as check:
        for i, size in enumerate(sizes):
            check.that(size > 0, f"stage {i} has {size} layers, but needs at least one")
        fault = f"balance {list(sizes)} places {sum(sizes)} layers, but the module has {layers}"
        check.that(sum(sizes) == layers, fault)
        fault = (
            f"balance has {stages} stages, but there are {len(places)} devices; give one per stage, which may repeat"
        )
        check.that(stages == len(places), f"{fault}, as in devices=['cpu'] * {stages}")
    return list(sizes), list(places)


def sizes_of(balance: Any) -> list[int]:
    """A balance as numbers of layers. Raises PartitionError that lists what is no whole number."""
    wanted = "a balance is a list with the number of layers of each stage, each an int; but"
    if not isinstance(balance, Iterable) or isinstance(balance, str | Mapping | Set):
        raise PartitionError(f"{wanted} it is {balance!r}")
    sizes: list[int] = []
    with Validator(wanted, PartitionError) as check:
        for stage, size in enumerate(cast("Iterable[Any]", balance)):
            try:
                sizes.append(index(size))  # also of NumPy and of a tensor
                valid = not isinstance(size, bool)
            except TypeError:
                valid = False
            check.that(valid, f"that of stage {stage} is {size!r}")
    return sizes


def places_of(devices: Any) -> list[torch.device]:
    """Devices as tensors report them. Raises UsageError that lists what is none."""
    given = [devices] if isinstance(devices, str | int | torch.device) else devices
    wanted = "devices are names such as 'cpu' or 'cuda:1', numbers, or torch.device, one per stage; but"
    if not isinstance(given, Iterable):
        raise UsageError(f"{wanted} it is {devices!r}")
    places: list[torch.device] = []
    with Validator(wanted) as check:
        for stage, each in enumerate(cast("Iterable[Any]", given)):
            try:
                device = torch.device(each)
                if device.type != "cuda" or (device.index or 0) < torch.cuda.device_count():
                    places.append(_indexed(device))
                else:
                    count = torch.cuda.device_count()
                    check.add(f"that of stage {stage} is {each!r}, and the number of CUDA devices here is {count}")
            except (TypeError, RuntimeError):
                check.add(f"that of stage {stage} is {each!r}")
        for place in dict.fromkeys(places):
            check.call(require_supported, place)
        for pair in combinations([place for place in dict.fromkeys(places) if place.type == "cuda"], 2):
            check.call(require_peer_access, *pair)
    return places


def require_peer_access(one: torch.device, other: torch.device) -> None:
    """Raise UsageError for two GPUs of which one cannot read the memory of the other."""
    if not all(starmap(torch.cuda.can_device_access_peer, ((one, other), (other, one)))):
        raise UsageError(f"{one} and {other} have no peer access, and nothing was tested without it; use one of them")


def _indexed(device: torch.device) -> torch.device:
    """The device as tensors report it: the CPU without a number, CUDA devices with theirs."""
    if device.type == "cuda" and device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
