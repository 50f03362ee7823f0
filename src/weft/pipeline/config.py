"""The arguments of a Pipe: axes, layers, balance, devices, checkpointing, schedule, loss. Checked all at once.

`BatchDims` says which axis holds the rows, where a Pipe cuts its arguments and joins its outputs. A recurrent network
or an attention without ``batch_first=True`` has time on axis 0. Cut there, it would compute something else without any
error, so a Pipe with such a module is refused unless it was told about axes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from operator import index
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from weft.core.errors import PartitionError, ScheduleError, SpecError, UsageError, listed
from weft.core.pytree import flatten
from weft.core.validation import Validator, is_whole
from weft.pipeline.loss import own_reduction
from weft.pipeline.partition import balance_by_parameters, balance_by_time
from weft.pipeline.schedule import SCHEDULES, Schedule, build

BatchDim = int | tuple[Any, ...] | dict[int | str, Any]
OutputBatchDim = int | tuple[Any, ...] | list[Any] | dict[Any, Any]
Layers = Sequence[tuple[str, nn.Module]]

_ON_AXIS_0 = (_ConvNd, _NormBase, nn.GroupNorm)
_KEEP_AXES = (nn.Linear, nn.Embedding, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.Dropout)


class BatchDims:
    """The batch axis of every argument and of every output.

    Args:
        arguments: an int for all of them and for the target; or a tuple with one entry per positional argument; or a
            dict by position and by keyword (``"target"`` is one). An entry is an int, ``None`` for what goes whole to
            every micro-batch, or nested as the argument is. ``None``: axis 0.
        outputs: an int, or nested as the output is. ``None``: as `arguments`, if that is an int.

    Raises UsageError that lists every entry which is no axis.
    """

    def __init__(self, arguments: Any, outputs: Any) -> None:
        self.assumed = arguments is None
        self.whole: int | None = (arguments or 0) if arguments is None or is_whole(arguments) else None
        self._by_name: dict[Any, Any] = {}
        faults: list[str] = []
        if isinstance(arguments, dict):
            self._by_name = dict(cast("dict[Any, Any]", arguments))
        elif isinstance(arguments, list | tuple):
            self._by_name = dict(enumerate(cast("Sequence[Any]", arguments)))
        elif self.whole is None:
            faults.append(f"batch_dim is {arguments!r}, wanted an int, a tuple, or a dict by position and keyword")
        faults += _faults("batch_dim", self._by_name or self.whole, none=True)
        self.outputs: Any = self.whole if outputs is None else outputs
        self.outputs_assumed = outputs is None
        if self.outputs is None:
            faults.append("output_batch_dim is missing; batch_dim is nested, so it does not tell that of the output")
        else:
            faults += _faults("output_batch_dim", self.outputs, none=False)
        if faults:
            raise UsageError(listed("these axes make no sense; each is counted from the front:", faults))

    @property
    def first(self) -> Any:
        """The axis of the first positional argument, or those of what is nested in it."""
        return self._by_name.get(0) if self.whole is None else self.whole

    @property
    def extras(self) -> int:
        """The axis of what a loss returns beside its number."""
        return self.outputs if isinstance(self.outputs, int) else 0

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


def _faults(name: str, value: Any, *, none: bool) -> list[str]:
    return [
        f"{name} has {each!r}, wanted an int from 0 up"
        for each in flatten(value)[0]
        if not ((is_whole(each) and each >= 0) or (each is None and none))
    ]


def check_batch_dims(layers: Layers, dims: BatchDims) -> None:
    """Raise UsageError that names each module whose batch is known to be on another axis.

    Where nothing was said of axes, that is every module anywhere in the layers with its batch not on axis 0: what is
    around it may swap axes, but nobody can see it. Where it was said, only those that the arguments reach, or that
    the output comes from, through nothing but layers which are known to leave axes as they are. A last layer that
    returns states with their batch on another axis than its output must have them said.
    """
    flat = [each for name, layer in layers for each in _opened(name, layer)]
    if dims.assumed and (found := [each for name, layer in layers for each in _anywhere(name, layer)]):
        headline = (
            "these modules have their batch on axis 1, and a Pipe cuts along axis 0 where nothing is said; make "
            "them with batch_first=True, or give Pipe batch_dim=1 if the rows of the model's input are there, or "
            "batch_dim=0 if its layers swap axes before and after these:"
        )
        raise UsageError(listed(headline, found))
    faults: list[str] = []
    for value, ordered, words in (
        (dims.first, flat, "gets the input, cut along"),
        (dims.outputs, flat[::-1], "makes the output, joined along"),
    ):
        if is_whole(value):
            faults += [f"{fault}, but it {words} axis {value}" for fault in _reached(ordered, value)]
    if faults:
        headline = (
            "these modules have their batch on another axis than batch_dim or output_batch_dim says; change one of "
            "them, or if a module beside them swaps axes, put both into one module:"
        )
        raise UsageError(listed(headline, list(dict.fromkeys(faults))))
    if dims.outputs_assumed and flat and (axes := _several_axes(flat[-1][1])):
        name, layer = flat[-1]
        raise UsageError(
            f"{name} ({type(layer).__name__}), the last layer, returns tensors with their batch on different axes; say "
            f"which, as in output_batch_dim={axes}, or let a layer after it return what is wanted"
        )


def _batch_axis(module: nn.Module) -> int | None:
    """The axis of the module's input and output that holds the rows, if it is known."""
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        return _batch_axis(module.layers[0])
    first = getattr(module, "batch_first", getattr(getattr(module, "self_attn", None), "batch_first", None))
    if isinstance(first, bool):
        return 0 if first else 1
    return 0 if isinstance(module, _ON_AXIS_0) else None


def _several_axes(module: nn.Module) -> str | None:
    """The axes of what the module returns, where they are known to differ, such as those of outputs and states."""
    axis = _batch_axis(module)
    if isinstance(module, nn.RNNBase):
        return "(0, 1)" if axis == 0 else None
    if isinstance(module, nn.MultiheadAttention):
        return "(1, 0)" if axis == 1 else None
    return "(1, 0, 1)" if axis == 1 and type(module).__module__.startswith("weft.recurrent.") else None


def _anywhere(name: str, module: nn.Module) -> Iterator[str]:
    """In words, the outermost modules with their batch on axis 1."""
    axis = _batch_axis(module)
    if axis == 1:
        yield _words(name, module, axis)
    elif axis is None:
        for child, each in module.named_children():
            yield from _anywhere(f"{name}.{child}", each)


def _opened(name: str, layer: nn.Module) -> Layers:
    if type(layer) is not nn.Sequential:
        return [(name, layer)]
    return [each for child, inner in layer.named_children() for each in _opened(f"{name}.{child}", inner)]


def _reached(layers: Layers, axis: int) -> Iterator[str]:
    """In words, the modules with their batch on another axis, as far as axes are known to be left as they are."""
    for name, layer in layers:
        own = _batch_axis(layer)
        if own not in (None, axis):
            yield _words(name, layer, own)
        if own is None and type(layer) not in _KEEP_AXES and type(layer).__module__ != "torch.nn.modules.activation":
            return


def _words(name: str, module: nn.Module, axis: int | None) -> str:
    return f"{name} ({type(module).__name__}) has its batch on axis {axis}"


Checkpoint = Literal["always", "except_last", "never"]
CheckpointRule = Callable[[int, int, int], bool]
"""``rule(stage, micro_batch, micro_batches)``: whether this forward keeps only its inputs and is recomputed."""

EXECUTORS = ("auto", "serial", "threads", "graph")
_RULES: dict[str, CheckpointRule] = {
    "always": lambda stage, micro_batch, micro_batches: True,
    "except_last": lambda stage, micro_batch, micro_batches: micro_batch < micro_batches - 1,
    "never": lambda stage, micro_batch, micro_batches: False,
}


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a sequential model with their names. Raises SpecError if it is something else, or has more."""
    sequential = isinstance(module, nn.Sequential)
    if not sequential or "forward" in vars(module) or type(module).forward is not nn.Sequential.forward:
        what = "an nn.Sequential with a forward of its own" if sequential else "no nn.Sequential"
        raise SpecError(
            f"Pipe takes an nn.Sequential, whose layers it can spread over stages, but {type(module).__name__} is "
            f"{what}; say where to cut it (split=['name of a submodule', ...] or split='auto'), or list its layers in "
            "an nn.Sequential, and use skippable layers for long connections"
        )
    if not len(module):
        raise SpecError("Pipe takes an nn.Sequential with at least one layer, but this one is empty")
    if faults := list(_beside_the_layers(module)):
        raise SpecError(
            listed(
                "Pipe takes the layers out of an nn.Sequential and leaves it behind, so what belongs to the "
                f"{type(module).__name__} itself and to none of its layers would be lost:",
                faults,
            )
        )
    forbid_lazy(module)
    return list(module._modules.items())  # named_children would leave out a layer that stands there twice


def forbid_lazy(module: nn.Module) -> None:
    """Raise SpecError that lists parameters and buffers without a size."""
    if lazy := [name for name, each in chain(module.named_parameters(), module.named_buffers()) if is_lazy(each)]:
        raise SpecError(
            listed("lazy layers have no sizes yet, and cannot be spread; run the model once before Pipe gets it:", lazy)
        )


def _beside_the_layers(module: nn.Sequential) -> Iterable[str]:
    """What a container has of its own, in words."""
    for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
        yield from (f"{kind} {name!r}; put it into a layer" for name, each in table.items() if each is not None)
    for name, table in vars(module).items():
        if name.endswith("_hooks") and name.startswith("_") and table:
            kind = name.strip("_").replace("_", " ").removesuffix("s")
            yield f"a {kind}; register it with the pipe, where it sees whole mini-batches, or with a layer"


def checkpoint_rules(checkpoint: Any, stages: int) -> list[CheckpointRule]:
    """One rule per stage. Raises UsageError that lists every entry which is no mode."""
    modes: list[Any] = []
    if isinstance(checkpoint, str) or callable(checkpoint):
        modes = [checkpoint] * stages
    elif isinstance(checkpoint, Iterable):
        modes = list(cast("Iterable[Any]", checkpoint))
    faults = [
        f"entry {i} is {mode!r}"
        for i, mode in enumerate(modes)
        if not (callable(mode) or (isinstance(mode, str) and mode in _RULES))
    ]
    if not modes:
        faults.append(f"it is {checkpoint!r}")
    elif len(modes) != stages:
        faults.append(f"it has {len(modes)} entries for {stages} stages")
    if faults:
        wanted = f"checkpoint is one of {', '.join(_RULES)}, a list of them with one per stage, or a function"
        raise UsageError(listed(f"{wanted} (stage, micro_batch, micro_batches) -> bool; but:", faults))
    return [_RULES[mode] if isinstance(mode, str) else mode for mode in modes]


def never_recomputes(checkpoint: Any) -> bool:
    """Whether no forward is recomputed, as far as the argument itself says so."""
    modes = [checkpoint] if isinstance(checkpoint, str) or callable(checkpoint) else checkpoint
    return all(mode == "never" for mode in modes)


def check_arguments(
    chunks: Any, executor: Any, loss: Any, reduction: Any, schedule: Any, deferred_batch_norm: Any = False
) -> None:
    """Raise one UsageError with all that is wrong among these."""
    faults: list[str] = []
    if not is_whole(chunks):
        faults.append(f"chunks is {chunks!r}; a number of micro-batches is an int")
    elif chunks < 1:
        faults.append(f"chunks is {chunks}; a mini-batch is cut into at least one micro-batch")
    if executor not in EXECUTORS:
        faults.append(f"executor is {executor!r}; there are {', '.join(EXECUTORS)}")
    if loss is not None and not callable(loss):
        faults.append(f"loss is {type(loss).__name__}; give a function or module (output, target) -> number")
    if reduction not in (None, "mean", "sum"):
        faults.append(f"loss_reduction is {reduction!r}; the losses of micro-batches are combined by 'mean' or 'sum'")
    if not isinstance(schedule, str | Schedule):
        names = ", ".join(map(repr, SCHEDULES))
        faults.append(f"schedule is {schedule!r}; it is one of {names}, a table as text, or a weft.Schedule")
    if not isinstance(deferred_batch_norm, bool):
        faults.append(f"deferred_batch_norm is {deferred_batch_norm!r}; it is True or False")
    if faults:
        raise UsageError(listed("these arguments of Pipe do not make sense:", faults))


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
    check.call(check_arguments, chunks, executor, loss, reduction, schedule, deferred_batch_norm)
    if stages:
        check.call(checkpoint_rules, checkpoint, stages)
        if isinstance(schedule, str | Schedule):
            check.call(check_schedule, schedule, stages, chunks if is_whole(chunks) and chunks > 0 else 1, loss)


def check_schedule(schedule: str | Schedule, stages: int, chunks: int, loss: Any) -> None:
    """Raise ScheduleError if the schedule does not fit, UsageError if it needs a loss inside and has none."""
    table = build(schedule, stages, chunks)
    if not any(table.backward_only.workers):
        raise ScheduleError(
            "the schedule has no backward, so nothing could be trained by it; add B, or I and W, for every F "
            "(a pipe that is only evaluated leaves them out by itself)"
        )
    if loss is None and not table.splits:
        name = schedule if isinstance(schedule, str) and schedule in SCHEDULES else "this table"
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
    cuda = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    sizes = None if balance is None else sizes_of(balance)
    here = cuda[: None if sizes is None else len(sizes)]
    here = here or [torch.device("cpu")] * (min(2, len(module)) if sizes is None else len(sizes))
    places = here if devices is None else places_of(devices)
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
    faults = [f"stage {i} has {size} layers, but needs at least one" for i, size in enumerate(sizes) if size < 1]
    if sum(sizes) != layers:
        faults.append(f"balance {list(sizes)} places {sum(sizes)} layers, but the module has {layers}")
    if len(sizes) > len(places):
        faults.append(
            f"balance has {len(sizes)} stages, but there are {len(places)} devices; one may be there more than "
            f"once, as in devices=['cpu'] * {len(sizes)}"
        )
    elif len(sizes) < len(places):
        faults.append(
            f"balance has {len(sizes)} stages, but there are {len(places)} devices, and a device without a stage would "
            "be left unused; give one per stage"
        )
    if faults:
        raise PartitionError(listed("these layers cannot be spread as asked:", faults))
    return list(sizes), list(places)


def sizes_of(balance: Any) -> list[int]:
    """A balance as numbers of layers. Raises PartitionError that lists what is no whole number."""
    wanted = "a balance is a list with the number of layers of each stage, each an int; but"
    if not isinstance(balance, Iterable) or isinstance(balance, str | Mapping | Set):
        raise PartitionError(f"{wanted} it is {balance!r}")
    sizes: list[int] = []
    faults: list[str] = []
    for stage, size in enumerate(cast("Iterable[Any]", balance)):
        try:
            sizes.append(index(size))  # also of NumPy and of a tensor
        except TypeError:
            faults.append(f"that of stage {stage} is {size!r}")
        else:
            faults += [f"that of stage {stage} is {size!r}"] * isinstance(size, bool)
    if faults:
        raise PartitionError(listed(f"{wanted}:", faults))
    return sizes


def places_of(devices: Any) -> list[torch.device]:
    """Devices as tensors report them. Raises UsageError that lists what is none."""
    given = [devices] if isinstance(devices, str | int | torch.device) else devices
    wanted = "devices are names such as 'cpu' or 'cuda:1', numbers, or torch.device, one per stage; but"
    if not isinstance(given, Iterable):
        raise UsageError(f"{wanted} it is {devices!r}")
    places: list[torch.device] = []
    faults: list[str] = []
    for stage, each in enumerate(cast("Iterable[Any]", given)):
        try:
            places.append(_indexed(torch.device(each)))
        except (TypeError, RuntimeError):
            faults.append(f"that of stage {stage} is {each!r}")
    if faults:
        raise UsageError(listed(f"{wanted}:", faults))
    return places


def _indexed(device: torch.device) -> torch.device:
    """The device as tensors report it: the CPU without a number, CUDA devices with theirs."""
    if device.type == "cuda" and device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
