"""Which dtypes travel, and the byte that stands for each.

The numbers are part of the format: they may be added to, never used again for something else. Left out are
dtypes that torch cannot store as whole bytes (`uint1` ... `int7`, `float4_e2m1fn_x2`), the quantized ones, which
carry a scale outside their bytes and crash when made from a buffer, and `complex32`, which torch calls experimental
and warns about at every allocation.
"""

import numpy as np
import torch

DTYPES: dict[int, torch.dtype] = {
    1: torch.bool,
    2: torch.uint8,
    3: torch.uint16,
    4: torch.uint32,
    5: torch.uint64,
    6: torch.int8,
    7: torch.int16,
    8: torch.int32,
    9: torch.int64,
    16: torch.float16,
    17: torch.bfloat16,
    18: torch.float32,
    19: torch.float64,
    32: torch.complex64,
    33: torch.complex128,
    48: torch.float8_e4m3fn,
    49: torch.float8_e4m3fnuz,
    50: torch.float8_e5m2,
    51: torch.float8_e5m2fnuz,
    52: torch.float8_e8m0fnu,
}
CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}
NUMPY: dict[torch.dtype, "np.dtype[np.generic]"] = {
    dtype: np.dtype(str(dtype).removeprefix("torch.").replace("bool", "bool_"))
    for code, dtype in DTYPES.items()
    if code < 48 and dtype is not torch.bfloat16
}
"""The same dtype of numpy, where there is one."""
