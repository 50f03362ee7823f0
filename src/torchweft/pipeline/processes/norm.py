"""The norm of the gradients of all ranks of a pipe."""

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


def norm_over_ranks(
    parameters: Iterable[nn.Parameter],
    group: ProcessGroup,
    device: torch.device,
    norm_type: float = 2.0,
    foreach: bool | None = None,
) -> Tensor:
    """The norm over the gradients of these parameters and of those that the other ranks give at the same time."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local_norm = nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
    if isinstance(local_norm, DTensor):  # of gradients that fully_shard has sharded over the replicas
        local_norm = local_norm.full_tensor()
    # In float64, because gradients of ranks can differ in dtype. Norms are gathered, and not reduced by all_reduce,
    # because a maximum could lose a NaN, and the ranks would then clip by different norms.
    norm = local_norm.to(device, torch.float64)
    norms = [torch.empty_like(norm) for _ in range(group.size())]
    dist.all_gather(norms, norm, group=group)
    return cast(Tensor, torch.linalg.vector_norm(torch.stack(norms), norm_type)).to(local_norm.dtype)
