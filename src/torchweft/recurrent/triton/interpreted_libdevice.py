"""Functions of CUDA's libdevice that kernels call, for Triton's interpreter, by NumPy."""

import importlib
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

errstate = np.errstate

_BY_NUMPY: dict[str, Callable[..., Any]] = {
    "tanh": np.tanh, "expm1": np.expm1, "log1p": np.log1p, "log10": np.log10, "atan2": np.arctan2, "pow": np.power,
    "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
    "fmod": np.fmod, "trunc": np.trunc, "nearbyint": np.rint, "erfc": np.vectorize(math.erfc, otypes=[float]),
}  # fmt: skip


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    tl: Any = importlib.import_module("triton.language")
    handle = cast(Any, importlib.import_module("triton.runtime.interpreter")).TensorHandle

    def apply(*operands: Any) -> Any:
        like = next(operand for operand in operands if isinstance(operand, tl.tensor))
        arrays = [operand.handle.data if isinstance(operand, tl.tensor) else operand for operand in operands]
        data = np.asarray(function(*arrays)).astype(like.handle.data.dtype)
        kind = like.dtype
        return tl.tensor(handle(data, kind), tl.block_type(kind, list(data.shape)) if data.shape else kind)

    return apply


globals().update({name: _bound(function) for name, function in _BY_NUMPY.items()})
