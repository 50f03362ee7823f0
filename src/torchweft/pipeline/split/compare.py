"""Compare values of two runs of a model."""

from typing import Any

import torch
from torch import Tensor


def difference(expected: Any, actual: Any) -> str | None:
    """The difference of two leaves in words. None if it is not more than rounding."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return None if type(expected) is type(actual) else f"by {actual!r} for {expected!r}"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"by {actual.dtype} {tuple(actual.shape)} for {expected.dtype} {tuple(expected.shape)}"
    # Equal first, which is the usual case. The rest takes a copy in complex128.
    if expected.is_meta or not expected.numel() or torch.equal(expected, actual):
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"at {int((expected != actual).sum())} of {expected.numel()} places"
    one, other = expected.to(torch.complex128), actual.to(expected.device, torch.complex128)
    apart = torch.where(one.isnan() & other.isnan() | (one == other), 0, (one - other).abs()).max().item()
    scale = one[one.isfinite()].abs().max().item() if bool(one.isfinite().any()) else 0.0
    # Half of the digits must agree: the program can use other kernels, whose order of sums differs.
    within = apart <= torch.finfo(expected.dtype).eps ** 0.5 * max(scale, 1e-3)
    return None if within else f"by {apart:.1e} (its largest is {scale:.1e})"
