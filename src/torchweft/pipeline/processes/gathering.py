"""The tensors of all ranks on the first one, to save the whole model in one file.

Each rank sends the tensors of its state_dict under all their names. The first rank then needs the memory of the whole
model, on the devices from which the tensors came. `weft.checkpoint` saves without that.
"""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchweft.core.errors import UsageError
from torchweft.pipeline.processes.links import Walk
from torchweft.pipeline.weights import names_by_tensor

GATHERED = -7  # route of addresses; those of values are numbered from 0


def send_tensors(walk: Walk, module: nn.Module, rank: int) -> None:
    entries = [*names_by_tensor(module).values()]
    walk.send(0, (GATHERED, rank, 0), [names for _, names in entries])
    for number, (tensor, _) in enumerate(entries, 1):
        walk.send(0, (GATHERED, rank, number), tensor.detach())


def receive_tensors(walk: Walk, size: int) -> dict[str, Tensor]:
    """The tensors of all other ranks, by each of their names."""
    found: dict[str, Tensor] = {}
    for rank in range(1, size):
        for number, names in enumerate(walk.receive((GATHERED, rank, 0), rank), 1):
            found |= dict.fromkeys(names, walk.receive((GATHERED, rank, number), rank))
    return found


def reject_sharded(module: nn.Module) -> None:
    for tensor, names in names_by_tensor(module).values():
        if isinstance(tensor, DTensor):
            raise UsageError(
                f"{names[0]} is sharded by fully_shard, so no rank has it whole; save with weft.checkpoint, and load "
                "that into a plain model"
            )
