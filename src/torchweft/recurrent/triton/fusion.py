"""Products that need no memory, and the rotation of the backward loop.

A product whose slices a single pass reads is computed in that pass (*inlined*). An LSTM forward is one pass per step:

    for t in 0 .. T-1:    i, f, g, o = h R    c, h = ...

Backward, the product comes last: the step's pass yields the gradients of the gates, and the product the gradient that
the step before reads. *Rotated*, a step begins with the product of the step that ran before it:

    for t in T-1 .. 0:    dgates = ...(dh)        dh = dgates R       two passes over memory, two launches in segments
    for t in T-1 .. 0:    dh = dgates[t+1] R      dgates[t] = ...     one

The very first dh is the given one, and the very last is computed after the loop, by the *tail*. What the product reads
must then have a row for every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.triton.emitter import Fusion, Rotated
from torchweft.recurrent.triton.memory import StepMemory

Group = list[ir.LoopValue]


@dataclass(frozen=True)
class FusedLoop:
    """The groups of a main loop that run in every step, those that run once after it, and their fusion."""

    groups: list[Group]
    tail: list[Group]
    fusion: Fusion
    tail_fusion: Fusion
    apart: list[tuple[ir.LoopValue, str]]  # gradients of the caller that are added in memory before the step


Placed = dict[ir.LoopValue, list[tuple[ir.LoopValue, int]]]


def place_pieces(memory: StepMemory, groups: Sequence[Group]) -> tuple[list[Group], Placed]:
    """The groups without concatenations that passes write, and the places of the values that those passes write."""
    passes = {value for group in groups for value in group if isinstance(value.operation, ir.Elementwise)}
    placed: Placed = {}
    kept: list[Group] = []
    for group in groups:
        cat, operation = group[0], group[0].operation
        if not isinstance(operation, ir.Cat):
            kept.append(group)
            continue
        pieces = list(zip(operation.pieces, operation.starts, strict=True))
        loose = [(piece, start) for piece, start in pieces if piece.value not in memory.function.slots]
        same = memory.axis_of(cat)
        if not all(p.is_whole and p.value in passes and memory.axis_of(p.value) == same for p, _ in loose):
            kept.append(group)
            continue
        for piece, start in loose:
            offset = start * memory.layouts[cat].strides[operation.axis]
            placed.setdefault(piece.value, []).append((cat, offset))
    return kept, placed


def fuse_loop(memory: StepMemory, groups: Sequence[Group], placed: Placed) -> FusedLoop:
    """Find the products to inline and the gradients to rotate. Gives memory a row per step where rotation needs one."""
    finder = _Finder(memory, groups)
    inlined = finder.inlined()
    rotated, tail = finder.rotated(inlined)
    moved = {value for group in tail for value in group}
    added, apart = finder.added()
    kept = [group for group in groups if group[0] not in inlined and group[0] not in moved]
    loop = {value: group for value, group in inlined.items() if value not in moved}
    rest = {value: group for value, group in inlined.items() if value in moved}
    return FusedLoop(
        kept, [g for g in tail if g[0] not in rest], Fusion(loop, rotated, added, placed), Fusion(rest), apart
    )


class _Finder:
    def __init__(self, memory: StepMemory, groups: Sequence[Group]) -> None:
        self.memory, self.groups = memory, groups
        self.home = {value: group for group in groups for value in group}
        self.readers: dict[ir.LoopValue, list[ir.LoopValue]] = {}
        for group in groups:
            for value in group:
                for operand in ir.operand_values(value.operation):
                    self.readers.setdefault(operand, []).append(value)

    def inlined(self) -> dict[ir.LoopValue, Group]:
        """The products that one pass can compute, with that pass."""
        found: dict[ir.LoopValue, Group] = {}
        for value, group in self.home.items():
            reader = self._only_pass_of(value)
            if reader is not None and reader is not group and self._is_by_rows(value):
                views = self._views_of(value)
                if all(_is_slice(view, value) for view in views) and self._needs_no_more(value, views):
                    found[value] = reader
        return found

    def _needs_no_more(self, value: ir.LoopValue, views: Sequence[ir.View]) -> bool:
        """Whether the slices are all of the product, or nothing else reads it."""
        if value in self.memory.locals:
            return True
        starts = {int(view.at.storage_offset()) for view in views}
        width = views[0].shape[1]
        return starts == set(range(0, value.shape[1], width)) and all(view.shape[1] == width for view in views)

    def _is_by_rows(self, value: ir.LoopValue) -> bool:
        plain = isinstance(value.operation, ir.Product) and len(value.shape) == 2
        return plain and self.memory.axis_of(value) == 0

    def _only_pass_of(self, value: ir.LoopValue) -> Group | None:
        """The elementwise group that all readers in the loop belong to."""
        readers = self.readers.get(value, [])
        homes = {id(self.home[reader]): self.home[reader] for reader in readers}
        if len(homes) != 1 or not all(isinstance(reader.operation, ir.Elementwise) for reader in readers):
            return None
        (group,) = homes.values()
        whole = all(view.shape == group[0].shape for view in self._views_of(value))
        return group if whole and self.memory.axis_of(group[0]) == 0 and len(group[0].shape) == 2 else None

    def _views_of(self, value: ir.LoopValue) -> list[ir.View]:
        return [v for r in self.readers.get(value, []) for v in ir.operand_views(r.operation) if v.value is value]

    def added(self) -> tuple[dict[ir.LoopValue, str], list[tuple[ir.LoopValue, str]]]:
        """Gradients that each pass adds as it reads the carried one, and those that must be added in memory."""
        in_passes: dict[ir.LoopValue, str] = {}
        apart: list[tuple[ir.LoopValue, str]] = []
        for value, argument in self.memory.function.signature.added:
            readers = self.readers.get(value, [])
            if readers and all(isinstance(reader.operation, ir.Elementwise) for reader in readers):
                in_passes[value] = argument.name
            else:
                apart.append((value, argument.name))
        return in_passes, apart

    # -- rotation -----------------------------------------------------------------------------------------------------

    def rotated(self, inlined: dict[ir.LoopValue, Group]) -> tuple[dict[ir.LoopValue, Rotated], list[Group]]:
        """The carried gradients to rotate, and the groups that they leave for after the loop."""
        found: dict[ir.LoopValue, Rotated] = {}
        tail: list[Group] = []
        signature = self.memory.function.signature
        if not (signature.backward and self.memory.by_rows):
            return {}, []
        starts = {end: start for start, end in signature.carried if end is not None}
        for end in starts:
            group = self.home.get(end)
            if group is None or group in tail or not all(value in starts for value in group):
                continue
            parts = [self._rotation_of(value, starts[value], inlined, group) for value in group]
            if all(part is not None for part in parts):
                for value, part in zip(group, parts, strict=True):
                    if part is not None:
                        found[starts[value]] = part
                products = dict.fromkeys(p for part in parts if part for p in part.products if p not in group)
                tail += [*(self.home[product] for product in products), group]
        for rotation in found.values():
            for value in self._read_later(rotation):
                self.memory.add_stack(value)
        return found, tail

    def _rotation_of(
        self, end: ir.LoopValue, start: ir.LoopValue, inlined: dict[ir.LoopValue, Group], group: Group
    ) -> Rotated | None:
        memory = self.memory
        reader = self._only_pass_of(start)
        if reader is None or reader is group or not all(view.is_whole for view in self._views_of(start)):
            return None
        if memory.layouts[end].row != "out" or memory.axis_of(end) != 0 or self.readers.get(end):
            return None
        if isinstance(end.operation, ir.Product):
            rotation = Rotated(end, [end]) if self._is_by_rows(end) else None
        else:
            read = list(dict.fromkeys(ir.operand_values(end.operation)))
            products = [value for value in read if value in inlined]
            only_here = products and all(product in memory.locals for product in products)
            rotation = Rotated(end, products) if only_here and len(end.shape) == 2 else None
        later = None if rotation is None else self._read_later(rotation)
        return rotation if later is not None and all(self._can_be_stacked(value) for value in later) else None

    def _read_later(self, rotation: Rotated) -> list[ir.LoopValue]:
        """The values that a rotated gradient reads one step later."""
        operations = [product.operation for product in rotation.products]
        if rotation.end not in rotation.products:
            operations.append(rotation.end.operation)
        read = dict.fromkeys(value for operation in operations for value in ir.operand_values(operation))
        return [value for value in read if value not in rotation.products and not value.is_constant]

    def _can_be_stacked(self, value: ir.LoopValue) -> bool:
        memory = self.memory
        if memory.layouts[value].row == "step":
            return True
        return value in memory.locals and memory.axis_of(value) == 0


def _is_slice(view: ir.View, value: ir.LoopValue) -> bool:
    """Whether a view of a matrix is some of its columns."""
    strides = view.at.stride()
    return len(view.shape) == 2 and strides[0] == value.shape[1] and strides[1] == 1
