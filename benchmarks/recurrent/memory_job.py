"""The job of memory.py in a fresh process: two training steps, and the most memory that was resident during them."""

import ctypes
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.recurrent.cells import LSTMCell, by_torch, by_torchweft, with_weights_of
from benchmarks.recurrent.work import Forward
from torchweft.recurrent import Recurrent
from torchweft.recurrent.cpp import workspace
from torchweft.recurrent.plan_backends import Memory, choose_policy, size_of

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TINY = 4
RATE = 1e-4


@dataclass(frozen=True)
class Peak:
    """Bytes beyond the baseline, and their forecast; seconds of the second step."""

    measured: int
    forecast: int | None
    kept: str
    seconds: float
    trains: bool
    """The loss fell."""


def peak_of(way: Memory, steps: int, batch: int, width: int) -> Peak:
    """Train an LSTM by this way of keeping; any other word than a way's stands for nn.LSTM."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    peer = nn.LSTM(width, width)
    x = torch.randn(steps, batch, width, requires_grad=True)
    seeds = torch.randn_like(x)
    state = (torch.zeros(batch, width), torch.zeros(batch, width))
    net = None
    if isinstance(way, int) or way in ("full", "states", "sqrt"):
        net = Recurrent(with_weights_of(peer, LSTMCell(width, width)), memory=way)
    model: nn.Module = peer if net is None else net

    def forward_of(x: Tensor) -> Forward:
        return by_torch(peer, x, state) if net is None else by_torchweft(net, x, state)

    tiny = x.detach()[:TINY].clone().requires_grad_()
    _step(model, forward_of(tiny), tiny, seeds[:TINY])
    baseline = _settle()
    before = _step(model, forward_of(x), x, seeds)
    start = time.perf_counter()
    after = _step(model, forward_of(x), x, seeds)
    seconds = time.perf_counter() - start
    peak = _bytes("VmHWM") - baseline
    forecast, kept = (None, "") if net is None else _foretold(net, steps, state)
    return Peak(peak, forecast, kept, seconds, after < before)


def _step(model: nn.Module, forward: Forward, x: Tensor, seeds: Tensor) -> float:
    """One step of gradient descent on the outputs' product with the seeds; returns it, before the step."""
    outputs = forward()[0]
    value = float(torch.dot(outputs.detach().view(-1), seeds.view(-1)))
    parameters = list(model.parameters())
    _, *gradients = torch.autograd.grad(outputs, [x, *parameters], seeds)
    with torch.no_grad():
        norm = torch.stack([each.square().sum() for each in gradients]).sum().sqrt()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= RATE * gradient / norm
    return value


def _foretold(net: Recurrent, steps: int, state: Sequence[Tensor]) -> tuple[int, str]:
    """The memory plan's forecast of a call with its backward, for the network's only kind of sequence."""
    plans: Any = net._plans
    (choice,) = plans.choices()
    size = size_of(choice.engine, steps, state)
    way = choose_policy(net.memory, size)
    return size.peak(way), f"{way}"


def _settle() -> int:
    """Free idle memory, reset the high-water mark, and return the resident bytes."""
    workspace.release()
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    try:
        CLEAR.write_text("5")
    except OSError as error:
        raise RuntimeError(f"{CLEAR} cannot be written ({error}); peaks are measured on Linux only") from error
    return _bytes("VmRSS")


def _bytes(name: str) -> int:
    """A line of this process's status, in bytes."""
    line = next(each for each in STATUS.read_text().splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
