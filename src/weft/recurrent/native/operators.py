"""Elementwise operators as C expressions, and the table of what larger operators are made of.

    aten.sigmoid_backward(g, y)      ({0}*({1}*(1-{1})))

`{0}`, `{1}` ... stand for the operands, each converted to the type in which PyTorch computes: that of the result, or,
for a comparison, the one that its operands promote to. Functions named `w_...` are in loops.h.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, _decomp, fx

from weft.recurrent.native.convolution import convolution, convolution_backward

aten = cast(Any, torch.ops.aten)

_BINARY: dict[Any, str] = {
    aten.mul.Tensor: "({0}*{1})",
    aten.mul.Scalar: "({0}*{1})",
    aten.div.Tensor: "({0}/{1})",
    aten.div.Scalar: "({0}/{1})",
    aten.maximum.default: "w_max({0},{1})",
    aten.minimum.default: "w_min({0},{1})",
    aten.clamp_min.Tensor: "w_max({0},{1})",
    aten.clamp_max.Tensor: "w_min({0},{1})",
    aten.atan2.default: "w_atan2({0},{1})",
}

_BITS: dict[Any, str] = {
    getattr(getattr(aten, f"bitwise_{name}"), form): f"({{0}}{sign}{{1}})"
    for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))
    for form in ("Tensor", "Scalar")
}

_UNARY: dict[Any, str] = {
    aten.neg.default: "(-{0})",
    aten.abs.default: "w_abs({0})",
    aten.sgn.default: "w_sign({0})",
    aten.sign.default: "w_sign({0})",
    aten.reciprocal.default: "(1/{0})",
    aten.square.default: "({0}*{0})",
    aten.sqrt.default: "w_sqrt({0})",
    aten.rsqrt.default: "(1/w_sqrt({0}))",
    aten.relu.default: "({0}<0?0:{0})",
} | {
    getattr(aten, name).default: f"w_{name}({{0}})"
    for name in (
        *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "erf", "erfc"),
    )
}

_BACKWARD: dict[Any, str] = {
    aten.sigmoid_backward.default: "({0}*({1}*(1-{1})))",
    aten.tanh_backward.default: "({0}*(1-{1}*{1}))",
    aten.threshold_backward.default: "({1}<={2}?0:{0})",
}

_CONVERSIONS: dict[Any, str] = {
    aten._to_copy.default: "{0}",
    aten.lift_fresh_copy.default: "{0}",
}

ARITHMETIC = _BINARY | _BITS | _UNARY | _BACKWARD | _CONVERSIONS
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
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.zeros.default: 0,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.ones.default: 1,
    aten.full.default: None,
    aten.full_like.default: None,
    aten.new_full.default: None,
    aten.scalar_tensor.default: None,
}
"""The value that they fill with; None if it is an argument."""

CHEAP = {"({0}+{1})", "({0}-{1})", "({0}*{1})", "(-{0})", "({0}+{1}*{2})", "({0}-{1}*{2})"}
"""Expressions that are computed where they are read, if only slices of them are."""

NARROWING = {
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
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


_ACTIVATIONS = """
    silu silu_backward gelu gelu_backward softplus softplus_backward log_sigmoid_forward log_sigmoid_backward
    elu elu_backward celu selu hardtanh hardtanh_backward hardsigmoid hardsigmoid_backward
    hardswish hardswish_backward mish mish_backward leaky_relu leaky_relu_backward glu glu_backward
    threshold softshrink softshrink_backward hardshrink logit logit_backward tan_backward
"""
_NORMS = """
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp logaddexp
    norm linalg_vector_norm var_mean std aminmax nansum mse_loss huber_loss
"""
_PRODUCTS = "addmv addr mv dot vdot outer baddbmm addcmul addcdiv lerp xlogy rsub"
_SHAPES = """
    select_backward slice_backward stack unsafe_split unsafe_chunk narrow narrow_copy
    diff unsqueeze_copy squeeze masked_fill fill new_empty nan_to_num tril triu index_fill
"""
_SIXTH = struct.unpack("f", struct.pack("f", 1 / 6))[0]


def composed() -> dict[Any, Callable[..., Any]]:
    """For operators that are made of smaller ones, PyTorch's own functions that make them so."""
    names = " ".join((_ACTIVATIONS, _NORMS, _PRODUCTS, _SHAPES)).split()
    known = [getattr(aten, name) for name in names if hasattr(aten, name)]
    table: dict[Any, Callable[..., Any]] = dict(cast(Any, _decomp).get_decompositions(known))
    table[aten.hardsigmoid_backward.default] = _hardsigmoid_backward
    table[aten.flip.default] = _flip
    table[aten.slice_scatter.default] = _slice_scatter
    table[aten.convolution.default] = convolution
    table[aten.convolution_backward.default] = convolution_backward
    return table


def _flip(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        x = x.index_select(axis, torch.arange(x.shape[axis] - 1, -1, -1, device=x.device))
    return x.clone() if not axes else x


def _slice_scatter(
    x: Tensor, piece: Tensor, axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Every nth element, by index; NotImplemented for whole pieces, which are joined."""
    if step == 1:
        return NotImplemented
    shape = [-1 if i == axis % x.dim() else 1 for i in range(x.dim())]
    index = torch.arange(*slice(start, end, step).indices(x.shape[axis]), device=x.device)
    return x.scatter(axis, index.view(shape).expand(piece.shape), piece)


def _hardsigmoid_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """As PyTorch's kernels have it: in float64, too, they multiply by a sixth of float32."""
    return torch.where((x > -3) & (x < 3), gradient * _SIXTH, 0.0)
