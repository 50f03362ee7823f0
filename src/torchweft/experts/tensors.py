"""Memory of a tensor of any layout, because a sparse tensor does not report its size itself."""

import torch
from torch import Tensor


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold its memory: itself, or the parts of a COO tensor. Empty for other layouts."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout is torch.strided else []


def tensor_bytes(tensor: Tensor) -> int:
    """The bytes of memory that its numbers take."""
    return sum([part.nbytes for part in strided_parts(tensor)])
