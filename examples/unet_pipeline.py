"""Across devices: an ordinary U-Net trains in four stages, and its gradients are those of plain PyTorch.

    python examples/unet_pipeline.py [--seconds 15] [--seed 0]

    stage 0              stage 1                 stage 2           stage 3
    enter ─ fine_down ── middle_down ─ bottom ── middle_up ─ cat ─ fine_up ─ leave ─ minus
      │         └─────── fine: past stage 1 ──────────────────┘                       │
      └───────────────── noisy: past stages 1 and 2 ──────────────────────────────────┘

The model is plain PyTorch: its skip connections are local variables of `forward`. `weft.Pipe(model, split=[...])` cuts
it before the modules that `split` names. Values for a later stage go straight to it. The net learns to remove noise
from scikit-learn's handwritten digits, so nothing is downloaded.
"""

import argparse
import copy
import math
import time
from statistics import median

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft

SPLIT = ["middle_down", "middle_up", "fine_up"]  # a stage begins at each of them
DEVICES = ["cpu"] * 4  # or "cuda:0", "cuda:1", ...
ROWS, CHUNKS = 128, 8
NOISE = 0.3  # standard deviation, for grey values from 0 to 1
RATE = 4e-3
LIMIT = 1e-10  # rounding error of float64, with a margin


def block(inputs: int, outputs: int) -> nn.Sequential:
    """A convolution, GroupNorm and activation. GroupNorm does not depend on how the batch is cut."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet(nn.Module):
    """Removes the noise of images N x 1 x H x W, where H and W are multiples of 4.

    U-Net: Ronneberger et al., arXiv 1505.04597. The last layer predicts the noise to subtract (Zhang et al., arXiv
    1608.03981).
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = block(1, width)
        self.fine_down = block(width, width)
        self.middle_down = nn.Sequential(block(width, 2 * width), block(2 * width, 2 * width))
        self.bottom = nn.Sequential(block(2 * width, 4 * width), block(4 * width, 2 * width))
        self.middle_up = nn.Sequential(block(4 * width, 2 * width), block(2 * width, width))
        self.fine_up = block(2 * width, width)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor) -> Tensor:
        fine = self.fine_down(self.enter(noisy))
        middle = self.middle_down(functional.avg_pool2d(fine, 2))
        x = self.bottom(functional.avg_pool2d(middle, 2))
        x = self.middle_up(torch.cat([functional.interpolate(x, scale_factor=2), middle], 1))
        x = self.fine_up(torch.cat([functional.interpolate(x, scale_factor=2), fine], 1))
        return noisy - self.leave(x)


def data() -> tuple[Tensor, Tensor]:
    """1500 training images and 297 held-out ones, 1 x 16 x 16 each, with grey values from 0 to 1."""
    small = torch.tensor(load_digits().images).float().unsqueeze(1) / 16
    images = functional.interpolate(small, size=(16, 16), mode="bilinear")[torch.randperm(len(small))]
    return images[297:], images[:297]


def with_noise(images: Tensor) -> Tensor:
    return images + NOISE * torch.randn_like(images)


def pipe_of(model: nn.Module, **settings) -> weft.Pipe:
    """The model in stages, with the loss inside, so that backward begins before forward has ended (1F1B)."""
    settings = {"schedule": "1f1b", **settings}
    return weft.Pipe(model, split=SPLIT, chunks=CHUNKS, devices=DEVICES, loss=functional.mse_loss, **settings)


def train(pipe: weft.Pipe, images: Tensor, seconds: float) -> None:
    """Train with Adam, at a rate that falls as a cosine."""
    optimizer = torch.optim.Adam(pipe.parameters(), lr=RATE)
    begin, durations = time.perf_counter(), []
    while (spent := time.perf_counter() - begin) < seconds or not durations:
        for group in optimizer.param_groups:
            warm_up = min(1.0, (len(durations) + 1) / 10)
            group["lr"] = RATE * warm_up * (0.525 + 0.475 * math.cos(math.pi * min(1.0, spent / seconds)))
        clean = images[torch.randint(len(images), (ROWS,))]
        optimizer.zero_grad()
        loss = pipe(with_noise(clean), target=clean)
        loss.backward()
        optimizer.step()
        durations.append(time.perf_counter() - begin - spent)
        if len(durations) % 50 == 0:
            print(f"  step {len(durations)}   loss {loss.item():.4f}   {spent:.0f} s", flush=True)
    print(f"  {len(durations)} steps of {ROWS} images, {median(durations) * 1e3:.0f} ms each")


def plain_milliseconds(model: nn.Module, clean: Tensor) -> float:
    """The median time of the same step without a pipe, on a copy."""
    model, noisy, durations = copy.deepcopy(model), with_noise(clean), []
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(9):
        start = time.perf_counter()
        optimizer.zero_grad()
        functional.mse_loss(model(noisy), clean).backward()
        optimizer.step()
        durations.append(time.perf_counter() - start)
    return median(durations[2:]) * 1e3


def gradients(module: nn.Module, loss_of, image: Tensor) -> list[Tensor]:
    """The gradients of the input and of all parameters."""
    image = image.clone().requires_grad_()
    return list(torch.autograd.grad(loss_of(image), [image, *module.parameters()]))


def largest_difference(model: nn.Module, clean: Tensor) -> float:
    """The largest difference of any gradient from plain PyTorch's, in float64, in every mode."""
    plain = copy.deepcopy(model).double()
    clean = clean.double()
    noisy = with_noise(clean)
    expected = gradients(plain, lambda image: functional.mse_loss(plain(image), clean), noisy)
    worst = 0.0
    for schedule in ("gpipe", "1f1b"):
        for checkpoint in ("never", "except_last", "always"):
            pipe = pipe_of(copy.deepcopy(plain), schedule=schedule, checkpoint=checkpoint, executor="threads")
            actual = gradients(pipe, lambda image, pipe=pipe: pipe(image, target=clean), noisy)
            worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)))
    return worst


def psnr(images: Tensor, clean: Tensor) -> float:
    """Peak signal-to-noise ratio in dB."""
    return -10 * math.log10(functional.mse_loss(images, clean).item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the stages run in parallel instead

    images, held_out = data()
    noisy = with_noise(held_out)
    model = UNet()
    print(f"across devices: an ordinary U-Net, in {len(DEVICES)} stages of {CHUNKS} micro-batches")
    worst = largest_difference(model, images[:19])  # 19 rows: eight micro-batches of unequal size
    print(f"  largest difference of any gradient from plain PyTorch, float64: {worst:.1e}")
    if not worst < LIMIT:
        raise SystemExit("the gradients differ by more than rounding")
    pipe = pipe_of(model)
    train(pipe, images, options.seconds)
    print(f"  the same step in plain PyTorch: {plain_milliseconds(model, images[:ROWS]):.0f} ms")
    for route in pipe.routes:
        if route.readers[-1] > route.source + 1:
            print(f"  {route.name} goes from stage {route.source} straight to stage {route.readers[-1]}")
    with torch.no_grad():
        restored = pipe.eval()(noisy).clamp(0, 1)
    print(f"  held-out images: {psnr(noisy, held_out):.2f} dB with noise, {psnr(restored, held_out):.2f} dB without")


if __name__ == "__main__":
    main()
