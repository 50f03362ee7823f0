"""FSDP2 around a pipe over processes: stages on one dimension of a mesh, shards on the other."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchweft as weft


def model(tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    if tied:
        layers[4].weight = layers[0].weight
    return nn.Sequential(*layers).double()


def train_sharded(schedule: str, checkpoint: str, tied: bool) -> float:
    """The largest difference of any weight of this rank from plain PyTorch's after three steps with clipping."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    plain, loss_function = model(tied), nn.functional.mse_loss
    settings = {"chunks": 2, "balance": [3, 2], "schedule": schedule, "checkpoint": checkpoint, "loss": loss_function}
    pipe = weft.Pipe(model(tied), group=mesh["pp"], **settings)
    fully_shard(pipe, mesh=mesh["dp"])
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = slice(0, 4) if mesh.get_local_rank("dp") == 0 else slice(4, 8)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (pipe, plain)]
    for _ in range(3):
        pipe(x[rows], target=y[rows]).backward()
        loss_function(plain(x), y).backward()
        norm, expected = weft.clip_grad_norm_(pipe, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert abs(float(norm - expected)) < 1e-14 and expected > 0.1
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    named = dict(plain.named_parameters(remove_duplicate=False))
    differences = [(weight.full_tensor() - named[key]).detach() for key, weight in pipe.named_parameters()]
    return max(float(difference.abs().max()) for difference in differences)


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_sharded_stages_train_as_plain_pytorch(ranks, schedule: str, checkpoint: str, tied: bool) -> None:
    assert max(ranks(4).run(train_sharded, schedule, checkpoint, tied)) < 1e-12
