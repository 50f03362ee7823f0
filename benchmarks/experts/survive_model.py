"""A classifier of digits with four remote experts in its middle: the model that `survive_learners` trains.

8 x 8 image ──> stem ──┬──> mixture: the 2 best of 4 experts ──> + ──> head ──> 10 scores
                here   |             at two servers              ^     here
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
    """Images, N x 64, float32 from 0 to 1, and the digit of each, N, int64; to learn from, and held out."""

    images: Tensor
    digits: Tensor
    held_out: Tensor
    held_out_digits: Tensor


def load_labelled(seed: int) -> Labelled:
    """scikit-learn's bundled digits (1797 of 8 x 8), split at random in two."""
    bundled = load_digits()
    images = torch.as_tensor(bundled.images, dtype=torch.float32).flatten(1) / 16
    digits = torch.as_tensor(bundled.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, digits = images[order], digits[order]
    return Labelled(images[_HELD_OUT:], digits[_HELD_OUT:], images[:_HELD_OUT], digits[:_HELD_OUT])


def digit_expert(hidden: int, seed: int) -> ExpertFactory:
    """A feed-forward layer, rows x ``hidden``, with the initial weights of ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = FeedForward(hidden, 2 * hidden)
    return ExpertFactory(module, (TensorSpec((None, hidden), torch.float32),))


class Classifier(nn.Module):
    """Rows x 64 pixels to rows x 10 scores, and the loss of ``middle``, a mixture, between its own layers."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(_PIXELS, WIDTH), nn.GELU())
        self.middle = middle
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, _CLASSES))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The scores, and the mixture's loss."""
        x = self.stem(images)
        y, balance = self.middle(x)
        return self.head(x + y), balance


def loss_of(model: nn.Module, images: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
    """The loss to minimise, and its cross-entropy without the loss of the mixture."""
    scores, balance = model(images)
    loss = functional.cross_entropy(scores, digits)
    return loss + _BALANCE * balance, loss.detach()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Labelled) -> float:
    """The share of held-out images that the model classifies right. No expert steps."""
    scores, _ = model(digits.held_out)
    return (scores.argmax(1) == digits.held_out_digits).double().mean().item()
