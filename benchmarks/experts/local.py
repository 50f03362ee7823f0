"""The same work without a server: an expert in the caller's process, with all rows in one batch.

forward               module(x)
forward + backward    module(x), gradients of the weights and of x, one step of the fused Adam
"""

import torch
from torch import nn

from benchmarks.experts.processes.callers import Call, forward_call, rate, training_call
from benchmarks.experts.processes.module import feed_forward
from benchmarks.experts.rounds import Lap


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the server's experts."""
    return torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)


def ideal(width: int, rows: int, train: bool) -> Lap:
    """Seconds of one batch of all rows."""
    module = feed_forward(width)
    optimizer = adam(module)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    call: Call = training_call(module, rows, width, step) if train else forward_call(module, rows, width)
    return lambda seconds: 1 / rate([call], seconds)
