"""A small U-Net for denoising, as an `nn.Sequential` of skippable layers, and the digits that it learns from.

    stage 0                   stage 1             stage 2            stage 3
    enter ─ encode ─ shrink ─ encode ─ bottom ─── widen ─ decode ─── widen ─ decode ─ leave
      │        │                │                            ^                 ^        ^
      │        │                └── middle ──────────────────┘                 │        │
      │        └── fine ───────────────────────── (goes straight) ─────────────┘        │
      └── noisy ───────────────────────────────── (goes straight) ──────────────────────┘

"fine" and "noisy" go from the first stage to the last, and the two in between neither hold nor forward them. The
net says what to take away from its input, so an untrained one does little harm (residual learning; Zhang et al.,
DnCNN, arXiv 1608.03981). U-Net is Ronneberger, Fischer and Brox's (arXiv 1505.04597).

GroupNorm, since its numbers do not depend on how the mini-batch is cut: then every gradient can be held against
plain PyTorch's to the last digits. A BatchNorm normalises by the rows that it sees, so with micro-batches it is,
whatever runs it, another function.
"""

from collections.abc import Generator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.core.errors import UsageError
from weft.pipeline.skip import pop, skippable, stash

BALANCE = (3, 2, 2, 3)
"""How many layers of `unet` each of its four stages has."""
SIDE = 16
"""Height and width of an image."""
NOISE = 0.3
"""Standard deviation of the noise; grey values go from 0 to 1."""
_HELD_OUT = 297

Talk = Generator[Any, Any, Tensor]


def unet(width: int = 16) -> nn.Sequential:
    """The net: N x 1 x H x W to the same shape, H and W multiples of 4. `width`, a multiple of 4, is that of the
    finest level."""
    return nn.Sequential(
        Enter(width),
        Encode(width),
        nn.AvgPool2d(2),
        EncodeMiddle(width),
        nn.Sequential(nn.AvgPool2d(2), block(2 * width, 4 * width), block(4 * width, 2 * width)),
        nn.Upsample(scale_factor=2),
        DecodeMiddle(width),
        nn.Upsample(scale_factor=2),
        Decode(width),
        Leave(width),
    )


def block(inputs: int, outputs: int) -> nn.Sequential:
    """A convolution that keeps height and width, with what follows each of them here."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


@skippable(stash=["noisy"])
class Enter(nn.Module):
    """Keeps the image itself for the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = block(1, width)

    def forward(self, image: Tensor) -> Talk:
        yield stash("noisy", image)
        return self.block(image)


@skippable(stash=["fine"])
class Encode(nn.Module):
    """The finest level, on the way down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = block(width, width)

    def forward(self, x: Tensor) -> Talk:
        x = self.block(x)
        yield stash("fine", x)  # the main path and the skip are one tensor
        return x


@skippable(stash=["middle"])
class EncodeMiddle(nn.Module):
    """The middle level, on the way down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(block(width, 2 * width), block(2 * width, 2 * width))

    def forward(self, x: Tensor) -> Talk:
        x = self.block(x)
        yield stash("middle", x)
        return x


@skippable(pop=["middle"])
class DecodeMiddle(nn.Module):
    """The middle level, on the way up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(block(4 * width, 2 * width), block(2 * width, width))

    def forward(self, x: Tensor) -> Talk:
        middle = yield pop("middle")
        return self.block(torch.cat([x, middle], 1))


@skippable(pop=["fine"])
class Decode(nn.Module):
    """The finest level, on the way up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = block(2 * width, width)

    def forward(self, x: Tensor) -> Talk:
        fine = yield pop("fine")
        return self.block(torch.cat([x, fine], 1))


@skippable(pop=["noisy"])
class Leave(nn.Module):
    """What is to be taken away from the image, and the image without it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Talk:
        noisy = yield pop("noisy")
        return noisy - self.convolution(x)


class Digits(NamedTuple):
    """Clean images, N x 1 x 16 x 16, float32, from 0 to 1; and held-out ones with their noise already added."""

    train: Tensor
    held_out: Tensor
    noisy: Tensor


def bundled() -> Any:
    """scikit-learn's digits as it gives them: ``images`` and ``target``. Raises UsageError when it is not installed."""
    try:
        datasets: Any = import_module("sklearn.datasets")  # only here, so that the rest works without it
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the demo trains on scikit-learn's bundled digits, but there is no module {error.name!r}; "
            "install the extra: pip install 'weft[demo]'"
        ) from None
    return datasets.load_digits()


def load_digits() -> Digits:
    """scikit-learn's bundled digits (1797 of 8 x 8), made twice as large and cut at random in two.

    Draws from the caller's generator. Raises UsageError when scikit-learn is not installed.
    """
    small = torch.as_tensor(bundled().images, dtype=torch.float32).unsqueeze(1) / 16
    images = functional.interpolate(small, size=(SIDE, SIDE), mode="bilinear")
    images = images[torch.randperm(len(images))]
    held_out = images[:_HELD_OUT]
    return Digits(images[_HELD_OUT:], held_out, with_noise(held_out))


def with_noise(images: Tensor) -> Tensor:
    """The images with fresh noise."""
    return images + NOISE * torch.randn_like(images)
