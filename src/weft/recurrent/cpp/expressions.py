"""Tables of the operators that are one C expression, that fill, or that are only views.

    aten.sigmoid_backward(g, y)      ({0}*({1}*(1-{1})))

`{0}`, `{1}` ... stand for the operands, each converted to the type in which PyTorch computes: that of the result, or,
for a comparison, the one that its operands promote to. Functions named `w_...` are in loops.h.
"""

from typing import Any, cast

import torch
from torch import fx

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

NARROWING = {
    *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
}
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
