"""Where to cut a model: opened down to the items of its ModuleLists, each measured, and cut where `partition` says.

units      embed | h.0 | h.1 | h.2 | h.3 | ln_f, lm_head      seconds of forward and backward of each
crossing     \\____/     \\___________________/             values from one unit to a later one: seconds to copy them
"""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.core.errors import PartitionError
from weft.core.pytree import flatten, unflatten
from weft.pipeline.partition import partition
from weft.pipeline.split.program import OpenCode, Program, Recording, Ref, Values
from weft.pipeline.split.record import ForwardRecorder, copies, undisturbed
from weft.pipeline.tracing import seeing_saved

ROUNDS = 4
_PROBE = 1 << 22  # bytes that are copied to see how long that takes


def automatic_split(
    model: nn.Module, devices: Sequence[torch.device], call: tuple[tuple[Any, ...], dict[str, Any]] | None
) -> list[str]:
    """Split points that make one stage per device. Without a `call` to measure, by parameters, with a warning.

    Raises PartitionError where there are fewer places to cut at than devices need.
    """
    names = _candidates(model)
    if call is None or any(each.is_meta for each in model.parameters()):
        warnings.warn(
            "split='auto' went by the sizes of parameters, in the order in which modules were registered; with sample= "
            "(a micro-batch) it goes by measured time",
            stacklevel=3,
        )
        return _cut(names, _parameter_bytes(model, names), devices, [])
    here = next((each.device for each in model.parameters()), devices[0])
    leaves, structure = flatten(call)
    leaves = [x.to(here) if isinstance(x, Tensor) else x for x in leaves]
    recorder = ForwardRecorder(model, names, [here])
    args, kwargs = unflatten(structure, leaves)
    recording = recorder.record(args, kwargs, optional=True)
    by_step: dict[int, str] = {}
    for name, step in recording.cuts.items():
        by_step.setdefault(step, name)
    starts = sorted(by_step)
    units = _Units(recording, [0, *starts[1:]], model)
    with undisturbed(model, [here]), torch.inference_mode(False), torch.enable_grad():
        costs, memory = units.measure(leaves, here)
    per_byte = _copy_seconds(here, devices[-1]) / _PROBE
    skips = [(source, reader, count * per_byte) for source, reader, count in units.crossing()]
    found = [by_step[step] for step in starts]
    cut = _cut(found, costs, devices, skips)
    return cut if _fits(cut, found, memory, devices) else _cut(found, memory, devices, [])


def _candidates(model: nn.Module) -> list[str]:
    """Names of the modules that a model may be cut before, down to the items of its lists."""
    found: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            at = f"{path}.{name}" if path else name
            items = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            blocks = isinstance(child, nn.Sequential) and any(True for item in child for _ in item.children())
            if not items and (blocks or any(isinstance(m, nn.ModuleList | nn.ModuleDict) for m in child.modules())):
                look(child, at)
            else:
                found.append(at)

    look(model, "")
    return found


def _cut(
    names: Sequence[str],
    costs: Sequence[float],
    devices: Sequence[torch.device],
    skips: Sequence[tuple[int, int, float]],
) -> list[str]:
    if len(names) < len(devices):
        raise PartitionError(
            f"split='auto' for {len(devices)} devices needs as many units, but finds {len(names)} in the model: "
            f"{', '.join(names) or 'none'}; give fewer devices, or name split points inside of these"
        )
    sizes = partition(costs, len(devices), skips=skips)
    return [names[sum(sizes[: k + 1])] for k in range(len(sizes) - 1)]


def _parameter_bytes(model: nn.Module, names: Iterable[str]) -> list[float]:
    """Of each module, without what a module before it has as well."""
    seen: set[int] = set()
    sizes: list[float] = []
    for name in names:
        own = {id(p): p.nbytes for p in model.get_submodule(name).parameters() if id(p) not in seen}
        seen |= own.keys()
        sizes.append(float(sum(own.values())))
    return sizes


class _Units:
    """A recording in pieces, each from one place to cut at to the next."""

    def __init__(self, recording: Recording, starts: Sequence[int], model: nn.Module) -> None:
        self._recording = recording
        steps = recording.steps
        ends = [*starts[1:], len(steps)]
        self._steps = [steps[a:b] for a, b in zip(starts, ends, strict=True)]
        self._at = {v: u for u, unit in enumerate(self._steps) for step in unit for v in step.makes if v is not None}
        self._model = model
        owned = {r.key for unit in self._steps for step in unit for _, r in step.reads if r.kind == "own"}
        self._code = OpenCode(model, owned)

    def _last_read(self) -> dict[Ref, int]:
        """The last unit that reads each value."""
        last = {ref: u for u, unit in enumerate(self._steps) for step in unit for _, ref in step.reads}
        return last | {ref: len(self._steps) - 1 for _, ref in self._recording.reads}

    def crossing(self) -> list[tuple[int, int, int]]:
        """Every value that a later unit reads: its unit, its last reader, its bytes."""
        sizes = {**self._recording.sizes}
        sizes |= {Ref("v", v): n for unit in self._steps for step in unit for v, n in step.sizes.items()}
        ways = [
            (self._at[ref.key] if ref.kind == "v" else 0, u, sizes.get(ref, 0)) for ref, u in self._last_read().items()
        ]
        return [(source, reader, count) for source, reader, count in ways if reader > source]

    def measure(self, leaves: Sequence[Any], device: torch.device) -> tuple[list[float], list[float]]:
        """Seconds of each unit, forward and backward, the least of some rounds; and the bytes that it needs."""
        last = self._last_read()
        values: Values = {Ref("in", k): leaf for k, leaf in enumerate(copies(leaves))}
        seconds: list[float] = []
        memory: list[float] = []
        for u, unit in enumerate(self._steps):
            modules = [step.module for step in unit if step.module is not None]
            parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
            reads = {ref: values[ref] for step in unit for _, ref in step.reads if ref in values}
            rounds: list[float] = []
            saved: dict[int, int] = {}
            made: Values = {}
            for number in range(ROUNDS):
                made = {ref: _fresh(x) for ref, x in reads.items()}
                inputs = [x for x in made.values() if isinstance(x, Tensor) and x.requires_grad]

                def note(x: Tensor, saved: dict[int, int] = saved) -> None:
                    saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()

                with seeing_saved(note):
                    start = _now(device)
                    for step in unit:
                        Program.perform(step, step.leaves, made, self._code.get)
                    ends = [made[ref] for ref in made if ref not in reads and last.get(ref, -1) > u]
                    ends += [made[ref] for _, ref in self._recording.reads if ref in made and u == len(self._steps) - 1]
                    roots = [x for x in ends if isinstance(x, Tensor) and x.requires_grad]
                    wanted = [*inputs, *(p for p in parameters if p.requires_grad)]
                    if roots and wanted:
                        torch.autograd.grad(roots, wanted, [torch.ones_like(x) for x in roots], allow_unused=True)
                if number:
                    rounds.append(_now(device) - start)
            seconds.append(min(rounds))
            memory.append(float(sum(saved.values()) + 2 * sum(p.nbytes for p in parameters)))
            values.update({ref: x.detach() if isinstance(x, Tensor) else x for ref, x in made.items()})
        return seconds, memory


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().requires_grad_(value.is_floating_point() or value.is_complex())
    return leaf.clone() if leaf.requires_grad else leaf  # no leaf: a unit may write into it


def _fits(cut: Sequence[str], names: Sequence[str], memory: Sequence[float], devices: Sequence[torch.device]) -> bool:
    """Whether the memory of every CUDA device takes its stage."""
    bounds = [0, *(names.index(name) for name in cut), len(names)]
    needs = [sum(memory[a:b]) for a, b in pairwise(bounds)]
    free: Callable[[Any], tuple[int, int]] = cast(Any, torch.cuda).mem_get_info
    return all(device.type != "cuda" or need < free(device)[0] for need, device in zip(needs, devices, strict=True))


def _copy_seconds(source: torch.device, target: torch.device) -> float:
    probe = torch.empty(_PROBE, dtype=torch.uint8, device=source)
    times: list[float] = []
    for _ in range(ROUNDS):
        start = _now(target)
        probe.to(target, copy=True)
        times.append(_now(target) - start)
    return min(times)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
