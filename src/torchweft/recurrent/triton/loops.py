"""One function of a plan, made runnable: kernels for its loops, and bulk work by PyTorch between them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.cpp.scheduling import LoopFunction, Phase, fuse
from torchweft.recurrent.triton import toolchain
from torchweft.recurrent.triton.bulk import BulkWork, unexpanded
from torchweft.recurrent.triton.fusion import fuse_loop, place_pieces
from torchweft.recurrent.triton.kernels import Kernel, rows_kernel, segment_kernels, steps_kernels
from torchweft.recurrent.triton.memory import StepMemory

Tier = Literal["rows", "segments"]


class TritonLoops:
    """A function of a plan. Raises Unsupported."""

    def __init__(self, function: LoopFunction, tier: Tier) -> None:
        self.memory = memory = StepMemory(function)
        if tier == "rows" and not memory.by_rows:
            raise ir.Unsupported(f"rows of the batch meet within a step ({function.signature.name})")
        self.tier: Tier = tier
        self.rows = memory.rows  # of a call
        self.main: tuple[list[Kernel], list[Kernel]] = ([], [])  # of the loop over time, and after it
        self.compiled: dict[str, Any] = {}  # what Triton made of the kernels: registers, spills
        self._arguments = {layout.base: value for value, layout in memory.layouts.items()}
        self._phases: list[tuple[Sequence[ir.LoopValue], list[Kernel], list[Kernel]]] = []
        for number, phase in enumerate(function.phases):
            if phase.main:
                self._add_main(phase)
            else:
                self._phases.append((phase.bulk, self._steps_kernels(phase.loop, f"phase_{number}"), []))

    def _add_main(self, phase: Phase) -> None:
        memory = self.memory
        groups, placed = place_pieces(memory, fuse(phase.loop, memory.axes))
        late = memory.postponed(groups, all_late=self.tier == "segments")
        groups = [[value for value in group if value not in late] for group in groups]
        loop = fuse_loop(memory, [group for group in groups if group], placed)
        in_rows = self.tier == "rows"
        kernels, tail = ([rows_kernel(memory, loop)], list[Kernel]()) if in_rows else segment_kernels(memory, loop)
        self.main = kernels, tail
        self._phases.append((phase.bulk, kernels, tail))
        if late:
            self._phases.append(([], self._steps_kernels(late, "late"), []))

    def _steps_kernels(self, values: Sequence[ir.LoopValue], name: str) -> list[Kernel]:
        # Steps run at once, so a value that is read only here needs a row per step too.
        for value in values:
            self.memory.add_stack(value)
        return steps_kernels(
            self.memory, fuse(values, self.memory.axes), f"{self.memory.function.signature.name}_{name}"
        )

    def empty_argument(self, name: str, steps: int, device: torch.device) -> Tensor:
        """Memory of an argument with a row per step."""
        return self.memory.empty(self._arguments[name], self.rows, device, steps)

    @property
    def description(self) -> str:
        """All that runs, with N for the number of rows. Two plans with the same description serve any number."""
        lines = [self.text]
        for values, _, _ in self._phases:
            for value in values:
                start = value.operation.start if isinstance(value.operation, ir.Product) else None
                read = [unexpanded(v) if v is start else v for v in ir.operand_views(value.operation)]
                views = read if isinstance(value.operation, ir.TimeReduction) else [ir.whole_view(value), *read]
                lines.append(f"{value} of {', '.join(map(self.memory.describe, views))}")
        return "\n".join(lines)

    @property
    def text(self) -> str:
        return "\n\n".join(kernel.text for _, kernels, tail in self._phases for kernel in (*kernels, *tail))

    def run(self, steps: int, tables: Mapping[str, Sequence[Tensor | None]], device: torch.device) -> None:
        """Run over so many steps, on the caller's tensors by kind and index."""
        memory, function, rows = self.memory, self.memory.function, self.rows
        tensors = {a.name: tables[a.kind][a.index] for a in function.signature.arguments}
        for value in memory.stacks:
            tensors[f"s_{value}"] = memory.empty(value, rows, device, steps)
        for value in memory.locals:
            own = self.tier == "rows" and memory.axis_of(value) is None
            tensors[f"l_{value}"] = memory.empty(value, rows, device, rows if own else None)
        bulk, precision = BulkWork(memory, tensors, steps, rows), _precision()
        order = range(steps - 1, -1, -1) if function.signature.backward else range(steps)
        for values, kernels, tail in self._phases:
            for value in values:
                bulk.run(value)
            each_step = bool(kernels) and kernels[0].sweep == "segments"
            for step in order if each_step else (0,):
                for kernel in kernels:
                    self.compiled[kernel.name] = kernel.launch(tensors, steps, step, rows, precision)
            for kernel in tail:
                kernel.launch(tensors, steps, 0, rows, precision)

    def explain(self) -> str:
        kernels, tail = self.main
        how = "one launch for all steps" if self.tier == "rows" else f"{len(kernels)} launches a step"
        return f"{self.memory.function.signature.name}: {how}" + (f", {len(tail)} after the last one" if tail else "")


def _precision() -> str:
    """The precision of products of float32, as PyTorch's own products have it."""
    rounds = not toolchain.is_interpreted() and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if rounds else "ieee"
