"""Lowering of single operators: from nodes of the captured graph to values.

    getitem                  one of several views
    HANDLERS                 an operator that depends on its arguments
    ARITHMETIC, COMPARISON   one C expression: aten.sigmoid_backward(g, y) is ({0}*({1}*(1-{1})))
    otherwise                a view, if the operator's schema says so

In an expression `{0}`, `{1}` ... stand for the operands, each converted to the type in which PyTorch computes: that of
the result, or, for a comparison, the one that its operands promote to. Functions named `w_...` are in loops.h.

Other operators raise `Unsupported`. PyTorch runs them beside the loops, unless every step depends on one of them; then
another backend runs the cell.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.cpp.ir import (
    AxisOp,
    Cat,
    LoopValue,
    LoweringContext,
    Product,
    Reduce,
    Unsupported,
    View,
    check_dtype,
    compute_dtype,
    meta_value,
    promoted_dtype,
    schema_arguments,
    whole_view,
)
from weft.recurrent.graph import StepGraph
from weft.recurrent.step_plan import leading_to

aten = cast(Any, torch.ops.aten)

ARITHMETIC: dict[Any, str] = {
    aten.mul.Tensor: "({0}*{1})",
    aten.mul.Scalar: "({0}*{1})",
    aten.div.Tensor: "({0}/{1})",
    aten.div.Scalar: "({0}/{1})",
    aten.maximum.default: "w_max({0},{1})",
    aten.minimum.default: "w_min({0},{1})",
    aten.clamp_min.Tensor: "w_max({0},{1})",
    aten.clamp_max.Tensor: "w_min({0},{1})",
    aten.atan2.default: "w_atan2({0},{1})",
    aten.neg.default: "(-{0})",
    aten.abs.default: "w_abs({0})",
    aten.sgn.default: "w_sign({0})",
    aten.sign.default: "w_sign({0})",
    aten.reciprocal.default: "(1/{0})",
    aten.square.default: "({0}*{0})",
    aten.sqrt.default: "w_sqrt({0})",
    aten.rsqrt.default: "(1/w_sqrt({0}))",
    aten.relu.default: "({0}<0?0:{0})",
    aten.sigmoid_backward.default: "({0}*({1}*(1-{1})))",
    aten.tanh_backward.default: "({0}*(1-{1}*{1}))",
    aten.threshold_backward.default: "({1}<={2}?0:{0})",
    aten.where.self: "({0}!=0?{1}:{2})",
    aten._to_copy.default: "{0}",
    aten.lift_fresh_copy.default: "{0}",
    **{
        getattr(getattr(aten, f"bitwise_{name}"), form): f"({{0}}{sign}{{1}})"
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))
        for form in ("Tensor", "Scalar")
    },
    **{
        getattr(aten, name).default: f"w_{name}({{0}})"
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid"),
            *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "erf", "erfc"),
        )
    },
}
"""Computed in the type of the result."""

COMPARISON: dict[Any, str] = {
    getattr(getattr(aten, name), form): f"({{0}}{sign}{{1}})"
    for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
    for form in ("Tensor", "Scalar")
} | {
    aten.logical_and.default: "({0}&&{1})",
    aten.logical_or.default: "({0}||{1})",
    aten.logical_xor.default: "(!{0}!=!{1})",
    aten.logical_not.default: "(!{0})",
    aten.isnan.default: "({0}!={0})",
    aten.isinf.default: "(w_abs({0})==INFINITY)",
    aten.isposinf.default: "({0}==INFINITY)",
    aten.isneginf.default: "({0}==-INFINITY)",
}
"""Computed in the type that the operands promote to; the result is bool."""

FILL: dict[Any, float | None] = {
    **dict.fromkeys([aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default], 0),
    **dict.fromkeys([aten.ones_like.default, aten.ones.default, aten.new_ones.default], 1),
    **dict.fromkeys([aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default]),
}
"""The value that they fill with; None if it is an argument."""

NARROWING = {*(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)}
"""Views by which cheap expressions are computed."""

RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
"""The same elements in another shape."""

RESTRIDING = {aten.as_strided.default, aten._reshape_alias.default, aten.view.dtype}
"""Views by the strides or the bytes that a tensor had when the step was captured: here it may lie otherwise."""


def is_view(node: fx.Node) -> bool:
    """Whether an operator only looks at another's value, or at one of its several."""
    if node.op != "call_function":
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return views(node.all_input_nodes[0])
    return node.target in RESHAPES or views(node)


def views(node: fx.Node) -> bool:
    """Whether an operator's schema says that it views its first argument, and does not write into it."""
    schema = getattr(node.target, "_schema", None)
    info = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return info is not None and not info.is_write


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


def _clamp(context: LoweringContext, node: fx.Node) -> View:
    """The upper bound last, as PyTorch has it: where the lower one is above it, the upper one wins."""
    given, dtype = schema_arguments(node), meta_value(node).dtype
    found = context.view(given["self"])
    for name, expression in (("min", "w_max({0},{1})"), ("max", "w_min({0},{1})")):
        bound = given.get(name)
        if bound is None:
            continue
        whole = isinstance(bound, int) and not dtype.is_floating_point
        if whole and (dtype == torch.bool or not torch.iinfo(dtype).min <= bound <= torch.iinfo(dtype).max):
            # To PyTorch 2.15 that is no bound, before it was what its bits make.
            raise Unsupported(f"loops in C clamp by numbers that {dtype} can hold, not by {bound} ({node.target})")
        found = context.like(node, expression, [found, context.operand(bound)])
    return found


_POWERS: dict[Any, str] = {0: "1", 1: "{0}", 2: "({0}*{0})", 3: "({0}*{0}*{0})"}
_ROOTS: dict[Any, str] = {0.5: "w_sqrt({0})", -0.5: "(1/w_sqrt({0}))", -1: "(1/{0})", -2: "(1/({0}*{0}))"}
"""Exponents that PyTorch itself computes otherwise than by the library's pow."""


def _power(context: LoweringContext, node: fx.Node) -> View:
    base, exponent = context.operand(node.args[0]), context.operand(node.args[1])
    floating = meta_value(node).is_floating_point()
    known = _POWERS | _ROOTS if floating else _POWERS
    if not isinstance(exponent, View) and exponent in known:
        return context.like(node, known[exponent], [base])
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


def _source(context: LoweringContext, node: fx.Node) -> View:
    """The first operand."""
    return context.view(cast(fx.Node, node.args[0]))


def _shaped(context: LoweringContext, source: View, shape: Sequence[int]) -> View:
    """The same elements in another shape; a copy where a view cannot be."""
    if source.shape == tuple(shape):
        return source
    apply = partial(torch.reshape, shape=tuple(shape))
    return cast(View, context.apply_view(source, apply) or context.apply_view(context.copied(source), apply))


def _cat(context: LoweringContext, node: fx.Node) -> View:
    value, given = meta_value(node), schema_arguments(node)
    pieces = [context.view(each) for each in given["tensors"]]
    pieces = [each for each in pieces if each.shape != (0,)]  # PyTorch takes an empty tensor of one axis anywhere
    pieces = [context.as_dtype(each, value.dtype) for each in pieces]
    return context.add(value.shape, value.dtype, Cat(pieces, given["dim"] % len(value.shape)))


# -- along an axis, and at an index -----------------------------------------------------------------------------------


def _cumsum(context: LoweringContext, node: fx.Node) -> View:
    value = meta_value(node)
    wide = compute_dtype(value.dtype)
    source = context.as_dtype(_source(context, node), wide)
    if source.shape:
        axis = schema_arguments(node)["dim"] % len(source.shape)
        source = context.add(value.shape, wide, AxisOp("cumsum", [source], axis))
    return context.as_dtype(source, value.dtype)


def _arg(context: LoweringContext, node: fx.Node) -> View:
    """Where the first of the largest or smallest is."""
    given, source = schema_arguments(node), _source(context, node)
    if given["dim"] is None or not source.shape:
        source, axis = _shaped(context, source, (source.at.numel(),)), 0
    else:
        axis = given["dim"] % len(source.shape)
    along = tuple(1 if i == axis else size for i, size in enumerate(source.shape))
    made = AxisOp("argmax" if node.target is aten.argmax.default else "argmin", [source], axis)
    return _shaped(context, context.add(along, torch.int64, made), meta_value(node).shape)


_BY_ELEMENT = {aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default}
"""They have an index for every element."""


def _index(context: LoweringContext, given: fx.Node, of: torch.dtype, node: fx.Node) -> View:
    """An index that is known to be within range: one that does not change, or the place of an extreme.

    PyTorch raises an error for others. A constant that went out of range since gives NaN, where the dtype has one.
    """
    view, at = context.view(given), given
    if view.value.dtype not in (torch.int64, torch.int32):
        raise Unsupported(f"loops in C take indices of int64 and int32, not of {view.value.dtype} ({node.target})")
    while is_view(at):
        at = at.all_input_nodes[0]
    fixed = not any(each.op == "get_attr" for each in leading_to([given]))
    extreme = at.target in (aten.argmax.default, aten.argmin.default)
    if extreme or (view.value.constant and (of.is_floating_point or fixed)):
        return view
    raise Unsupported(f"loops in C take constant indices, not such as are computed in a step ({node.target})")


def _indexed(context: LoweringContext, node: fx.Node) -> tuple[View, View, int, tuple[int, ...]]:
    """The operands of an operator at an index: x, the index for every element, its axis, and its own shape.

    The index of x[:, index] is spread over the other axes of x; gather and scatter have one for every element.
    """
    given = schema_arguments(node)
    source = context.view(given["self"])
    if "index" in given:
        several = [(given["dim"] % max(len(source.shape), 1), given["index"])]
    else:
        several = [(i, each) for i, each in enumerate(given["indices"]) if each is not None]
    if len(several) > 1 or not source.shape:
        raise Unsupported(f"loops in C take one index at a time, along an axis ({node.target})")
    ((axis, one),) = several
    index = _index(context, one, source.value.dtype, node)
    if node.target in _BY_ELEMENT:
        if len(index.shape) != len(source.shape):
            raise Unsupported(f"loops in C index along an axis ({node.target})")
        return source, index, axis, index.shape
    flat = _shaped(context, index, (index.at.numel(),))
    at = flat.at.view([-1 if i == axis else 1 for i in range(len(source.shape))])
    over = [flat.shape[0] if i == axis else size for i, size in enumerate(source.shape)]
    return source, View(flat.value, at.expand(over)), axis, index.shape


def _cut(view: View, shape: Sequence[int], but: int | None = None) -> View:
    """The beginning of every axis but one."""
    at = view.at
    for axis, size in enumerate(shape):
        at = at if axis == but else at.narrow(axis, 0, size)
    return View(view.value, at)


def _read(context: LoweringContext, node: fx.Node) -> View:
    """x at an index."""
    source, index, axis, _ = _indexed(context, node)
    made = AxisOp("gather", [_cut(source, index.shape, axis), index], axis)
    return _shaped(context, context.add(index.shape, source.value.dtype, made), meta_value(node).shape)


def _written(context: LoweringContext, node: fx.Node) -> View:
    """x with other numbers at an index, or with numbers added there, in x's dtype; PyTorch adds in a wider one."""
    given, (start, index, axis, shape) = schema_arguments(node), _indexed(context, node)
    if any(index.shape[i] != size for i, size in enumerate(start.shape) if i != axis):
        raise Unsupported(f"loops in C scatter over whole axes only ({node.target})")
    if given.get("alpha", 1) != 1:
        raise Unsupported(f"loops in C add without a factor ({node.target})")
    if "value" in given:
        source = context.elementwise("{0}", [context.operand(given["value"])], index.shape, start.value.dtype)
    elif "src" in given:
        source = _cut(context.view(given["src"]), index.shape)
    else:
        source = context.view(given["source"] if "source" in given else given["values"])
        source = View(source.value, source.at.expand((*start.shape[:axis], *shape, *start.shape[axis + 1 :])))
        source = _shaped(context, source, index.shape)
    add = given.get("accumulate", node.target in (aten.scatter_add.default, aten.index_add.default))
    wide = compute_dtype(start.value.dtype) if add else start.value.dtype
    operands = [context.as_dtype(start, wide), index, context.as_dtype(source, wide)]
    made = AxisOp("scatter_add" if add else "scatter", operands, axis)
    return context.as_dtype(context.add(start.shape, wide, made), start.value.dtype)


# -- sums and products ------------------------------------------------------------------------------------------------


def _remainder(context: LoweringContext, node: fx.Node) -> View:
    operands, truncates = [context.operand(each) for each in node.args[:2]], "fmod" in str(node.target)
    if meta_value(node).is_floating_point():
        return context.like(node, "w_fmod({0},{1})" if truncates else "w_remainder({0},{1})", operands)
    divisor = operands[1]
    if isinstance(divisor, View) or not 0 < divisor < 1 << 30:  # beyond, the sum below could overflow
        raise Unsupported(f"loops in C divide integers by constants from 1 to 2**30 only ({node.target})")
    return context.like(node, "({0}%{1})" if truncates else "(({0}%{1}+{1})%{1})", operands)


_TRUTH = {"any": "max", "all": "min"}


def _reduced(kind: Any, context: LoweringContext, node: fx.Node) -> View:
    given, value = schema_arguments(node).get("dim"), meta_value(node)
    wide = torch.bool if kind in _TRUTH else compute_dtype(value.dtype)
    kind = _TRUTH.get(kind, kind)
    source = context.as_dtype(_source(context, node), wide)
    dims = len(source.shape)
    several = cast("list[int]", [given] if isinstance(given, int) else given)  # none: along all
    axes = tuple(sorted({axis % dims for axis in several if dims})) if several else tuple(range(dims))
    if axes:
        reduction = Reduce("sum" if kind == "mean" else kind, source, axes, len(value.shape) == dims)
        total = context.add(value.shape, wide, reduction)
        count = math.prod(source.shape[axis] for axis in axes)
        if kind == "mean" and count != 1:
            return context.like(node, "({0}/{1})", [total, float(count)])
        source = total
    return context.as_dtype(source, value.dtype)


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
    **dict.fromkeys([aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default], _clamp),
    **dict.fromkeys([aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar], _power),
    aten.bitwise_not.default: _not,
    **dict.fromkeys([aten.floor.default, aten.ceil.default, aten.trunc.default, aten.round.default], _rounded),
    **dict.fromkeys(FILL, _fill),
    **dict.fromkeys(RESHAPES, lambda context, node: _shaped(context, _source(context, node), meta_value(node).shape)),
    aten.clone.default: lambda context, node: context.copied(_source(context, node)),
    **dict.fromkeys([aten.contiguous.default, aten.detach.default, aten.alias.default], _source),
    aten.cat.default: _cat,
    aten.cumsum.default: _cumsum,
    **dict.fromkeys([aten.argmax.default, aten.argmin.default], _arg),
    **dict.fromkeys([aten.index_select.default, aten.index.Tensor, aten.gather.default], _read),
    **dict.fromkeys([aten.index_add.default, aten.index_put.default, *_BY_ELEMENT - {aten.gather.default}], _written),
    **dict.fromkeys([aten.sum.dim_IntList, aten.sum.default], partial(_reduced, "sum")),
    **dict.fromkeys([aten.mean.dim, aten.mean.default], partial(_reduced, "mean")),
    **dict.fromkeys([aten.amax.default, aten.max.default], partial(_reduced, "max")),
    **dict.fromkeys([aten.amin.default, aten.min.default], partial(_reduced, "min")),
    **dict.fromkeys([aten.any.dim, aten.any.default], partial(_reduced, "any")),
    **dict.fromkeys([aten.all.dim, aten.all.default], partial(_reduced, "all")),
    **dict.fromkeys([aten.remainder.Tensor, aten.remainder.Scalar], _remainder),
    **dict.fromkeys([aten.fmod.Tensor, aten.fmod.Scalar], _remainder),
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
    plain = _expression if node.target in ARITHMETIC or node.target in COMPARISON else _viewed
    context.views[node] = HANDLERS.get(node.target, plain)(context, node)


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
    look = cast(Any, node.target)
    push = node.target in NARROWING
    seen = context.apply_view(context.view(source), lambda at: look(at, *node.args[1:], **node.kwargs), push)
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
            changes = varies(each)
            found = [whole_view(LoopValue("", tuple(like.shape), like.dtype, None, changes)) for like in tensors]
            given[each] = found if several else found[0]
        lower_node(LoweringContext(given), node)
    except Unsupported as error:
        return str(error)
    return None
