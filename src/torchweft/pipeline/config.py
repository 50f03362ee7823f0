"""The arguments of a Pipe: axes, layers, balance, devices, checkpointing, schedule, loss. Checked all at once.

`BatchDims` holds the axis of the rows, along which a Pipe cuts its arguments and joins its outputs. A recurrent network
or an attention without ``batch_first=True`` has time on axis 0. If it were cut along that axis, it would compute
something else without any error. So a Pipe with such a module is rejected unless axes are given.
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import wraps
from inspect import signature
from itertools import chain
from operator import index
from typing import Any, Literal, ParamSpec, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from torchweft.core.errors import PartitionError, ScheduleError, SpecError, UsageError, join_faults
from torchweft.core.pytree import flatten
from torchweft.core.validation import Validator, is_whole, suggest
from torchweft.pipeline.batchnorm import DeferredBatchNorm
from torchweft.pipeline.devices import cuda_devices, places_of
from torchweft.pipeline.loss import own_reduction
from torchweft.pipeline.partition import balance_by_parameters, balance_by_time
from torchweft.pipeline.schedule import SCHEDULES, Schedule, ScheduleFunction, build

Parameters = ParamSpec("Parameters")
BatchDim = int | tuple[Any, ...] | dict[int | str, Any]
OutputBatchDim = int | tuple[Any, ...] | list[Any] | dict[Any, Any]
Layers = Sequence[tuple[str, nn.Module]]

_ON_AXIS_0 = (_ConvNd, _NormBase, nn.GroupNorm)
_KEEP_AXES = (nn.Linear, nn.Embedding, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.Dropout)
OTHER_AXES = (
    "these modules have their batch on another axis than batch_dim or output_batch_dim; change one of these settings, "
    "or if a module next to them swaps axes, put both into one module:"
)


class BatchDims:
    """The batch axis of every argument and of every output. Raises UsageError that lists every invalid axis."""

    def __init__(self, arguments: Any, outputs: Any) -> None:
        self.assumed = arguments is None
        self.whole: int | None = (arguments or 0) if arguments is None or is_whole(arguments) else None
        self._by_name: dict[Any, Any] = {}
        self.outputs: Any = self.whole if outputs is None else outputs
        self.outputs_assumed = outputs is None
        with Validator("these axes are invalid; each is counted from the front") as check:
            if isinstance(arguments, dict):
                self._by_name = dict(cast("dict[Any, Any]", arguments))
            elif isinstance(arguments, list | tuple):
                self._by_name = dict(enumerate(cast("Sequence[Any]", arguments)))
            elif self.whole is None:
                check.add(f"batch_dim is {arguments!r}; give an int, a tuple, or a dict by position and keyword")
            _check_axes(check, "batch_dim", self._by_name or self.whole, none=True)
            if self.outputs is None:
                check.add("output_batch_dim is missing; batch_dim is nested, so the axis of the output is not known")
            else:
                _check_axes(check, "output_batch_dim", self.outputs, none=False)

    @property
    def first(self) -> Any:
        return self._by_name.get(0) if self.whole is None else self.whole

    @property
    def extras(self) -> int:
        return self.outputs if isinstance(self.outputs, int) else 0

    @property
    def arguments(self) -> Any:
        return self._by_name if self.whole is None else self.whole

    def of_call(self, positional: int, keywords: Collection[str], *, target: bool, nested: bool = False) -> Any:
        """The axes of a call, nested as its mini-batch (with the target) is. Raises UsageError for missing axes."""
        if self.whole is not None:
            return self.whole
        names: list[int | str] = [*range(positional), *keywords, *(["target"] if target else [])]
        if missing := [name for name in names if name not in self._by_name]:
            raise UsageError(
                join_faults(
                    "batch_dim lacks these arguments; name all of them, as in {0: 1, 'mask': 0, 'target': 1}:",
                    [f"argument {name!r}" for name in missing],
                )
            )
        axes = [self._by_name[name] for name in names]
        arguments = (tuple(axes[:positional]), {name: self._by_name[name] for name in keywords})
        main = axes[0] if positional == 1 and not keywords and not nested else arguments
        return (main, axes[-1]) if target else main


def _check_axes(check: Validator, name: str, value: Any, *, none: bool) -> None:
    for axis in flatten(value)[0]:
        valid = (is_whole(axis) and axis >= 0) or (axis is None and none)
        check.require(valid, f"{name} has {axis!r}; an axis is an int, at least 0")


def check_batch_dims(layers: Layers, dims: BatchDims) -> None:
    """Raise UsageError that names each module with its batch known to be on another axis: any module if no axes are
    given, or else those that the arguments reach, or that make the output, through layers that are known to keep axes.
    """
    # Without axes, code around such a module can swap axes, but that is not visible here. So it is rejected.
    reject_other_axes(layers, dims)
    flat = [leaf for name, layer in layers for leaf in flatten_sequential(name, layer)]
    faults: list[str] = []
    for axis, ordered, words in (
        (dims.first, flat, "gets the input, cut along"),
        (dims.outputs, flat[::-1], "makes the output, joined along"),
    ):
        if is_whole(axis):
            faults += [f"{fault}, but it {words} axis {axis}" for fault in _reached_on_other_axis(ordered, axis)]
    if faults:
        raise UsageError(join_faults(OTHER_AXES, list(dict.fromkeys(faults))))
    # A recurrent network returns states with their batch on another axis than its output.
    if dims.outputs_assumed and flat:
        reject_several_axes(*flat[-1])


def reject_other_axes(layers: Layers, dims: BatchDims) -> None:
    if dims.assumed and (faults := [fault for name, layer in layers for fault in _modules_on_axis_1(name, layer)]):
        headline = (
            "these modules have their batch on axis 1, and a Pipe cuts along axis 0 by default; make them with "
            "batch_first=True, or give Pipe batch_dim=1 if the rows of the model's input are on axis 1, or batch_dim=0 "
            "if its layers swap axes before and after these:"
        )
        raise UsageError(join_faults(headline, faults))


def reject_several_axes(name: str, layer: nn.Module) -> None:
    if axes := _several_axes(layer):
        raise UsageError(
            f"{name} ({type(layer).__name__}), the last layer, returns tensors with their batch on different axes; "
            f"give them, as in output_batch_dim={axes}, or add a layer after it that returns only one of them"
        )


def batch_axis(module: nn.Module) -> int | None:
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        return batch_axis(module.layers[0])
    first = getattr(module, "batch_first", getattr(getattr(module, "self_attn", None), "batch_first", None))
    if isinstance(first, bool):
        return 0 if first else 1
    return 0 if isinstance(module, _ON_AXIS_0) else None


def _several_axes(module: nn.Module) -> str | None:
    axis = batch_axis(module)
    if isinstance(module, nn.RNNBase):  # the states always have their batch on axis 1
        return "(0, 1)" if axis == 0 else None
    if isinstance(module, nn.MultiheadAttention) and axis == 1:
        return "(1, 0)"
    return "(1, 0, 1)" if axis == 1 and type(module).__module__.startswith("torchweft.recurrent.") else None


def _modules_on_axis_1(name: str, module: nn.Module) -> Iterator[str]:
    axis = batch_axis(module)
    if axis == 1:
        yield axis_in_words(name, module, axis)
    elif axis is None:
        for child_name, child in module.named_children():
            yield from _modules_on_axis_1(f"{name}.{child_name}", child)


def flatten_sequential(name: str, layer: nn.Module) -> Layers:
    if type(layer) is not nn.Sequential:
        return [(name, layer)]
    children = layer.named_children()
    return [leaf for child_name, child in children for leaf in flatten_sequential(f"{name}.{child_name}", child)]


def _reached_on_other_axis(layers: Layers, axis: int) -> Iterator[str]:
    for name, layer in layers:
        own = batch_axis(layer)
        if own not in (None, axis):
            yield axis_in_words(name, layer, own)
        if own is None and not keeps_axes(layer):
            return


def keeps_axes(module: nn.Module) -> bool:
    return type(module) in _KEEP_AXES or type(module).__module__ == "torch.nn.modules.activation"


def axis_in_words(name: str, module: nn.Module, axis: int | None) -> str:
    return f"{name} ({type(module).__name__}) has its batch on axis {axis}"


Checkpoint = Literal["always", "except_last", "never"]
CheckpointRule = Callable[[int, int, int], bool]
"""``rule(stage, micro_batch, micro_batches)`` returns whether this forward keeps only its inputs and is recomputed."""

_FORWARD = cast(Any, nn.Sequential).forward
EXECUTORS = ("auto", "serial", "threads", "graph", "cuda_graph")
_RULES: dict[str, CheckpointRule] = {
    "always": lambda stage, micro_batch, micro_batches: True,
    "except_last": lambda stage, micro_batch, micro_batches: micro_batch < micro_batches - 1,
    "never": lambda stage, micro_batch, micro_batches: False,
}


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a sequential model with their names. Raises SpecError for a model that has more than layers."""
    # A subclass with its own forward would run in another order than its layers.
    if not isinstance(module, nn.Sequential) or "forward" in vars(module) or type(module).forward is not _FORWARD:
        raise SpecError(
            "without split=, Pipe takes an nn.Sequential, whose layers it can spread over stages, but this is a "
            f"{type(module).__name__} with its own forward; give the points to cut at (split=['name of a submodule', "
            "...] or split='auto'), or list its layers in an nn.Sequential, and use skippable layers for long "
            "connections"
        )
    if not len(module):
        raise SpecError("Pipe takes an nn.Sequential with at least one layer, but this one is empty")
    title = f"Pipe keeps the layers of the {type(module).__name__} and drops the rest of it, which would be lost"
    with Validator(title, SpecError) as check:
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            check.require(tensor is None, f"parameter or buffer {name!r}; put it into a layer")
        for name, table in vars(module).items():
            hooks = name.startswith("_") and name.endswith("_hooks") and bool(table)
            check.require(
                not hooks, f"{name[1:]}; register them with the pipe, for whole mini-batches, or with a layer"
            )
    reject_lazy(module)
    return list(module._modules.items())  # named_children() would list a layer that occurs twice only once


def reject_lazy(module: nn.Module) -> None:
    named = chain(module.named_parameters(), module.named_buffers())
    if lazy := [name for name, tensor in named if is_lazy(tensor)]:
        raise SpecError(
            join_faults("lazy layers have no sizes yet, and cannot be spread; run the model once before that:", lazy)
        )


class _NoGroup:
    def __repr__(self) -> str:
        return "NO_GROUP"


NO_GROUP: Any = _NoGroup()
"""The default of `group`. It differs from None, which `torch.distributed.group.WORLD` is before it is initialised."""


def resolve_group(group: Any) -> Any:
    """The group, or None for a pipe in one process. Raises UsageError where each of several ranks would train a model
    of its own, because `torch.distributed` is not initialised."""
    if group is not None and group is not NO_GROUP:
        return group
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                f"this process is one of {size} (WORLD_SIZE), but torch.distributed is not initialised, so that "
                f"{'dist.group.WORLD is None, and ' * (group is None)}each would train the whole model by itself; call "
                "torch.distributed.init_process_group() before the Pipe is made, and give group=dist.group.WORLD. "
                "Remove WORLD_SIZE from the environment if these processes are meant to be independent"
            )
        if group is None:
            raise UsageError(
                f"group is None in one of {size} processes (WORLD_SIZE), each of which would train the whole model by "
                "itself; give group=dist.group.WORLD to spread the stages over processes, or leave group out for a "
                "Pipe in this process alone"
            )
    return None


_OF_TORCH = {
    **{"n_microbatches": "chunks", "loss_fn": "loss", "split_spec": "split", "scale_grads": "loss_reduction"},
    **{"mb_args": "sample", "mb_kwargs": "sample", "args_chunk_spec": "batch_dim", "kwargs_chunk_spec": "batch_dim"},
}
"""Arguments of `torch.distributed.pipelining`, with those of a Pipe."""


def suggest_arguments(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Make the constructor of Pipe raise SpecError that names the argument which was meant by an unknown one."""
    names = [*signature(init).parameters]

    @wraps(init)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        # Before the call: Python reports a missing `chunks` and an unknown `chunk` one at a time.
        for name in kwargs:
            if name not in names:
                meant = f"; did you mean {_OF_TORCH[name]!r}?" if name in _OF_TORCH else suggest(name, names)
                raise SpecError(f"Pipe() got an unexpected keyword argument {name!r}{meant}")
        init(*args, **kwargs)

    return checked


def warn_of_batch_norm(pipe: nn.Module, chunks: int) -> None:
    """Warn if batch norms in training would normalise micro-batches, because gradients are then other ones."""
    norms: list[str] = [
        name
        for name, module in cast(Any, pipe).named_modules()
        if isinstance(module, _BatchNorm) and module.training and not isinstance(module, DeferredBatchNorm)
    ]
    if chunks > 1 and norms:
        more = f" and {len(norms) - 1} more" * (len(norms) > 1)
        warnings.warn(
            f"batch norm in a Pipe with chunks={chunks}: {norms[0]}{more} will normalise the rows of each micro-batch, "
            "so that outputs and gradients in training are not those of the undivided model. GroupNorm and chunks=1 "
            "are exact. Pipe(deferred_batch_norm=True) accepts the difference, and keeps the running statistics those "
            "of the whole mini-batch",
            stacklevel=4,
        )


def checkpoint_rules(checkpoint: Any, stages: int) -> list[CheckpointRule]:
    choices = f"checkpoint is one of {', '.join(_RULES)}, a list of them with one per stage, or a function"
    with Validator(f"{choices} (stage, micro_batch, micro_batches) -> bool; but") as check:
        modes: list[Any] = []
        if isinstance(checkpoint, str) or callable(checkpoint):
            modes = [checkpoint] * stages
        elif check.require(isinstance(checkpoint, Iterable), f"it is {checkpoint!r}"):
            modes = list(cast("Iterable[Any]", checkpoint))
            check.require(len(modes) == stages, f"it has {len(modes)} entries for {stages} stages")
        for i, mode in enumerate(modes):
            check.require(callable(mode) or (isinstance(mode, str) and mode in _RULES), f"entry {i} is {mode!r}")
    return [_RULES[mode] if isinstance(mode, str) else mode for mode in modes]


def never_recomputes(checkpoint: Any) -> bool:
    """Whether the setting excludes any recomputation. A function does not, because its results are not known yet."""
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
    """Add all faults of these settings to `check`. `stages` is 0 if the number of stages is not known."""
    counted = check.count("chunks", chunks)
    check.choice("executor", executor, EXECUTORS)
    check.add(*_loss_faults(loss))
    check.choice("loss_reduction", reduction, ("mean", "sum"), optional=True)
    names = ", ".join(map(repr, SCHEDULES))
    kinds = f"one of {names}, a table as text, a weft.Schedule, or a function (stages, micro_batches) -> Schedule"
    known = callable(schedule) or check.instance("schedule", schedule, (str, Schedule), kinds)
    check.boolean("deferred_batch_norm", deferred_batch_norm)
    if stages:
        check.call(checkpoint_rules, checkpoint, stages)
        if known:
            check.call(check_schedule, schedule, stages, chunks if counted else 1, loss)


def _loss_faults(loss: Any) -> Iterator[str]:
    wanted = "a function or module (output, target) -> number"
    if isinstance(loss, type):
        yield f"loss is the class {loss.__name__}; give {loss.__name__}(), {wanted}"
    elif loss is not None and not callable(loss):
        yield f"loss is {type(loss).__name__}; give {wanted}"
    elif loss is not None:
        with suppress(ValueError):  # a built-in function has no signature
            parameters = signature(loss.forward if isinstance(loss, nn.Module) else loss)
            try:
                parameters.bind(None, None)
            except TypeError as error:
                name = getattr(loss, "__name__", type(loss).__name__)
                yield f"loss is {name}{parameters}, but it is called as loss(output, target): {error}"


def check_schedule(schedule: str | Schedule | ScheduleFunction, stages: int, chunks: int, loss: Any) -> None:
    """Raise ScheduleError if the schedule does not fit, UsageError if it needs a loss inside and has none."""
    table = build(schedule, stages, chunks)
    if not any(table.backward_only.workers):
        raise ScheduleError(
            "the schedule has no backward, so it cannot train a model; add B, or I and W, for every F (in evaluation "
            "they are left out automatically)"
        )
    if loss is None and not table.allows_external_loss:
        name = schedule if schedule in SCHEDULES else "this function" if callable(schedule) else "this table"
        raise UsageError(
            f"schedule {name!r} starts backward before all forwards have ended, but the loss is computed outside, "
            "after forward; give the Pipe a loss (loss=fn, then pipe(x, target=y)), or use schedule='gpipe'; with "
            "split= and a loss that forward() computes, say how micro-batches combine (loss_reduction='mean' or 'sum')"
        )


def reduction_of(loss: Any, reduction: str | None, weight: Any = None) -> str:
    """The reduction of the losses of the micro-batches. Raises UsageError if it is neither a mean nor a sum."""
    if loss is None:
        for name, value in (("loss_reduction", reduction), ("loss_weight", weight)):
            if value is not None:
                raise UsageError(f"{name} is {value!r}, but there is no loss; give the pipe one, or leave it out")
        return "mean"
    result = reduction or own_reduction(loss)
    if result not in ("mean", "sum"):
        raise UsageError(
            f"the loss has reduction {result!r}, but the loss of a micro-batch must be one number; "
            "use reduction 'mean' or 'sum'"
        )
    if weight is not None and (result == "sum" or not callable(weight)):
        raise UsageError(
            f"loss_weight is {weight!r}; give a function target -> number, the denominator of the mean over a "
            f"micro-batch{', and leave it out for losses that are added up (reduction sum)' * (result == 'sum')}"
        )
    return result


def resolve_layout(
    module: nn.Sequential,
    balance: Sequence[int] | None,
    devices: Sequence[str | int | torch.device] | str | int | torch.device | None,
    sample: Any,
) -> tuple[list[int], list[torch.device]]:
    """Layers per stage and one device per stage, by default as `Pipe` says. Raises PartitionError that lists all
    faults."""
    cuda = cuda_devices()
    sizes = None if balance is None else sizes_of(balance)
    default = cuda[: None if sizes is None else len(sizes)]
    default = default or [torch.device("cpu")] * (min(2, len(module)) if sizes is None else len(sizes) or 1)
    places = places_of(default if devices is None else devices)
    if sizes is not None:
        return checked_layout(sizes, places, len(module))
    stages = min(len(places), len(module))
    if sample is None:
        return balance_by_parameters(stages, module), places[:stages]
    return balance_by_time(stages, module, sample), places[:stages]


def checked_layout(
    sizes: Sequence[int], places: Sequence[torch.device], layers: int
) -> tuple[list[int], list[torch.device]]:
    stages = len(sizes)
    with Validator("these layers cannot be spread like this", PartitionError) as check:
        for i, size in enumerate(sizes):
            check.require(size > 0, f"stage {i} has {size} layers, but needs at least one")
        fault = f"balance {list(sizes)} places {sum(sizes)} layers, but the module has {layers}"
        check.require(sum(sizes) == layers, fault)
        fault = (
            f"balance has {stages} stages, but there are {len(places)} devices; give one per stage, which may repeat"
        )
        check.require(stages == len(places), f"{fault}, as in devices=['cpu'] * {stages}")
    return list(sizes), list(places)


def sizes_of(balance: Any) -> list[int]:
    """A balance as a list of ints. Raises PartitionError that lists every entry that is not an integer."""
    headline = "a balance is a list with the number of layers of each stage, each an int; but"
    if not isinstance(balance, Iterable) or isinstance(balance, str | Mapping | Set):
        raise PartitionError(f"{headline} it is {balance!r}")
    sizes: list[int] = []
    with Validator(headline, PartitionError) as check:
        # Integers of NumPy and of tensors are accepted too, because balances are computed with them.
        for stage, size in enumerate(cast("Iterable[Any]", balance)):
            try:
                sizes.append(index(size))
                valid = not isinstance(size, bool)
            except TypeError:
                valid = False
            check.require(valid, f"that of stage {stage} is {size!r}")
    return sizes
