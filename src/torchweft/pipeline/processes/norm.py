"""The norm of the gradients of all ranks of a pipe."""

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def norm_over_ranks(
    parameters: Iterable[nn.Parameter],
    exchange: Callable[[float], list[float]],
    device: torch.device,
    norm_type: float = 2.0,
    foreach: bool | None = None,
) -> Tensor:
    """The norm over the gradients of these parameters and of those that the other ranks give at the same time.
    `exchange` returns the norms of all ranks."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local_norm = nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
    if isinstance(local_norm, DTensor):  # of gradients that fully_shard has sharded over the replicas
        local_norm = local_norm.full_tensor()
    # In float64, because gradients of ranks can differ in dtype. All norms, because a maximum could lose a NaN, and the
    # ranks would then clip by different norms. Not by a collective of gloo, which names no rank that is lost.
    norms = torch.tensor(exchange(float(local_norm)), dtype=torch.float64)
    return cast(Tensor, torch.linalg.vector_norm(norms, norm_type)).to(device, local_norm.dtype)
