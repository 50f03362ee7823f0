r"""Automatic choice of split points: the model is divided into units, these are measured, and `partition` cuts them.

    units      embed | h.0 | h.1 | h.2 | h.3 | ln_f, lm_head      seconds of forward and backward of each
    crossing     \____/     \___________________/      values from one unit to a later one: seconds to copy them

Units are the modules down to the items of ModuleLists. They are measured as stages of a pipe that is cut before each of
them. Timing each unit alone would need its inputs, which only the model's own code makes. The pipe comes from the
caller, because `Pipe` imports the code that calls this module.
"""

import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.autograd import StepsInBackward, silence_hooks
from torchweft.core.errors import PartitionError, UsageError, join_faults
from torchweft.core.pytree import flatten, unflatten
from torchweft.pipeline.config import BatchDims
from torchweft.pipeline.partition import own_bytes, partition, synchronize
from torchweft.pipeline.schedule import Action
from torchweft.pipeline.sequential import MakePipe
from torchweft.pipeline.simulate import Costs, MemoryRecorder, costs_from
from torchweft.pipeline.split.isolation import undisturbed
from torchweft.pipeline.split.modules import named_modules
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.tracing import Recorder

ROUNDS = 6  # the minimum over the rounds counts, because other programs can only add to a time
_PROBE = 1 << 22  # bytes of the copy that measures the speed of a link

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def automatic_split(
    model: nn.Module, devices: Sequence[torch.device], call: Arguments | None, dims: BatchDims, make_pipe: MakePipe
) -> list[str]:
    """Split points that make one stage per device. Without a `call` to measure, by parameters, with a warning.

    Raises PartitionError for fewer units than devices, UsageError if measuring would train a remote expert.
    """
    if len(devices) == 1:
        return []
    names = list(_candidates(model))
    if call is None or any(parameter.is_meta for parameter in model.parameters()):
        warnings.warn(
            "split='auto' used the sizes of parameters, in the order in which modules were registered; with sample= "
            "(a micro-batch) it uses measured time",
            stacklevel=3,
        )
        return _cut(names, own_bytes(model.get_submodule(name).parameters() for name in names), len(devices))
    if faults := [f"{k} ({type(m).__name__})" for k, m in named_modules(model) if isinstance(m, StepsInBackward)]:
        headline = "split='auto' with sample= measures backward, which would train these; leave sample out, or name"
        raise UsageError(join_faults(f"{headline} split points:", faults))
    here = next((parameter.device for parameter in model.parameters()), devices[0])
    leaves, structure = flatten(call)
    args, kwargs = unflatten(structure, [x.to(here) if isinstance(x, Tensor) else x for x in leaves])
    cuts = ForwardRecorder(model, names, [here]).record(args, kwargs, optional=True).cuts
    units = [name for _, name in sorted({step: name for name, step in reversed(cuts.items())}.items())]
    if len(units) < len(devices):
        return _cut(units, [], len(devices))  # raises
    steps = _measured(model, units[1:], here, (args, kwargs), dims, make_pipe)
    measured = zip(*(step.stages for step in steps), strict=True)
    times = [min(cost.forward for cost in unit) + min(cost.backward for cost in unit) for unit in measured]
    per_byte = _copy_seconds(here, devices[-1]) / _PROBE
    skips = [(value.source, max(value.readers), value.bytes * per_byte) for value in steps[0].values]
    cut = _cut(units, times, len(devices), skips)
    # Memory is that of parameters with gradients, and of one micro-batch. If the fastest cut does not fit into a
    # device, the model is cut by memory instead.
    parameters = own_bytes(model.get_submodule(name).parameters() for name in units)
    memory = [stage.saved_bytes + 2 * size for stage, size in zip(steps[0].stages, parameters, strict=True)]
    for device, start, stop in zip(devices, [0, *map(units.index, cut)], [*map(units.index, cut), None], strict=True):
        if device.type == "cuda" and sum(memory[start:stop]) >= torch.cuda.mem_get_info(device)[0]:
            return _cut(units, memory, len(devices))
    return cut


def _candidates(module: nn.Module, path: str = "") -> Iterator[str]:
    """Names of the modules before which the model can be cut, down to the items of its lists."""
    items = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        blocks = isinstance(child, nn.Sequential) and any(True for item in child for _ in item.children())
        if not items and (blocks or any(isinstance(m, nn.ModuleList | nn.ModuleDict) for m in child.modules())):
            yield from _candidates(child, at)
        else:
            yield at


def _cut(
    names: Sequence[str], costs: Sequence[float], count: int, skips: Sequence[tuple[int, int, float]] = ()
) -> list[str]:
    if len(names) < count:
        raise PartitionError(
            f"split='auto' for {count} devices needs as many units, but finds {len(names)} in the model: "
            f"{', '.join(names) or 'none'}; give fewer devices, or name split points inside of these"
        )
    return [names[end] for end in accumulate(partition(costs, count, skips=skips)[:-1])]


class _Timer(Recorder):
    """A recorder that waits for the device, so that a span includes all the work started in it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @contextmanager
    def action_scope(self, kind: str, action: Action) -> Generator[None]:
        synchronize(self._device)
        with super().action_scope(kind, action):
            yield
            synchronize(self._device)


def _measured(
    model: nn.Module, split: list[str], device: torch.device, call: Arguments, dims: BatchDims, make_pipe: MakePipe
) -> list[Costs]:
    """The costs of the units between these split points, measured in several steps."""
    args, kwargs = call
    timers = [_Timer(device) for _ in range(ROUNDS)]
    with undisturbed(model, [device]), torch.enable_grad():
        devices = [device] * (len(split) + 1)
        axes: dict[str, Any] = {"batch_dim": dims.arguments, "output_batch_dim": dims.outputs}
        pipe = make_pipe(model, chunks=1, split=split, devices=devices, executor="serial", verify=False, **axes)
        sizes = MemoryRecorder([*model.parameters(), *model.buffers()])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for observer in (Recorder(), sizes, *timers):  # the first step warms up
            with pipe.observed_by(observer), silence_hooks(trained):
                roots = [x for x in flatten(pipe(*args, **kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]
                if roots and trained:
                    # Not backward(), which would add to the gradients of the user's parameters.
                    torch.autograd.grad(roots, trained, [torch.ones_like(x) for x in roots], allow_unused=True)
    return [costs_from([timer], sizes) for timer in timers]


def _copy_seconds(source: torch.device, target: torch.device) -> float:
    probe = torch.empty(_PROBE, dtype=torch.uint8, device=source)
    times: list[float] = []
    for _ in range(ROUNDS):
        synchronize(target)
        start = time.perf_counter()
        probe.to(target, copy=True)
        synchronize(target)
        times.append(time.perf_counter() - start)
    return min(times)
