"""The blocks, tensors and crossing values of each stage of a model with split points."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from threading import RLock
from typing import cast

import torch
from torch import Tensor, nn

from torchweft.core.errors import SplitError
from torchweft.pipeline.pipeline_plan import Crossing
from torchweft.pipeline.split.isolation import place_tensor
from torchweft.pipeline.split.modules import named_modules
from torchweft.pipeline.split.program import (
    Copies,
    InterBlockParameters,
    Program,
    SplitStage,
    StepPrograms,
    bundle,
)
from torchweft.pipeline.split.recording import (
    Devices,
    tensor_of,
)
from torchweft.pipeline.stage import Stage
from torchweft.pipeline.weights import map_tensors


class StageMembers:
    """The blocks, parameters and crossing values of each stage: all that the programs so far need.

    They only grow, because stages for one program would have to be built again whenever another one runs.
    """

    def __init__(self, model: nn.Module, devices: Devices) -> None:
        self._model, self._devices = model, devices
        self.find = partial(tensor_of, model)
        self.version = 0  # changes whenever the stages must be built again
        self.blocks: list[dict[nn.Module, str]] = [{} for _ in devices]
        self.owned: list[set[str]] = [set() for _ in devices]
        self.in_tail: dict[nn.Module, str] = {}  # blocks that run once for all rows
        self._owned_in_tail: dict[str, None] = {}
        self._order: list[str] = []
        self._pairs: set[tuple[int, int]] = set()
        self._away: list[list[nn.Parameter]] = [[] for _ in devices]

    def add(self, program: Program) -> bool:
        """Add all that a program needs. Returns whether stages must be built again."""
        if self._order and program.order != self._order:
            raise SplitError(
                f"forward called the split points in the order {program.order}, and before in the order {self._order}; "
                "split at modules that are always called in one order"
            )
        before = [len(entries) for entries in (*self.blocks, *self.owned, self._pairs)]
        for s, part in enumerate(program.parts):
            self.blocks[s].update(part.blocks)
            self.owned[s] |= part.owned
            self._pairs |= {(s, reader) for reader in part.gives}
        for step in map(program.recording.steps.__getitem__, sorted(program.tail.steps)):
            self.in_tail.update({step.module: step.name} if step.module is not None else {})
            self._owned_in_tail.update({value.key: None for value in step.reads.values() if value.kind == "own"})
        has_grown = not self.version or before != [len(entries) for entries in (*self.blocks, *self.owned, self._pairs)]
        self._order = program.order
        self.version += has_grown
        return has_grown

    def build(self, stage_type: type[SplitStage]) -> tuple[list[Stage], Crossing]:
        """The stages, and the bundles that cross between them."""
        # Counted once per stage, however often its blocks contain the module.
        callers = Counter(m for blocks in self.blocks for m in {m for block in blocks for m in block.modules()})
        # A module that several stages call has the parameters of one device at a time, so these stages take turns.
        lock = RLock()
        stages: list[Stage] = []
        for s, (blocks, names, device) in enumerate(zip(self.blocks, self.owned, self._devices, strict=True)):
            shared = any(callers[module] > 1 for block in blocks for module in block.modules())
            turns = lock if shared and any(self._away) else nullcontext()
            # Sorted: ranks number the parameters that they lend in this order, and that of a set differs per process.
            code = InterBlockParameters(self._model, sorted(names))
            stages.append(stage_type(s, blocks, code, device, self._pairs, turns))
        return stages, [(bundle(s, t), s, (t,)) for s, t in sorted(self._pairs)]

    def homes(self, split: Sequence[str]) -> dict[int, int]:
        """The first stage that uses each parameter and buffer, by its id(). Modules that no program has used yet are
        assumed to run in the order in which they were registered."""
        homes: dict[int, int] = {}
        for s, tensors in enumerate(self._tensors()):
            for tensor in tensors:
                homes.setdefault(id(tensor), s)
        for block in self.in_tail:
            for tensor in (*block.parameters(), *block.buffers()):
                homes.setdefault(id(tensor), len(self._devices) - 1)
        for name in self._owned_in_tail:
            homes.setdefault(id(self.find(name)), len(self._devices) - 1)
        stage = 0
        starts = {name: s + 1 for s, name in enumerate(self._order or split)}
        for path, module in named_modules(self._model):
            stage = starts.get(path, stage)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                homes.setdefault(id(tensor), stage)
        return homes

    def place(self, homes: Mapping[int, int]) -> None:
        """Move parameters and buffers to the device of their stage. Those on the meta device stay."""
        map_tensors(self._model, lambda tensor: place_tensor(tensor, self._devices[homes[id(tensor)]]))
        for s, (tensors, device) in enumerate(zip(self._tensors(), self._devices, strict=True)):
            parameters = {id(p): p for p in tensors if isinstance(p, nn.Parameter)}.values()
            self._away[s] = [p for p in parameters if is_elsewhere(p, device, homes[id(p)], s)]

    def programs_of_step(self, chosen: Sequence[Program], *, graph: bool) -> StepPrograms:
        """The programs of a step, with copies of parameters for the stages on other devices than theirs."""
        copies = [_copied(away, device, graph) for away, device in zip(self._away, self._devices, strict=True)]
        return StepPrograms(chosen, copies, chain(*self._away))

    def set_copies(self, stages: Iterable[Stage], choice: StepPrograms) -> dict[int, Tensor]:
        """Give the copies of this step to the stages. Return the original parameter by the id() of its copy."""
        owners: dict[int, Tensor] = {}
        for stage, away, copies in zip(stages, self._away, choice.copies, strict=True):
            cast(SplitStage, stage).set_tied_copies(copies)
            owners.update({id(copies[id(p)]): p for p in away})
        return owners

    def _tensors(self) -> Iterator[list[Tensor]]:
        for blocks, names in zip(self.blocks, self.owned, strict=True):
            yield [*(x for block in blocks for x in (*block.parameters(), *block.buffers())), *map(self.find, names)]


def is_elsewhere(parameter: Tensor, device: torch.device, home: int, stage: int) -> bool:
    """Whether a stage must use a copy of a parameter that an earlier stage has on another device."""
    return home != stage and parameter.device != device and not parameter.is_meta


def _copied(away: Iterable[nn.Parameter], device: torch.device, graph: bool) -> Copies:
    # Under one graph for the whole step, autograd brings gradients to the original itself. Otherwise a copy is a leaf,
    # and the step adds its gradient to the original, once for all micro-batches.
    copies = {id(p): (p if graph else p.detach()).to(device, copy=True) for p in away}
    return copies if graph else {id(p): copies[id(p)].requires_grad_(p.requires_grad) for p in away}
