"""The expert of all these benchmarks: torchweft's feed-forward layer, with weights that every process knows by a
number.
"""

import torch
from torch import nn

from torchweft.experts.registry import FeedForward


def feed_forward(width: int, seed: int = 0) -> nn.Module:
    """``width`` to 4 times that and back, float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FeedForward(width, 4 * width)
