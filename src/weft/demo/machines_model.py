"""A classifier of digits whose middle is four experts elsewhere, and the kind of expert that they are.

    8 x 8 image ──> stem ──┬──> mixture: the 2 best of 4 experts ──> + ──> head ──> 10 scores
                    here   |             at two servers              ^     here
                           └─────────────────────────────────────────┘

The experts stand in a grid of two by two, and each server has a diagonal of it:

            column 0   column 1        An expert's score is that of its row plus that of its column. So the second
    row 0      a          b            best differs from the best in its row or in its column, never in both: of
    row 1      b          a            the two, one is always at server a and one at b. Whichever of the two servers
                                       dies, every sample has one expert left, so k_min=1 holds and nobody waits.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.core.spec import TensorSpec
from weft.demo.unet import bundled
from weft.experts.client import Connections
from weft.experts.mixture import RemoteSwitchMixtureOfExperts
from weft.experts.registry import Blueprint, FeedForward, register_expert

KIND = "demo.digits"
PREFIX = "digits"
GRID = (2, 2)
SERVERS = (("digits.0.0", "digits.1.1"), ("digits.0.1", "digits.1.0"))
"""Which experts each of the two servers has: the diagonals."""
UIDS = tuple(sorted(uid for uids in SERVERS for uid in uids))
WIDTH = 64
_CLASSES = 10
_PIXELS = 64
_HELD_OUT = 297
_BALANCE = 0.05  # of the mixture's loss in the whole
_WAIT = 20.0  # seconds that a call may take at most
_LATE = 5.0  # seconds that one expert of a sample is waited for when the other has answered


class Labelled(NamedTuple):
    """Images, N x 64, float32 from 0 to 1, and which digit each shows, N, int64; to learn from, and held out."""

    images: Tensor
    digits: Tensor
    held_out: Tensor
    held_out_digits: Tensor

    def half(self, number: int) -> "Labelled":
        """Every second image, from this one on: what one of two trainers sees. All held-out ones."""
        return self._replace(images=self.images[number::2], digits=self.digits[number::2])


def load_labelled(seed: int) -> Labelled:
    """scikit-learn's bundled digits (1797 of 8 x 8), cut at random in two. Raises UsageError without scikit-learn."""
    digits = bundled()
    images = torch.as_tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    shown = torch.as_tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, shown = images[order], shown[order]
    return Labelled(images[_HELD_OUT:], shown[_HELD_OUT:], images[:_HELD_OUT], shown[:_HELD_OUT])


def write_labelled(digits: Labelled, path: Path) -> None:
    """For other processes, which then need no scikit-learn."""
    torch.save(digits._asdict(), path)


def read_labelled(path: Path) -> Labelled:
    """What `write_labelled` wrote."""
    found: dict[str, Tensor] = torch.load(path, weights_only=True)
    return Labelled(**found)


@register_expert(KIND)
def digit_expert(hidden: int, seed: int, double: bool = False) -> Blueprint:
    """A feed-forward layer, rows x ``hidden``, whose first weights are those of ``seed``, wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = FeedForward(hidden, 2 * hidden)
    dtype = torch.float64 if double else torch.float32
    return Blueprint(module.to(dtype), (TensorSpec((None, hidden), dtype),))


def mixture(
    connections: Connections, *, width: int = WIDTH, dtype: torch.dtype | None = None
) -> RemoteSwitchMixtureOfExperts:
    """The router and the way to the experts: rows x width to the same, and a loss that keeps them equally busy."""
    return RemoteSwitchMixtureOfExperts(
        in_features=width,
        grid_size=GRID,
        uid_prefix=PREFIX,
        connections=connections,
        k_best=2,
        k_min=1,
        backward_k_min=1,
        allow_zero_outputs=False,
        jitter_eps=0.0,
        forward_timeout=_WAIT,
        backward_timeout=_WAIT,
        timeout_after_k_min=_LATE,
        dtype=dtype,
    )


class Classifier(nn.Module):
    """Rows x 64 pixels to rows x 10 scores, and the loss of ``middle``, a mixture, between its own layers."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(_PIXELS, WIDTH), nn.GELU())
        self.middle = middle
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, _CLASSES))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The scores, and that loss."""
        x = self.stem(images)
        y, balance = self.middle(x)
        return self.head(x + y), balance


def loss_of(model: nn.Module, images: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
    """What to learn from, and the part of it that counts: the cross-entropy, without the loss of the mixture."""
    scores, balance = model(images)
    loss = functional.cross_entropy(scores, digits)
    return loss + _BALANCE * balance, loss.detach()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Labelled) -> float:
    """Which share of the held-out images the model gets right. Nothing steps."""
    scores, _ = model(digits.held_out)
    return (scores.argmax(1) == digits.held_out_digits).double().mean().item()
