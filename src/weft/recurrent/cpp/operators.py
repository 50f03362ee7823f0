"""Lowering of single operators: from nodes of the captured graph to values.

    getitem                  one of several views
    HANDLERS                 an operator of more than one value, or that depends on its arguments
    ARITHMETIC, COMPARISON   one C expression, see expressions.py
    otherwise                a view, if the operator's schema says so

Other operators raise `Unsupported`. PyTorch runs them beside the loops, unless every step depends on one of them; then
another backend runs the cell.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.cpp.expressions import (
    ARITHMETIC,
    COMPARISON,
    FILL,
    NARROWING,
    RESHAPES,
    RESTRIDING,
    aten,
    is_view,
    views,
)
from weft.recurrent.cpp.ir import (
    AxisOp,
    Cat,
    LoweringContext,
    Product,
    Reduce,
    Unsupported,
    Value,
    View,
    check_dtype,
    compute_dtype,
    meta_value,
    promoted_dtype,
    schema_arguments,
    whole_view,
)
from weft.recurrent.graph import StepGraph
from weft.recurrent.plan import leading_to

Handler = Callable[[LoweringContext, fx.Node], View | list[View]]


# -- elementwise ------------------------------------------------------------------------------------------------------


def _add(context: LoweringContext, node: fx.Node) -> View:
    """A sum or a difference, of which the second operand may have a factor. Truth values are added as by "or"."""
    given = schema_arguments(node)
    operands = [context.operand(given["self"]), context.operand(given["other"])]
    if meta_value(node).dtype == torch.bool:
        return context.like(node, "({0}|{1})", operands)
    sign = "-" if node.target in (aten.sub.Tensor, aten.sub.Scalar) else "+"
    if given["alpha"] == 1:
        return context.like(node, f"({{0}}{sign}{{1}})", operands)
    return context.like(node, f"({{0}}{sign}{{1}}*{{2}})", [*operands, context.operand(given["alpha"])])


def _where(context: LoweringContext, node: fx.Node) -> View:
    return context.like(node, "({0}!=0?{1}:{2})", [context.operand(each) for each in node.args])


def _clamp(context: LoweringContext, node: fx.Node) -> View:
    """The upper bound last, as PyTorch has it: where the lower one is above it, the upper one wins."""
    given, dtype = schema_arguments(node), meta_value(node).dtype
    found = context.view(given["self"])
    for name, expression in (("min", "w_max({0},{1})"), ("max", "w_min({0},{1})")):
        bound = given.get(name)
        if bound is None:
            continue
        if isinstance(bound, int) and not (dtype.is_floating_point or _holds(dtype, bound)):
            raise Unsupported(
                f"loops in C clamp by numbers that {dtype} can hold, not by {bound} ({node.target}): to PyTorch 2.15 "
                "that is no bound, before it was the number that the bits of this one make"
            )
        found = context.like(node, expression, [found, context.operand(bound)])
    return found


def _holds(dtype: torch.dtype, number: int) -> bool:
    return dtype != torch.bool and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


_POWERS = {
    0: "1",
    1: "{0}",
    2: "({0}*{0})",
    3: "({0}*{0}*{0})",
    0.5: "w_sqrt({0})",
    -0.5: "(1/w_sqrt({0}))",
    -1: "(1/{0})",
    -2: "(1/({0}*{0}))",
}
"""Exponents that PyTorch itself computes otherwise than by the library's pow."""


def _power(context: LoweringContext, node: fx.Node) -> View:
    base, exponent = context.operand(node.args[0]), context.operand(node.args[1])
    floating = meta_value(node).is_floating_point()
    if not isinstance(exponent, View) and exponent in _POWERS and (floating or exponent in (0, 1, 2, 3)):
        return context.like(node, _POWERS[exponent], [base])
    if not floating:
        raise Unsupported(f"loops in C raise integers to the powers 0 to 3 only ({node.target})")
    return context.like(node, "w_pow({0},{1})", [base, exponent])


def _not(context: LoweringContext, node: fx.Node) -> View:
    truth = meta_value(node).dtype == torch.bool
    return context.like(node, "(!{0})" if truth else "(~{0})", [context.operand(node.args[0])])


def _rounded(context: LoweringContext, node: fx.Node) -> View:
    """Integers are unchanged."""
    name = cast(Any, node.target)._schema.name.removeprefix("aten::")
    floating = meta_value(node).is_floating_point()
    return context.like(node, f"w_{name}({{0}})" if floating else "{0}", [context.operand(node.args[0])])


def _fill(context: LoweringContext, node: fx.Node) -> View:
    number = FILL[node.target]
    if number is None:
        given = schema_arguments(node)
        number = context.operand(given["s"] if "s" in given else given["fill_value"])
    return context.like(node, "{0}", [number])


# -- shapes -----------------------------------------------------------------------------------------------------------


def _reshape(context: LoweringContext, node: fx.Node) -> View:
    return _shaped(context, context.view(cast(fx.Node, node.args[0])), tuple(meta_value(node).shape))


def _shaped(context: LoweringContext, source: View, shape: tuple[int, ...]) -> View:
    """The same elements in another shape; a copy where a view cannot be."""
    if source.shape == shape:
        return source

    def apply(at: Tensor) -> Tensor:
        return at.reshape(shape)

    return cast(View, context.apply_view(source, apply) or context.apply_view(context.copied(source), apply))


def _copy(context: LoweringContext, node: fx.Node) -> View:
    return context.copied(context.view(cast(fx.Node, node.args[0])))


def _same(context: LoweringContext, node: fx.Node) -> View:
    return context.view(cast(fx.Node, node.args[0]))


def _cat(context: LoweringContext, node: fx.Node) -> View:
    value, given = meta_value(node), schema_arguments(node)
    pieces = [context.view(each) for each in given["tensors"]]
    pieces = [each for each in pieces if each.shape != (0,)]  # PyTorch takes an empty tensor of one axis anywhere
    pieces = [context.as_dtype(each, value.dtype) for each in pieces]
    return context.add(value.shape, value.dtype, Cat(pieces, given["dim"] % len(value.shape)))


def _slice_scatter(context: LoweringContext, node: fx.Node) -> View:
    """A tensor with a piece of it replaced: what is before, the piece, what is behind."""
    value, given = meta_value(node), schema_arguments(node)
    axis = cast(int, given["dim"]) % len(value.shape)
    size = int(value.shape[axis])
    begin, end, _ = slice(given["start"], given["end"]).indices(size)
    if given["step"] != 1:
        raise Unsupported(f"loops in C replace whole pieces only, not every {given['step']}th element ({node.target})")
    return _with_piece(context, context.view(given["self"]), context.view(given["src"]), axis, begin, end)


def _select_scatter(context: LoweringContext, node: fx.Node) -> View:
    given = schema_arguments(node)
    whole, piece = context.view(given["self"]), context.view(given["src"])
    axis = cast(int, given["dim"]) % len(whole.shape)
    begin = cast(int, given["index"]) % whole.shape[axis]
    return _with_piece(context, whole, View(piece.value, piece.at.unsqueeze(axis)), axis, begin, begin + 1)


def _with_piece(context: LoweringContext, whole: View, piece: View, axis: int, begin: int, end: int) -> View:
    """A tensor with another piece from `begin` to `end`."""
    piece = context.as_dtype(piece, whole.value.dtype)
    pieces = [_narrow(whole, axis, 0, begin), piece, _narrow(whole, axis, end, whole.shape[axis])]
    return _joined(context, pieces, axis)


def _narrow(view: View, axis: int, begin: int, end: int) -> View:
    return View(view.value, view.at.narrow(axis, begin, end - begin))


def _joined(context: LoweringContext, pieces: Sequence[View], axis: int) -> View:
    """Pieces of one dtype, one behind the other; those that are empty are left out."""
    pieces = [each for each in pieces if each.shape[axis]]
    shape = list(pieces[0].shape)
    shape[axis] = sum(each.shape[axis] for each in pieces)
    return context.add(shape, pieces[0].value.dtype, Cat(pieces, axis))


def _pad(context: LoweringContext, node: fx.Node) -> View:
    """A number all around; less where a width is negative."""
    given = schema_arguments(node)
    found, widths = context.view(given["self"]), cast("list[int]", given["pad"])
    for axis, low, high in zip(range(len(found.shape) - 1, -1, -1), widths[::2], widths[1::2], strict=False):
        found = _narrow(found, axis, max(-low, 0), found.shape[axis] - max(-high, 0))
        around = [list(found.shape) for _ in range(2)]
        around[0][axis], around[1][axis] = max(low, 0), max(high, 0)
        dtype = found.value.dtype
        edges = [
            context.elementwise("{0}", [context.operand(given["value"])], s, dtype) if s[axis] else None for s in around
        ]
        pieces = [each for each in (edges[0], found, edges[1]) if each is not None]
        found = _joined(context, pieces, axis) if len(pieces) > 1 else found
    return found


def _roll(context: LoweringContext, node: fx.Node) -> View:
    given, shape = schema_arguments(node), meta_value(node).shape
    shifts, axes = cast("list[int]", given["shifts"]), cast("list[int]", given["dims"])
    found = context.view(given["self"])
    if not axes:  # of all elements in a row
        found, axes = _shaped(context, found, (shape.numel(),)), [0]
    for shift, axis in zip(shifts, axes, strict=True):
        axis %= len(found.shape)
        size = found.shape[axis]
        at = size - shift % size
        found = _joined(context, [_narrow(found, axis, at, size), _narrow(found, axis, 0, at)], axis)
    return _shaped(context, found, tuple(shape))


def _repeat(context: LoweringContext, node: fx.Node) -> View:
    given = schema_arguments(node)
    source, times = context.view(given["self"]), cast("list[int]", given["repeats"])
    sizes = [*[1] * (len(times) - len(source.shape)), *source.shape]

    def apply(at: Tensor) -> Tensor:
        at = at[(None,) * (len(times) - at.dim())]
        for axis in range(len(times)):
            at = at.unsqueeze(2 * axis)
        return at.expand([each for pair in zip(times, sizes, strict=True) for each in pair])

    return _shaped(context, cast(View, context.apply_view(source, apply)), tuple(meta_value(node).shape))


# -- along an axis, and at an index ------------------------------------------------------------------------------


def _cumsum(context: LoweringContext, node: fx.Node) -> View:
    given, value = schema_arguments(node), meta_value(node)
    wide = compute_dtype(value.dtype)
    source = context.as_dtype(context.view(given["self"]), wide)
    if not source.shape:
        return context.as_dtype(source, value.dtype)
    made = context.add(value.shape, wide, AxisOp("cumsum", [source], given["dim"] % len(source.shape)))
    return context.as_dtype(made, value.dtype)


def _extreme(context: LoweringContext, node: fx.Node) -> list[View]:
    """The largest or smallest along an axis, and where the first of them is."""
    given, (value, _) = schema_arguments(node), cast("tuple[Tensor, Tensor]", node.meta["val"])
    source, kind = context.view(given["self"]), "max" if node.target is aten.max.dim else "min"
    if not source.shape:
        raise Unsupported(f"loops in C look for it along an axis, not in a single number ({node.target})")
    axis = given["dim"] % len(source.shape)
    found = context.add(value.shape, value.dtype, Reduce(kind, source, (axis,), given["keepdim"]))
    return [found, _where_first(context, source, f"arg{kind}", axis, tuple(value.shape))]


def _arg(context: LoweringContext, node: fx.Node) -> View:
    given, shape = schema_arguments(node), tuple(meta_value(node).shape)
    source = context.view(given["self"])
    if given["dim"] is None or not source.shape:
        source, axis = _shaped(context, source, (source.at.numel(),)), 0
    else:
        axis = given["dim"] % len(source.shape)
    return _where_first(context, source, "argmax" if node.target is aten.argmax.default else "argmin", axis, shape)


def _where_first(context: LoweringContext, source: View, kind: Any, axis: int, shape: tuple[int, ...]) -> View:
    along = tuple(1 if i == axis else size for i, size in enumerate(source.shape))
    return _shaped(context, context.add(along, torch.int64, AxisOp(kind, [source], axis)), shape)


_EXTREMES = (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)


def _index(context: LoweringContext, given: fx.Node, of: torch.dtype, node: fx.Node) -> View:
    """An index that is known to be within range: one that does not change, or the place of an extreme.

    PyTorch raises an error for others. A constant that went out of range since gives NaN, where the dtype has one.
    """
    view, at = context.view(given), given
    if view.value.dtype not in (torch.int64, torch.int32):
        raise Unsupported(f"loops in C take indices of int64 and int32, not of {view.value.dtype} ({node.target})")
    while is_view(at) or at.target is operator.getitem:
        at = at.all_input_nodes[0]
    fixed = not any(each.op == "get_attr" for each in leading_to([given]))
    if at.target in _EXTREMES or (view.value.constant and (of.is_floating_point or fixed)):
        return view
    raise Unsupported(f"loops in C take constant indices, not such as are computed in a step ({node.target})")


def _spread(index: View, over: Sequence[int], axis: int) -> View:
    """An index of one axis, over all elements that it selects."""
    shape = [-1 if i == axis else 1 for i in range(len(over))]
    wanted = [index.shape[0] if i == axis else size for i, size in enumerate(over)]
    return View(index.value, index.at.view(shape).expand(wanted))


def _one_index(context: LoweringContext, node: fx.Node) -> tuple[View, View, int, tuple[int, ...]]:
    """The operands of x[:, index]: x, the index along one axis, the axis, and the index's own shape."""
    given = schema_arguments(node)
    source, indices = context.view(given["self"]), cast("list[fx.Node | None]", given["indices"])
    several = [(i, each) for i, each in enumerate(indices) if each is not None]
    if len(several) > 1:
        raise Unsupported(f"loops in C take one index at a time ({node.target})")
    ((axis, one),) = several
    index = _index(context, one, source.value.dtype, node)
    return source, _shaped(context, index, (index.at.numel(),)), axis, index.shape


def _gathered(context: LoweringContext, source: View, index: View, axis: int, shape: Sequence[int]) -> View:
    made = AxisOp("gather", [source, index], axis)
    return _shaped(context, context.add(index.shape, source.value.dtype, made), tuple(shape))


def _index_select(context: LoweringContext, node: fx.Node) -> View:
    given, shape = schema_arguments(node), tuple(meta_value(node).shape)
    source = context.view(given["self"])
    axis = given["dim"] % max(len(source.shape), 1)
    index = _index(context, given["index"], source.value.dtype, node)
    if not source.shape or len(index.shape) != 1:
        raise Unsupported(f"loops in C select along an axis by a list of indices ({node.target})")
    return _gathered(context, source, _spread(index, source.shape, axis), axis, shape)


def _index_by_tensor(context: LoweringContext, node: fx.Node) -> View:
    source, index, axis, _ = _one_index(context, node)
    return _gathered(context, source, _spread(index, source.shape, axis), axis, meta_value(node).shape)


def _gather(context: LoweringContext, node: fx.Node) -> View:
    given = schema_arguments(node)
    source = context.view(given["self"])
    index = _index(context, given["index"], source.value.dtype, node)
    if not source.shape or len(index.shape) != len(source.shape):
        raise Unsupported(f"loops in C gather along an axis ({node.target})")
    axis = given["dim"] % len(source.shape)
    for i, size in enumerate(index.shape):
        source = source if i == axis else _narrow(source, i, 0, size)
    return _gathered(context, source, index, axis, index.shape)


def _scattered(context: LoweringContext, kind: Any, start: View, index: View, source: View, axis: int) -> View:
    """All in the dtype of the start, which is computed with as wide as PyTorch does."""
    dtype = start.value.dtype
    wide = compute_dtype(dtype) if kind == "scatter_add" else dtype
    operands = [context.as_dtype(start, wide), index, context.as_dtype(source, wide)]
    return context.as_dtype(context.add(start.shape, wide, AxisOp(kind, operands, axis)), dtype)


def _scatter(context: LoweringContext, node: fx.Node) -> View:
    given = schema_arguments(node)
    start, index = context.view(given["self"]), _index(context, given["index"], meta_value(node).dtype, node)
    if not start.shape or len(index.shape) != len(start.shape):
        raise Unsupported(f"loops in C scatter along an axis ({node.target})")
    axis = given["dim"] % len(start.shape)
    if any(index.shape[i] != size for i, size in enumerate(start.shape) if i != axis):
        raise Unsupported(f"loops in C scatter over whole axes only ({node.target})")
    if "src" in given:
        source = context.view(given["src"])
        for i, size in enumerate(index.shape):
            source = _narrow(source, i, 0, size)
    else:
        source = context.elementwise("{0}", [context.operand(given["value"])], index.shape, start.value.dtype)
    kind = "scatter_add" if node.target is aten.scatter_add.default else "scatter"
    return _scattered(context, kind, start, index, source, axis)


def _index_add(context: LoweringContext, node: fx.Node) -> View:
    given = schema_arguments(node)
    start, source = context.view(given["self"]), context.view(given["source"])
    index = _index(context, given["index"], meta_value(node).dtype, node)
    if not start.shape or len(index.shape) != 1 or given["alpha"] != 1:
        raise Unsupported(f"loops in C add along an axis, by a list of indices, without a factor ({node.target})")
    axis = given["dim"] % len(start.shape)
    return _scattered(context, "scatter_add", start, _spread(index, start.shape, axis), source, axis)


def _index_put(context: LoweringContext, node: fx.Node) -> View:
    start, index, axis, shape = _one_index(context, node)
    given = schema_arguments(node)
    values = context.view(given["values"])
    written = (*start.shape[:axis], *shape, *start.shape[axis + 1 :])
    values = View(values.value, values.at.expand(written))
    flat = _shaped(context, values, (*start.shape[:axis], index.shape[0], *start.shape[axis + 1 :]))
    kind = "scatter_add" if given["accumulate"] else "scatter"
    return _scattered(context, kind, start, _spread(index, start.shape, axis), flat, axis)


# -- sums and products ------------------------------------------------------------------------------------------------


def _axes(given: object, dims: int) -> tuple[int, ...]:
    """Axes as PyTorch takes them: one, several, or none for all."""
    several = cast("list[int]", [given] if isinstance(given, int) else given)
    return tuple(sorted({axis % dims for axis in several})) if several else tuple(range(dims))


def _reduced(context: LoweringContext, node: fx.Node, kind: Any) -> tuple[View, int]:
    """A reduction, and of how many numbers each."""
    given, value = schema_arguments(node), meta_value(node)
    wide = compute_dtype(value.dtype)
    source = context.as_dtype(context.view(cast(fx.Node, node.args[0])), wide)
    axes = _axes(given.get("dim"), len(source.shape))
    if not axes:
        return context.as_dtype(source, value.dtype), 1
    keep = len(value.shape) == len(source.shape)
    made = context.add(value.shape, wide, Reduce(kind, source, axes, keep))
    return made, math.prod(source.shape[axis] for axis in axes)


def _sum(context: LoweringContext, node: fx.Node) -> View:
    return context.as_dtype(_reduced(context, node, "sum")[0], meta_value(node).dtype)


def _mean(context: LoweringContext, node: fx.Node) -> View:
    total, count = _reduced(context, node, "sum")
    return (
        context.as_dtype(total, meta_value(node).dtype)
        if count == 1
        else context.like(node, "({0}/{1})", [total, float(count)])
    )


def _greatest(context: LoweringContext, node: fx.Node) -> View:
    return context.as_dtype(_reduced(context, node, "max")[0], meta_value(node).dtype)


def _least(context: LoweringContext, node: fx.Node) -> View:
    return context.as_dtype(_reduced(context, node, "min")[0], meta_value(node).dtype)


def _var(context: LoweringContext, node: fx.Node) -> View:
    """As the mean of the squared distances from the mean: two passes, so that nothing cancels."""
    given, value = schema_arguments(node), meta_value(node)
    wide = compute_dtype(value.dtype)
    source = context.as_dtype(context.view(cast(fx.Node, node.args[0])), wide)
    axes = _axes(given.get("dim"), len(source.shape))
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(source.shape))
    count = math.prod(source.shape[axis] for axis in axes)
    correction = 1.0 if given["correction"] is None else float(given["correction"])
    total = context.add(kept, wide, Reduce("sum", source, axes, True))
    mean = context.elementwise("({0}/{1})", [total, float(count)], kept, wide)
    apart = context.elementwise("({0}-{1})", [source, mean], source.shape, wide)
    square = context.elementwise("({0}*{0})", [apart], source.shape, wide)
    summed = context.add(value.shape, wide, Reduce("sum", square, axes, len(value.shape) == len(kept)))
    return context.like(node, "({0}/{1})", [summed, max(count - correction, 0.0)])


_FACTORS = ("self", "mat1", "batch1", "mat2", "batch2")


def _product(context: LoweringContext, node: fx.Node) -> View:
    value, given = meta_value(node), schema_arguments(node)
    wide = compute_dtype(value.dtype)
    if not wide.is_floating_point:
        raise Unsupported(f"loops in C multiply matrices of floating numbers, not of {value.dtype}")
    *start, left, right = (context.as_dtype(context.view(given[name]), wide) for name in _FACTORS if name in given)
    alpha, beta = given.get("alpha", 1), given.get("beta", 1)
    plain = alpha == 1 and beta == 1
    begin = View(start[0].value, start[0].at.expand(value.shape)) if start and plain else None
    made = context.add(value.shape, wide, Product(left, right, begin, context.row_masks.get(node)))
    if plain:
        return context.as_dtype(made, value.dtype)
    scaled = context.like(node, "({0}*{1})", [made, context.operand(alpha)])
    if beta == 0:  # whatever the start is, be it NaN
        return scaled
    return context.like(node, "({0}+{1}*{2})", [scaled, start[0], context.operand(beta)])


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys([aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar], _add),
    aten.where.self: _where,
    **dict.fromkeys([aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default], _clamp),
    **dict.fromkeys([aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar], _power),
    aten.bitwise_not.default: _not,
    **dict.fromkeys([aten.floor.default, aten.ceil.default, aten.trunc.default, aten.round.default], _rounded),
    **dict.fromkeys(FILL, _fill),
    **dict.fromkeys(RESHAPES, _reshape),
    aten.clone.default: _copy,
    **dict.fromkeys([aten.contiguous.default, aten.detach.default, aten.alias.default], _same),
    aten.cat.default: _cat,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    aten.repeat.default: _repeat,
    aten.cumsum.default: _cumsum,
    **dict.fromkeys([aten.max.dim, aten.min.dim], _extreme),
    **dict.fromkeys([aten.argmax.default, aten.argmin.default], _arg),
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index_by_tensor,
    aten.gather.default: _gather,
    **dict.fromkeys([aten.scatter.src, aten.scatter.value, aten.scatter_add.default], _scatter),
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    **dict.fromkeys([aten.sum.dim_IntList, aten.sum.default], _sum),
    **dict.fromkeys([aten.mean.dim, aten.mean.default], _mean),
    **dict.fromkeys([aten.amax.default, aten.max.default], _greatest),
    **dict.fromkeys([aten.amin.default, aten.min.default], _least),
    aten.var.correction: _var,
    **dict.fromkeys([aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default], _product),
}


def lower_node(context: LoweringContext, node: fx.Node) -> None:
    """Turn a node into values, once; those that it reads were lowered before. Raises Unsupported."""
    if node in context.views:
        return
    if node.target is operator.getitem:
        source, index = cast("tuple[fx.Node, int]", node.args)
        context.views[node] = cast("list[View]", context.views[source])[index]
        return
    value: object = node.meta.get("val")
    for each in cast("list[object]", value) if isinstance(value, list | tuple) else [value]:
        if isinstance(each, Tensor):
            check_dtype(each.dtype, f"what {node.target} yields")
    lower = HANDLERS.get(
        node.target, _expression if node.target in ARITHMETIC or node.target in COMPARISON else _viewed
    )
    context.views[node] = lower(context, node)


def _expression(context: LoweringContext, node: fx.Node) -> View:
    """One C expression of the arguments that are tensors or numbers."""
    operands = [context.operand(each) for each in node.args if isinstance(each, fx.Node | bool | int | float)]
    if node.target in ARITHMETIC:
        return context.like(node, ARITHMETIC[node.target], operands)
    value = meta_value(node)
    return context.elementwise(COMPARISON[node.target], operands, value.shape, value.dtype, promoted_dtype(operands))


def _viewed(context: LoweringContext, node: fx.Node) -> View | list[View]:
    source = node.args[0] if node.args else None
    if not views(node) or node.target in RESTRIDING or not isinstance(source, fx.Node):
        raise Unsupported(f"loops in C do not know the operator {node.target}")

    def apply(at: Tensor) -> Any:
        return cast(Any, node.target)(at, *node.args[1:], **node.kwargs)

    seen = context.apply_view(context.view(source), apply, push=node.target in NARROWING)
    if seen is None:
        raise Unsupported(f"loops in C cannot view a tensor by {node.target}")
    return seen


def refusal(node: fx.Node, captured: StepGraph, varies: Callable[[fx.Node], bool]) -> str | None:
    """Why an operator cannot be lowered, whatever it reads; None if it can."""
    if node.target is operator.getitem:
        return None
    try:
        given: dict[fx.Node, View | list[View]] = {}
        for each in node.all_input_nodes:
            value = captured.value(each)
            several = isinstance(value, list | tuple)
            tensors = cast("list[Any]", value) if several else [value]
            for tensor in tensors:
                if not isinstance(tensor, Tensor):
                    raise Unsupported(f"loops in C do not know the operator {node.target}, which reads no tensor")
                check_dtype(tensor.dtype, f"what {node.target} reads")
            found = [whole_view(Value("", tuple(tensor.shape), tensor.dtype, None, varies(each))) for tensor in tensors]
            given[each] = found if several else found[0]
        lower_node(LoweringContext(given), node)
    except Unsupported as error:
        return str(error)
    return None
