"""Expressions and numbers of the intermediate representation as text of Triton.

The expressions are templates of C (`recurrent.cpp.operators`). Most are valid Python as well. Those that are not have
a translation here. A template that contains anything else is rejected, because C and Python give some signs another
meaning.
"""

import math
import re

import torch

from torchweft.recurrent.cpp import ir

# The dtypes by their names in kernels.
TYPES = {
    torch.float32: "tl.float32", torch.float64: "tl.float64", torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16", torch.bool: "tl.int1", torch.uint8: "tl.uint8", torch.int8: "tl.int8",
    torch.int16: "tl.int16", torch.int32: "tl.int32", torch.int64: "tl.int64",
}  # fmt: skip

# Templates with signs of C.
_TRANSLATED = {
    "({0}<0?0:{0})": "tl.where({0} < 0, 0, {0})",
    "({1}<={2}?0:{0})": "tl.where({1} <= {2}, 0, {0})",
    "({0}!=0?{1}:{2})": "tl.where({0} != 0, {1}, {2})",
    "({0}&&{1})": "(({0} != 0) & ({1} != 0))",
    "({0}||{1})": "(({0} != 0) | ({1} != 0))",
    "(!{0}!=!{1})": "(({0} == 0) != ({1} == 0))",
    "(!{0})": "({0} == 0)",
    "(w_abs({0})==INFINITY)": '(tl.abs({0}) == float("inf"))',
    "({0}==INFINITY)": '({0} == float("inf"))',
    "({0}==-INFINITY)": '({0} == float("-inf"))',
}
# Functions by their names in C.
_FUNCTIONS = {
    "w_exp": "tl.exp", "w_exp2": "tl.exp2", "w_log": "tl.log", "w_log2": "tl.log2", "w_sqrt": "tl.sqrt",
    "w_sin": "tl.sin", "w_cos": "tl.cos", "w_erf": "tl.erf", "w_abs": "tl.abs", "w_floor": "tl.floor",
    "w_ceil": "tl.ceil", "w_sigmoid": "sigmoid", "w_sign": "sign", "w_max": "maximum", "w_min": "minimum",
    "w_remainder": "remainder", "w_round": "libdevice.nearbyint",
    **{
        f"w_{name}": f"libdevice.{name}"
        for name in (
            *("tanh", "expm1", "log1p", "log10", "atan2", "pow", "tan", "asin", "acos", "atan", "sinh", "cosh"),
            *("fmod", "trunc", "erfc"),
        )
    },
}  # fmt: skip


def translate(template: str) -> str:
    """A template of C as one of Triton. Raises Unsupported."""
    if template in _TRANSLATED:
        return _TRANSLATED[template]
    unknown = [name for name in re.findall(r"w_\w+", template) if name not in _FUNCTIONS]
    if unknown or re.search(r"[?;]|&&|\|\||!(?!=)|INFINITY|NAN|/\d", template):
        raise ir.Unsupported(f"kernels in Triton do not know the expression {template}")
    text = re.sub(r"w_\w+", lambda found: _FUNCTIONS[found[0]], template)
    return re.sub(r"(?<=[\w})])([-+*/%&|^]|[=!<>]=|[<>])(?=[\w{(])", r" \1 ", text)


def literal(number: bool | int | float, dtype: torch.dtype, *, typed: bool = False) -> str:
    """A number in this dtype. With `typed` it is a tensor, which cannot take another operand's dtype."""
    if dtype == torch.bool:
        text = repr(bool(number))
    elif not dtype.is_floating_point:
        text = repr(int(number))
    else:
        text = repr(float(number)) if math.isfinite(number) else f'float("{float(number)}")'
    # Triton takes a number of Python for one of float32 unless its neighbour says otherwise.
    return f"tl.full([1, 1], {text}, {TYPES[dtype]})" if typed or dtype == torch.float64 else text


def converted(text: str, to: torch.dtype, of: torch.dtype) -> str:
    if to == of:
        return text
    return f"({text} != 0)" if to == torch.bool else f"{text}.to({TYPES[to]})"


def computed(operation: ir.Elementwise, operands: list[str], dtype: torch.dtype) -> str:
    """The value of an elementwise operation in `dtype`, from its operands as texts in `operation.type`."""
    template = translate(operation.expression)
    if "{" not in template:  # a constant, whatever the operand
        return literal(float(template), dtype, typed=True)
    text = template.format(*operands)
    boolean = re.search(r"[=!<>]=|[<>]|tl.full\(\[1, 1\], (?:True|False)", text) is not None
    exact = dtype == operation.type and not (boolean or operation.type == torch.bool)
    return text if exact else f"({text}).to({TYPES[dtype]})"
