"""The memory of one loop function: row axes, addresses with the number of rows as a variable, and allocation.

    x0 + t * (N * 5) + rows * 5 + cols      an input (N, 5) in step t
    h0 + (t + 1) * (N * 8) + ...            a new state: the next row of memory that has T + 1 rows
    l_z3 + pid * 8 + cols                   a value without rows, of which every program has its own

A value's *row axis* (`recurrent.cpp.scheduling`) is the axis along which its elements depend only on the same row of
the values before. If it is the first axis, as almost always, the number of rows appears in no other place than above.
The same kernels then serve any number of rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.cpp.scheduling import LoopFunction, axis_in_result, axis_in_view

_STEP = {"same": None, "step": "{t}", "next": "({t} + 1)", "in": "(({t} + 1) % 2)", "out": "({t} % 2)"}
_SHARED: tuple[ir.ArgumentKind, ...] = ("constant", "parameter gradient")


class StepMemory:
    """The layouts of a function's values. `by_rows` says whether rows never meet in its main loop."""

    def __init__(self, function: LoopFunction) -> None:
        self.function = function
        found, self.rows = _find_axes(function), _row_count(function)
        self._axes, self._mixed = found or ({}, set[ir.LoopValue]())
        self._readers: dict[ir.LoopValue, list[ir.LoopValue]] = {}
        for value in function.values:
            for operand in ir.operand_values(value.operation):
                self._readers.setdefault(operand, []).append(value)
        self.recurrent = _recurrent(function)
        self.layouts = dict(function.layouts)
        self.stacks = list(function.stacks)
        self.locals = dict.fromkeys(function.locals)
        self._sizes: dict[str, str] = {}
        for value, layout in self.layouts.items():
            if value not in function.slots:  # arguments first: a state's memory has the size of the state
                self._sizes.setdefault(layout.base, self._size_text(value))

        self.by_rows = found is not None and all(map(self._can_be_postponed, self._mixed_in_main()))
        if not self.by_rows:
            self._axes = {}
        for value, argument in function.signature.added:
            self._sizes[argument.name] = self._size_text(value)

    @property
    def bases(self) -> list[str]:
        """All variables of kernels that are addresses."""
        return list(self._sizes)

    def axis_of(self, value: ir.LoopValue) -> int | None:
        return self._axes.get(value)

    @property
    def _main(self) -> list[ir.LoopValue]:
        return [value for phase in self.function.phases if phase.main for value in phase.loop]

    def _mixed_in_main(self) -> set[ir.LoopValue]:
        """Values of the main loop that mix rows, or that read such values."""
        mixed = set[ir.LoopValue]()
        for value in self._main:
            if value in self._mixed or any(operand in mixed for operand in ir.operand_values(value.operation)):
                mixed.add(value)
        return mixed

    def _can_be_postponed(self, value: ir.LoopValue) -> bool:
        """Whether the operands of a value still exist after the main loop."""
        rows = {self.layouts[operand].row for operand in ir.operand_values(value.operation)}
        return value not in self.recurrent and rows.isdisjoint(("in", "out"))

    def postponed(self, groups: Sequence[Sequence[ir.LoopValue]], *, all_late: bool) -> list[ir.LoopValue]:
        """Values of the main loop to compute after it, for all steps at once. Their operands get a row per step.

        Those are values that mix rows. With `all_late`, also groups that no later step needs.
        """
        late = self._mixed_in_main() if self.by_rows else set[ir.LoopValue]()
        if all_late:
            # Last group first: a group can go if all that read it go.
            for group in reversed(groups):
                readers = {reader for value in group for reader in self._readers.get(value, []) if reader in self._main}
                free = all(self._can_be_postponed(value) and self._is_free(value) for value in group)
                if free and readers - set(group) <= late:
                    late.update(group)
        for value in late:
            for stacked in (value, *ir.operand_values(value.operation)):
                self.add_stack(stacked)
        return [value for value in self._main if value in late]

    def _is_free(self, value: ir.LoopValue) -> bool:
        """Whether only rows of its own step depend on the place of a value in the schedule."""
        return value not in self.function.slots

    @property
    def axes(self) -> Mapping[ir.LoopValue, int | None] | None:
        return self._axes if self.by_rows else None

    def axis_of_view(self, view: ir.View) -> int | None:
        axis = self.axis_of(view.value)
        return None if axis is None else axis_in_view(view, axis, self.rows)

    def layout_of(self, view: ir.View) -> ir.MemoryLayout:
        layout = self.layouts[view.value]
        if view.value in self.function.slots:
            return layout
        return layout.with_strides(tuple(view.at.stride()), int(view.at.storage_offset()))

    def add_stack(self, value: ir.LoopValue) -> None:
        """Give a value that has one row for all steps a row per step."""
        if value not in self.locals:
            return
        del self.locals[value]
        self.stacks.append(value)
        old, new = self.layouts[value].base, f"s_{value}"
        self._sizes[new] = self._sizes.pop(old)
        for other, layout in self.layouts.items():  # the value, and pieces that are computed within it
            if layout.base == old:
                self.layouts[other] = replace(layout, base=new, row="step")

    def is_stored(self, value: ir.LoopValue, group: Sequence[ir.LoopValue]) -> bool:
        return self.function.is_stored(value, group)

    # -- addresses ----------------------------------------------------------------------------------------------------

    def row_start(self, layout: ir.MemoryLayout, time: str, *, private: bool = False) -> str:
        """The address of the row of memory that a step uses."""
        text, step, size = layout.base, _STEP[layout.row], self._sizes[layout.base]
        if step is not None:
            text += f" + {step.format(t=time)} * {size}"
        if private:
            text += f" + pid * {size}"
        return f"{text} + {layout.offset}" if layout.offset else text

    def _size_text(self, value: ir.LoopValue) -> str:
        if self.axis_of(value) != 0:
            return str(value.size)
        size = value.size // self.rows
        return "N" if size == 1 else f"(N * {size})"

    # -- tensors ------------------------------------------------------------------------------------------------------

    def sizes(self, shape: Sequence[int], axis: int | None, rows: int) -> list[int]:
        """A shape with this number of rows."""
        return [rows if i == axis else size for i, size in enumerate(shape)]

    def empty(self, value: ir.LoopValue, rows: int, device: torch.device, first: int | None = None) -> Tensor:
        """Memory of a value, with `first` rows of memory."""
        axis = self.axis_of(value)
        sizes = self.sizes(value.shape, axis if axis == 0 else None, rows)
        return torch.empty([*([] if first is None else [first]), *sizes], dtype=value.dtype, device=device)

    def over_steps(self, memory: Tensor, layout: ir.MemoryLayout, steps: int, rows: int, shape: "ViewShape") -> Tensor:
        """A view in all steps, T x ..., or without T if it is the same in all."""
        sizes = self.sizes(shape.sizes, shape.axis if shape.first else None, rows)
        flat = memory.reshape(-1)
        offset = flat.storage_offset() + layout.offset  # a chunk is a part of the caller's memory
        if layout.row == "same":
            return flat.as_strided(sizes, layout.strides, offset)
        pitch = memory[0].numel()
        start = pitch if layout.row == "next" else 0
        return flat.as_strided([steps, *sizes], [pitch, *layout.strides], offset + start)

    def describe(self, view: ir.View) -> str:
        shape = self.view_shape(view)
        sizes = ["N" if i == shape.axis and shape.first else str(size) for i, size in enumerate(shape.sizes)]
        return f"{view.value} [{' x '.join(sizes)}] by {tuple(view.at.stride())} from {view.at.storage_offset()}"

    def view_shape(self, view: ir.View) -> "ViewShape":
        return ViewShape(view.shape, self.axis_of_view(view), self.axis_of(view.value) == 0)


@dataclass(frozen=True)
class ViewShape:
    """The shape of a view, its row axis, and whether rows are the first axis of the viewed value."""

    sizes: tuple[int, ...]
    axis: int | None
    first: bool


def _row_count(function: LoopFunction) -> int:
    carried = function.signature.carried
    return next(iter(carried[0][0].shape), 1) if carried else 1


def _recurrent(function: LoopFunction) -> set[ir.LoopValue]:
    """The values that lead to a carried value of the next step."""
    ends = [value for value in function.values if (at := function.layouts.get(value)) and at.row in ("next", "out")]
    return ir.with_ancestors(ends)


def _find_axes(function: LoopFunction) -> tuple[dict[ir.LoopValue, int | None], set[ir.LoopValue]] | None:
    """The row axis of every value, and the values that mix rows. None if the next step needs one of those."""
    signature, rows = function.signature, _row_count(function)
    carried = [start for start, _ in signature.carried]
    if not carried or any(start.shape[:1] != (rows,) for start in carried):
        return None
    values = [value for value in function.values if not isinstance(value.operation, ir.TimeReduction)]
    alternating = {value for value in values if function.layouts[value].row == "out"}
    # A constant tensor such as zeros, which has rows although it reads nothing that has.
    filled = {value for value in values if value.shape[:1] == (rows,) and _is_filled(value)}
    inputs = [
        value
        for value, source in signature.inputs.items()
        if source.kind not in _SHARED and value.shape[:1] == (rows,) and value not in carried
    ]
    # Rows of inputs too, so that a value of inputs alone is divided as well. An invariant state, such as an encoded
    # source, can have another first axis of the same size. Then only the carried values are known to have rows.
    for starts in ([*carried, *inputs], carried):
        for own_rows in (alternating | filled, alternating):
            found = _axes_from(values, starts, own_rows, rows)
            if found[1].isdisjoint(_recurrent(function)):
                return found
    return None


def _axes_from(
    values: Sequence[ir.LoopValue], starts: Sequence[ir.LoopValue], own_rows: set[ir.LoopValue], rows: int
) -> tuple[dict[ir.LoopValue, int | None], set[ir.LoopValue]]:
    """The row axes that follow from `starts`, and the values that mix rows. Those in `own_rows` have rows anyway."""
    axes: dict[ir.LoopValue, int | None] = dict.fromkeys(starts, 0)
    mixed: set[ir.LoopValue] = set()
    for value in values:
        bound = [(v, axis) for v in ir.operand_views(value.operation) if (axis := axes.get(v.value)) is not None]
        found = {axis_in_result(value, view, axis_in_view(view, axis, rows)) for view, axis in bound}
        if len(found) > 1 or None in found:
            mixed.add(value)
            axes[value] = None
        else:
            axes[value] = found.pop() if found else 0 if value in own_rows and value.shape[:1] == (rows,) else None
    return axes, mixed


def _is_filled(value: ir.LoopValue) -> bool:
    return isinstance(value.operation, ir.Elementwise) and not ir.operand_views(value.operation)


def mixed_index(sizes: Sequence[int], strides: Sequence[int], index: str) -> list[str]:
    """The terms of an address for one index over several axes. Axes that are adjacent in memory are merged."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    terms: list[str] = []
    rest = prod(size for size, _ in merged)
    for i, (size, stride) in enumerate(merged):
        rest //= size
        if stride:
            part = index if rest == 1 else f"({index} // {rest})"
            part = part if i == 0 else f"({part} % {size})"
            terms.append(part if stride == 1 else f"{part} * {stride}")
    return terms
