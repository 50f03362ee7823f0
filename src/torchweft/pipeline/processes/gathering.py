"""Values of all ranks on the first one, such as their tensors, to save the whole model in one file.

The first rank then needs the memory of the whole model, on the devices from which the tensors came. `weft.checkpoint`
saves without that.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from torchweft.core.errors import UsageError
from torchweft.pipeline.processes.links import Walk
from torchweft.pipeline.weights import names_by_tensor

GATHERED = -7  # route of addresses; those of values are numbered from 0


def gather(walk: Walk, value: Any, rank: int, size: int) -> list[Any]:
    """On the first rank the values of all ranks, elsewhere that of this rank."""
    if rank > 0:
        walk.send(0, (GATHERED, rank, 0), value)
        return [value]
    return [value, *(walk.receive((GATHERED, other, 0), other) for other in range(1, size))]


def reject_sharded(module: nn.Module) -> None:
    for tensor, names in names_by_tensor(module).values():
        if isinstance(tensor, DTensor):
            raise UsageError(
                f"{names[0]} is sharded by fully_shard, so no rank has it whole; save with weft.checkpoint, and load "
                "that into a plain model"
            )
