"""Lowering of single operators: from nodes of the captured graph to values.

    getitem                  one of several views
    HANDLERS                 an operator that depends on its arguments
    ARITHMETIC, COMPARISON   one C expression: aten.sigmoid_backward(g, y) is ({0}*({1}*(1-{1})))
    otherwise                a view, if the operator's schema says so

In an expression `{0}`, `{1}` ... stand for the operands, each converted to the type in which PyTorch computes. That is
the type of the result or, for a comparison, the type to which its operands promote. Functions named `w_...` are in
loops.h.

Other operators raise `Unsupported`. PyTorch runs them outside the loops. If a carried value needs one of them, another
backend runs the cell.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.step_plan import leading_to

aten = cast(Any, torch.ops.aten)

# Operators that are computed in the type of the result.
ARITHMETIC: dict[Any, str] = {
    **dict.fromkeys([aten.mul.Tensor, aten.mul.Scalar], "({0}*{1})"),
    **dict.fromkeys([aten.div.Tensor, aten.div.Scalar], "({0}/{1})"),
    **dict.fromkeys([aten.maximum.default, aten.clamp_min.Tensor], "w_max({0},{1})"),
    **dict.fromkeys([aten.minimum.default, aten.clamp_max.Tensor], "w_min({0},{1})"),
    aten.atan2.default: "w_atan2({0},{1})",
    aten.neg.default: "(-{0})",
    aten.abs.default: "w_abs({0})",
    **dict.fromkeys([aten.sgn.default, aten.sign.default], "w_sign({0})"),
    aten.reciprocal.default: "(1/{0})",
    aten.square.default: "({0}*{0})",
    aten.sqrt.default: "w_sqrt({0})",
    aten.rsqrt.default: "(1/w_sqrt({0}))",
    aten.relu.default: "({0}<0?0:{0})",
    aten.sigmoid_backward.default: "({0}*({1}*(1-{1})))",
    aten.tanh_backward.default: "({0}*(1-{1}*{1}))",
    aten.threshold_backward.default: "({1}<={2}?0:{0})",
    aten.where.self: "({0}!=0?{1}:{2})",
    **dict.fromkeys([aten._to_copy.default, aten.lift_fresh_copy.default], "{0}"),
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

# Operators that are computed in the type to which the operands promote; the result is bool.
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

# Operators that fill a tensor, and the number they fill it with; None if that is an argument.
FILL: dict[Any, float | None] = {
    **dict.fromkeys([aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default], 0),
    **dict.fromkeys([aten.ones_like.default, aten.ones.default, aten.new_ones.default], 1),
    **dict.fromkeys([aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default]),
}

# Views that are pushed to the operands of a cheap expression.
NARROWING = {*(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)}

# Operators that give the same elements another shape.
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)

# Views by the strides or the bytes of the captured tensor, whose layout here can be another one.
RESTRIDING = {aten.as_strided.default, aten._reshape_alias.default, aten.view.dtype}


def is_view(node: fx.Node) -> bool:
    """Whether an operator only views another's value, or selects one of its results, which are views."""
    if node.op != "call_function":
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return views_argument(node.all_input_nodes[0])
    return node.target in RESHAPES or views_argument(node)


def views_argument(node: fx.Node) -> bool:
    """Whether an operator's schema says that it views its first argument, and does not write into it."""
    schema = ir.operator_schema(node)
    info = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return info is not None and not info.is_write


Handler = Callable[[ir.LoweringContext, fx.Node], ir.View | list[ir.View]]


def _lower_add(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    """A sum or a difference. The second operand can have a factor. Booleans are added by "or"."""
    arguments = ir.schema_arguments(node)
    operands = [context.as_operand(arguments["self"]), context.as_operand(arguments["other"])]
    if ir.meta_value(node).dtype == torch.bool:
        return context.add_result(node, "({0}|{1})", operands)
    sign = "-" if node.target in (aten.sub.Tensor, aten.sub.Scalar) else "+"
    alpha = arguments["alpha"]
    if alpha == 1:
        return context.add_result(node, f"({{0}}{sign}{{1}})", operands)
    return context.add_result(node, f"({{0}}{sign}{{1}}*{{2}})", [*operands, context.as_operand(alpha)])


def _lower_clamp(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    arguments, dtype = ir.schema_arguments(node), ir.meta_value(node).dtype
    clamped = context.view_of(arguments["self"])
    # The upper bound comes last: as in PyTorch, it wins over a lower bound above it.
    for name, expression in (("min", "w_max({0},{1})"), ("max", "w_min({0},{1})")):
        bound = arguments.get(name)
        if bound is None:
            continue
        is_integer = isinstance(bound, int) and not dtype.is_floating_point
        if is_integer and (dtype == torch.bool or not torch.iinfo(dtype).min <= bound <= torch.iinfo(dtype).max):
            # PyTorch 2.15 ignores such a bound. Earlier releases use its low bits.
            raise ir.Unsupported(f"loops in C clamp by numbers that {dtype} can hold, not by {bound} ({node.target})")
        clamped = context.add_result(node, expression, [clamped, context.as_operand(bound)])
    return clamped


_POWERS: dict[Any, str] = {0: "1", 1: "{0}", 2: "({0}*{0})", 3: "({0}*{0}*{0})"}
# Exponents for which PyTorch itself does not use the library's pow. These give the same bits.
_ROOTS: dict[Any, str] = {0.5: "w_sqrt({0})", -0.5: "(1/w_sqrt({0}))", -1: "(1/{0})", -2: "(1/({0}*{0}))"}


def _lower_power(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    base, exponent = context.as_operand(node.args[0]), context.as_operand(node.args[1])
    floating = ir.meta_value(node).is_floating_point()
    known = _POWERS | _ROOTS if floating else _POWERS
    if not isinstance(exponent, ir.View) and exponent in known:
        return context.add_result(node, known[exponent], [base])
    if not floating:
        raise ir.Unsupported(f"loops in C raise integers to the powers 0 to 3 only ({node.target})")
    return context.add_result(node, "w_pow({0},{1})", [base, exponent])


def _lower_not(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    is_bool = ir.meta_value(node).dtype == torch.bool
    return context.add_result(node, "(!{0})" if is_bool else "(~{0})", [context.as_operand(node.args[0])])


def _lower_rounding(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    """Integers are unchanged."""
    name = ir.operator_schema(node).name.removeprefix("aten::")
    floating = ir.meta_value(node).is_floating_point()
    return context.add_result(node, f"w_{name}({{0}})" if floating else "{0}", [context.as_operand(node.args[0])])


def _lower_fill(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    number = FILL[node.target]
    if number is None:
        arguments = ir.schema_arguments(node)
        number = context.as_operand(arguments["s"] if "s" in arguments else arguments["fill_value"])
    return context.add_result(node, "{0}", [number])


def _first_operand(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    return context.view_of(cast(fx.Node, node.args[0]))


def _reshaped(context: ir.LoweringContext, source: ir.View, shape: Sequence[int]) -> ir.View:
    """The same elements in another shape, copied if no view can have it."""
    if source.shape == tuple(shape):
        return source
    apply = partial(torch.reshape, shape=tuple(shape))
    return cast(ir.View, context.apply_view(source, apply) or context.apply_view(context.add_copy(source), apply))


def _lower_cat(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    value, arguments = ir.meta_value(node), ir.schema_arguments(node)
    views = [context.view_of(piece) for piece in arguments["tensors"]]
    # PyTorch accepts an empty tensor of one axis among pieces of any shape.
    pieces = [context.as_dtype(view, value.dtype) for view in views if view.shape != (0,)]
    return context.add_value(value.shape, value.dtype, ir.Cat(pieces, arguments["dim"] % len(value.shape)))


def _lower_cumsum(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    value = ir.meta_value(node)
    wide = ir.compute_dtype(value.dtype)
    source = context.as_dtype(_first_operand(context, node), wide)
    if source.shape:
        axis = ir.schema_arguments(node)["dim"] % len(source.shape)
        source = context.add_value(value.shape, wide, ir.AxisOp("cumsum", [source], axis))
    return context.as_dtype(source, value.dtype)


def _lower_arg_extreme(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    dim, source = ir.schema_arguments(node)["dim"], _first_operand(context, node)
    if dim is None or not source.shape:
        source, axis = _reshaped(context, source, (source.at.numel(),)), 0
    else:
        axis = dim % len(source.shape)
    along = tuple(1 if i == axis else size for i, size in enumerate(source.shape))
    operation = ir.AxisOp("argmax" if node.target is aten.argmax.default else "argmin", [source], axis)
    return _reshaped(context, context.add_value(along, torch.int64, operation), ir.meta_value(node).shape)


# Operators with an index for every element.
_BY_ELEMENT = {aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default}


def _checked_index(context: ir.LoweringContext, index: fx.Node, of: torch.dtype, node: fx.Node) -> ir.View:
    """An index that is known to be within range: a constant, or the index of an extreme."""
    # PyTorch raises an error for an index out of range, which loops cannot. A get_attr node can be a buffer, whose
    # content can change between calls. If it has gone out of range since the capture, the result is NaN, so the dtype
    # must have it. Computed constants cannot change.
    view, producer = context.view_of(index), index
    if view.value.dtype not in (torch.int64, torch.int32):
        raise ir.Unsupported(f"loops in C take indices of int64 and int32, not of {view.value.dtype} ({node.target})")
    while is_view(producer):
        producer = producer.all_input_nodes[0]
    unchangeable = not any(ancestor.op == "get_attr" for ancestor in leading_to([index]))
    extreme = producer.target in (aten.argmax.default, aten.argmin.default)
    if extreme or (view.value.is_constant and (of.is_floating_point or unchangeable)):
        return view
    raise ir.Unsupported(f"loops in C take constant indices, not such as are computed in a step ({node.target})")


def _indexed(context: ir.LoweringContext, node: fx.Node) -> tuple[ir.View, ir.View, int, tuple[int, ...]]:
    """The operands of an operator at an index: x, the index for every element, its axis, and its own shape."""
    # The index of x[:, index] is broadcast over the other axes of x. Gather and scatter have one for every element.
    arguments = ir.schema_arguments(node)
    source = context.view_of(arguments["self"])
    if "index" in arguments:
        indices = [(arguments["dim"] % max(len(source.shape), 1), arguments["index"])]
    else:
        indices = [(i, index) for i, index in enumerate(arguments["indices"]) if index is not None]
    if len(indices) > 1 or not source.shape:
        raise ir.Unsupported(f"loops in C take one index at a time, along an axis ({node.target})")
    ((axis, index_node),) = indices
    index = _checked_index(context, index_node, source.value.dtype, node)
    if node.target in _BY_ELEMENT:
        if len(index.shape) != len(source.shape):
            raise ir.Unsupported(f"loops in C index along an axis ({node.target})")
        return source, index, axis, index.shape
    # Stride 0 along the other axes: the index is stored once, and every element finds its own entry.
    flat = _reshaped(context, index, (index.at.numel(),))
    at = flat.at.view([-1 if i == axis else 1 for i in range(len(source.shape))])
    over = [flat.shape[0] if i == axis else size for i, size in enumerate(source.shape)]
    return source, ir.View(flat.value, at.expand(over)), axis, index.shape


def _narrowed(view: ir.View, shape: Sequence[int], but: int | None = None) -> ir.View:
    """The first elements of every axis but one, as many as `shape` has."""
    at = view.at
    for axis, size in enumerate(shape):
        at = at if axis == but else at.narrow(axis, 0, size)
    return ir.View(view.value, at)


def _lower_gather(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    source, index, axis, _ = _indexed(context, node)
    operation = ir.AxisOp("gather", [_narrowed(source, index.shape, axis), index], axis)
    return _reshaped(context, context.add_value(index.shape, source.value.dtype, operation), ir.meta_value(node).shape)


def _lower_scatter(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    arguments, (start, index, axis, shape) = ir.schema_arguments(node), _indexed(context, node)
    if any(index.shape[i] != size for i, size in enumerate(start.shape) if i != axis):
        raise ir.Unsupported(f"loops in C scatter over whole axes only ({node.target})")
    if arguments.get("alpha", 1) != 1:
        raise ir.Unsupported(f"loops in C add without a factor ({node.target})")
    if "value" in arguments:
        number = context.as_operand(arguments["value"])
        source = context.add_elementwise("{0}", [number], index.shape, start.value.dtype)
    elif "src" in arguments:
        source = _narrowed(context.view_of(arguments["src"]), index.shape)
    else:
        source = context.view_of(arguments["source"] if "source" in arguments else arguments["values"])
        source = ir.View(source.value, source.at.expand((*start.shape[:axis], *shape, *start.shape[axis + 1 :])))
        source = _reshaped(context, source, index.shape)
    add = arguments.get("accumulate", node.target in (aten.scatter_add.default, aten.index_add.default))
    # PyTorch accumulates 16 bits in float32, and rounds only the final sums.
    wide = ir.compute_dtype(start.value.dtype) if add else start.value.dtype
    operands = [context.as_dtype(start, wide), index, context.as_dtype(source, wide)]
    operation = ir.AxisOp("scatter_add" if add else "scatter", operands, axis)
    return context.as_dtype(context.add_value(start.shape, wide, operation), start.value.dtype)


def _lower_remainder(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    operands = [context.as_operand(argument) for argument in node.args[:2]]
    truncates = "fmod" in str(node.target)
    if ir.meta_value(node).is_floating_point():
        return context.add_result(node, "w_fmod({0},{1})" if truncates else "w_remainder({0},{1})", operands)
    divisor = operands[1]
    # A larger divisor could overflow the sum below. Division by zero ends the process in C, where PyTorch raises.
    if isinstance(divisor, ir.View) or not 0 < divisor < 1 << 30:
        raise ir.Unsupported(f"loops in C divide integers by constants from 1 to 2**30 only ({node.target})")
    return context.add_result(node, "({0}%{1})" if truncates else "(({0}%{1}+{1})%{1})", operands)


_LOGICAL = {"any": "max", "all": "min"}


def _lower_reduction(kind: Any, context: ir.LoweringContext, node: fx.Node) -> ir.View:
    dim, value = ir.schema_arguments(node).get("dim"), ir.meta_value(node)
    wide = torch.bool if kind in _LOGICAL else ir.compute_dtype(value.dtype)
    kind = _LOGICAL.get(kind, kind)
    source = context.as_dtype(_first_operand(context, node), wide)
    dims = len(source.shape)
    axes = cast("list[int] | None", [dim] if isinstance(dim, int) else dim)
    # In PyTorch no axes, like an empty list, mean all axes.
    along = tuple(sorted({axis % dims for axis in axes if dims})) if axes else tuple(range(dims))
    if along:
        reduction = ir.Reduce("sum" if kind == "mean" else kind, source, along, len(value.shape) == dims)
        total = context.add_value(value.shape, wide, reduction)
        count = math.prod(source.shape[axis] for axis in along)
        if kind == "mean" and count != 1:
            return context.add_result(node, "({0}/{1})", [total, float(count)])
        source = total
    return context.as_dtype(source, value.dtype)


_FACTORS = ("self", "mat1", "batch1", "mat2", "batch2")


def _lower_product(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    value, arguments = ir.meta_value(node), ir.schema_arguments(node)
    wide = ir.compute_dtype(value.dtype)
    if not wide.is_floating_point:
        raise ir.Unsupported(f"loops in C multiply matrices of floating numbers, not of {value.dtype}")
    factors = [context.view_of(arguments[name]) for name in _FACTORS if name in arguments]
    *start, left, right = (context.as_dtype(factor, wide) for factor in factors)
    alpha, beta = arguments.get("alpha", 1), arguments.get("beta", 1)
    # Without factors, the kernels add the start themselves, which saves a pass over memory.
    plain = alpha == 1 and beta == 1
    begin = ir.View(start[0].value, start[0].at.expand(value.shape)) if start and plain else None
    product = context.add_value(value.shape, wide, ir.Product(left, right, begin, context.row_masks.get(node)))
    if plain:
        return context.as_dtype(product, value.dtype)
    scaled = context.add_result(node, "({0}*{1})", [product, context.as_operand(alpha)])
    if beta == 0:  # PyTorch ignores the start then, even NaN
        return scaled
    return context.add_result(node, "({0}+{1}*{2})", [scaled, start[0], context.as_operand(beta)])


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys([aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar], _lower_add),
    **dict.fromkeys(
        [aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default], _lower_clamp
    ),
    **dict.fromkeys([aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar], _lower_power),
    aten.bitwise_not.default: _lower_not,
    **dict.fromkeys([aten.floor.default, aten.ceil.default, aten.trunc.default, aten.round.default], _lower_rounding),
    **dict.fromkeys(FILL, _lower_fill),
    **dict.fromkeys(
        RESHAPES, lambda context, node: _reshaped(context, _first_operand(context, node), ir.meta_value(node).shape)
    ),
    aten.clone.default: lambda context, node: context.add_copy(_first_operand(context, node)),
    **dict.fromkeys([aten.contiguous.default, aten.detach.default, aten.alias.default], _first_operand),
    aten.cat.default: _lower_cat,
    aten.cumsum.default: _lower_cumsum,
    **dict.fromkeys([aten.argmax.default, aten.argmin.default], _lower_arg_extreme),
    **dict.fromkeys([aten.index_select.default, aten.index.Tensor, aten.gather.default], _lower_gather),
    **dict.fromkeys(
        [aten.index_add.default, aten.index_put.default, *_BY_ELEMENT - {aten.gather.default}], _lower_scatter
    ),
    **dict.fromkeys([aten.sum.dim_IntList, aten.sum.default], partial(_lower_reduction, "sum")),
    **dict.fromkeys([aten.mean.dim, aten.mean.default], partial(_lower_reduction, "mean")),
    **dict.fromkeys([aten.amax.default, aten.max.default], partial(_lower_reduction, "max")),
    **dict.fromkeys([aten.amin.default, aten.min.default], partial(_lower_reduction, "min")),
    **dict.fromkeys([aten.any.dim, aten.any.default], partial(_lower_reduction, "any")),
    **dict.fromkeys([aten.all.dim, aten.all.default], partial(_lower_reduction, "all")),
    **dict.fromkeys([aten.remainder.Tensor, aten.remainder.Scalar], _lower_remainder),
    **dict.fromkeys([aten.fmod.Tensor, aten.fmod.Scalar], _lower_remainder),
    **dict.fromkeys([aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default], _lower_product),
}


def lower_node(context: ir.LoweringContext, node: fx.Node) -> None:
    """Lower a node to values, once. Its operands are lowered already. Raises Unsupported."""
    if node in context.views:
        return
    if node.target is operator.getitem:
        source, index = cast("tuple[fx.Node, int]", node.args)
        context.views[node] = cast("list[ir.View]", context.views[source])[index]
        return
    value: object = node.meta.get("val")
    for result in cast("list[object]", value) if isinstance(value, list | tuple) else [value]:
        if isinstance(result, Tensor):
            ir.check_dtype(result.dtype, f"a result of {node.target}")
    default = _lower_expression if node.target in ARITHMETIC or node.target in COMPARISON else _lower_view
    context.views[node] = HANDLERS.get(node.target, default)(context, node)


def _lower_expression(context: ir.LoweringContext, node: fx.Node) -> ir.View:
    operands = [context.as_operand(argument) for argument in node.args if isinstance(argument, _OPERANDS)]
    if node.target in ARITHMETIC:
        return context.add_result(node, ARITHMETIC[node.target], operands)
    value, promoted = ir.meta_value(node), ir.promoted_dtype(operands)
    return context.add_elementwise(COMPARISON[node.target], operands, value.shape, value.dtype, promoted)


_OPERANDS = (fx.Node, bool, int, float)


def _lower_view(context: ir.LoweringContext, node: fx.Node) -> ir.View | list[ir.View]:
    source = node.args[0] if node.args else None
    if not views_argument(node) or node.target in RESTRIDING or not isinstance(source, fx.Node):
        raise ir.Unsupported(f"loops in C do not know the operator {node.target}")
    target = cast(Any, node.target)
    push = node.target in NARROWING
    view = context.apply_view(context.view_of(source), lambda at: target(at, *node.args[1:], **node.kwargs), push)
    if view is None:
        raise ir.Unsupported(f"loops in C cannot view a tensor by {node.target}")
    return view


def why_unsupported(node: fx.Node, captured: StepGraph, varies: Callable[[fx.Node], bool]) -> str | None:
    """The reason why an operator cannot be lowered, whichever values it reads, or None if it can."""
    if node.target is operator.getitem:
        return None
    # Lower the node alone, on placeholders with the shapes and dtypes of its operands.
    try:
        views: dict[fx.Node, ir.View | list[ir.View]] = {}
        for operand in node.all_input_nodes:
            value = captured.value(operand)
            is_list = isinstance(value, list | tuple)
            tensors = cast("list[Any]", value) if is_list else [value]
            for tensor in tensors:
                if not isinstance(tensor, Tensor):
                    raise ir.Unsupported(f"loops in C do not know the operator {node.target}, which reads no tensor")
                ir.check_dtype(tensor.dtype, f"an operand of {node.target}")
            changes = varies(operand)
            placeholders = [ir.whole_view(ir.LoopValue("", tuple(x.shape), x.dtype, None, changes)) for x in tensors]
            views[operand] = placeholders if is_list else placeholders[0]
        lower_node(ir.LoweringContext(views), node)
    except ir.Unsupported as error:
        return str(error)
    return None
