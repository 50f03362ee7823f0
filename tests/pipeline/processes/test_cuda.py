"""Pipes over processes with tensors on a GPU. Ranks that share one GPU exchange them through the CPU, over gloo."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import torchweft as weft
from tests.pipeline.processes.steps import batch, layers


def train_on_cuda(schedule: str, checkpoint: Any) -> float:
    """The largest difference from a serial pipe on the CPU, relative to the largest gradient."""
    stages = 2 * dist.get_world_size()
    table = weft.pipeline.SCHEDULES[schedule](stages, 4)
    if len(table.workers) != dist.get_world_size():
        stages = dist.get_world_size()
    settings: Any = {"chunks": 4, "balance": [1] * stages, "schedule": schedule, "checkpoint": checkpoint}
    settings["loss"] = nn.functional.mse_loss
    serial = weft.Pipe(layers(stages, drop=0.0).eval(), devices=["cpu"] * stages, executor="serial", **settings)
    pipe = weft.Pipe(layers(stages, drop=0.0).eval(), group=dist.group.WORLD, devices="cuda:0", **settings)
    named, worst = dict(serial.named_parameters()), 0.0
    for rows in (8, 5, 8):
        x, y = batch(rows)
        serial(x, target=y).backward()
        pipe(x.cuda(), target=y.cuda()).backward()
    for name, parameter in pipe.named_parameters():
        assert parameter.is_cuda
        assert parameter.grad is not None
        expected = named[name].grad
        assert expected is not None
        worst = max(worst, float((parameter.grad.cpu() - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.cuda
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_ranks_on_one_gpu_train_as_on_the_cpu(ranks, schedule: str, checkpoint: str) -> None:
    assert max(ranks(2).run(train_on_cuda, schedule, checkpoint)) < 1e-10
