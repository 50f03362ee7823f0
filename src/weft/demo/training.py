"""Training the U-Net to take noise away, and how well it does on images that it has not seen."""

import copy
import math
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.demo.stage import Stagehand
from weft.demo.unet import Digits, with_noise
from weft.pipeline.pipe import Pipe

_RATE = 4e-3
_WARM_UP = 10  # steps


class Training(NamedTuple):
    """What training leaves: the loss of every step, and the median seconds of one from batch to update."""

    losses: list[float]
    seconds: float


def train(pipe: Pipe, digits: Digits, rows: int, hand: Stagehand) -> Training:
    """Train with Adam and a rate that falls as a cosine, until steps or seconds are used up; at least one step."""
    options = hand.options
    optimizer = torch.optim.Adam(pipe.parameters(), lr=_RATE)
    begin = time.perf_counter()
    losses: list[float] = []
    taken: list[float] = []
    done = 0.0
    while done < 1 or not losses:
        for group in optimizer.param_groups:
            group["lr"] = _rate(len(losses), done)
        start = time.perf_counter()
        clean = digits.train[torch.randint(len(digits.train), (rows,))]
        losses.append(_step(lambda x, y: pipe(x, target=y), optimizer, clean))
        taken.append(time.perf_counter() - start)
        spent = time.perf_counter() - begin
        done = 1.0 if spent >= options.seconds else max(len(losses) / options.steps, spent / options.seconds)
        speed = f"{median(taken[-20:]) * 1e3:.0f} ms a step"
        hand.progress(f"  step {len(losses)} of {options.steps}   loss {losses[-1]:.4f}   {speed}   {spent:.0f} s")
    return Training(losses, median(taken))


def _rate(step: int, done: float) -> float:
    """The learning rate: a few steps up, then down as a cosine of the share that is done."""
    return _RATE * min(1.0, (step + 1) / _WARM_UP) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


def plain_seconds(model: nn.Sequential, clean: Tensor, steps: int = 7) -> float:
    """The median seconds of the same step without a pipe, on a copy: one graph over the whole mini-batch."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    taken: list[float] = []
    for _ in range(steps):
        start = time.perf_counter()
        _step(lambda x, y: functional.mse_loss(model(x), y), optimizer, clean)
        taken.append(time.perf_counter() - start)
    return median(taken[2:])


def _step(loss: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer, clean: Tensor) -> float:
    optimizer.zero_grad()
    found = loss(with_noise(clean), clean)
    found.backward()
    optimizer.step()
    return found.item()


@torch.no_grad()
def restored(model: nn.Module, noisy: Tensor) -> Tensor:
    """The images without what the model takes for noise, within the range of grey values."""
    was = model.training
    found = model.eval()(noisy).clamp(0, 1)
    model.train(was)
    return found


def psnr(images: Tensor, clean: Tensor) -> float:
    """Peak signal-to-noise ratio in dB, for values from 0 to 1; larger is better."""
    return -10 * math.log10(functional.mse_loss(images, clean).item())
