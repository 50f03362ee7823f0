"""C++ text of one function: bulk products, loops over time, and in them nests over the elements of one step.

    void forward(long thread, long threads, long steps, void **values, int *gate)
        pack the weights                                    each thread some panels
        bulk products                                       each thread some rows          then all meet
        for (t ...) groups of elementwise operators         each thread some steps         then all meet
        for (t ...) the carried step                        each thread some rows of the batch, without meeting;
            for (long i0 = r0; i0 < r1; i0++)               or, where rows mix, one thread, products by all
                #pragma GCC ivdep
                for (long i1 = 0; i1 < 128; i1++) { ... }

The kernels and the nests fix the order of every sum. It does not depend on threads, tiles or chunks of time.

A nest leaves out axes of size 1, and merges axes that are adjacent in the memory of all operands. `ivdep` promises the
compiler that no iteration reads memory that another writes. This holds because every value has memory of its own, and
because the members of a group read each other as variables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.cpp.gemm import ALIGN, MatrixProducts, aligned
from torchweft.recurrent.cpp.scheduling import LoopFunction, Phase

_MEET = "kernels.meet(gate, threads);"


class Emitter:
    """The text of one function. `width` holds the columns of a packed panel, by dtype."""

    def __init__(self, function: LoopFunction, width: Mapping[torch.dtype, int]) -> None:
        self.function = function
        # The order of `values` in the C signature: these addresses, the workspace, and the number of rows.
        self.arguments = function.signature.arguments
        self._axes = function.axes
        self._products = MatrixProducts(function, width)
        self._local_bytes = sum(aligned(value.bytes) for value in function.locals)
        body = [line for phase in function.phases for line in self._phase_lines(phase)]
        # OpenMP returns only when all threads have ended, so the last meeting would be a second one.
        if body and body[-1] == _MEET:
            del body[-1]
        self.text = "\n".join([*self._head_lines(), *self._products.pack_lines(), *body, "}"])

    def workspace_bytes(self, steps: int, threads: int) -> int:
        stacks = sum(aligned(value.bytes * steps) for value in self.function.stacks)
        return self._products.packed_bytes + threads * (self._products.room + self._local_bytes) + stacks + ALIGN

    def _head_lines(self) -> list[str]:
        """The C signature and every pointer.

        workspace   packed weights | for each thread: room, its own locals | stacks
        """
        function, arguments = self.function, self.arguments
        room, local, start = self._products.room, self._local_bytes, self._products.packed_bytes
        name = function.signature.name
        lines = [
            f'extern "C" void {name}(long thread, long threads, long steps, void **values, int *gate) {{',
            *(_pointer(argument.dtype, argument.name, f"values[{i}]") for i, argument in enumerate(arguments)),
            f"const long count = (long)values[{len(arguments) + 1}];",
            f"char *const work = w_align((char *)values[{len(arguments)}]);",
            f"char *const room = work + {start}L + thread * {room + local}L, *const own = room + {room}L;",
            f"char *const first = work + {start + room}L;",
            f"char *stack = work + {start}L + threads * {room + local}L;",
        ]
        # Each thread has its own locals. But if the first thread computes the main loop for all, its locals must be
        # the ones that all threads read: they share the products of that loop.
        main_groups = [group for phase in function.phases if phase.main for group in phase.groups]
        shared = {value for group in main_groups for value in group} if self._axes is None else set[ir.LoopValue]()
        offset = 0
        for value in function.locals:
            base = f"({'first' if value in shared else 'own'} + {offset}L)"
            lines.append(_pointer(value.dtype, f"l_{value}", base))
            offset += aligned(value.bytes)
        for value in function.stacks:
            size = f"(steps * {value.bytes}L + {ALIGN - 1}) / {ALIGN} * {ALIGN}"
            lines += [_pointer(value.dtype, f"s_{value}", "stack"), f"stack += {size};"]
        return [*lines, "(void)own; (void)first; (void)stack; (void)count;"]

    def _phase_lines(self, phase: Phase) -> list[str]:
        lines = self._bulk_lines(phase.bulk)
        if phase.main:
            return [*lines, *self._main_lines(phase.groups), _MEET]
        if not phase.groups:
            return lines
        share = "for (long t = steps * thread / threads; t < steps * (thread + 1) / threads; t++) {"
        return [*lines, share, *self._step_lines(phase.groups), "}", _MEET]

    def _bulk_lines(self, bulk: Sequence[ir.LoopValue]) -> list[str]:
        lines: list[str] = []
        destinations, target = dict(self.function.signature.totals), None
        for value in bulk:
            if not isinstance(value.operation, ir.TimeReduction):
                lines += self._products.bulk_lines(value)
                continue
            # Two sums into one argument can divide its elements differently among threads. Without a meeting in
            # between, two threads could add to the same element at once.
            previous, target = target, destinations[value].value
            lines += [_MEET] if previous is target else []
            line = self._products.total_line(value)
            layout = self.function.layout_of(destinations[value])
            lines += [line] if line is not None else self._total_lines(value.operation.of, layout)
        return [*lines, _MEET] if lines else []

    def _total_lines(self, of: ir.Product | ir.Reduce | ir.View, to: ir.MemoryLayout) -> list[str]:
        """A sum over time, step by step by the first thread."""
        assert not isinstance(of, ir.Product)
        source, axes, keep = (of, (), False) if isinstance(of, ir.View) else (of.source, of.axes, of.keep)
        layout, into = self.function.layout_of(source), _unreduced(source.shape, axes, keep, to)
        # Reduced axes outside: the innermost loop then adds to adjacent elements of the result.
        order = [*axes, *(i for i in range(len(source.shape)) if i not in axes)]
        loops = loop_axes([source.shape[i] for i in order], [layout.select_axes(order), into.select_axes(order)], None)
        body = nest(loops, [f"{element(into, loops, 1)} += {element(layout, loops, 0)};"], free=not axes)
        return ["if (thread == 0) for (long t = 0; t < steps; t++) {", *body, "}"]

    def _main_lines(self, groups: Sequence[Sequence[ir.LoopValue]]) -> list[str]:
        signature, rows = self.function.signature, self.function.rows
        steps = "long t = steps - 1; t >= 0; t--" if signature.backward else "long t = 0; t < steps; t++"
        loop = f"for ({steps}) {{"
        share = f"const long r0 = {rows} * thread / threads, r1 = {rows} * (thread + 1) / threads;"
        by_rows = self._axes is not None
        return [
            *(["{", share, loop] if by_rows else ["{", loop, "if (thread == 0) {"]),
            *(self._add_line(value, argument) for value, argument in signature.added),
            *self._step_lines(groups, main=True),
            *(self._clear_line(start) for start, end in signature.carried if end is None),
            *(["}", "}"] if by_rows else ["}", "}", "}"]),
        ]

    def _add_line(self, value: ir.LoopValue, argument: ir.Argument) -> str:
        """Add the caller's gradient of the state after this step, if there is one, to the carried gradient."""
        low, high = self._share_of(value)
        into = f"{self.function.layouts[value].row_pointer}[i] += {argument.name}[t * {argument.size}L + i];"
        return f"if ({argument.name}) for (long i = {low}; i < {high}; i++) {into}"

    def _clear_line(self, value: ir.LoopValue) -> str:
        """Write zeros as the carried gradient of a state that the step does not read."""
        low, high = self._share_of(value)
        # The row still holds the gradient that step t + 1 has read.
        base = f"{self.function.layouts[value].base} + (t & 1) * {value.size}L"
        return f"memset({base} + {low}, 0, ({high} - {low}) * {value.dtype.itemsize}L);"

    def _share_of(self, value: ir.LoopValue) -> tuple[str, str]:
        """The bounds of this thread's numbers of a carried value."""
        if self._axes is None:
            return "0", f"{value.size}L"
        row = value.size // value.shape[0]
        return f"r0 * {row}L", f"r1 * {row}L"

    def _step_lines(self, groups: Sequence[Sequence[ir.LoopValue]], main: bool = False) -> list[str]:
        axes = self._axes if main else None
        layout_of, layouts = self.function.layout_of, self.function.layouts
        lines: list[str] = []
        for group in groups:
            value = group[0]
            axis = None if axes is None else axes.get(value)
            match value.operation:
                case ir.Elementwise():
                    lines += group_nest(group, self.function, axis)
                case ir.Reduce(source=source):
                    # A value without a row axis is computed by every thread, possibly in memory that they share. There
                    # they would see each other's partial sums; but they can all store the same final number.
                    by_all = axes is not None and axis is None
                    lines += reduce_nest(value, layout_of(source), layouts[value], axis, in_register=by_all)
                case ir.AxisOp(operands=operands):
                    lines += axis_nest(value, [layout_of(view) for view in operands], layouts[value], axis)
                case ir.Cat(pieces=pieces, axis=joined):
                    into = layouts[value]
                    for start, piece in zip(value.operation.starts, pieces, strict=True):
                        if piece.value not in self.function.slots:  # else it was computed in its place
                            to = into.with_strides(into.strides, into.offset + start * into.strides[joined])
                            lines += copy_nest(piece.shape, layout_of(piece), to, axis)
                case ir.Product(fixed=fixed) if main and axes is None and fixed is not None:
                    # The text is inside "if (thread == 0) {". All threads share a product by a weight, so that block
                    # is closed before it. The first meeting shows them the operand, the second one the result.
                    product = self._products.step_lines(value, None, by_panels=True)
                    lines += ["}", _MEET, *product, _MEET, "if (thread == 0) {"]
                case ir.Product():
                    lines += self._products.step_lines(value, axis)
                case _:
                    raise AssertionError(f"{value} cannot be computed in a loop")
        return lines


def _pointer(dtype: torch.dtype, name: str, at: str) -> str:
    return f"{ir.C_TYPES[dtype]} *const {name} = ({ir.C_TYPES[dtype]} *){at};"


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    kind = ir.C_TYPES[dtype]
    if dtype == torch.bool:
        return f"({kind}){int(bool(value))}"
    if isinstance(value, int):
        # C has no literal for the lowest number: it reads the minus sign as an operator on 2**63, which overflows.
        if value == -(2**63):
            return f"({kind})({value + 1}LL - 1)"
        return f"({kind}){int(value)}" + ("LL" if abs(value) > 2**31 - 1 else "")
    if math.isnan(value):
        return f"({kind})NAN"
    if math.isinf(value):
        return f"({kind}){'-' if value < 0 else ''}INFINITY"
    # Hexadecimal, because a decimal number could be rounded to another float.
    return f"({kind}){float(value).hex()}"


def converted(text: str, to: torch.dtype, of: torch.dtype) -> str:
    if to == of:
        return text
    return f"({text} != 0)" if to == torch.bool else f"({ir.C_TYPES[to]}){text}"


@dataclass(frozen=True)
class LoopAxis:
    """One loop: its size, and each operand's stride along it. `rows` marks the row axis."""

    size: int
    strides: list[int]
    rows: bool = False


def loop_axes(shape: Sequence[int], layouts: Sequence[ir.MemoryLayout], row_axis: int | None) -> list[LoopAxis]:
    axes: list[LoopAxis] = []
    for i, size in enumerate(shape):
        axis = LoopAxis(size, [layout.strides[i] for layout in layouts], i == row_axis)
        if size == 1 and not axis.rows:
            continue
        # The row axis has bounds of its own, so it never merges.
        last = axes[-1] if axes and not axes[-1].rows and not axis.rows else None
        if last is not None and last.strides == [stride * size for stride in axis.strides]:
            axes[-1] = LoopAxis(last.size * size, axis.strides)
        else:
            axes.append(axis)
    return axes


def open_loops(axes: Sequence[LoopAxis], *, free: bool = True, begin: int = 0) -> list[str]:
    """The heads of loops, with variables from i<begin> on. `free` promises that the innermost has no dependences."""
    lines: list[str] = []
    for i, axis in enumerate(axes, begin):
        low, high = ("r0", "r1") if axis.rows else ("0", str(axis.size))
        if free and axis is axes[-1] and not axis.rows:
            lines.append("#pragma GCC ivdep")
        lines.append(f"for (long i{i} = {low}; i{i} < {high}; i{i}++) {{")
    return lines


def nest(axes: Sequence[LoopAxis], body: Sequence[str], *, free: bool = True) -> list[str]:
    return [*(open_loops(axes, free=free) or ["{"]), *body, "}" * max(len(axes), 1)]


def element(layout: ir.MemoryLayout, axes: Sequence[LoopAxis], which: int) -> str:
    """The element of the operand of that number, within the loops."""
    strides = [axis.strides[which] for axis in axes]
    terms = [f"i{i}" if stride == 1 else f"i{i} * {stride}L" for i, stride in enumerate(strides) if stride]
    return f"({layout.row_pointer})[{' + '.join([str(layout.offset), *terms])}]"


def _element_at(element: str, index: str, stride: int) -> str:
    return f"{element[:-1]} + {index} * {stride}L]"


def group_nest(group: Sequence[ir.LoopValue], function: LoopFunction, row_axis: int | None) -> list[str]:
    """Elementwise values of one shape in one pass: operands are read once, and only values with readers are stored."""
    shape, members = group[0].shape, set(group)
    views = [view for value in group for view in ir.operand_views(value.operation) if view.value not in members]
    read = {view: function.layout_of(view).broadcast_to(view.shape, shape) for view in views}
    stored = {value: function.layout_of(ir.whole_view(value)) for value in group if function.is_stored(value, group)}
    axes = loop_axes(shape, [*read.values(), *stored.values()], row_axis)
    names = {view: f"e{n}" for n, view in enumerate(read)}
    body = [
        f"const {ir.C_TYPES[view.value.dtype]} e{n} = {element(layout, axes, n)};"
        for n, (view, layout) in enumerate(read.items())
    ]
    for value in group:
        operation = value.operation
        assert isinstance(operation, ir.Elementwise)
        operands = [_operand_text(operand, names, operation.type) for operand in operation.operands]
        body.append(f"const {ir.C_TYPES[value.dtype]} {value} = {operation.expression.format(*operands)};")
    body += [f"{element(layout, axes, len(read) + n)} = {value};" for n, (value, layout) in enumerate(stored.items())]
    return nest(axes, body)


def _operand_text(operand: ir.Operand, names: Mapping[ir.View, str], dtype: torch.dtype) -> str:
    """An operand in this dtype. `names` holds the variables of views that are read from memory."""
    if not isinstance(operand, ir.View):
        return literal(operand, dtype)
    return converted(names.get(operand, str(operand.value)), dtype, operand.value.dtype)


def copy_nest(shape: Sequence[int], source: ir.MemoryLayout, to: ir.MemoryLayout, row_axis: int | None) -> list[str]:
    axes = loop_axes(shape, [source, to], row_axis)
    return nest(axes, [f"{element(to, axes, 1)} = {element(source, axes, 0)};"])


_COMBINE = {"sum": "{0} + {1}", "max": "w_max({0}, {1})", "min": "w_min({0}, {1})"}


def _identity(kind: str, dtype: torch.dtype) -> str:
    if kind == "sum":
        return literal(0, dtype)
    if dtype.is_floating_point:
        return literal(-math.inf if kind == "max" else math.inf, dtype)
    if dtype == torch.bool:
        return literal(kind == "min", dtype)
    return literal(torch.iinfo(dtype).min if kind == "max" else torch.iinfo(dtype).max, dtype)


def reduce_nest(
    value: ir.LoopValue,
    source: ir.MemoryLayout,
    target: ir.MemoryLayout,
    row_axis: int | None,
    *,
    in_register: bool = False,
) -> list[str]:
    """A reduction: along adjacent elements into a register, else row by row into the result."""
    # With `in_register`, the result is stored once in any case, so that several threads can all compute it.
    reduction = value.operation
    assert isinstance(reduction, ir.Reduce)
    shape, kind, axes = reduction.source.shape, ir.C_TYPES[value.dtype], reduction.axes
    to = _unreduced(shape, axes, reduction.keep, target)
    others = [i for i in range(len(shape)) if i not in axes]
    rows = None if row_axis is None else others.index(row_axis) if reduction.keep else row_axis
    outer = loop_axes([shape[i] for i in others], [source.select_axes(others), to.select_axes(others)], rows)
    inner = loop_axes([shape[i] for i in axes], [source.select_axes(axes), to.select_axes(axes)], None)
    combine, identity = _COMBINE[reduction.kind], _identity(reduction.kind, value.dtype)
    adjacent = bool(inner) and inner[-1].strides[0] == 1
    if in_register or not inner or adjacent or not outer or outer[-1].strides[0] != 1:
        loops, item = inner, element(source, [*outer, *inner], 0)
        # The compiler may not reorder a sum of floats, so w_sum spells out an order that uses vectors.
        if adjacent and reduction.kind == "sum" and value.dtype.is_floating_point:
            loops, item = inner[:-1], f"w_sum({inner[-1].size}L, &{element(source, [*outer, *inner[:-1]], 0)})"
        body = [f"{kind} sum = {identity};", *open_loops(loops, free=False, begin=len(outer))]
        body += [f"sum = {combine.format('sum', item)};", "}" * len(loops)]
        return nest(outer, [*body, f"{element(to, outer, 1)} = sum;"], free=False)
    # The outer axis is the adjacent one: as the innermost loop it runs over vectors, one partial sum per element.
    transposed = [*inner, *outer]
    sum_so_far = element(to, transposed, 1)
    return [
        *nest(outer, [f"{element(to, outer, 1)} = {identity};"]),
        *nest(transposed, [f"{sum_so_far} = {combine.format(sum_so_far, element(source, transposed, 0))};"]),
    ]


def _unreduced(shape: Sequence[int], axes: Sequence[int], keep: bool, to: ir.MemoryLayout) -> ir.MemoryLayout:
    """The result's layout over the source's shape: stride 0 along the reduced axes."""
    strides = iter(to.strides)
    steps = [next(strides) if keep or i not in axes else 0 for i in range(len(shape))]
    return to.with_strides([0 if i in axes else step for i, step in enumerate(steps)])


def axis_nest(
    value: ir.LoopValue, layouts: Sequence[ir.MemoryLayout], target: ir.MemoryLayout, row_axis: int | None
) -> list[str]:
    operation = value.operation
    assert isinstance(operation, ir.AxisOp)
    if operation.kind == "gather" or operation.kind.startswith("scatter"):
        return _indexed_nest(value, operation, layouts, target, row_axis)
    (source,), (layout,), axis = operation.operands, layouts, operation.axis
    others = [i for i in range(len(value.shape)) if i != axis]
    rows = None if row_axis is None else others.index(row_axis)
    selected = [layout.select_axes(others), target.select_axes(others)]
    loops = loop_axes([source.shape[i] for i in others], selected, rows)
    item, to = (
        _element_at(element(where, loops, i), "j", where.strides[axis]) for i, where in enumerate((layout, target))
    )
    head = f"for (long j = 0; j < {source.shape[axis]}L; j++) {{"
    if operation.kind == "cumsum":
        kind = (
            "double" if value.dtype.is_floating_point else ir.C_TYPES[value.dtype]
        )  # PyTorch accumulates in double too
        return nest(loops, [f"{kind} sum = 0;", head, f"sum += {item}; {to} = sum;", "}"], free=False)
    worse = "<=" if operation.kind == "argmax" else ">="
    # As in PyTorch, the first NaN wins: `!(x <= best)` accepts a NaN, and `best == best` rejects all that follow it.
    body = [
        f"long at = 0; {ir.C_TYPES[source.value.dtype]} best = {element(layout, loops, 0)};",
        *(head, f"if (!({item} {worse} best) && best == best) best = {item}, at = j;", "}"),
        f"{element(target, loops, 1)} = at;",
    ]
    return nest(loops, body, free=False)


def _indexed_nest(
    value: ir.LoopValue,
    operation: ir.AxisOp,
    layouts: Sequence[ir.MemoryLayout],
    target: ir.MemoryLayout,
    row_axis: int | None,
) -> list[str]:
    """Read or write at an index."""
    # An index out of range gives NaN and touches no other memory. The handlers of operators allow such an index only
    # for a dtype that has NaN.
    writes, (first, index, *rest) = operation.kind != "gather", layouts
    source = rest[0] if writes else first
    axis, indexed_shape = operation.axis, value.shape if writes else operation.operands[0].shape
    indexed, plain, size = (target, source, indexed_shape[axis]) if writes else (source, target, indexed_shape[axis])
    at_zero = indexed.with_strides([0 if i == axis else stride for i, stride in enumerate(indexed.strides)])
    axes = loop_axes(operation.operands[1].shape, [index, at_zero, plain], row_axis)
    here, other = element(at_zero, axes, 1), element(plain, axes, 2)
    there = _element_at(here, "at", indexed.strides[axis])
    nan = f"({ir.C_TYPES[value.dtype]})" + ("NAN" if value.dtype.is_floating_point else "0")
    body = [f"long at = {element(index, axes, 0)};", f"at += at < 0 ? {size}L : 0;"]
    in_range = f"(unsigned long)at < {size}"
    if not writes:
        return nest(axes, [*body, f"{other} = {in_range} ? {there} : {nan};"])
    sign = "+=" if operation.kind == "scatter_add" else "="
    body.append(f"if ({in_range}) {there} {sign} {other}; else {here} = {nan};")
    # Two indices can be equal, so the iterations of a scatter depend on each other.
    return [*copy_nest(value.shape, first, target, row_axis), *nest(axes, body, free=False)]
