"""Digit classifier with four remote experts in the middle: the model that `survive_learners` trains.

8 x 8 image ──> stem ──┬──> mixture: the 2 best of 4 experts ──> + ──> head ──> 10 scores
                local  |             on two servers              ^     local
                       └─────────────────────────────────────────┘
"""

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from torchweft.core.spec import TensorSpec
from torchweft.experts.registry import ExpertFactory, FeedForward

GRID = (2, 2)
WIDTH = 64
_CLASSES, _PIXELS = 10, 64
_HELD_OUT = 297
_BALANCE = 0.05  # weight of the mixture's loss


class Labelled(NamedTuple):
    """Images (N x 64, float32, 0 to 1) and digits (N, int64), for training and held out."""

    images: Tensor
    digits: Tensor
    held_out: Tensor
    held_out_digits: Tensor


def load_labelled(seed: int) -> Labelled:
    """scikit-learn's digits (1797 images of 8 x 8), split randomly into two parts."""
    bundled = load_digits()
    images = torch.as_tensor(bundled.images, dtype=torch.float32).flatten(1) / 16
    digits = torch.as_tensor(bundled.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, digits = images[order], digits[order]
    return Labelled(images[_HELD_OUT:], digits[_HELD_OUT:], images[:_HELD_OUT], digits[:_HELD_OUT])


def digit_expert(hidden: int, seed: int) -> ExpertFactory:
    """Feed-forward expert of width ``hidden``, initialized from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = FeedForward(hidden, 2 * hidden)
    return ExpertFactory(module, (TensorSpec((None, hidden), torch.float32),))


class Classifier(nn.Module):
    """Map rows x 64 pixels to rows x 10 scores, with the mixture ``middle`` between two local layers."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(_PIXELS, WIDTH), nn.GELU())
        self.middle = middle
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, _CLASSES))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and the load-balancing loss of the mixture."""
        x = self.stem(images)
        y, balance = self.middle(x)
        return self.head(x + y), balance


def loss_of(model: nn.Module, images: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss to minimise, and the cross-entropy alone."""
    scores, balance = model(images)
    loss = functional.cross_entropy(scores, digits)
    return loss + _BALANCE * balance, loss.detach()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Labelled) -> float:
    """Share of held-out images that are classified correctly. Experts take no step."""
    scores, _ = model(digits.held_out)
    return (scores.argmax(1) == digits.held_out_digits).double().mean().item()
