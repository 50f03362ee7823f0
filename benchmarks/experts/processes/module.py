"""The expert of these benchmarks: torchweft's feed-forward layer, initialized from a seed that processes share."""

import torch
from torch import nn

from torchweft.experts.registry import FeedForward


def feed_forward(width: int, seed: int = 0) -> nn.Module:
    """Layers from ``width`` to 4 times ``width`` and back, float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FeedForward(width, 4 * width)
