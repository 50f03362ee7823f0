"""Batch norms over ranks have the statistics and gradients of one process, bit by bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.pipe_cases import with_batch_norm

pytestmark = with_batch_norm
LAYERS = 9
SCHEDULES = {"gpipe": 2, "1f1b": 2, "zero_bubble": 2, "interleaved": 4, "looped_bfs": 4, "zbv": 4, "dualpipev": 4}


def normed(schedule: str, **placement: Any) -> dict[str, Tensor]:
    """Parameters, gradients and running statistics after two steps, and an output in eval mode."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS // 3) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())]
    stages = SCHEDULES[schedule]
    balance = [LAYERS // stages + (stage < LAYERS % stages) for stage in range(stages)]
    pipe = weft.Pipe(
        nn.Sequential(*layers).double(), chunks=4, balance=balance, schedule=schedule, loss=nn.MSELoss(), **placement
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    x, y = torch.randn(2, 12, 4, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        pipe(x, target=y).backward()
        optimizer.step()
    state = {key: value.clone() for key, value in pipe.state_dict().items()}
    state |= {f"{name}.grad": weight.grad for name, weight in pipe.named_parameters() if weight.grad is not None}
    return {**state, "output": pipe.eval()(x).detach()}


def over_ranks(schedule: str) -> dict[str, Tensor]:
    return normed(schedule, group=dist.group.WORLD)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batch_norms_are_those_of_one_process(ranks, schedule: str) -> None:
    expected = normed(schedule, devices=["cpu"] * SCHEDULES[schedule])
    states = ranks(2).run(over_ranks, schedule)
    assert {key for state in states for key in state} == expected.keys()
    assert all(torch.equal(value, expected[key]) for state in states for key, value in state.items())
