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

In an explanation, names are those of the C text: x inputs, h states, y outputs, v kept, c constants, d gradients,
p parameters; a dash marks the row of the next step, and brackets a part or another view of a value, with the number
that it begins from.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch

from weft.recurrent.cpp.ir import (
    AxisOp,
    Cat,
    Elementwise,
    LoopValue,
    MemoryLayout,
    Operand,
    Operation,
    Product,
    Reduce,
    Row,
    TimeReduction,
    View,
    ancestors,
    contiguous_meta,
    operand_views,
    replace_operand,
    sources,
    whole_view,
)

SequenceAxes = Mapping[LoopValue, int | None]
"""The row axis of each value of a loop; None for one that every thread computes for itself."""
ROWS = 4
"""A batch of fewer rows is not shared out."""
Carried = tuple[LoopValue, LoopValue | None]


@dataclass(eq=False)
class Phase:
    """Bulk work, then a loop, whose `groups` are one pass over memory each. `main` marks the loop that carries."""

    bulk: list[LoopValue] = field(default_factory=list[LoopValue])
    loop: list[LoopValue] = field(default_factory=list[LoopValue])
    main: bool = False
    groups: list[list[LoopValue]] = field(default_factory=list["list[LoopValue]"])


@dataclass
class Phases:
    """In order of running; `of` says in which phase's loop or bulk a value is made."""

    phases: list[Phase]
    main: Phase
    of: dict[LoopValue, Phase]
    bulk: set[LoopValue]

    def apart(self, value: LoopValue, readers: Iterable[LoopValue]) -> bool:
        """Whether a value must be kept for all steps, as it is read in another phase or in bulk, or made in bulk."""
        phase = self.of[value]
        return value in self.bulk or any(self.of[each] is not phase or each in self.bulk for each in readers)

    def late(self, value: LoopValue) -> bool:
        """Whether a value is made when the main loop is over."""
        return self.of[value] is not self.main or value in self.bulk

    def copy_in_main(self, name: str, value: LoopValue, *, first: bool) -> LoopValue:
        """A copy that is made first or last in the main loop."""
        copy = _copy(name, whole_view(value))
        self.of[copy] = self.main
        self.main.loop.insert(0 if first else len(self.main.loop), copy)
        return copy


def assign_phases(values: Sequence[LoopValue], carried: Sequence[LoopValue], ends: Iterable[LoopValue]) -> Phases:
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
    level: dict[LoopValue, int] = {}

    def after(value: LoopValue) -> int:
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
    of = {value: found[level[value] + 1] for value in values}
    for value, phase in of.items():
        (phase.bulk if value in heavy else phase.loop).append(value)
    found[main + 1].main = bool(carried)
    return Phases(found, found[main + 1], of, heavy)


def _readers(values: Iterable[LoopValue]) -> dict[LoopValue, list[LoopValue]]:
    found: dict[LoopValue, list[LoopValue]] = {}
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
    layouts: dict[LoopValue, MemoryLayout] = field(default_factory=dict[LoopValue, MemoryLayout])
    """The storage of each value, as a whole."""
    carried: list[Carried] = field(default_factory=list[Carried])
    """Values from the previous step, and their successors; None for zeros."""
    added: list[tuple[LoopValue, Argument]] = field(default_factory=list["tuple[LoopValue, Argument]"])
    """Added by the caller to a carried value before a step reads it."""
    wanted: list[tuple[View, Argument]] = field(default_factory=list["tuple[View, Argument]"])
    """Values to write, and where."""
    totals: list[tuple[LoopValue, View]] = field(default_factory=list["tuple[LoopValue, View]"])
    """Sums over all steps, and what they are added to."""
    values: list[LoopValue] = field(default_factory=list[LoopValue])
    """All that is made, in order."""
    readers: dict[LoopValue, list[LoopValue]] = field(default_factory=dict[LoopValue, list[LoopValue]])
    stacks: list[LoopValue] = field(default_factory=list[LoopValue])
    locals: dict[LoopValue, None] = field(default_factory=dict[LoopValue, None])
    slots: set[LoopValue] = field(default_factory=set[LoopValue])
    phases: list[Phase] = field(default_factory=list[Phase])
    """Those that do something, in order of running."""
    axes: SequenceAxes | None = None
    """Row axes, if threads take rows of the batch in the main loop."""
    rows: int = 1

    def argument(self, name: str, dtype: torch.dtype, size: int, row: Row) -> Argument:
        """A new argument, behind those that there are."""
        self.arguments.append(Argument(name, dtype, size, row))
        return self.arguments[-1]

    def given(self, name: str, shape: Sequence[int], dtype: torch.dtype, row: Row) -> LoopValue:
        """A new argument that is read as a value."""
        value = LoopValue(name, tuple(shape), dtype, None, row != "same")
        self.argument(name, dtype, value.size, row)
        self.allocate(value, name, row)
        return value

    def allocate(self, value: LoopValue, base: str, row: Row) -> None:
        """Give a value memory of its own."""
        self.layouts[value] = MemoryLayout(base, row, value.size, contiguous_meta(value.shape, value.dtype).stride())

    def layout(self, view: View) -> MemoryLayout:
        """The elements of a view."""
        layout = self.layouts[view.value]
        if view.value in self.slots:
            assert view.whole
            return layout
        return layout.with_strides(tuple(view.at.stride()), int(view.at.storage_offset()))

    def stored(self, value: LoopValue, group: Sequence[LoopValue]) -> bool:
        """Whether a value of a group is read outside of it, and so needs memory."""
        return value not in self.locals or any(each not in group for each in self.readers[value])

    def finalize(self, made: Sequence[LoopValue]) -> None:
        """Decide on copies, phases, homes and fusion. `made` are all values in order of making."""
        values = list(made)
        targets = self._targets(values)
        ends = [value for value, argument in targets.items() if argument.row in ("next", "out")]
        wanted = ancestors([*targets, *(total for total, _ in self.totals)])
        values = [value for value in values if value in wanted]
        carried = [start for start, _ in self.carried]
        phases = assign_phases(values, carried, ends)
        self._copy_carried(phases, values)
        self._copy_passing(phases, values, targets)
        self.values = values
        self.readers = {value: [] for value in values} | _readers(values)
        for value, argument in targets.items():
            self.allocate(value, argument.name, argument.row)
        for value in values:
            if not isinstance(value.made, TimeReduction):
                self._allocate_value(phases, value)
        if phases.main.main:
            self.rows = next(iter(carried[0].shape), 1)
            alternating = {value for value, argument in targets.items() if argument.row == "out"}
            self.axes = row_axes(phases.main.loop, carried, alternating) if self.rows >= ROWS else None
        self.phases = [each for each in phases.phases if each.bulk or each.loop or each.main]
        for each in self.phases:
            each.groups = fuse(each.loop, self.axes if each.main else None)

    def _targets(self, values: list[LoopValue]) -> dict[LoopValue, Argument]:
        """Values computed in place at their destination; copies are added for those that cannot be."""
        targets: dict[LoopValue, Argument] = {}
        for view, argument in self.wanted:
            value = view.value
            if not view.whole or value.made is None or value in targets or isinstance(value.made, TimeReduction):
                value = _copy(f"{argument.name}_copy", view)
                values.append(value)
            targets[value] = argument
        return targets

    def _copy_carried(self, phases: Phases, values: list[LoopValue]) -> None:
        """A carried value in memory of two rows is gone when bulk work reads it: that reads a copy, a row per step."""
        for start, _ in self.carried:
            late = [each for each in values if start in sources(each.made) and phases.late(each)]
            if late and not self.layouts[start].per_step:
                copy = phases.copy_in_main(f"{start}_copy", start, first=True)
                values.insert(0, copy)
                for each in late:
                    assert each.made is not None
                    each.made = replace_operand(each.made, start, copy)

    def _copy_passing(self, phases: Phases, values: list[LoopValue], targets: dict[LoopValue, Argument]) -> None:
        """A carried value that bulk work reads needs a row per step beside the two rows that it passes through; into
        these only the main loop writes, which reads them."""
        for value, argument in list(targets.items()):
            readers = [each for each in values if value in sources(each.made)]
            if argument.row == "out" and (phases.late(value) or phases.apart(value, readers)):
                copy = phases.copy_in_main(f"{argument.name}_copy", value, first=False)
                values.insert(values.index(value) + 1, copy)
                targets[copy] = targets.pop(value)

    def _allocate_value(self, phases: Phases, value: LoopValue) -> None:
        """Find memory for a value: an argument's, within a concatenation, a stack or a local."""
        if value in self.layouts:
            return
        readers = self.readers[value]
        cat = self._slotted(phases, value, readers)
        if cat is not None:
            self.slots.add(value)
            self._allocate_value(phases, cat)
            assert isinstance(cat.made, Cat)
            layout, pieces = self.layouts[cat], [piece.value for piece in cat.made.pieces]
            offset = cat.made.starts[pieces.index(value)] * layout.strides[cat.made.axis]
            self.layouts[value] = layout.with_strides(layout.strides, layout.offset + offset)
        elif phases.apart(value, readers):
            self.stacks.append(value)
            self.allocate(value, f"s_{value}", "step")
        else:
            self.locals[value] = None
            self.allocate(value, f"l_{value}", "same")

    def _slotted(self, phases: Phases, value: LoopValue, readers: list[LoopValue]) -> LoopValue | None:
        """The concatenation in which a value is made: if it is read there whole, once, and nowhere as a view."""
        cats = [each for each in readers if isinstance(each.made, Cat)]
        if len(cats) != 1 or not isinstance(value.made, Elementwise) or phases.apart(value, readers):
            return None
        views = [view for each in readers for view in operand_views(each.made) if view.value is value]
        return cats[0] if all(view.whole for view in views) else None


def _copy(name: str, view: View) -> LoopValue:
    return LoopValue(name, view.shape, view.value.dtype, Elementwise("{0}", [view], view.value.dtype))


def row_axes(
    loop: Sequence[LoopValue], carried: Sequence[LoopValue], alternating: Collection[LoopValue] = ()
) -> SequenceAxes | None:
    """The row axis of every value in the loop, or None if the rows cannot be parted.

    Those `alternating` have two places in memory for all steps. Threads share them, and may be in different steps, so
    each writes only its rows of the batch, even of what it could compute whole.
    """
    if not carried or any(not each.shape or each.shape[0] != carried[0].shape[0] for each in carried):
        return None
    rows = carried[0].shape[0]
    found: dict[LoopValue, int | None] = dict.fromkeys(carried, 0)
    for value in loop:
        bound = [(view, axis) for view in operand_views(value.made) if (axis := found.get(view.value)) is not None]
        axes = {_axis_in_result(value, view, axis_in_view(view, axis, rows)) for view, axis in bound}
        if len(axes) > 1 or None in axes:
            return None
        if not axes and isinstance(value.made, AxisOp) and value.made.kind.startswith("scatter"):
            return None  # it is built up in memory, which threads that all compute it would share
        if not axes and value in alternating:
            if not isinstance(value.made, Elementwise) or tuple(value.shape[:1]) != (rows,):
                return None
            axes = {0}
        found[value] = axes.pop() if axes else None
    return found


def rows_apart(function: LoopFunction, rows: int) -> bool:
    """Whether all that a function computes or writes has rows along its first axis, none of which depends on another.

    Sums over time are over rows; they must be such as the kernels can take of some rows only.
    """
    starts = [v for v in function.layouts if v.made is None and v.shape and not v.name.startswith(("c", "dp"))]
    axes = row_axes([v for v in function.values if not isinstance(v.made, TimeReduction)], starts)
    if axes is None or any(axes[value] is None for value in function.stacks):
        return False

    def seen(view: View) -> int | None:
        axis = axes.get(view.value)
        return None if axis is None else axis_in_view(view, axis, rows)

    for value, _ in function.totals:
        of = value.made.of if isinstance(value.made, TimeReduction) else None
        plain = isinstance(of, Reduce) and of.axes == (0,) and len(of.source.shape) == 2
        if [seen(view) for view in operand_views(value.made)] != ([1, 0] if isinstance(of, Product) else [0] * plain):
            return False
    return all(seen(view) == 0 for view, _ in function.wanted)


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


def _axis_in_result(value: LoopValue, view: View, axis: int | None) -> int | None:
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


def fuse(loop: Sequence[LoopValue], axes: SequenceAxes | None) -> list[list[LoopValue]]:
    """The values of one loop in an order in which they can be made, elementwise ones in groups."""
    pending: list[LoopValue] = list(loop)
    found: list[list[LoopValue]] = []
    while pending:
        waiting = set(pending)
        ready = [each for each in pending if not any(view.value in waiting for view in operand_views(each.made))]
        groups = [[each] for each in ready if not isinstance(each.made, Elementwise)]
        groups = groups or [_group(pending, waiting, ready[0], axes)]
        done = {each for group in groups for each in group}
        found += groups
        pending = [each for each in pending if each not in done]
    return found


def _group(
    pending: Sequence[LoopValue], waiting: set[LoopValue], first: LoopValue, axes: SequenceAxes | None
) -> list[LoopValue]:
    """All that can be made in one pass with `first`."""
    members: dict[LoopValue, None] = {}
    for value in pending:
        same = value.shape == first.shape and (axes is None or axes.get(value) == axes.get(first))
        if same and isinstance(value.made, Elementwise):
            views = operand_views(value.made)
            if all(view.value not in waiting or (view.value in members and view.whole) for view in views):
                members[value] = None
    return list(members)


_WIDTH = 28
"""The column where formulas begin."""
_KINDS: dict[Any, str] = {
    Elementwise: "pass", Reduce: "reduction", AxisOp: "axis", Cat: "join", Product: "product", TimeReduction: "total",
}  # fmt: skip


def explain_function(function: LoopFunction) -> str:
    """All phases, one behind the other."""
    passes = sum(len(each.groups) for each in function.phases)
    workspace = sum(each.bytes for each in function.stacks)
    lines = [f"{function.name}: {passes} passes over memory and {workspace} bytes of workspace a step"]
    for phase in function.phases:
        if phase.bulk:
            lines.append("  bulk, all steps at once")
            lines += [line for value in phase.bulk for line in _explained(function, [value])]
        if phase.main:
            back = ", last one first" if function.backward else ""
            rows = f"each thread takes some of {function.rows} rows"
            lines.append(f"  main loop, step by step{back}; {rows if function.axes else 'threads share products only'}")
        elif phase.groups:
            lines.append("  loop, steps in any order, shared by threads")
        lines += [line for group in phase.groups for line in _explained(function, group)]
    return "\n".join(lines)


def _explained(function: LoopFunction, group: Sequence[LoopValue]) -> list[str]:
    """A line for each value that is made in one go."""
    totals = dict(function.totals)
    head = f"    {_KINDS[type(group[0].made)]:<10} {' x '.join(map(str, group[0].shape)) or 'one number'}"
    lines: list[str] = []
    for value in group:
        into = f"{_named(function, totals[value])} +=" if value in totals else f"{_named(function, value)} ="
        lines.append(f"{head:<{_WIDTH}} {into} {_formula(function, value.made)}")
        head = ""
    return lines


def _formula(function: LoopFunction, made: Operation | View | None) -> str:
    name = partial(_named, function)
    match made:
        case Elementwise(expression=expression, operands=operands):
            text = expression.format(*map(name, operands)).replace("w_", "")
            return text[1:-1] if text.startswith("(") else text
        case Reduce(kind=kind, source=source, axes=axes):
            return f"{kind} of {name(source)} along {', '.join(map(str, axes))}"
        case AxisOp(kind=kind, operands=operands, axis=axis):
            return f"{kind} of {', '.join(map(name, operands))} along {axis}"
        case Product(left=left, right=right, start=start):
            return f"{name(left)} @ {name(right)}" + ("" if start is None else f" + {name(start)}")
        case Cat(pieces=pieces, axis=axis):
            return f"{', '.join(map(name, pieces))} along {axis}"
        case TimeReduction(of=of):
            return f"{_formula(function, of)}, over all steps"
        case View():
            return name(made)
        case None:
            return ""


def _named(function: LoopFunction, operand: Operand | LoopValue) -> str:
    """A number, or a value as the argument that it is, if it is one."""
    if not isinstance(operand, View | LoopValue):
        return f"{operand:g}" if isinstance(operand, float) else str(operand)
    value = operand.value if isinstance(operand, View) else operand
    layout, name = function.layouts.get(value), value.name
    if layout is not None and value not in function.slots and not layout.base.startswith(("s_", "l_")):
        name = layout.base + ("'" if layout.row in ("next", "out") else "")
    if isinstance(operand, LoopValue) or operand.whole:
        return name
    offset = int(operand.at.storage_offset())
    return f"{name}[{' x '.join(map(str, operand.shape))}{f' from {offset}' if offset else ''}]"
