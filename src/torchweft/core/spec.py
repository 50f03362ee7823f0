"""Specification of a tensor: shape with free axes, dtype, and whether it has a gradient.

    spec     TensorSpec((None, 3, 32, 32), float32)        None marks a free axis: any size fits
    value    a tensor of 8 x 3 x 32 x 30, float64
    faults   axis 3 has size 30, wanted 32;  has dtype torch.float64, wanted torch.float32

Describing tensors without their batch axis, and making samples from that, is hivemind's idea (its schemas).
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from torchweft.core.validation import Validator, is_whole

# Not an ordinary required field: Python's error for a missing argument would not show a valid spec.
_MISSING = cast("torch.dtype", None)


@dataclass(frozen=True)
class Dim:
    """A free axis of a `TensorSpec` with an upper bound, such as the length of sequences.

    Example:
        >>> weft.experts.TensorSpec((None, weft.experts.Dim(max=4096), 64), torch.float32).shape
        (None, None, 64)
    """

    max: int

    def __post_init__(self) -> None:
        with Validator("invalid Dim; a valid one is Dim(max=4096)") as check:
            check.count("max", self.max)


@dataclass(frozen=True)
class TensorSpec:
    """Shape (``None`` for a free axis, usually axis 0, the batch), dtype and ``requires_grad``.

    ``values``: the range of an expert's integers, such as ``range(1000)`` for indices into 1000 rows. ``most``: the
    largest size of each free axis, or None. An `Dim` in the shape sets it.

    Example:
        >>> weft.TensorSpec((None, 64), torch.float32)  # any number of rows of 64 numbers
        TensorSpec(shape=(None, 64), dtype=torch.float32, requires_grad=False)
    """

    shape: tuple[Any, ...]  # int or None; for the constructor also `Dim`
    dtype: torch.dtype = _MISSING
    requires_grad: bool = False
    values: range | None = field(default=None, repr=False)
    most: tuple[int | None, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.shape, list):
            object.__setattr__(self, "shape", tuple(self.shape))
        sizes = cast("Any", self.shape)  # of any type before the check below
        sizes = cast("tuple[int | Dim | None, ...]", sizes if isinstance(sizes, tuple) else ())
        if any(isinstance(size, Dim) for size in sizes):
            object.__setattr__(self, "most", tuple(size.max if isinstance(size, Dim) else None for size in sizes))
            object.__setattr__(self, "shape", tuple(None if isinstance(size, Dim) else size for size in sizes))
        with Validator("invalid TensorSpec; a valid one is TensorSpec((None, 8), torch.float32)") as check:
            if check.instance("shape", self.shape, tuple, "a tuple with a size for each axis, None for any size"):
                wrong = [size for size in self.shape if not (size is None or _is_size(size))]
                hint = "wanted numbers from 0, and None for an axis of any size, usually the batch"
                check.require(not wrong, f"shape is {self.shape!r}, in which {wrong} are not sizes; {hint}")
            check.instance("dtype", self.dtype, torch.dtype, "a dtype, such as torch.float32")
            check.instance("values", self.values, range, "a range, such as range(1000)", optional=True)

    @staticmethod
    def of(tensor: Tensor, batch_axis: int | None = 0) -> "TensorSpec":
        """The spec of ``tensor`` with ``batch_axis`` free; without a free axis if it is ``None`` or does not exist."""
        shape = tuple(None if axis == batch_axis else size for axis, size in enumerate(tensor.shape))
        return TensorSpec(shape, tensor.dtype, tensor.requires_grad)

    def empty(self, batch: int, device: torch.device | str | None = None) -> Tensor:
        """A sample with ``batch`` in every free axis, filled with 0, or the first of ``values`` if 0 is not allowed."""
        shape = [batch if size is None else size for size in self.shape]
        value = 0 if self.values is None or 0 in self.values else self.values[0]
        return torch.full(shape, value, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    def faults(self, tensor: Tensor) -> list[str]:
        """A description of every difference between ``tensor`` and this spec; empty if it matches."""
        faults: list[str] = []
        if tensor.dim() != len(self.shape):
            faults.append(f"has shape {tuple(tensor.shape)}, wanted {len(self.shape)} axes: {self.shape}")
        else:
            faults += [
                f"axis {axis} has size {seen}, wanted {size}"
                for axis, (size, seen) in enumerate(zip(self.shape, tensor.shape, strict=True))
                if size is not None and size != seen
            ]
            # Only axes with a bound are compared, because most specs have none.
            bounds = [(axis, most) for axis, most in enumerate(self.most) if most is not None]
            faults += [
                f"axis {axis} has size {tensor.shape[axis]}, wanted at most {most}"
                for axis, most in bounds
                if tensor.shape[axis] > most
            ]
        if tensor.dtype != self.dtype:
            faults.append(f"has dtype {tensor.dtype}, wanted {self.dtype}")
        if tensor.requires_grad != self.requires_grad:
            faults.append(f"has requires_grad={tensor.requires_grad}, wanted {self.requires_grad}")
        if self.values is not None and not faults and tensor.numel():
            least, most = (int(bound) for bound in tensor.aminmax())
            if least not in self.values or most not in self.values:
                faults.append(f"has values from {least} to {most}, wanted {self.values}")
        return faults


def _is_size(size: object) -> bool:
    # Under torch.compile, sizes of tensors can be symbols.
    return isinstance(size, torch.SymInt) or (is_whole(size) and size >= 0)
