"""Schedule of one loop function: when each value is computed, where it lies, and what threads and passes share.

Phases, by dependence on the carried values:

    level 0   bulk: products of inputs            x W for T x N rows at once
              loop: what they need
    level 1   bulk, loop ...
    main      the one loop whose steps depend on each other: the carried values, and what is cheap beside them
    later     bulk: products of the main loop's values; sums over time for parameters

Memory:

    argument   the caller's, one row per step (states one row more), or one for all steps
    stack      one row per step, in the workspace: read in another phase than the one that computes it
    local      one row for each thread: read in the loop that computes it
    register   a variable within one group of fused elementwise values
    slot       a piece of a concatenation, computed where it belongs, so that nothing is copied

Fusion: elementwise values of one shape form a group, which is one pass over memory. A value joins if its operands are
computed before the group, or are members read whole. Products and reductions go first, so that groups grow.

Threads, in the main loop:

    by rows    each takes rows of the batch through all steps and never waits; rows must not meet within a step
    shared     rows meet: the first thread computes, and all share the products

A value's *row axis* is the axis along which its elements depend only on the same row of what was computed before:

    h (N, H) axis 0    h W  axis 0    (h W).t()  axis 1    softmax(h, 1)  axis 0    h.mean(0)  rows meet: none
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from weft.recurrent.cpp.ir import (
    AxisOp,
    Cat,
    Elementwise,
    MemoryLayout,
    Product,
    Reduce,
    Row,
    TimeReduction,
    Value,
    View,
    ancestors,
    contiguous_meta,
    operand_views,
    replace_operand,
    sources,
    whole_view,
)


@dataclass
class Phase:
    """Bulk work, then a loop, whose `groups` are one pass over memory each. `main` marks the loop that carries."""

    bulk: list[Value] = field(default_factory=list[Value])
    loop: list[Value] = field(default_factory=list[Value])
    main: bool = False
    groups: list[list[Value]] = field(default_factory=list["list[Value]"])


@dataclass
class Phases:
    """In order of running; `at` says of a value in which phase's loop or bulk it is made."""

    phases: list[Phase]
    at: dict[Value, int]
    bulk: set[Value]

    def apart(self, value: Value, readers: Iterable[Value]) -> bool:
        """Whether a value must be kept for all steps, as it is read in another phase or in bulk, or made in bulk."""
        return value in self.bulk or any(self.at[each] != self.at[value] or each in self.bulk for each in readers)

    def late(self, value: Value, main: int) -> bool:
        """Whether a value is made when the main loop, of this number, is over."""
        return self.at[value] != main or value in self.bulk


def assign_phases(values: Sequence[Value], carried: Sequence[Value], ends: Iterable[Value]) -> Phases:
    """Give every value its phase. `values` are in order of making, `carried` come from the step before, `ends` are what
    that step becomes."""
    ends = list(ends)
    from_carry = set(carried)
    for value in values:
        if any(each in from_carry for each in sources(value.made)):
            from_carry.add(value)
    recurrent = {each for each in values if each in from_carry} & ancestors(ends)
    heavy = {
        v for v in values if isinstance(v.made, TimeReduction) or (isinstance(v.made, Product) and v not in recurrent)
    }
    level: dict[Value, int] = {}

    def after(value: Value) -> int:
        return max((level.get(each, -1) for each in sources(value.made)), default=-1)

    early = [each for each in values if each not in from_carry]
    for value in early:
        level[value] = after(value) + (value in heavy)
    ready = [*ends, *(s for v in recurrent for s in sources(v.made))]
    main = max([0, *(level.get(each, -1) for each in ready)])
    level.update(dict.fromkeys(carried, main))
    for value in values:
        if value in from_carry:
            level[value] = main if value in recurrent else max(main, after(value)) + (value in heavy)
    readers = _readers(values)
    for value in reversed(early):  # what is cheap moves to the loop that reads it first
        if value not in heavy:
            limits = [level[each] - (each in heavy) for each in readers.get(value, [])]
            level[value] = min(limits, default=max(level[value], main))
    found = [Phase() for _ in range(max([main, *level.values()]) + 2)]
    for value in values:
        phase = found[level[value] + 1]
        (phase.bulk if value in heavy else phase.loop).append(value)
    found[main + 1].main = bool(carried)
    return Phases(found, {value: level[value] + 1 for value in values}, heavy)


def _readers(values: Iterable[Value]) -> dict[Value, list[Value]]:
    found: dict[Value, list[Value]] = {}
    for value in values:
        for each in sources(value.made):
            found.setdefault(each, []).append(value)
    return found


@dataclass(eq=False)
class Argument:
    """Memory that the caller gives, by position."""

    name: str
    dtype: torch.dtype
    size: int
    row: Row


@dataclass(eq=False)
class LoopFunction:
    """A function to generate. Fill in, then `finalize`."""

    name: str
    backward: bool = False
    arguments: list[Argument] = field(default_factory=list[Argument])
    layouts: dict[Value, MemoryLayout] = field(default_factory=dict[Value, MemoryLayout])
    """The storage of each value, as a whole."""
    carried: list[tuple[Value, Value | None]] = field(default_factory=list["tuple[Value, Value | None]"])
    """Values from the previous step, and their successors; None for zeros."""
    added: list[tuple[Value, Argument]] = field(default_factory=list["tuple[Value, Argument]"])
    """Added by the caller to a carried value before a step reads it."""
    wanted: list[tuple[View, Argument]] = field(default_factory=list["tuple[View, Argument]"])
    """Values to write, and where."""
    totals: list[tuple[Value, View]] = field(default_factory=list["tuple[Value, View]"])
    """Sums over all steps, and what they are added to."""
    values: list[Value] = field(default_factory=list[Value])
    """All that is made, in order."""
    readers: dict[Value, list[Value]] = field(default_factory=dict[Value, list[Value]])
    stacks: list[Value] = field(default_factory=list[Value])
    locals: dict[Value, None] = field(default_factory=dict[Value, None])
    slots: set[Value] = field(default_factory=set[Value])
    phases: Phases = field(default_factory=lambda: Phases([], {}, set()))

    def argument(self, name: str, dtype: torch.dtype, size: int, row: Row) -> Argument:
        """A new argument, behind those that there are."""
        self.arguments.append(Argument(name, dtype, size, row))
        return self.arguments[-1]

    def given(self, name: str, shape: Sequence[int], dtype: torch.dtype, row: Row) -> Value:
        """A new argument that is read as a value."""
        value = Value(name, tuple(shape), dtype, None, row != "same")
        self.argument(name, dtype, value.size, row)
        self.allocate(value, name, row)
        return value

    def allocate(self, value: Value, base: str, row: Row) -> None:
        """Give a value memory of its own."""
        self.layouts[value] = MemoryLayout(base, row, value.size, contiguous_meta(value.shape, value.dtype).stride())

    def layout(self, view: View) -> MemoryLayout:
        """The elements of a view."""
        layout = self.layouts[view.value]
        if view.value in self.slots:
            assert view.whole
            return layout
        return layout.with_strides(tuple(view.at.stride()), int(view.at.storage_offset()))

    def stored(self, value: Value, group: Sequence[Value]) -> bool:
        """Whether a value of a group is read outside of it, and so needs memory."""
        return value not in self.locals or any(each not in group for each in self.readers[value])

    def finalize(self, made: Sequence[Value]) -> None:
        """Decide on copies, phases and homes. `made` are all values in order of making."""
        values = list(made)
        targets = self._targets(values)
        ends = [value for value, argument in targets.items() if argument.row in ("next", "out")]
        wanted = ancestors([*targets, *(total for total, _ in self.totals)])
        values = [value for value in values if value in wanted]
        self.phases = assign_phases(values, [start for start, _ in self.carried], ends)
        main = next((i for i, each in enumerate(self.phases.phases) if each.main), 0)
        self._copy_carried(values, main)
        self._copy_passing(values, targets, main)
        self.values = values
        self.readers = {value: [] for value in values} | _readers(values)
        for value, argument in targets.items():
            self.allocate(value, argument.name, argument.row)
        for value in values:
            if not isinstance(value.made, TimeReduction):
                self._allocate_value(value)

    def _targets(self, values: list[Value]) -> dict[Value, Argument]:
        """Values computed in place at their destination; copies are added for those that cannot be."""
        targets: dict[Value, Argument] = {}
        for view, argument in self.wanted:
            value = view.value
            if not view.whole or value.made is None or value in targets or isinstance(value.made, TimeReduction):
                value = _copy(f"{argument.name}_copy", view)
                values.append(value)
            targets[value] = argument
        return targets

    def _copy_carried(self, values: list[Value], main: int) -> None:
        """A carried value in memory of two rows is gone when bulk work reads it: that reads a copy, a row per step."""
        for start, _ in self.carried:
            late = [each for each in values if start in sources(each.made) and self.phases.late(each, main)]
            if late and not self.layouts[start].per_step:
                copy = _copy(f"{start}_copy", whole_view(start))
                values.insert(0, copy)
                self.phases.at[copy] = main
                self.phases.phases[main].loop.insert(0, copy)
                for each in late:
                    assert each.made is not None
                    each.made = replace_operand(each.made, start, copy)

    def _copy_passing(self, values: list[Value], targets: dict[Value, Argument], main: int) -> None:
        """A carried value that bulk work reads needs a row per step beside the two rows that it passes through; into
        these only the main loop writes, which reads them."""
        for value, argument in list(targets.items()):
            readers = [each for each in values if value in sources(each.made)]
            if argument.row == "out" and (self.phases.late(value, main) or self.phases.apart(value, readers)):
                copy = _copy(f"{argument.name}_copy", whole_view(value))
                values.insert(values.index(value) + 1, copy)
                self.phases.at[copy] = main
                self.phases.phases[main].loop.append(copy)
                targets[copy] = targets.pop(value)

    def _allocate_value(self, value: Value) -> None:
        """Find memory for a value: an argument's, within a concatenation, a stack or a local."""
        if value in self.layouts:
            return
        readers = self.readers[value]
        cat = self._slotted(value, readers)
        if cat is not None:
            self.slots.add(value)
            self._allocate_value(cat)
            assert isinstance(cat.made, Cat)
            axis, values = cat.made.axis, [piece.value for piece in cat.made.pieces]
            before = sum(piece.shape[axis] for piece in cat.made.pieces[: values.index(value)])
            layout = self.layouts[cat]
            self.layouts[value] = layout.with_strides(layout.strides, layout.offset + before * layout.strides[axis])
        elif self.phases.apart(value, readers):
            self.stacks.append(value)
            self.allocate(value, f"s_{value}", "step")
        else:
            self.locals[value] = None
            self.allocate(value, f"l_{value}", "same")

    def _slotted(self, value: Value, readers: list[Value]) -> Value | None:
        """The concatenation in which a value is made: if it is read there whole, once, and nowhere as a view."""
        cats = [each for each in readers if isinstance(each.made, Cat)]
        if len(cats) != 1 or not isinstance(value.made, Elementwise) or self.phases.apart(value, readers):
            return None
        views = [view for each in readers for view in operand_views(each.made) if view.value is value]
        return cats[0] if all(view.whole for view in views) else None


def _copy(name: str, view: View) -> Value:
    return Value(name, view.shape, view.value.dtype, Elementwise("{0}", [view], view.value.dtype))


SequenceAxes = Mapping[Value, int | None]
"""The row axis of each value of a loop; None for one that every thread computes for itself."""


def row_axes(loop: Sequence[Value], carried: Sequence[Value]) -> SequenceAxes | None:
    """The row axis of every value in the loop, or None if the rows cannot be parted."""
    if not carried or any(not each.shape or each.shape[0] != carried[0].shape[0] for each in carried):
        return None
    rows = carried[0].shape[0]
    found: dict[Value, int | None] = dict.fromkeys(carried, 0)
    for value in loop:
        bound = [(view, axis) for view in operand_views(value.made) if (axis := found.get(view.value)) is not None]
        axes = {_axis_in_result(value, view, axis_in_view(view, axis, rows)) for view, axis in bound}
        if len(axes) > 1 or None in axes:
            return None
        if not axes and isinstance(value.made, AxisOp) and value.made.kind.startswith("scatter"):
            return None  # it is built up in memory, which threads that all compute it would share
        found[value] = axes.pop() if axes else None
    return found


def axis_in_view(view: View, axis: int, rows: int) -> int | None:
    """The row axis of a value in a view of it; None if it is split, joined with another, shifted or cut.

    value (A, rows, B)   one element:  a * rows * B + row * B + b        stride B, and what moves b stays below B,
                                                                         what moves a is a multiple of rows * B
    """
    stride = prod(view.value.shape[axis + 1 :])
    sizes, strides, offset = view.at.shape, view.at.stride(), int(view.at.storage_offset())
    at = [i for i, size in enumerate(sizes) if size == rows and strides[i] == stride]
    if len(at) != 1 or offset // max(stride, 1) % rows:
        return None
    inner = offset % max(stride, 1)
    for i, (size, step) in enumerate(zip(sizes, strides, strict=True)):
        if i == at[0] or size == 1 or step == 0:
            continue
        if step < stride:
            inner += (size - 1) * step
        elif step % (rows * stride):
            return None
    return at[0] if inner < stride else None


def _axis_in_result(value: Value, view: View, axis: int | None) -> int | None:
    """The row axis of an operand in the result; None if the operator mixes rows."""
    if axis is None:
        return None
    match value.made:
        case Elementwise():
            return axis + len(value.shape) - len(view.shape)
        case Reduce(axes=axes, keep=keep):
            return None if axis in axes else axis if keep else axis - sum(each < axis for each in axes)
        case AxisOp(axis=along):
            return None if axis == along else axis
        case Cat(axis=joined):
            return None if axis == joined else axis
        case Product(left=left, start=start, fixed=fixed):
            rows, columns = len(view.shape) - 2, len(view.shape) - 1
            if axis < rows:  # batches stay what they are
                return axis
            if view is start:  # threads cannot share the columns of a packed weight by rows of the batch
                return None if fixed is not None and axis == (columns if fixed == "right" else rows) else axis
            return axis if axis == (rows if view is left else columns) else None
        case _:
            return None


def fuse(loop: Sequence[Value], axes: SequenceAxes | None) -> list[list[Value]]:
    """The values of one loop in an order in which they can be made, elementwise ones in groups."""
    pending: list[Value] = list(loop)
    found: list[list[Value]] = []
    while pending:
        waiting = set(pending)
        ready = [each for each in pending if not any(view.value in waiting for view in operand_views(each.made))]
        groups = [[each] for each in ready if not isinstance(each.made, Elementwise)]
        groups = groups or [_group(pending, waiting, ready[0], axes)]
        done = {each for group in groups for each in group}
        found += groups
        pending = [each for each in pending if each not in done]
    return found


def _group(pending: Sequence[Value], waiting: set[Value], first: Value, axes: SequenceAxes | None) -> list[Value]:
    """All that can be made in one pass with `first`."""
    members: dict[Value, None] = {}
    for value in pending:
        same = value.shape == first.shape and (axes is None or axes.get(value) == axes.get(first))
        if same and isinstance(value.made, Elementwise):
            views = operand_views(value.made)
            if all(view.value not in waiting or (view.value in members and view.whole) for view in views):
                members[value] = None
    return list(members)


ROWS = 4
"""A batch of fewer rows is not shared out."""


@dataclass(frozen=True)
class LoopSchedule:
    """All phases that do something; `axes` is given if rows are split in the main loop."""

    steps: Sequence[Phase]
    axes: SequenceAxes | None
    rows: int


def schedule(function: LoopFunction) -> LoopSchedule:
    """The order in which a function runs, once it is finalized."""
    rows, axes = 1, None
    if any(each.main for each in function.phases.phases):
        (main,) = [each for each in function.phases.phases if each.main]
        rows = next(iter(function.carried[0][0].shape), 1)
        axes = row_axes(main.loop, [start for start, _ in function.carried]) if rows >= ROWS else None
    steps = [each for each in function.phases.phases if each.bulk or each.loop or each.main]
    for each in steps:
        each.groups = fuse(each.loop, axes if each.main else None)
    return LoopSchedule(steps, axes, rows)
