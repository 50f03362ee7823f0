"""Nests of C loops that take many elements to one: along axes of a step, or added up over all steps."""

from collections.abc import Sequence

import torch

from weft.recurrent.native.c_types import TYPES, literal
from weft.recurrent.native.nest import axes_of, element, nest, opened
from weft.recurrent.native.place import Place
from weft.recurrent.native.values import Reduce, Value

_STEP = {"sum": "{0} + {1}", "max": "w_max({0}, {1})", "min": "w_min({0}, {1})"}


def _begin(kind: str, dtype: torch.dtype) -> str:
    """What a reduction of nothing gives, so that one more number is that number."""
    if kind == "sum":
        return literal(0, dtype)
    if dtype.is_floating_point:
        return literal(float("-inf" if kind == "max" else "inf"), dtype)
    if dtype == torch.bool:
        return literal(kind == "min", dtype)
    return literal(torch.iinfo(dtype).min if kind == "max" else torch.iinfo(dtype).max, dtype)


def reduce_nest(
    value: Value, source: Place, own: Place, row_axis: int | None, *, in_register: bool = False
) -> list[str]:
    """A reduction: along what lies one behind the other into a register, else row by row into the result.

    With `in_register`, the result is stored once in any case, so that several threads may all compute it.
    """
    made = value.made
    assert isinstance(made, Reduce)
    shape, kind = made.source.shape, TYPES[value.dtype]
    to = _unreduced(shape, made.axes, made.keep, own)
    kept = [i for i in range(len(shape)) if i not in made.axes]
    rows = None if row_axis is None else kept.index(row_axis) if made.keep else row_axis
    outer = axes_of([shape[i] for i in kept], [source.only(kept), to.only(kept)], rows)
    inner = axes_of([shape[i] for i in made.axes], [source.only(made.axes), to.only(made.axes)], None)
    step, begin = _STEP[made.kind], _begin(made.kind, value.dtype)
    near = bool(inner) and inner[-1].strides[0] == 1
    if in_register or not inner or near or not outer or outer[-1].strides[0] != 1:
        loops, item = inner, element(source, [*outer, *inner], 0)
        if near and made.kind == "sum" and value.dtype.is_floating_point:
            loops, item = inner[:-1], f"w_sum({inner[-1].size}L, &{element(source, [*outer, *inner[:-1]], 0)})"
        body = [f"{kind} sum = {begin};", *opened(loops, free=False, begin=len(outer))]
        body += [f"sum = {step.format('sum', item)};", "}" * len(loops)]
        return nest(outer, [*body, f"{element(to, outer, 1)} = sum;"], free=False)
    turned = [*inner, *outer]
    here = element(to, turned, 1)
    return [
        *nest(outer, [f"{element(to, outer, 1)} = {begin};"]),
        *nest(turned, [f"{here} = {step.format(here, element(source, turned, 0))};"]),
    ]


def total_nest(shape: Sequence[int], axes: Sequence[int], keep: bool, source: Place, to: Place) -> list[str]:
    """Adds one step's elements, summed along axes, to what is there."""
    into = _unreduced(shape, axes, keep, to)
    order = [*axes, *(i for i in range(len(shape)) if i not in axes)]
    loops = axes_of([shape[i] for i in order], [source.only(order), into.only(order)], None)
    return nest(loops, [f"{element(into, loops, 1)} += {element(source, loops, 0)};"], free=not axes)


def _unreduced(shape: Sequence[int], axes: Sequence[int], keep: bool, to: Place) -> Place:
    """The result's place over the source's shape: no stride along the axes that are gone."""
    strides = iter(to.strides)
    found: list[int] = []
    for i in range(len(shape)):
        if i in axes:
            found.append(0)
            if keep:
                next(strides)
        else:
            found.append(next(strides))
    return to.seen(tuple(found), to.offset)
