"""Gradients as PyTorch would have put them into ``.grad``: in their parameter's layout, and in memory of their own.

    y = x @ (a + b)                  one gradient, and it is that of a and that of b
    y = (x + p) * 2, one row         the gradient of p is the answer to the client as well
    y = x + p.sum()                  one number, expanded: its strides are 0
    y = x @ torch.cat([q, k], 1)     the gradients of q and k are columns of one matrix

`torch.autograd.grad` returns them so. Clipping would scale the first twice and the client's own numbers, and fused
steps walk raw memory, and so past the end of the others. What fits already is not copied: on the CPU a copy of all
gradients takes as long as a step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def strided(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold its memory: itself, or what a sparse one is made of."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # memory that nobody can look into


def nbytes(tensor: Tensor) -> int:
    """How much memory its numbers take. A sparse tensor does not say so itself."""
    return tensor.nbytes if tensor.layout is torch.strided else sum([part.nbytes for part in strided(tensor)])


def own(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], held: set[int]) -> list[Tensor | None]:
    """The gradients, each in memory that nobody else has; ``held``: the addresses of storages that others have."""
    seen = set(held)
    return [
        None if gradient is None else _owned(parameter, gradient, seen)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]


def _owned(parameter: Tensor, gradient: Tensor, seen: set[int]) -> Tensor:
    """The gradient or a copy; its memory is seen from now on."""
    if gradient.layout is not torch.strided:
        there = {part.untyped_storage().data_ptr() for part in strided(gradient)}
        gradient = gradient.clone() if there & seen else gradient
        seen.update(there)
        return gradient
    address = gradient.untyped_storage().data_ptr()
    if address in seen:
        return _copied(parameter, gradient)
    found = laid_out(parameter, gradient)
    if found is gradient:
        seen.add(address)
    return found


def laid_out(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of the shape of a parameter, or a copy where its memory is in another order."""
    return tensor if fits(parameter, tensor) else _copied(parameter, tensor)


def _copied(parameter: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def fits(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether a kernel that walks both memories from end to end meets the same elements, and all of them."""
    if parameter.is_contiguous():
        return gradient.is_contiguous()
    dense = torch.empty_like(parameter, device="meta")  # that of optimizers, whose states are made so
    return gradient.stride() == dense.stride()
