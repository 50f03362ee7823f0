"""The kernels of a main loop, in one of two ways, and of loops whose steps do not depend on each other.

    rows        one launch for all T steps. A program takes its rows of the batch through time and meets no other one.
    segments    one launch for each group and step. The end of a launch is where all programs meet.
    steps       one launch for each group, for all steps

Within a program of "rows", threads exchange values through memory: `tl.debug_barrier` after each group lets every
thread of the program see what the others wrote.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.triton import toolchain
from torchweft.recurrent.triton.emitter import ELEMENTS, ROWS, Fusion, Sweep, TileEmitter, columns_of, power_of_two
from torchweft.recurrent.triton.fusion import FusedLoop, Group
from torchweft.recurrent.triton.memory import StepMemory
from torchweft.recurrent.triton.operations import emit_operation, has_products_by_rows

WARPS = 4
_BARRIER = "tl.debug_barrier()"
# The beginning of a kernel: its place in the grid, and its step.
_PLACES: dict[Sweep, str] = {
    "rows": "    pid = tl.program_id(0)\n",
    "segments": "    pid = tl.program_id(0)\n    pid_c = tl.program_id(1)\n    t = tl.cast(step, tl.int64)\n",
    "steps": "    t = tl.cast(tl.program_id(0), tl.int64)\n    pid = tl.program_id(1)\n    pid_c = tl.program_id(2)\n",
}


@dataclass(frozen=True)
class Kernel:
    """The text of a kernel, its arguments, and its grid."""

    name: str
    text: str
    pointers: tuple[str, ...]
    flags: tuple[str, ...]  # arguments that can be absent
    sweep: Sweep
    block: int  # rows of a program; 0 if programs do not divide rows
    row_tiles: int
    column_tiles: int

    @cached_property
    def _loaded(self) -> Any:
        return toolchain.load_kernel(self.name, self.text)

    def launch(self, memory: Mapping[str, Tensor | None], steps: int, step: int, rows: int, precision: str) -> Any:
        """Launch for all steps, or in segments for one step. Returns what Triton compiled."""
        pointers = [memory[name] for name in self.pointers]
        dummy = next(tensor for tensor in pointers if tensor is not None)
        tiles = -(-rows // self.block) if self.block else self.row_tiles
        grid = (steps, tiles, self.column_tiles) if self.sweep == "steps" else (tiles, self.column_tiles)
        arguments = [dummy if tensor is None else tensor for tensor in pointers]
        flags = {f"HAS_{name}": memory[name] is not None for name in self.flags}
        return self._loaded[grid](*arguments, steps, step, rows, PRECISION=precision, **flags, num_warps=WARPS)


# The values of a group, and a function that emits them. It returns whether there is anything to do.
Part = tuple[Sequence[ir.LoopValue], Callable[[TileEmitter], bool]]


def emit_group(group: Group, emitter: TileEmitter) -> bool:
    if isinstance(group[0].operation, ir.Elementwise):
        emitter.emit_pass(group)
        return True
    return emit_operation(emitter, group[0])


def step_parts(memory: StepMemory, loop: FusedLoop) -> list[Part]:
    parts: list[Part] = [([v], partial(TileEmitter.emit_added, value=v, argument=name)) for v, name in loop.apart]
    parts += [(group, partial(emit_group, group)) for group in loop.groups]
    carried = memory.function.signature.carried
    return parts + [([start], partial(TileEmitter.emit_zeros, value=start)) for start, end in carried if end is None]


def rows_kernel(memory: StepMemory, loop: FusedLoop) -> Kernel:
    """All steps in one kernel."""
    signature = memory.function.signature
    values = [value for group in [*loop.groups, *loop.tail] for value in group]
    block = ROWS if has_products_by_rows([*values, *loop.fusion.products, *loop.tail_fusion.products], memory) else 1
    emitter = TileEmitter(memory, "rows", block, loop.fusion)
    with emitter.indented("for i in tl.range(0, T, num_stages=1):"):
        emitter.add("t = tl.cast(T - 1 - i, tl.int64)" if signature.backward else "t = tl.cast(i, tl.int64)")
        for _, emit in step_parts(memory, loop):
            if emit(emitter):
                emitter.add(_BARRIER)
    if loop.tail:
        emitter.add("t = tl.cast(0, tl.int64)")
        emitter.fusion = loop.tail_fusion
        for group in loop.tail:
            if emit_group(group, emitter):
                emitter.add(_BARRIER)
    emitter.divides_rows = True
    return finish(signature.name, emitter)


def segment_kernels(memory: StepMemory, loop: FusedLoop) -> tuple[list[Kernel], list[Kernel]]:
    """The launches of each step, and those after the last step."""
    name = memory.function.signature.name
    tail: list[Part] = [(group, partial(emit_group, group)) for group in loop.tail]
    return (
        _one_kernel_each(memory, "segments", step_parts(memory, loop), loop.fusion, name),
        _one_kernel_each(memory, "segments", tail, loop.tail_fusion, f"{name}_end"),
    )


def steps_kernels(memory: StepMemory, groups: Sequence[Group], name: str) -> list[Kernel]:
    """The kernels of a loop whose steps do not depend on each other."""
    parts: list[Part] = [(group, partial(emit_group, group)) for group in groups]
    return _one_kernel_each(memory, "steps", parts, Fusion(), name)


def _one_kernel_each(
    memory: StepMemory, sweep: Sweep, parts: Sequence[Part], fusion: Fusion, name: str
) -> list[Kernel]:
    kernels: list[Kernel] = []
    for values, emit in parts:
        emitter = TileEmitter(memory, sweep, _block_of(memory, values, fusion), fusion)
        if emit(emitter):
            kernels.append(finish(f"{name}_{len(kernels)}", emitter))
    return kernels


def _block_of(memory: StepMemory, values: Sequence[ir.LoopValue], fusion: Fusion) -> int:
    """The rows of a tile."""
    first = values[0]
    read = [operand for value in values for operand in ir.operand_values(value.operation)]
    if has_products_by_rows(values, memory) or any(v in fusion.inlined or v in fusion.rotated for v in read):
        return ROWS
    if isinstance(first.operation, ir.Product):
        return 1
    # One row is enough for a tile if it is long.
    return max(1, min(ROWS, ELEMENTS // power_of_two(columns_of(first.shape, memory.axis_of(first)))))


def finish(name: str, emitter: TileEmitter) -> Kernel:
    """The whole text of a kernel."""
    body = "\n".join(emitter.lines)
    words = set(re.findall(r"\w+", body))
    pointers = tuple(base for base in emitter.memory.bases if base in words)
    flags = tuple(base for base in pointers if f"HAS_{base}" in words)
    arguments = [*pointers, "T", "step", "N", "PRECISION: tl.constexpr", *(f"HAS_{f}: tl.constexpr" for f in flags)]
    block = emitter.block if emitter.divides_rows else 0
    rows = f"    r0 = pid * {block}\n    rows = r0 + tl.arange(0, {block})[:, None]\n" if block else ""
    head = f'@triton.jit(do_not_specialize=["T", "step", "N"])\ndef {name}({", ".join(arguments)}):\n'
    text = f"{head}{_PLACES[emitter.sweep]}{rows}{body}\n"
    return Kernel(name, text, pointers, flags, emitter.sweep, block, emitter.row_tiles, emitter.column_tiles)
