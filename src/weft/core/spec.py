"""What a tensor must look like, and a check that reports every mismatch at once.

    spec     TensorSpec((None, 3, 32, 32), float32)        None marks a free axis: any size fits
    value    a tensor of 8 x 3 x 32 x 30, float64
    check    input axis 3 has size 30, wanted 32
             input has dtype torch.float64, wanted torch.float32

Specs nest as values do, so one ``check`` covers all arguments of a call: what is missing, what is too much,
and whether all tensors hold the same number of rows. Describing tensors without their batch axis, and making
samples from that, is hivemind's idea (its schemas).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import SpecError, listed
from weft.core.pytree import Structure, difference, flatten, structure_paths


@dataclass(frozen=True)
class TensorSpec:
    """Shape (``None`` for a free axis, usually axis 0, the batch), dtype and ``requires_grad``.

    Example:
        >>> weft.TensorSpec((None, 64), torch.float32)  # any number of rows of 64 numbers
        TensorSpec(shape=(None, 64), dtype=torch.float32, requires_grad=False)
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @staticmethod
    def of(tensor: Tensor, batch_axis: int | None = 0) -> "TensorSpec":
        """The spec of ``tensor`` with ``batch_axis`` free; ``None``, or an axis it has not, frees none."""
        shape = tuple(None if axis == batch_axis else size for axis, size in enumerate(tensor.shape))
        return TensorSpec(shape, tensor.dtype, tensor.requires_grad)

    def empty(self, batch: int, device: torch.device | str | None = None) -> Tensor:
        """A sample with ``batch`` in every free axis. It holds zeros, which are valid as indices too."""
        shape = [batch if size is None else size for size in self.shape]
        return torch.zeros(shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    def matches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is as this spec says."""
        return not self.faults(tensor)

    def faults(self, tensor: Tensor) -> list[str]:
        """Every way in which ``tensor`` differs from this spec, in words; empty if it fits."""
        faults: list[str] = []
        if tensor.dim() != len(self.shape):
            faults.append(f"has shape {tuple(tensor.shape)}, wanted {len(self.shape)} axes: {self.shape}")
        else:
            faults += [
                f"axis {axis} has size {seen}, wanted {size}"
                for axis, (size, seen) in enumerate(zip(self.shape, tensor.shape, strict=True))
                if size is not None and size != seen
            ]
        if tensor.dtype != self.dtype:
            faults.append(f"has dtype {tensor.dtype}, wanted {self.dtype}")
        if tensor.requires_grad != self.requires_grad:
            faults.append(f"has requires_grad={tensor.requires_grad}, wanted {self.requires_grad}")
        return faults


def check(spec_tree: Any, value: Any, where: str = "input", *, batch_axis: int = 0) -> None:
    """Check that ``value`` is nested as ``spec_tree`` is and that every leaf fits.

    A leaf of ``spec_tree`` that is no ``TensorSpec`` (a number, ``None``) must be found as it is.
    Tensors whose ``batch_axis`` is free must all have the same size along it; other free axes may differ.

    Raises one ``SpecError`` that lists every mismatch with the place where it is, seen from ``where``.
    """
    specs, wanted = flatten(spec_tree)
    leaves, seen = flatten(value)
    pairs, faults = _paired(specs, wanted, leaves, seen, where)
    batches: dict[str, int] = {}
    for name, spec, leaf in pairs:
        if not isinstance(spec, TensorSpec):
            faults += [] if _equal(spec, leaf) else [f"{name} is {leaf!r}, wanted {spec!r}"]
        elif not isinstance(leaf, Tensor):
            faults.append(f"{name} is of type {type(leaf).__name__}, wanted a tensor ({spec})")
        else:
            faults += [f"{name} {fault}" for fault in spec.faults(leaf)]
            if leaf.dim() == len(spec.shape) > batch_axis and spec.shape[batch_axis] is None:
                batches[name] = leaf.shape[batch_axis]
    if len(set(batches.values())) > 1:
        sizes = ", ".join(f"{name} has {rows}" for name, rows in batches.items())
        faults.append(f"axis {batch_axis} is the batch and must have one size everywhere: {sizes}")
    if faults:
        raise SpecError(listed(f"{where} is not as its spec says:", faults))


def _paired(
    specs: Sequence[Any], wanted: Structure, leaves: Sequence[Any], seen: Structure, where: str
) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """(path, spec, leaf) for every path that both have, and what is wrong with the nesting."""
    expected = dict(zip(structure_paths(wanted, where), specs, strict=True))
    present = dict(zip(structure_paths(seen, where), leaves, strict=True))
    faults = [f"{name} is missing, wanted {spec}" for name, spec in expected.items() if name not in present]
    faults += [f"{name} is too much, nothing is wanted there" for name in present if name not in expected]
    fault = difference(wanted, seen, where)
    if fault is not None and not faults:  # the same names in other containers, or in another order
        faults.append(fault)
    return [(name, expected[name], present[name]) for name in expected if name in present], faults


def _equal(constant: Any, leaf: Any) -> bool:
    """Whether a leaf is the constant; a tensor never is."""
    if leaf is constant:
        return True
    return type(leaf) is type(constant) and not isinstance(leaf, Tensor) and bool(leaf == constant)
