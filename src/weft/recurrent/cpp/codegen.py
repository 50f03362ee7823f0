"""C++ text of one function: bulk products, loops over time, and in them nests over the elements of one step.

    void forward(long thread, long threads, long steps, void **values, int *gate)
        pack the weights                                    each thread some panels
        bulk products                                       each thread some rows          then all meet
        for (t ...) groups of elementwise operators         each thread some steps         then all meet
        for (t ...) the carried step                        each thread some rows of the batch, without meeting;
            for (long i0 = r0; i0 < r1; i0++)               or, where rows mix, one thread, products by all
                #pragma GCC ivdep
                for (long i1 = 0; i1 < 128; i1++) { ... }

The order of every sum is fixed by the kernels and the nests, not by threads, tiles or chunks of time.

In a nest, axes of size 1 are left out, and axes that lie one behind the other in all operands are one loop. That it has
no dependence (`ivdep`) is true because every value has memory of its own: what a pass stores, no value of the same pass
reads from memory. Members of a group read each other as variables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.recurrent.cpp.gemm import ALIGN, MatrixProducts, aligned
from weft.recurrent.cpp.ir import (
    C_TYPES,
    AxisOp,
    Cat,
    Elementwise,
    LoopValue,
    MemoryLayout,
    Operand,
    Product,
    Reduce,
    TimeReduction,
    View,
    operand_views,
    whole_view,
)
from weft.recurrent.cpp.scheduling import Argument, LoopFunction, Phase

_MEET = "kernels.meet(gate, threads);"


class Emitter:
    """Emit one finalized function. `width` says how many columns a packed panel has, by dtype."""

    def __init__(self, function: LoopFunction, width: Mapping[torch.dtype, int]) -> None:
        self.function = function
        self._axes = function.axes
        self._products = MatrixProducts(function, width)
        self._local_bytes = sum(aligned(each.bytes) for each in function.locals)
        body = [line for phase in function.phases for line in self._phase(phase)]
        if body and body[-1] == _MEET:
            del body[-1]  # the call ends when all threads have ended
        self.text = "\n".join([*self._head(), *self._products.pack(), *body, "}"])
        """The whole function."""

    def workspace(self, steps: int, threads: int) -> int:
        """Bytes that the function works in, for so many steps and threads."""
        stacks = sum(aligned(each.bytes * steps) for each in self.function.stacks)
        return self._products.packed_bytes + threads * (self._products.room + self._local_bytes) + stacks + ALIGN

    def _head(self) -> list[str]:
        """The signature and every pointer.

        workspace   packed weights | of each thread: room, its own locals | stacks
        """
        arguments = self.function.arguments
        room, own, start = self._products.room, self._local_bytes, self._products.packed_bytes
        lines = [
            f'extern "C" void {self.function.name}(long thread, long threads, long steps, void **values, int *gate) {{',
            *(_pointer(each.dtype, each.name, f"values[{i}]") for i, each in enumerate(arguments)),
            f"const long count = (long)values[{len(arguments) + 1}];",
            f"char *const work = w_align((char *)values[{len(arguments)}]);",
            f"char *const room = work + {start}L + thread * {room + own}L, *const own = room + {room}L;",
            f"char *const first = work + {start + room}L;",
            f"char *stack = work + {start}L + threads * {room + own}L;",
        ]
        # Each thread has its own locals; but where the first computes for all, they are the first thread's.
        mains = [group for phase in self.function.phases if phase.main for group in phase.groups]
        shared = {each for group in mains for each in group} if self._axes is None else set[LoopValue]()
        at = 0
        for value in self.function.locals:
            base = f"({'first' if value in shared else 'own'} + {at}L)"
            lines.append(_pointer(value.dtype, f"l_{value}", base))
            at += aligned(value.bytes)
        for value in self.function.stacks:
            size = f"(steps * {value.bytes}L + {ALIGN - 1}) / {ALIGN} * {ALIGN}"
            lines += [_pointer(value.dtype, f"s_{value}", "stack"), f"stack += {size};"]
        return [*lines, "(void)own; (void)first; (void)stack; (void)count;"]

    def _phase(self, phase: Phase) -> list[str]:
        lines = self._bulk(phase.bulk)
        if phase.main:
            return [*lines, *self._main(phase.groups), _MEET]
        if not phase.groups:
            return lines
        share = "for (long t = steps * thread / threads; t < steps * (thread + 1) / threads; t++) {"
        return [*lines, share, *self._loop(phase.groups), "}", _MEET]

    def _bulk(self, bulk: Sequence[LoopValue]) -> list[str]:
        """Work for all steps at once. Between two sums into one argument all meet: threads may share them otherwise."""
        lines: list[str] = []
        into, target = dict(self.function.totals), None
        for value in bulk:
            if not isinstance(value.made, TimeReduction):
                lines += self._products.bulk(value)
                continue
            before, target = target, into[value].value
            lines += [_MEET] if before is target else []
            line = self._products.total(value)
            lines += [line] if line is not None else self._total(value.made.of, self.function.layout(into[value]))
        return [*lines, _MEET] if lines else []

    def _total(self, of: Product | Reduce | View, to: MemoryLayout) -> list[str]:
        """A sum over time, step by step by the first thread."""
        assert not isinstance(of, Product)
        source, axes, keep = (of, (), False) if isinstance(of, View) else (of.source, of.axes, of.keep)
        layout, into = self.function.layout(source), _unreduced(source.shape, axes, keep, to)
        order = [*axes, *(i for i in range(len(source.shape)) if i not in axes)]
        loops = axes_of([source.shape[i] for i in order], [layout.select_axes(order), into.select_axes(order)], None)
        body = nest(loops, [f"{element(into, loops, 1)} += {element(layout, loops, 0)};"], free=not axes)
        return ["if (thread == 0) for (long t = 0; t < steps; t++) {", *body, "}"]

    def _main(self, groups: Sequence[Sequence[LoopValue]]) -> list[str]:
        """The loop whose steps depend on each other."""
        function, rows = self.function, self.function.rows
        down = "for (long t = steps - 1; t >= 0; t--) {" if function.backward else "for (long t = 0; t < steps; t++) {"
        share = f"const long r0 = {rows} * thread / threads, r1 = {rows} * (thread + 1) / threads;"
        split = self._axes is not None
        return [
            *(["{", share, down] if split else ["{", down, "if (thread == 0) {"]),
            *(self._add(value, argument) for value, argument in function.added),
            *self._loop(groups, main=True),
            *(self._clear(start) for start, end in function.carried if end is None),
            *(["}", "}"] if split else ["}", "}", "}"]),
        ]

    def _add(self, value: LoopValue, argument: Argument) -> str:
        """A gradient that comes in for the state after this step, added to the carried one."""
        low, high = self._mine(value)
        into = f"{self.function.layouts[value].here}[i] += {argument.name}[t * {argument.size}L + i];"
        return f"if ({argument.name}) for (long i = {low}; i < {high}; i++) {into}"

    def _clear(self, value: LoopValue) -> str:
        """The carried gradient of a state that the step does not read: zeros."""
        low, high = self._mine(value)
        base = f"{self.function.layouts[value].base} + (t & 1) * {value.size}L"
        return f"memset({base} + {low}, 0, ({high} - {low}) * {value.dtype.itemsize}L);"

    def _mine(self, value: LoopValue) -> tuple[str, str]:
        """Which numbers of a carried value this thread has."""
        if self._axes is None:
            return "0", f"{value.size}L"
        row = value.size // value.shape[0]
        return f"r0 * {row}L", f"r1 * {row}L"

    def _loop(self, groups: Sequence[Sequence[LoopValue]], main: bool = False) -> list[str]:
        """The body of one step."""
        axes = self._axes if main else None
        layout, layouts = self.function.layout, self.function.layouts
        lines: list[str] = []
        for group in groups:
            value = group[0]
            axis = None if axes is None else axes.get(value)
            match value.made:
                case Elementwise():
                    lines += group_nest(group, self.function, axis)
                case Reduce(source=source):
                    # What every thread computes for itself, it may not build up in memory that they share.
                    alone = axes is not None and axis is None
                    lines += reduce_nest(value, layout(source), layouts[value], axis, in_register=alone)
                case AxisOp(operands=operands):
                    lines += axis_nest(value, [layout(each) for each in operands], layouts[value], axis)
                case Cat(pieces=pieces, axis=joined):
                    into = layouts[value]
                    for before, piece in zip(value.made.starts, pieces, strict=True):
                        if piece.value not in self.function.slots:  # else it was made in place
                            to = into.with_strides(into.strides, into.offset + before * into.strides[joined])
                            lines += copy_nest(piece.shape, layout(piece), to, axis)
                case Product(fixed=fixed) if main and axes is None and fixed is not None:
                    # The text stands inside "if (thread == 0) {", and products by weights are by all threads.
                    product = self._products.step(value, None, by_panels=True)
                    lines += ["}", _MEET, *product, _MEET, "if (thread == 0) {"]
                case Product():
                    lines += self._products.step(value, axis)
                case _:
                    raise AssertionError(f"{value} cannot be made in a loop")
        return lines


def _pointer(dtype: torch.dtype, name: str, at: str) -> str:
    return f"{C_TYPES[dtype]} *const {name} = ({C_TYPES[dtype]} *){at};"


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A number as C, exactly."""
    kind = C_TYPES[dtype]
    if dtype == torch.bool:
        return f"({kind}){int(bool(value))}"
    if isinstance(value, int):
        if value == -(2**63):  # C has no such literal
            return f"({kind})({value + 1}LL - 1)"
        return f"({kind}){int(value)}" + ("LL" if abs(value) > 2**31 - 1 else "")
    if math.isnan(value):
        return f"({kind})NAN"
    if math.isinf(value):
        return f"({kind}){'-' if value < 0 else ''}INFINITY"
    return f"({kind}){float(value).hex()}"


def converted(text: str, to: torch.dtype, of: torch.dtype) -> str:
    """An expression of one dtype, in another."""
    if to == of:
        return text
    return f"({text} != 0)" if to == torch.bool else f"({C_TYPES[to]}){text}"


@dataclass
class LoopAxis:
    """One loop: its size, and each operand's stride along it. `rows` marks the row axis."""

    size: int
    strides: list[int]
    rows: bool = False


def axes_of(shape: Sequence[int], layouts: Sequence[MemoryLayout], row_axis: int | None) -> list[LoopAxis]:
    """The loops over a shape, as few as possible."""
    found: list[LoopAxis] = []
    for i, size in enumerate(shape):
        axis = LoopAxis(size, [layout.strides[i] for layout in layouts], i == row_axis)
        if size == 1 and not axis.rows:
            continue
        last = found[-1] if found and not found[-1].rows and not axis.rows else None
        if last is not None and last.strides == [each * size for each in axis.strides]:
            last.size, last.strides = last.size * size, axis.strides
        else:
            found.append(axis)
    return found


def open_loops(axes: Sequence[LoopAxis], *, free: bool = True, begin: int = 0) -> list[str]:
    """The heads of loops, with variables from i<begin> on; the innermost is `free` of dependences, or not."""
    lines: list[str] = []
    for i, axis in enumerate(axes, begin):
        low, high = ("r0", "r1") if axis.rows else ("0", str(axis.size))
        if free and axis is axes[-1] and not axis.rows:
            lines.append("#pragma GCC ivdep")
        lines.append(f"for (long i{i} = {low}; i{i} < {high}; i{i}++) {{")
    return lines


def nest(axes: Sequence[LoopAxis], body: Sequence[str], *, free: bool = True) -> list[str]:
    """Statements within loops; a block if there are none."""
    return [*(open_loops(axes, free=free) or ["{"]), *body, "}" * max(len(axes), 1)]


def element(layout: MemoryLayout, axes: Sequence[LoopAxis], which: int) -> str:
    """The element of the operand of that number, within the loops."""
    strides = [axis.strides[which] for axis in axes]
    terms = [f"i{i}" if step == 1 else f"i{i} * {step}L" for i, step in enumerate(strides) if step]
    return f"({layout.here})[{' + '.join([str(layout.offset), *terms])}]"


def _further(element: str, index: str, stride: int) -> str:
    """An element so many strides on."""
    return f"{element[:-1]} + {index} * {stride}L]"


def group_nest(group: Sequence[LoopValue], function: LoopFunction, row_axis: int | None) -> list[str]:
    """Elementwise values of one shape in one pass; stored are those that others read."""
    shape, members = group[0].shape, set(group)
    views = [view for value in group for view in operand_views(value.made) if view.value not in members]
    read = {view: function.layout(view).broadcast(view.shape, shape) for view in views}
    kept = {each: function.layout(whole_view(each)) for each in group if function.stored(each, group)}
    axes = axes_of(shape, [*read.values(), *kept.values()], row_axis)
    names = {view: f"e{n}" for n, view in enumerate(read)}
    body = [
        f"const {C_TYPES[view.value.dtype]} e{n} = {element(where, axes, n)};"
        for n, (view, where) in enumerate(read.items())
    ]
    for value in group:
        made = value.made
        assert isinstance(made, Elementwise)
        operands = [_operand(each, names, made.type) for each in made.operands]
        body.append(f"const {C_TYPES[value.dtype]} {value} = {made.expression.format(*operands)};")
    body += [f"{element(where, axes, len(read) + n)} = {value};" for n, (value, where) in enumerate(kept.items())]
    return nest(axes, body)


def _operand(operand: Operand, names: Mapping[View, str], dtype: torch.dtype) -> str:
    """An operand in this dtype; `names` are those of what is read from memory."""
    if not isinstance(operand, View):
        return literal(operand, dtype)
    return converted(names.get(operand, str(operand.value)), dtype, operand.value.dtype)


def copy_nest(shape: Sequence[int], source: MemoryLayout, to: MemoryLayout, row_axis: int | None) -> list[str]:
    """Copy elements from one layout to another."""
    axes = axes_of(shape, [source, to], row_axis)
    return nest(axes, [f"{element(to, axes, 1)} = {element(source, axes, 0)};"])


_STEP = {"sum": "{0} + {1}", "max": "w_max({0}, {1})", "min": "w_min({0}, {1})"}


def _begin(kind: str, dtype: torch.dtype) -> str:
    """The identity element of a reduction."""
    if kind == "sum":
        return literal(0, dtype)
    if dtype.is_floating_point:
        return literal(-math.inf if kind == "max" else math.inf, dtype)
    if dtype == torch.bool:
        return literal(kind == "min", dtype)
    return literal(torch.iinfo(dtype).min if kind == "max" else torch.iinfo(dtype).max, dtype)


def reduce_nest(
    value: LoopValue, source: MemoryLayout, own: MemoryLayout, row_axis: int | None, *, in_register: bool = False
) -> list[str]:
    """A reduction: along what lies one behind the other into a register, else row by row into the result.

    With `in_register`, the result is stored once in any case, so that several threads may all compute it.
    """
    made = value.made
    assert isinstance(made, Reduce)
    shape, kind = made.source.shape, C_TYPES[value.dtype]
    to = _unreduced(shape, made.axes, made.keep, own)
    kept = [i for i in range(len(shape)) if i not in made.axes]
    rows = None if row_axis is None else kept.index(row_axis) if made.keep else row_axis
    outer = axes_of([shape[i] for i in kept], [source.select_axes(kept), to.select_axes(kept)], rows)
    inner = axes_of([shape[i] for i in made.axes], [source.select_axes(made.axes), to.select_axes(made.axes)], None)
    step, begin = _STEP[made.kind], _begin(made.kind, value.dtype)
    near = bool(inner) and inner[-1].strides[0] == 1
    if in_register or not inner or near or not outer or outer[-1].strides[0] != 1:
        loops, item = inner, element(source, [*outer, *inner], 0)
        if near and made.kind == "sum" and value.dtype.is_floating_point:
            loops, item = inner[:-1], f"w_sum({inner[-1].size}L, &{element(source, [*outer, *inner[:-1]], 0)})"
        body = [f"{kind} sum = {begin};", *open_loops(loops, free=False, begin=len(outer))]
        body += [f"sum = {step.format('sum', item)};", "}" * len(loops)]
        return nest(outer, [*body, f"{element(to, outer, 1)} = sum;"], free=False)
    transposed = [*inner, *outer]
    here = element(to, transposed, 1)
    return [
        *nest(outer, [f"{element(to, outer, 1)} = {begin};"]),
        *nest(transposed, [f"{here} = {step.format(here, element(source, transposed, 0))};"]),
    ]


def _unreduced(shape: Sequence[int], axes: Sequence[int], keep: bool, to: MemoryLayout) -> MemoryLayout:
    """The result's layout over the source's shape: stride 0 along the axes that are reduced."""
    strides = iter(to.strides)
    steps = [next(strides) if keep or i not in axes else 0 for i in range(len(shape))]
    return to.with_strides([0 if i in axes else step for i, step in enumerate(steps)])


def axis_nest(value: LoopValue, layouts: Sequence[MemoryLayout], own: MemoryLayout, row_axis: int | None) -> list[str]:
    """An operation along one axis; `layouts` are those of its operands."""
    made = value.made
    assert isinstance(made, AxisOp)
    if made.kind == "gather" or made.kind.startswith("scatter"):
        return _indexed_nest(value, made, layouts, own, row_axis)
    (source,), (layout,), axis = made.operands, layouts, made.axis
    others = [i for i in range(len(value.shape)) if i != axis]
    rows = None if row_axis is None else others.index(row_axis)
    loops = axes_of([source.shape[i] for i in others], [layout.select_axes(others), own.select_axes(others)], rows)
    item, to = (_further(element(each, loops, i), "j", each.strides[axis]) for i, each in enumerate((layout, own)))
    head = f"for (long j = 0; j < {source.shape[axis]}L; j++) {{"
    if made.kind == "cumsum":
        kind = "double" if value.dtype.is_floating_point else C_TYPES[value.dtype]  # as PyTorch adds them up
        return nest(loops, [f"{kind} sum = 0;", head, f"sum += {item}; {to} = sum;", "}"], free=False)
    worse = "<=" if made.kind == "argmax" else ">="  # the first that is NaN stays
    body = [
        f"long at = 0; {C_TYPES[source.value.dtype]} best = {element(layout, loops, 0)};",
        *(head, f"if (!({item} {worse} best) && best == best) best = {item}, at = j;", "}"),
        f"{element(own, loops, 1)} = at;",
    ]
    return nest(loops, body, free=False)


def _indexed_nest(
    value: LoopValue, made: AxisOp, layouts: Sequence[MemoryLayout], own: MemoryLayout, row_axis: int | None
) -> list[str]:
    """At an index: an index out of range touches no memory but gives NaN; where that is possible, handlers see to it
    that the dtype has one."""
    writes, (begin, index, *rest) = made.kind != "gather", layouts
    source, target = (rest[0], own) if writes else (begin, own)
    indexed, size = (target, value.shape[made.axis]) if writes else (source, made.operands[0].shape[made.axis])
    fixed = indexed.with_strides([0 if i == made.axis else n for i, n in enumerate(indexed.strides)])
    plain = source if writes else target
    axes = axes_of(made.operands[1].shape, [index, fixed, plain], row_axis)
    here, other = element(fixed, axes, 1), element(plain, axes, 2)
    there = _further(here, "at", indexed.strides[made.axis])
    nan = f"({C_TYPES[value.dtype]})" + ("NAN" if value.dtype.is_floating_point else "0")
    body = [f"long at = {element(index, axes, 0)};", f"at += at < 0 ? {size}L : 0;"]
    found = f"(unsigned long)at < {size}"
    if not writes:
        return nest(axes, [*body, f"{other} = {found} ? {there} : {nan};"])
    sign = "+=" if made.kind == "scatter_add" else "="
    body.append(f"if ({found}) {there} {sign} {other}; else {here} = {nan};")
    return [*copy_nest(value.shape, begin, own, row_axis), *nest(axes, body, free=False)]
