"""What a recomputation in backward must find as its forward did: buffers, generators, weights, modes.

    forward of micro-batch 0    note buffers and generators     run: the modules write into them
    forward of micro-batch 1    note ...                        run
    recomputation of 0          take what was noted for 0       run       put all back as it was

Restoring values afterwards would not do: autograd would find that a tensor which it saved has been written to. So the
modules get copies for the while.

What writes is observed, not declared. PyTorch's norm layers, in training, write their running statistics and do not
read them: any copy does. Every other module with buffers is watched in its first forward, in training and in evaluation
each; if it wrote, all its buffers are copied before every forward, else only their versions are noted. A module that
begins to write later is an error at the recomputation that would read something else, and is copied from then on.

Weights and training modes must not change between the forward of a step and its recomputations (`ModuleVersions`):

    forward ... seal()     the caller's code: optimizers, eval(), the end of a functional_call     check() ... backward

They are compared twice per step, between the walks, not around every micro-batch. So what a layer does to its own
weights while it runs, as ``Embedding(max_norm=...)`` does, goes unnoticed. Other attributes are left out, since a layer
may keep there what it likes, such as its last loss.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm  # pyright: ignore[reportPrivateUsage] # no public name
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage] # no public name

from weft.core.context import is_checkpointing, is_recomputing
from weft.core.errors import ModuleChangedError
from weft.core.rng import generators
from weft.core.segment import MicroBatchContext, version, versions
from weft.pipeline.routing import StreamLock

Buffers = dict[str, Tensor | None]

_WRITE_ONLY = frozenset((_BatchNorm.forward, _InstanceNorm.forward, SyncBatchNorm.forward))


def only_writes(module: nn.Module) -> bool:
    """Whether the module's buffers have no part in what it computes now: a norm of PyTorch's in training."""
    return module.training and type(module).forward in _WRITE_ONLY


class BufferSnapshot:
    """The buffers of one module at one time, and how often each had been written to."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.key = module, module.training
        self.buffers: Buffers = dict(module._buffers)
        self._held = self._now()

    def changed(self) -> bool:
        """Whether a buffer was written to or replaced since."""
        return self._now() != self._held

    def _now(self) -> list[tuple[str, int, int]]:
        buffers = self.module._buffers.items()
        return [(key, id(each), 0 if each is None else version(each)) for key, each in buffers]


class Observations(NamedTuple):
    """What one forward of a stage found: copies of what is written to, and the versions of what is not."""

    norms: Sequence[nn.Module]
    copies: Sequence[tuple[nn.Module, Buffers]]
    still: Sequence[BufferSnapshot]
    states: Sequence[tuple[torch.Generator, Tensor]]


class StageReplay:
    """What the modules of one stage hold besides weights: see the file's head."""

    def __init__(self, index: int, layers: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
        self.index = index
        self.layers = layers
        self._device = device
        self._defaults = generators([device])
        self._writes: dict[tuple[nn.Module, bool], bool] = {}
        self._norms: list[nn.Module] = []
        self._holders: list[nn.Module] = []
        self._sources: list[torch.Generator] = []
        self._shared: frozenset[object] = frozenset()
        self._lock = StreamLock()
        self._passed: list[nn.Module] = []
        self.idle = self._alone = True
        """Idle: the modules hold nothing but weights, so nothing has to surround a run of the stage."""

    def serialize(self, shared: Iterable[object], lock: StreamLock) -> None:
        """These modules and generators are those of other stages too: one stage at a time may write to them."""
        self._shared, self._lock = frozenset(shared), lock

    def scan(self, norms: list[nn.Module], holders: list[nn.Module], sources: Iterable[torch.Generator]) -> None:
        """Before every step: norms that only write, other modules with buffers, generators that modules hold.

        PyTorch's default generators are not for here, but for `weft.core.rng`.
        """
        self._norms, self._holders = norms, holders
        self._sources = [each for each in dict.fromkeys(sources) if each not in self._defaults]
        self.idle = not (norms or holders or self._sources)
        writers = [each for each in holders if self._may_write(each)] if self._shared else []
        self._passed = [each for each in (*norms, *writers) if each in self._shared]
        self._alone = not self._passed and self._shared.isdisjoint(self._sources)

    def around(self, context: MicroBatchContext) -> AbstractContextManager[None] | None:
        """What has to surround a run of the stage, if anything."""
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

    def _may_write(self, module: nn.Module) -> bool:
        """Whether the module is known to write to its buffers, or not known yet."""
        return self._writes.get((module, module.training), True)

    def _noted(self, context: MicroBatchContext) -> Generator[None]:
        seen = [BufferSnapshot(each) for each in self._holders]
        made: dict[int, Tensor] = {}
        copies = {each.module: _copied(each.buffers, made) for each in seen if self._may_write(each.module)}
        states = [(source, source.get_state()) for source in self._sources]
        yield
        for each in seen:
            if each.module in copies and not self._writes.get(each.key):
                self._writes[each.key] = each.changed()
        written = [(each, copy) for each, copy in copies.items() if self._may_write(each)]
        still = [each for each in seen if not self._may_write(each.module)]
        context.notes[self.index] = Observations(self._norms, written, still, states)

    def _repeated(self, notes: Observations) -> Generator[None]:
        for each in notes.still:
            if each.changed():
                self._writes[each.key] = True
                raise ModuleChangedError(
                    f"a buffer of layer {self._name_of(each.module)!r} ({type(each.module).__name__}) of stage "
                    f"{self.index} was written to since the forward, and its recomputation in backward would compute "
                    "something else. If the layer does so itself, it had not done so when it first ran: its buffers "
                    "are kept from now on, so run the step again. If your code does, let it write after backward. Or "
                    "use checkpoint='never' for this stage"
                )
        before = [(each, dict(each._buffers)) for each in (*notes.norms, *(module for module, _ in notes.copies))]
        states = [(source, source.get_state()) for source, _ in notes.states]
        made: dict[int, Tensor] = {}
        for norm in notes.norms:
            _put(norm, _copied(norm._buffers, made))
        for module, copy in notes.copies:
            _put(module, _copied(copy, made))  # where the graph is retained, there is another recomputation
        for source, state in notes.states:
            source.set_state(state)
        try:
            yield
        finally:
            for module, buffers in before:
                _put(module, buffers)
            for source, state in states:
                source.set_state(state)

    def _name_of(self, module: nn.Module) -> str:
        for name, layer in self.layers:
            for path, each in cast("Iterable[tuple[str, nn.Module]]", layer.named_modules(prefix=name)):
                if each is module:
                    return path
        return "?"


def _copied(buffers: Buffers, made: dict[int, Tensor]) -> Buffers:
    """Copies; those in `made`, by the id of their original, are used again: modules may share a buffer."""
    for each in buffers.values():
        if each is not None and id(each) not in made:
            made[id(each)] = each.detach().clone()
    return {key: None if each is None else made[id(each)] for key, each in buffers.items()}


def _put(module: nn.Module, buffers: Buffers) -> None:
    """Let the module have these buffers, in the very dict that it has."""
    table = module._buffers
    for key in table.keys() - buffers.keys():
        del table[key]
    table.update(buffers)


Held = tuple[list[bool], list[Tensor | None], list[int]]
"""Of all modules of a stage, in order: training or not, weights, and how often those were written to."""


class ModuleVersions:
    """The stages that will recompute, as they are now."""

    def __init__(self, stages: Sequence[StageReplay]) -> None:
        self._stages = stages
        self.seal()

    def seal(self) -> None:
        """From here on nothing may change."""
        self._held = [_held(stage) for stage in self._stages]

    def check(self) -> None:
        """Raise ModuleChangedError, which names what changed since `seal`."""
        for stage, before in zip(self._stages, self._held, strict=True):
            now = _held(stage)
            same = before[0] == now[0] and before[2] == now[2] and len(before[1]) == len(now[1])
            if not same or any(one is not other for one, other in zip(before[1], now[1], strict=True)):
                raise ModuleChangedError(
                    f"{_difference(stage, before, now)} between the forward of stage {stage.index} and its "
                    "recomputation in backward, which would compute something else now; change it after backward, or "
                    "use checkpoint='never' for this stage"
                )


def _held(stage: StageReplay) -> Held:
    training: list[bool] = []
    weights: list[Tensor | None] = []
    stack: list[nn.Module | None] = [layer for _, layer in reversed(stage.layers)]
    while stack:
        module = stack.pop()
        if module is not None:
            training.append(module.training)
            weights += module._parameters.values()
            stack += reversed(module._modules.values())
    return training, weights, versions(each for each in weights if each is not None)


def _difference(stage: StageReplay, before: Held, now: Held) -> str:
    """The first thing that changed, in words."""
    modules = [
        pair
        for name, layer in stage.layers
        for pair in cast("Iterable[tuple[str, nn.Module]]", layer.named_modules(prefix=name, remove_duplicate=False))
    ]
    if len(modules) != len(before[0]) or len(before[1]) != len(now[1]):
        return "layers were added or removed"
    names = [f"{path}.{key}" for path, module in modules for key in module._parameters]
    for name, one, other in zip(names, before[1], now[1], strict=True):
        if one is not other:
            return f"parameter {name!r} was replaced (by torch.func.functional_call, say, which ends with the call)"
    present = [name for name, each in zip(names, now[1], strict=True) if each is not None]
    for name, one, other in zip(present, before[2], now[2], strict=True):
        if one != other:
            return f"parameter {name!r} was written to (by an optimizer's step or load_state_dict, say)"
    path = next(path for (path, _), was, is_now in zip(modules, before[0], now[0], strict=True) if was != is_now)
    return f"layer {path!r} went from training to evaluation or back"
