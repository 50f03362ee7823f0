"""Dtypes and numbers as C says them, and the refusal of those that it cannot say.

torch.float32  float         1.5          (float)0x1.8000000000000p+0     exactly, whatever the locale
torch.bool     boolean       float("inf") (float)INFINITY                  a byte that is 0 or 1
"""

import math

import torch

from weft.core.errors import WeftError

TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "w_bfloat16",
    torch.float16: "w_float16",
    torch.bool: "boolean",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
"""The dtypes that loops can hold, and their names in C."""


SMALL = (torch.bfloat16, torch.float16)
"""Held, but computed with in float32, as PyTorch does on a CPU: each operator's result is rounded."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which C computes what is of this one."""
    return torch.float32 if dtype in SMALL else dtype


class Unsupported(WeftError, RuntimeError):
    """The generated loops do not know an operator or a dtype of this cell; the message names it."""


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise Unsupported for a dtype that loops cannot hold; `what` has it."""
    if dtype not in TYPES:
        raise Unsupported(f"{what} is of {dtype}; loops in C hold {', '.join(map(str, TYPES))}")


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A number as C, exactly."""
    kind = TYPES[dtype]
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
    return f"({text} != 0)" if to == torch.bool else f"({TYPES[to]}){text}"
