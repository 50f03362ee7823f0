"""Nests of C loops over the elements of one step: elementwise groups in one pass, copies, reductions, indexing.

    for (long i0 = r0; i0 < r1; i0++)          axes of size 1 are left out; axes that lie one behind the other
        #pragma GCC ivdep                      in all operands are one loop
        for (long i1 = 0; i1 < 128; i1++) { ... }

That a loop has no dependence (`ivdep`) is true because every value has memory of its own: what a pass stores, no value
of the same pass reads from memory. Members of a group read each other as variables.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.recurrent.cpp.ir import (
    C_TYPES,
    AxisOp,
    Elementwise,
    MemoryLayout,
    Operand,
    Reduce,
    Value,
    View,
    operand_views,
    whole_view,
)


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


def element(layout: MemoryLayout, axes: Sequence[LoopAxis], which: int) -> str:
    """The element of the operand of that number, within the loops."""
    strides = [axis.strides[which] for axis in axes]
    terms = [f"i{i}" if step == 1 else f"i{i} * {step}L" for i, step in enumerate(strides) if step]
    return f"({layout.here})[{' + '.join([str(layout.offset), *terms])}]"


def nest(axes: Sequence[LoopAxis], body: Sequence[str], *, free: bool = True) -> list[str]:
    """Statements within loops; a block if there are none."""
    return [*(open_loops(axes, free=free) or ["{"]), *body, "}" * max(len(axes), 1)]


def group_nest(
    group: Sequence[Value],
    layout: Callable[[View], MemoryLayout],
    stored: Callable[[Value, Sequence[Value]], bool],
    row_axis: int | None,
) -> list[str]:
    """Elementwise values of one shape in one pass; `stored` tells which of them need memory."""
    shape, members = group[0].shape, set(group)
    views = [view for value in group for view in operand_views(value.made) if view.value not in members]
    read = {view: layout(view).broadcast(view.shape, shape) for view in views}
    kept = {each: layout(whole_view(each)) for each in group if stored(each, group)}
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
        return literal(float("-inf" if kind == "max" else "inf"), dtype)
    if dtype == torch.bool:
        return literal(kind == "min", dtype)
    return literal(torch.iinfo(dtype).min if kind == "max" else torch.iinfo(dtype).max, dtype)


def reduce_nest(
    value: Value, source: MemoryLayout, own: MemoryLayout, row_axis: int | None, *, in_register: bool = False
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


def axis_nest(value: Value, layouts: Sequence[MemoryLayout], own: MemoryLayout, row_axis: int | None) -> list[str]:
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
    value: Value, made: AxisOp, layouts: Sequence[MemoryLayout], own: MemoryLayout, row_axis: int | None
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


def _further(element: str, index: str, stride: int) -> str:
    """An element so many strides on."""
    return f"{element[:-1]} + {index} * {stride}L]"


def time_reduction_nest(
    shape: Sequence[int], axes: Sequence[int], keep: bool, source: MemoryLayout, to: MemoryLayout
) -> list[str]:
    """Adds one step's elements, summed along axes, to what is there."""
    into = _unreduced(shape, axes, keep, to)
    order = [*axes, *(i for i in range(len(shape)) if i not in axes)]
    loops = axes_of([shape[i] for i in order], [source.select_axes(order), into.select_axes(order)], None)
    return nest(loops, [f"{element(into, loops, 1)} += {element(source, loops, 0)};"], free=not axes)


def _unreduced(shape: Sequence[int], axes: Sequence[int], keep: bool, to: MemoryLayout) -> MemoryLayout:
    """The result's layout over the source's shape: stride 0 along the axes that are reduced."""
    strides = iter(to.strides)
    found: list[int] = []
    for i in range(len(shape)):
        step = next(strides) if keep or i not in axes else 0
        found.append(0 if i in axes else step)
    return to.with_strides(found)
