"""Nests of C loops over the elements of one step: groups of elementwise values in one pass, and copies.

    for (long i0 = r0; i0 < r1; i0++)          axes of size 1 are left out; axes that lie one behind the other
        #pragma GCC ivdep                      in all operands are one loop
        for (long i1 = 0; i1 < 128; i1++) { ... }

That a loop has no dependence (`ivdep`) is true because every value has memory of its own: what a pass stores, no value
of the same pass reads from memory. Members of a group read each other as variables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.recurrent.native.c_types import TYPES, converted, literal
from weft.recurrent.native.place import Place
from weft.recurrent.native.values import Operand, Point, Ref, Value, natural


@dataclass
class Axis:
    """One loop: its size, and each operand's stride along it. `rows` marks the row axis."""

    size: int
    strides: list[int]
    rows: bool = False


def axes_of(shape: Sequence[int], places: Sequence[Place], row_axis: int | None) -> list[Axis]:
    """The loops over a shape, as few as possible."""
    found: list[Axis] = []
    for i, size in enumerate(shape):
        axis = Axis(size, [place.strides[i] for place in places], i == row_axis)
        if size == 1 and not axis.rows:
            continue
        last = found[-1] if found else None
        joins = last is not None and not last.rows and not axis.rows
        if last is not None and joins and all(a == b * size for a, b in zip(last.strides, axis.strides, strict=True)):
            last.size, last.strides = last.size * size, axis.strides
        else:
            found.append(axis)
    return found


def opened(axes: Sequence[Axis], *, free: bool = True, begin: int = 0) -> list[str]:
    """The heads of loops, with variables from i<begin> on; the innermost is `free` of dependences, or not."""
    lines: list[str] = []
    for i, axis in enumerate(axes, begin):
        low, high = ("r0", "r1") if axis.rows else ("0", str(axis.size))
        if free and axis is axes[-1] and not axis.rows:
            lines.append("#pragma GCC ivdep")
        lines.append(f"for (long i{i} = {low}; i{i} < {high}; i{i}++) {{")
    return lines


def element(place: Place, axes: Sequence[Axis], which: int) -> str:
    """The element of the operand of that number, within the loops."""
    terms = [f"i{i} * {axis.strides[which]}L" for i, axis in enumerate(axes) if axis.strides[which]]
    terms = [each.replace(" * 1L", "") for each in terms]
    return f"({place.here})[{' + '.join([str(place.offset), *terms])}]"


def nest(axes: Sequence[Axis], body: Sequence[str], *, free: bool = True) -> list[str]:
    """Statements within loops; a block if there are none."""
    return [*(opened(axes, free=free) or ["{"]), *body, "}" * max(len(axes), 1)]


def group_nest(
    group: Sequence[Value],
    place: Callable[[Ref], Place],
    stored: Callable[[Value, Sequence[Value]], bool],
    row_axis: int | None,
) -> list[str]:
    """Elementwise values of one shape in one pass; `stored` tells which of them need memory."""
    shape, members = group[0].shape, set(group)
    read: dict[Ref, Place] = {}
    for value in group:
        for each in _operands(value):
            if isinstance(each, Ref) and each.value not in members:
                read[each] = place(each).spread(each.shape, shape)
    kept = {each: place(Ref(each, natural(each.shape, each.dtype))) for each in group if stored(each, group)}
    axes = axes_of(shape, [*read.values(), *kept.values()], row_axis)
    lines: list[str] = []
    names: dict[Ref, str] = {}
    for n, (ref, where) in enumerate(read.items()):
        names[ref] = f"e{n}"
        lines.append(f"const {TYPES[ref.value.dtype]} e{n} = {element(where, axes, n)};")
    lines += [_line(value, names) for value in group]
    lines += [f"{element(where, axes, len(read) + n)} = {value};" for n, (value, where) in enumerate(kept.items())]
    return nest(axes, lines)


def _line(value: Value, names: dict[Ref, str]) -> str:
    """One value's variable; `names` are those of what is read from memory."""
    made = value.made
    assert isinstance(made, Point)

    def text(operand: Operand) -> str:
        if not isinstance(operand, Ref):
            return literal(operand, made.type)
        return converted(names.get(operand, str(operand.value)), made.type, operand.value.dtype)

    return f"const {TYPES[value.dtype]} {value} = {made.expression.format(*(text(each) for each in made.operands))};"


def _operands(value: Value) -> Sequence[Operand]:
    assert isinstance(value.made, Point)
    return value.made.operands


def copy_nest(shape: Sequence[int], source: Place, to: Place, row_axis: int | None) -> list[str]:
    """Elements from one place to another."""
    axes = axes_of(shape, [source, to], row_axis)
    return nest(axes, [f"{element(to, axes, 1)} = {element(source, axes, 0)};"])
