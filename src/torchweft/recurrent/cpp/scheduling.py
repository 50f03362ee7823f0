"""Schedule of one loop function: when each value is computed, its memory, and the work of threads and passes.

A loop that computed every value step by step would be correct, but slow: most products can run for all steps at once.

Phases, by dependence on the carried values:

    level 0   bulk: products of inputs            x W for T x N rows at once
              loop: the values that these products read
    level 1   bulk, loop ...
    main      the one loop whose steps depend on each other: the carried values, and cheap values next to them
    later     bulk: products of the main loop's values; sums over time for parameters

Memory:

    argument   the caller's, one row per step (states one row more), or one for all steps
    stack      one row per step, in the workspace: read in another phase than the one that computes it
    local      one row for each thread: read in the loop that computes it
    register   a variable within one group of fused elementwise values
    slot       a piece of a concatenation, computed in its place there, so that nothing is copied

Fusion: elementwise values of one shape form a group, which is one pass over memory. A value joins if its operands are
computed before the group, or are members read whole. Products and reductions go first, so that groups grow.

Threads, in the main loop:

    by rows    each takes rows of the batch through all steps and never waits, if no step mixes rows
    shared     a step mixes rows: the first thread computes, and all threads share the products

A value's *row axis* is the axis along which its elements depend only on the same row of the values before:

    h (N, H) axis 0    h W  axis 0    (h W).t()  axis 1    softmax(h, 1)  axis 0    h.mean(0)  none: rows are mixed

In an explanation, names are those of the C text, see lowering.py. A dash marks the row of the next step. Brackets mark
a part or another view of a value, with the number that it begins from.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch

from torchweft.recurrent.cpp import ir

# The row axis of each value of a loop; None for one that every thread computes for itself.
SequenceAxes = Mapping[ir.LoopValue, int | None]
ROWS = 4  # A batch of fewer rows is not divided among threads
Carried = tuple[ir.LoopValue, ir.LoopValue | None]


@dataclass(eq=False)
class LoopSignature:
    """The interface of a function to generate: its arguments, and the values that it reads and writes there."""

    name: str
    backward: bool = False
    arguments: list[ir.Argument] = field(
        default_factory=list[ir.Argument]
    )  # in the order in which the function takes them
    # Values that are in the caller's memory already.
    inputs: dict[ir.LoopValue, ir.Argument] = field(default_factory=dict[ir.LoopValue, ir.Argument])
    # Values from the previous step, and their successors; None for zeros.
    carried: list[Carried] = field(default_factory=list[Carried])
    # Gradients from the caller that are added to a carried value before a step reads it.
    added: list[tuple[ir.LoopValue, ir.Argument]] = field(default_factory=list["tuple[ir.LoopValue, ir.Argument]"])
    # Values to write, and their destinations.
    results: list[tuple[ir.View, ir.Argument]] = field(default_factory=list["tuple[ir.View, ir.Argument]"])
    # Sums over all steps, and the views of arguments that they are added to.
    totals: list[tuple[ir.LoopValue, ir.View]] = field(default_factory=list["tuple[ir.LoopValue, ir.View]"])

    def add_argument(
        self, kind: ir.ArgumentKind, index: int, dtype: torch.dtype, size: int, row: ir.Row
    ) -> ir.Argument:
        self.arguments.append(ir.Argument(kind, index, dtype, size, row))
        return self.arguments[-1]

    def add_input(
        self, kind: ir.ArgumentKind, index: int, shape: Sequence[int], dtype: torch.dtype, row: ir.Row
    ) -> ir.LoopValue:
        argument = self.add_argument(kind, index, dtype, torch.Size(shape).numel(), row)
        value = ir.LoopValue(argument.name, tuple(shape), dtype, None, row != "same")
        self.inputs[value] = argument
        return value


@dataclass(frozen=True, eq=False)
class Phase:
    """Bulk work, then a loop. Each of its `groups` is one pass over memory. `main` marks the loop that carries."""

    bulk: list[ir.LoopValue] = field(default_factory=list[ir.LoopValue])
    loop: list[ir.LoopValue] = field(default_factory=list[ir.LoopValue])
    main: bool = False
    groups: list[list[ir.LoopValue]] = field(default_factory=list["list[ir.LoopValue]"])


@dataclass
class Phases:
    """All phases in order of running. `of` holds the phase of each value, and `bulk` the values computed in bulk."""

    phases: list[Phase]
    main: Phase
    of: dict[ir.LoopValue, Phase]
    bulk: set[ir.LoopValue]

    def needs_all_steps(self, value: ir.LoopValue, readers: Iterable[ir.LoopValue]) -> bool:
        """Whether a value needs a row per step: it is computed in bulk, or read in bulk or in another phase."""
        phase = self.of[value]
        return value in self.bulk or any(self.of[reader] is not phase or reader in self.bulk for reader in readers)

    def is_after_main(self, value: ir.LoopValue) -> bool:
        return self.of[value] is not self.main or value in self.bulk

    def copy_in_main(self, name: str, value: ir.LoopValue, *, first: bool) -> ir.LoopValue:
        copy = _copy(name, ir.whole_view(value))
        self.of[copy] = self.main
        self.main.loop.insert(0 if first else len(self.main.loop), copy)
        return copy


def assign_phases(
    values: Sequence[ir.LoopValue], carried: Sequence[ir.LoopValue], ends: Iterable[ir.LoopValue]
) -> Phases:
    """Assign every value to a phase. `values` have operands before their readers. `ends` succeed the carried ones."""
    ends = list(ends)
    from_carry = set(carried)
    for value in values:
        if any(operand in from_carry for operand in ir.operand_values(value.operation)):
            from_carry.add(value)
    recurrent = {value for value in values if value in from_carry} & ir.with_ancestors(ends)
    heavy = {
        value
        for value in values
        if isinstance(value.operation, ir.TimeReduction)
        or (isinstance(value.operation, ir.Product) and value not in recurrent)
    }
    level: dict[ir.LoopValue, int] = {}

    def level_of_operands(value: ir.LoopValue) -> int:
        return max((level.get(operand, -1) for operand in ir.operand_values(value.operation)), default=-1)

    early = [value for value in values if value not in from_carry]
    for value in early:
        level[value] = level_of_operands(value) + (value in heavy)
    # The main loop runs at the first level at which all that its values read is there.
    ready = [*ends, *(operand for value in recurrent for operand in ir.operand_values(value.operation))]
    main = max([0, *(level.get(value, -1) for value in ready)])
    level.update(dict.fromkeys(carried, main))
    for value in values:
        if value in from_carry:
            level[value] = main if value in recurrent else max(main, level_of_operands(value)) + (value in heavy)
    readers = _readers(values)
    # A cheap value moves to the loop of its first reader. There it needs no row per step, and often only a register.
    for value in reversed(early):
        if value not in heavy:
            limits = [level[reader] - (reader in heavy) for reader in readers.get(value, [])]
            level[value] = min(limits, default=max(level[value], main))
    count = max([main, *level.values()]) + 2
    phases = [Phase(main=bool(carried) and i == main + 1) for i in range(count)]
    of = {value: phases[level[value] + 1] for value in values}
    for value, phase in of.items():
        (phase.bulk if value in heavy else phase.loop).append(value)
    return Phases(phases, phases[main + 1], of, heavy)


def _readers(values: Iterable[ir.LoopValue]) -> dict[ir.LoopValue, list[ir.LoopValue]]:
    readers: dict[ir.LoopValue, list[ir.LoopValue]] = {}
    for value in values:
        for operand in ir.operand_values(value.operation):
            readers.setdefault(operand, []).append(value)
    return readers


class LoopFunction:
    """A function to generate: its signature, and the schedule of all values that it computes."""

    def __init__(self, signature: LoopSignature, computed: Sequence[ir.LoopValue]) -> None:
        self.signature = signature
        values = list(computed)
        targets = _targets(signature, values)
        ends = [value for value, argument in targets.items() if argument.row in ("next", "out")]
        needed = ir.with_ancestors([*targets, *(total for total, _ in signature.totals)])
        values = [value for value in values if value in needed]
        carried = [start for start, _ in signature.carried]
        phases = assign_phases(values, carried, ends)
        # Inputs first: copies of carried values depend on their rows.
        self.layouts = {
            value: ir.MemoryLayout.contiguous(value, argument.name, argument.row)
            for value, argument in signature.inputs.items()
        }
        self._copy_carried(phases, values)
        _copy_alternating(phases, values, targets)
        self.values = values  # operands before their readers
        self.stacks: list[ir.LoopValue] = []  # values with a row per step in the workspace
        self.locals: dict[ir.LoopValue, None] = {}  # values with one row per thread
        self.slots: set[ir.LoopValue] = set()  # values that are computed in their place within a concatenation
        self._readers = _readers(values)
        for value, argument in targets.items():
            self.layouts[value] = ir.MemoryLayout.contiguous(value, argument.name, argument.row)
        for value in values:
            if not isinstance(value.operation, ir.TimeReduction):
                self._allocate(phases, value)
        self.axes: SequenceAxes | None = None  # if threads divide the rows of the batch in the main loop
        self.rows = 1
        if phases.main.main:
            # Few rows are not divided: shared products then use all threads better.
            self.rows = next(iter(carried[0].shape), 1)
            alternating = {value for value, argument in targets.items() if argument.row == "out"}
            self.axes = row_axes(phases.main.loop, carried, alternating) if self.rows >= ROWS else None
        self.phases = [
            replace(phase, groups=fuse(phase.loop, self.axes if phase.main else None))
            for phase in phases.phases
            if phase.bulk or phase.loop or phase.main
        ]

    def layout_of(self, view: ir.View) -> ir.MemoryLayout:
        layout = self.layouts[view.value]
        if view.value in self.slots:
            # A slot has the strides of its concatenation, to which the view's own do not apply.
            assert view.is_whole
            return layout
        return layout.with_strides(tuple(view.at.stride()), int(view.at.storage_offset()))

    def is_stored(self, value: ir.LoopValue, group: Sequence[ir.LoopValue]) -> bool:
        """Whether a value of a group is read outside of it, and so needs memory."""
        return value not in self.locals or any(reader not in group for reader in self._readers.get(value, []))

    def _copy_carried(self, phases: Phases, values: list[ir.LoopValue]) -> None:
        """Copy carried values that are read after the main loop, unless they have a row per step anyway."""
        # A value in two alternating rows is overwritten by then.
        for start, _ in self.signature.carried:
            readers = [value for value in values if start in ir.operand_values(value.operation)]
            late = [value for value in readers if phases.is_after_main(value)]
            if late and not self.layouts[start].is_per_step:
                copy = phases.copy_in_main(f"{start}_copy", start, first=True)
                values.insert(0, copy)
                for value in late:
                    assert value.operation is not None
                    value.operation = ir.with_operand(value.operation, start, copy)

    def _allocate(self, phases: Phases, value: ir.LoopValue) -> None:
        if value in self.layouts:
            return
        readers = self._readers.get(value, [])
        cat = self._cat_for(phases, value, readers)
        if cat is not None:
            self.slots.add(value)
            self._allocate(phases, cat)
            assert isinstance(cat.operation, ir.Cat)
            layout, pieces = self.layouts[cat], [piece.value for piece in cat.operation.pieces]
            offset = cat.operation.starts[pieces.index(value)] * layout.strides[cat.operation.axis]
            self.layouts[value] = layout.with_strides(layout.strides, layout.offset + offset)
        elif phases.needs_all_steps(value, readers):
            self.stacks.append(value)
            self.layouts[value] = ir.MemoryLayout.contiguous(value, f"s_{value}", "step")
        else:
            self.locals[value] = None
            self.layouts[value] = ir.MemoryLayout.contiguous(value, f"l_{value}", "same")

    def _cat_for(self, phases: Phases, value: ir.LoopValue, readers: list[ir.LoopValue]) -> ir.LoopValue | None:
        """The concatenation within which a value can be computed: the only one, and every reader reads it whole."""
        cats = [reader for reader in readers if isinstance(reader.operation, ir.Cat)]
        if len(cats) != 1 or not isinstance(value.operation, ir.Elementwise) or phases.needs_all_steps(value, readers):
            return None
        views = [view for reader in readers for view in ir.operand_views(reader.operation) if view.value is value]
        return cats[0] if all(view.is_whole for view in views) else None


def _targets(signature: LoopSignature, values: list[ir.LoopValue]) -> dict[ir.LoopValue, ir.Argument]:
    """The values computed in place at their destination. Copies for the other results are appended to `values`."""
    targets: dict[ir.LoopValue, ir.Argument] = {}
    for view, argument in signature.results:
        value = view.value
        computed = value.operation is not None and not isinstance(value.operation, ir.TimeReduction)
        if not view.is_whole or not computed or value in targets:
            value = _copy(f"{argument.name}_copy", view)
            values.append(value)
        targets[value] = argument
    return targets


def _copy_alternating(phases: Phases, values: list[ir.LoopValue], targets: dict[ir.LoopValue, ir.Argument]) -> None:
    """Compute a carried value outside of its two alternating rows if it needs a row per step, and copy it there."""
    # Only the main loop can write these rows, right before its next step reads them.
    for value, argument in list(targets.items()):
        readers = [reader for reader in values if value in ir.operand_values(reader.operation)]
        if argument.row == "out" and (phases.is_after_main(value) or phases.needs_all_steps(value, readers)):
            copy = phases.copy_in_main(f"{argument.name}_copy", value, first=False)
            values.insert(values.index(value) + 1, copy)
            targets[copy] = targets.pop(value)


def _copy(name: str, view: ir.View) -> ir.LoopValue:
    return ir.LoopValue(name, view.shape, view.value.dtype, ir.Elementwise("{0}", [view], view.value.dtype))


def row_axes(
    loop: Sequence[ir.LoopValue], carried: Sequence[ir.LoopValue], alternating: Collection[ir.LoopValue] = ()
) -> SequenceAxes | None:
    """The row axis of every value in the loop, or None if a step mixes rows."""
    # Values in `alternating` have two rows of memory for all steps. Threads share these, and can be in different steps.
    # Therefore each thread writes only its rows of the batch, even of a value that it could compute whole.
    if not carried or any(not start.shape or start.shape[0] != carried[0].shape[0] for start in carried):
        return None
    rows = carried[0].shape[0]
    axes: dict[ir.LoopValue, int | None] = dict.fromkeys(carried, 0)
    for value in loop:
        bound = [
            (view, axis) for view in ir.operand_views(value.operation) if (axis := axes.get(view.value)) is not None
        ]
        in_result = {axis_in_result(value, view, axis_in_view(view, axis, rows)) for view, axis in bound}
        if len(in_result) > 1 or None in in_result:
            return None
        # A scatter accumulates in memory. If all threads computed it, each would add its own sums there.
        if not in_result and isinstance(value.operation, ir.AxisOp) and value.operation.kind.startswith("scatter"):
            return None
        if not in_result and value in alternating:
            if not isinstance(value.operation, ir.Elementwise) or tuple(value.shape[:1]) != (rows,):
                return None
            in_result = {0}
        axes[value] = in_result.pop() if in_result else None
    return axes


def rows_apart(function: LoopFunction, rows: int) -> bool:
    """Whether all that a function computes or writes has rows along its first axis, none of which depends on another.

    Sums over time are over rows. Each must be one that the kernels can restrict to some rows.
    """
    shared: tuple[ir.ArgumentKind, ...] = ("constant", "parameter gradient")
    starts = [value for value, source in function.signature.inputs.items() if value.shape and source.kind not in shared]
    axes = row_axes([value for value in function.values if not isinstance(value.operation, ir.TimeReduction)], starts)
    if axes is None or any(axes[value] is None for value in function.stacks):
        return False

    def axis_of(view: ir.View) -> int | None:
        axis = axes.get(view.value)
        return None if axis is None else axis_in_view(view, axis, rows)

    for value, _ in function.signature.totals:
        of = value.operation.of if isinstance(value.operation, ir.TimeReduction) else None
        plain = isinstance(of, ir.Reduce) and of.axes == (0,) and len(of.source.shape) == 2
        supported = [1, 0] if isinstance(of, ir.Product) else [0] * plain
        if [axis_of(view) for view in ir.operand_views(value.operation)] != supported:
            return False
    return all(axis_of(view) == 0 for view, _ in function.signature.results)


def axis_in_view(view: ir.View, axis: int, rows: int) -> int | None:
    """The row axis of a value in a view of it, or None if it is split, joined with another, shifted or cut.

    value (A, rows, B)   one element:  a * rows * B + row * B + b        stride B; the strides that move b stay below B,
                                                                         those that move a are multiples of rows * B
    """
    stride = prod(view.value.shape[axis + 1 :])
    sizes, strides, offset = view.at.shape, view.at.stride(), int(view.at.storage_offset())
    candidates = [i for i, size in enumerate(sizes) if size == rows and strides[i] == stride]
    if len(candidates) != 1 or offset // max(stride, 1) % rows:
        return None
    # The largest position within a row that the view reaches: at `stride`, it would have moved on to the next row.
    inner = offset % max(stride, 1)
    for i, (size, step) in enumerate(zip(sizes, strides, strict=True)):
        if i == candidates[0] or size == 1 or step == 0:
            continue
        if step < stride:
            inner += (size - 1) * step
        elif step % (rows * stride):
            return None
    return candidates[0] if inner < stride else None


def axis_in_result(value: ir.LoopValue, view: ir.View, axis: int | None) -> int | None:
    """The row axis of an operand in the result, or None if the operator mixes rows."""
    if axis is None:
        return None
    match value.operation:
        case ir.Elementwise():
            return axis + len(value.shape) - len(view.shape)
        case ir.Reduce(axes=axes, keep=keep):
            return None if axis in axes else axis if keep else axis - sum(reduced < axis for reduced in axes)
        case ir.AxisOp(axis=along):
            return None if axis == along else axis
        case ir.Cat(axis=joined):
            return None if axis == joined else axis
        case ir.Product(left=left, start=start, fixed=fixed):
            rows, columns = len(view.shape) - 2, len(view.shape) - 1
            if axis < rows:  # a batch axis stays
                return axis
            if view is start:
                # Threads cannot divide the columns of a packed weight at a row of the batch.
                return None if fixed is not None and axis == (columns if fixed == "right" else rows) else axis
            return axis if axis == (rows if view is left else columns) else None
        case _:
            return None


def fuse(loop: Sequence[ir.LoopValue], axes: SequenceAxes | None) -> list[list[ir.LoopValue]]:
    """The values of one loop, operands before their readers, elementwise ones in groups."""
    pending: list[ir.LoopValue] = list(loop)
    order: list[list[ir.LoopValue]] = []
    while pending:
        waiting = set(pending)
        ready = [value for value in pending if waiting.isdisjoint(ir.operand_values(value.operation))]
        # Products and reductions first: the elementwise values that wait for them can then join a single group.
        groups = [[value] for value in ready if not isinstance(value.operation, ir.Elementwise)]
        groups = groups or [_group(pending, waiting, ready[0], axes)]
        done = {value for group in groups for value in group}
        order += groups
        pending = [value for value in pending if value not in done]
    return order


def _group(
    pending: Sequence[ir.LoopValue], waiting: set[ir.LoopValue], first: ir.LoopValue, axes: SequenceAxes | None
) -> list[ir.LoopValue]:
    members: dict[ir.LoopValue, None] = {}
    for value in pending:
        fits = value.shape == first.shape and (axes is None or axes.get(value) == axes.get(first))
        if fits and isinstance(value.operation, ir.Elementwise):
            views = ir.operand_views(value.operation)
            if all(view.value not in waiting or (view.value in members and view.is_whole) for view in views):
                members[value] = None
    return list(members)


_WIDTH = 28  # the column at which formulas begin
_KINDS: dict[Any, str] = {
    ir.Elementwise: "pass", ir.Reduce: "reduction", ir.AxisOp: "axis", ir.Cat: "join", ir.Product: "product",
    ir.TimeReduction: "total",
}  # fmt: skip


def explain_function(function: LoopFunction) -> str:
    name, backward = function.signature.name, function.signature.backward
    passes = sum(len(phase.groups) for phase in function.phases)
    workspace = sum(value.bytes for value in function.stacks)
    lines = [f"{name}: {passes} passes over memory and {workspace} bytes of workspace a step"]
    for phase in function.phases:
        if phase.bulk:
            lines.append("  bulk, all steps at once")
            lines += [line for value in phase.bulk for line in _group_lines(function, [value])]
        if phase.main:
            order = ", last one first" if backward else ""
            by_rows = f"each thread takes some of {function.rows} rows"
            threads = by_rows if function.axes else "threads share products only"
            lines.append(f"  main loop, step by step{order}; {threads}")
        elif phase.groups:
            lines.append("  loop, steps in any order, shared by threads")
        lines += [line for group in phase.groups for line in _group_lines(function, group)]
    return "\n".join(lines)


def _group_lines(function: LoopFunction, group: Sequence[ir.LoopValue]) -> list[str]:
    totals = dict(function.signature.totals)
    head = f"    {_KINDS[type(group[0].operation)]:<10} {' x '.join(map(str, group[0].shape)) or 'one number'}"
    lines: list[str] = []
    for value in group:
        target, sign = _operand_name(function, totals.get(value, value)), "+=" if value in totals else "="
        lines.append(f"{head:<{_WIDTH}} {target} {sign} {_formula(function, value.operation)}")
        head = ""
    return lines


def _formula(function: LoopFunction, operation: ir.Operation | ir.View | None) -> str:
    name = partial(_operand_name, function)
    match operation:
        case ir.Elementwise(expression=expression, operands=operands):
            text = expression.format(*map(name, operands)).replace("w_", "")
            return text[1:-1] if text.startswith("(") else text
        case ir.Reduce(kind=kind, source=source, axes=axes):
            return f"{kind} of {name(source)} along {', '.join(map(str, axes))}"
        case ir.AxisOp(kind=kind, operands=operands, axis=axis):
            return f"{kind} of {', '.join(map(name, operands))} along {axis}"
        case ir.Product(left=left, right=right, start=start):
            return f"{name(left)} @ {name(right)}" + ("" if start is None else f" + {name(start)}")
        case ir.Cat(pieces=pieces, axis=axis):
            return f"{', '.join(map(name, pieces))} along {axis}"
        case ir.TimeReduction(of=of):
            return f"{_formula(function, of)}, over all steps"
        case ir.View():
            return name(operation)
        case None:
            return ""


def _operand_name(function: LoopFunction, operand: ir.Operand | ir.LoopValue) -> str:
    """A number, an argument's name, or the name of a value in the workspace."""
    if not isinstance(operand, ir.View | ir.LoopValue):
        return f"{operand:g}" if isinstance(operand, float) else str(operand)
    value = operand.value if isinstance(operand, ir.View) else operand
    layout, name = function.layouts.get(value), value.name
    in_workspace = value in function.slots or value in function.locals or value in function.stacks
    if layout is not None and not in_workspace:
        name = layout.base + ("'" if layout.row in ("next", "out") else "")
    if isinstance(operand, ir.LoopValue) or operand.is_whole:
        return name
    offset = int(operand.at.storage_offset())
    return f"{name}[{' x '.join(map(str, operand.shape))}{f' from {offset}' if offset else ''}]"
