"""State that a recomputation in backward must find as its forward found it: buffers, generators, weights, modes.

    forward of micro-batch 0    note buffers and generators     run: the modules write into them
    forward of micro-batch 1    note ...                        run
    recomputation of 0          take the notes of micro-batch 0    run    put all back as it was

Restoring the values afterwards would not work: autograd would detect that a saved tensor was modified in place. The
modules therefore run on copies of their buffers during recomputation.

Modules do not declare whether they write to buffers, so this is observed in the first forward, once in training and
once in evaluation. If a module wrote, its buffers are copied before every forward. If not, only their versions are
noted. A module that starts to write later causes an error at its recomputation. PyTorch's norm layers write their
running statistics in training and do not read them, so any copy serves.

Weights and training modes must not change between the forward of a step and its recomputations (`ModuleVersions`):

    forward ... snapshot()     the caller's code: optimizers, eval(), end of a functional_call     verify() ... backward

They are compared between the walks. A layer that writes to its own weights while it runs, as ``Embedding(max_norm=)``
does, is therefore not reported. Other attributes are not compared, because a layer can keep its own notes there.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm  # pyright: ignore[reportPrivateUsage] # no public name
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage] # no public name

from torchweft.core.context import is_checkpointing, is_recomputing
from torchweft.core.errors import ModuleChangedError
from torchweft.core.rng import generators_of
from torchweft.core.segment import MicroBatchContext, version, versions
from torchweft.pipeline.routing import StreamLock

Buffers = dict[str, Tensor | None]

_WRITE_ONLY = frozenset((_BatchNorm.forward, _InstanceNorm.forward, SyncBatchNorm.forward))


def only_writes(module: nn.Module) -> bool:
    return module.training and type(module).forward in _WRITE_ONLY


class BufferSnapshot:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.key = module, module.training
        self.buffers: Buffers = dict(module._buffers)
        self._held = self._now()

    def changed(self) -> bool:
        return self._now() != self._held

    def _now(self) -> list[tuple[str, int, int]]:
        buffers = self.module._buffers.items()
        return [(key, id(buffer), 0 if buffer is None else version(buffer)) for key, buffer in buffers]


class Observations(NamedTuple):
    """State that one forward of a stage started from: copies of buffers that are written to, snapshots of the rest."""

    norms: Sequence[nn.Module]
    copies: Sequence[tuple[nn.Module, Buffers]]
    still: Sequence[BufferSnapshot]
    states: Sequence[tuple[torch.Generator, Tensor]]


class StageReplay:
    """Buffers and generators of the modules of one stage, and how to recompute with them."""

    def __init__(self, index: int, layers: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
        self.index, self.layers, self._device = index, layers, device
        self._defaults = generators_of([device])
        self._writes: dict[tuple[nn.Module, bool], bool] = {}
        self._norms: list[nn.Module] = []
        self._holders: list[nn.Module] = []
        self._sources: list[torch.Generator] = []
        self._shared: frozenset[object] = frozenset()
        self._lock = StreamLock()
        self._passed: list[nn.Module] = []
        # Idle: the modules hold only weights, so a run of the stage needs no surroundings.
        self.idle = self._alone = True

    def serialize(self, shared: Iterable[object], lock: StreamLock) -> None:
        """Hold `lock` while a module or generator of `shared` can be written to, because other stages have it too."""
        self._shared, self._lock = frozenset(shared), lock

    def scan(self, norms: list[nn.Module], holders: list[nn.Module], sources: Iterable[torch.Generator]) -> None:
        """Take over the scan of a step: norms that only write, other modules with buffers, generators of modules."""
        self._norms, self._holders = norms, holders
        self._sources = [source for source in dict.fromkeys(sources) if source not in self._defaults]
        self.idle = not (norms or holders or self._sources)
        writers = [module for module in holders if self._can_write(module)] if self._shared else []
        self._passed = [module for module in (*norms, *writers) if module in self._shared]
        self._alone = not self._passed and self._shared.isdisjoint(self._sources)

    def around(self, context: MicroBatchContext) -> AbstractContextManager[None] | None:
        if self.idle or (self._alone and not is_checkpointing() and not is_recomputing()):
            return None
        return self._surrounded(context)

    @contextmanager
    def _surrounded(self, context: MicroBatchContext) -> Generator[None]:
        with nullcontext() if self._alone else self._lock.held(self._device, self._passed):
            if is_checkpointing():
                yield from self._noted(context)
            elif is_recomputing() and self.index in context.notes:
                yield from self._repeated(context.notes[self.index])
            else:
                yield

    def _can_write(self, module: nn.Module) -> bool:
        # A module that was not observed yet counts as one that writes.
        return self._writes.get((module, module.training), True)

    def _noted(self, context: MicroBatchContext) -> Generator[None]:
        snapshots = [BufferSnapshot(module) for module in self._holders]
        clones: dict[int, Tensor] = {}
        # Copies are made before the run, also of modules that may turn out not to write. After the run it is too late.
        copies = {
            snapshot.module: _copy_buffers(snapshot.buffers, clones)
            for snapshot in snapshots
            if self._can_write(snapshot.module)
        }
        states = [(source, source.get_state()) for source in self._sources]
        yield
        for snapshot in snapshots:
            if snapshot.module in copies and not self._writes.get(snapshot.key):
                self._writes[snapshot.key] = snapshot.changed()
        written = [(module, copy) for module, copy in copies.items() if self._can_write(module)]
        still = [snapshot for snapshot in snapshots if not self._can_write(snapshot.module)]
        context.notes[self.index] = Observations(self._norms, written, still, states)

    def _repeated(self, notes: Observations) -> Generator[None]:
        for snapshot in notes.still:
            if snapshot.changed():
                self._writes[snapshot.key] = True
                raise ModuleChangedError(
                    f"a buffer of layer {self._name_of(snapshot.module)!r} ({type(snapshot.module).__name__}) of stage "
                    f"{self.index} was written to since the forward, and its recomputation in backward would compute "
                    "something else. If the layer writes it, it did not do so when it first ran: its buffers are "
                    "copied from now on, so run the step again. If your code writes it, do so after backward. Or use "
                    "checkpoint='never' for this stage"
                )
        modules = (*notes.norms, *(module for module, _ in notes.copies))
        before = [(module, dict(module._buffers)) for module in modules]
        states = [(source, source.get_state()) for source, _ in notes.states]
        clones: dict[int, Tensor] = {}
        for norm in notes.norms:
            _set_buffers(norm, _copy_buffers(norm._buffers, clones))
        for module, copy in notes.copies:
            # The copy is copied again, because a retained graph can be recomputed again.
            _set_buffers(module, _copy_buffers(copy, clones))
        for source, state in notes.states:
            source.set_state(state)
        try:
            yield
        finally:
            for module, buffers in before:
                _set_buffers(module, buffers)
            for source, state in states:
                source.set_state(state)

    def _name_of(self, module: nn.Module) -> str:
        for name, layer in self.layers:
            for path, inner in cast("Iterable[tuple[str, nn.Module]]", layer.named_modules(prefix=name)):
                if inner is module:
                    return path
        return "?"


def _copy_buffers(buffers: Buffers, clones: dict[int, Tensor]) -> Buffers:
    """Copies of buffers. `clones` holds earlier copies by the id() of the original: modules can share a buffer."""
    for buffer in buffers.values():
        if buffer is not None and id(buffer) not in clones:
            clones[id(buffer)] = buffer.detach().clone()
    return {key: None if buffer is None else clones[id(buffer)] for key, buffer in buffers.items()}


def _set_buffers(module: nn.Module, buffers: Buffers) -> None:
    # The dict stays the same object, because a split pipe shares it with the model.
    table = module._buffers
    for key in table.keys() - buffers.keys():
        del table[key]
    table.update(buffers)


class _Versions(NamedTuple):
    training: list[bool]
    weights: list[Tensor | None]
    versions: list[int]


class ModuleVersions:
    """Weights and training modes of the stages that will recompute, at the time of the last `snapshot`."""

    def __init__(self, stages: Sequence[StageReplay]) -> None:
        self._stages = stages
        self.snapshot()

    def snapshot(self) -> None:
        self._versions = [_versions_of(stage) for stage in self._stages]

    def verify(self) -> None:
        for stage, before in zip(self._stages, self._versions, strict=True):
            now = _versions_of(stage)
            same = (before.training, before.versions) == (now.training, now.versions)
            same = same and len(before.weights) == len(now.weights)
            # By identity: == of tensors compares their values.
            if not same or any(old is not new for old, new in zip(before.weights, now.weights, strict=True)):
                raise ModuleChangedError(
                    f"{_describe_difference(stage, before, now)} between the forward of stage {stage.index} and its "
                    "recomputation in backward, which would compute something else now; change it after backward, or "
                    "use checkpoint='never' for this stage"
                )


def _versions_of(stage: StageReplay) -> _Versions:
    training: list[bool] = []
    weights: list[Tensor | None] = []
    stack: list[nn.Module | None] = [layer for _, layer in reversed(stage.layers)]
    while stack:
        module = stack.pop()
        if module is not None:
            training.append(module.training)
            weights += module._parameters.values()
            stack += reversed(module._modules.values())
    return _Versions(training, weights, versions(weight for weight in weights if weight is not None))


def _describe_difference(stage: StageReplay, before: _Versions, now: _Versions) -> str:
    modules = [
        pair
        for name, layer in stage.layers
        for pair in cast("Iterable[tuple[str, nn.Module]]", layer.named_modules(prefix=name, remove_duplicate=False))
    ]
    if len(modules) != len(before.training) or len(before.weights) != len(now.weights):
        return "layers were added or removed"
    names = [f"{path}.{key}" for path, module in modules for key in module._parameters]
    for name, old, new in zip(names, before.weights, now.weights, strict=True):
        if old is not new:
            return f"parameter {name!r} was replaced (by torch.func.functional_call, say, which ends with the call)"
    present = [name for name, weight in zip(names, now.weights, strict=True) if weight is not None]
    for name, old, new in zip(present, before.versions, now.versions, strict=True):
        if old != new:
            return f"parameter {name!r} was written to (by an optimizer's step or load_state_dict, say)"
    modes = zip(modules, before.training, now.training, strict=True)
    path = next(path for (path, _), was, is_now in modes if was != is_now)
    return f"layer {path!r} went from training to evaluation or back"
