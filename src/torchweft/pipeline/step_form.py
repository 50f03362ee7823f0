"""The form of a step: all that a CUDA graph of it depends on, apart from the numbers in tensors.

    form       mini-batch, schedule, modes, and of every module: its tensors' memory, training mode, hooks, attributes
    obstacle   the reason why a step of this pipe cannot be recorded, in one sentence

A replay runs no Python code of the layers. All that this code reads is frozen in the recording, so it is part of the
form. Two attributes that are not plain values are equal if they are the same object, with the same number of items.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchweft.core.autograd import StepsInBackward
from torchweft.core.context import has_local_modes
from torchweft.core.rng import RandomUse
from torchweft.pipeline.checks import collective_layers
from torchweft.pipeline.loss import LossStage
from torchweft.pipeline.microbatch import PLAIN
from torchweft.pipeline.stage import HOOKS, TABLES, ModuleScan, Stage, has_global_hooks
from torchweft.pipeline.step import PipeStep

_SIZED = (list, dict, set, tuple)


def form_of(step: PipeStep, stages: Sequence[Stage]) -> tuple[Any, ...]:
    """The form of a step of these stages. Equal forms are recorded alike."""
    ambient = step.ambient
    surroundings = ambient.inference, ambient.autocast, ambient.default_device, ambient.flags
    return step.tracked, step.keeps, step.mini_batch.form, step.schedule, surroundings, marks_of(stages)


def modules_of(stages: Sequence[Stage]) -> Iterator[tuple[str, nn.Module]]:
    """Every module of the stages, also where it is repeated, with its place in words."""
    for stage in stages:
        stack: list[tuple[str, nn.Module | None]] = [*reversed(stage.layers)]
        while stack:
            name, module = stack.pop()
            if module is not None:
                yield name, module
                # The name of the layer, because names of inner modules would cost more than all the rest.
                stack += [(name, child) for child in reversed(module._modules.values())]


def marks_of(stages: Sequence[Stage]) -> list[Hashable]:
    """All that the code of the modules can read of them."""
    marks = [mark for _, module in modules_of(stages) for mark in _marks_of_module(module)]
    return [*marks, *[stage.hooked for stage in stages]]


def _marks_of_module(module: nn.Module) -> Iterator[Hashable]:
    yield id(module)
    yield module.training
    for table in (module._parameters, module._buffers):
        for key, tensor in table.items():
            yield (key, *_memory_of(tensor)) if tensor is not None else None
    for table in HOOKS:
        yield len(getattr(module, table))
    attributes = vars(module)
    yield len(attributes)
    for value in islice(attributes.values(), TABLES, None):
        if type(value) in PLAIN:
            yield type(value), value
        else:
            yield id(value), len(cast("Sized", value)) if isinstance(value, _SIZED) else 0


def _memory_of(tensor: Tensor) -> tuple[Hashable, ...]:
    dense = tensor.layout is torch.strided
    memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if dense else ()
    return id(tensor), tensor.requires_grad, *memory


def changed_attribute(stages: Sequence[Stage], before: Sequence[Hashable]) -> str:
    """Name a layer of which something has changed since `marks_of` was `before`. Empty if nothing has."""
    rest = iter(before)
    for stage in stages:
        for name, module in modules_of([stage]):
            names = ["identity", "training mode", *module._parameters, *module._buffers, *HOOKS, "attributes"]
            names += islice(vars(module), TABLES, None)
            for key, mark in zip(names, _marks_of_module(module), strict=True):
                if next(rest, object()) != mark:
                    return f"layer {name!r} ({type(module).__name__}) of stage {stage.index} changes its {key!r}"
    return ""


def passing_obstacle(observed: bool) -> str:
    """A reason that lies in this call alone. Such a step runs in the ordinary way."""
    if observed:
        return "an observer watches single actions"
    if has_global_hooks():
        return "hooks of all modules (register_module_forward_hook, say) run on the host"
    if has_local_modes():
        return "modes or hooks of the calling thread watch operators"
    return "anomaly detection watches the backward" if torch.is_anomaly_enabled() else ""


def obstacle_to(
    step: PipeStep, stages: Sequence[Stage], scans: Mapping[int, ModuleScan], uses: Sequence[RandomUse]
) -> str:
    """The reason why steps like this one cannot be recorded. Empty if none is known."""
    if any(type(stage) not in (Stage, LossStage) for stage in stages):
        return "split= chooses the program of its stages anew in each step"
    if found := collective_layers(stage.layers for stage in stages):
        return f"layer {found[0].layer!r} of stage {found[0].stage} communicates with other processes"
    for stage in stages:
        if stage.hooked:
            return f"pipe.partitions[{stage.index}] has hooks, which run on the host"
        for name, module in modules_of([stage]):
            if reason := _obstacle_in(module):
                return f"layer {name!r} ({type(module).__name__}) of stage {stage.index} {reason}"
    if any(type(leaf) is object for leaf in step.mini_batch.form[-1]):
        return "an argument is no plain value, and a recording cannot tell whether it has changed"
    if any(x.device.type == "cpu" for x in step.mini_batch.shared) and stages[0].device.type != "cpu":
        return "a tensor that every micro-batch gets whole is on the CPU; move it to the device of the first stage"
    if step.deferred:
        return "deferred batch norm sums its statistics on the host"
    if any(isinstance(stage, LossStage) and stage.reads_targets for stage in stages):
        return "the host looks for targets that the loss does not count; give Pipe loss_weight="
    for number, scan in scans.items():
        if uses[number].draws.get(scan.configuration):
            where = f"stage {number}" if number < len(uses) - 1 else "the loss"
            return f"{where} draws random numbers (dropout, say), and each step seeds them anew for every layer"
    return ""


def _obstacle_in(module: nn.Module) -> str:
    if any(getattr(module, table) for table in HOOKS):
        return "has hooks, which run on the host"
    if isinstance(module, StepsInBackward):
        return "calls another process, which the host has to wait for"
    tensors = [x for table in (module._parameters, module._buffers) for x in table.values() if x is not None]
    if any(type(x) not in (Tensor, nn.Parameter, nn.Buffer) or x.layout is not torch.strided for x in tensors):
        return "has parameters or buffers of a special type or layout"
    return ""
