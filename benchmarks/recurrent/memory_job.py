"""Job of memory.py in a fresh process: two training steps, and the peak of resident memory during them."""

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
    """Peak bytes above the baseline and their forecast, and the seconds of the second step."""

    measured: int
    forecast: int | None
    kept: str
    seconds: float
    trains: bool
    """Whether the second step lowered the loss."""


def peak_of(mode: Memory, steps: int, batch: int, width: int) -> Peak:
    """Train an LSTM with this memory mode. Any other string stands for nn.LSTM."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    peer = nn.LSTM(width, width)
    x = torch.randn(steps, batch, width, requires_grad=True)
    seeds = torch.randn_like(x)
    state = (torch.zeros(batch, width), torch.zeros(batch, width))
    net = None
    if isinstance(mode, int) or mode in ("full", "states", "sqrt"):
        net = Recurrent(with_weights_of(peer, LSTMCell(width, width)), memory=mode)
    model: nn.Module = peer if net is None else net

    def forward_of(x: Tensor) -> Forward:
        return by_torch(peer, x, state) if net is None else by_torchweft(net, x, state)

    tiny = x.detach()[:TINY].clone().requires_grad_()
    _step(model, forward_of(tiny), tiny, seeds[:TINY])
    baseline = _settle()
    first = _step(model, forward_of(x), x, seeds)
    start = time.perf_counter()
    second = _step(model, forward_of(x), x, seeds)
    seconds = time.perf_counter() - start
    peak = _bytes("VmHWM") - baseline
    forecast, kept = (None, "") if net is None else _forecast(net, steps, state)
    return Peak(peak, forecast, kept, seconds, second < first)


def _step(model: nn.Module, forward: Forward, x: Tensor, seeds: Tensor) -> float:
    """Take one gradient descent step on the product of outputs and seeds. Return its value before the step."""
    outputs = forward()[0]
    value = float(torch.dot(outputs.detach().view(-1), seeds.view(-1)))
    parameters = list(model.parameters())
    _, *gradients = torch.autograd.grad(outputs, [x, *parameters], seeds)
    with torch.no_grad():
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= RATE * gradient / norm
    return value


def _forecast(net: Recurrent, steps: int, state: Sequence[Tensor]) -> tuple[int, str]:
    """Forecast of a call with its backward, and the chosen mode, from the network's only plan."""
    plans: Any = net._plans
    (choice,) = plans.choices()
    size = size_of(choice.engine, steps, state)
    mode = choose_policy(net.memory, size)
    return size.peak(mode), f"{mode}"


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
    """Read a size of this process from its status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
