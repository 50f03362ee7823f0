"""What a router's scores are worth: weights of the answers that came, and the loss that keeps all experts at work.

    mixture   softmax over the k that answered                 weights of a sample add up to 1
    switch    softmax over all living experts, of the chosen   who failed is missing, nobody else gets more

All of it is plain autograd, so it is the router's true gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def weights_of_answered(scores: Tensor, alive: Tensor) -> Tensor:
    """Softmax over the chosen that answered: samples x k. Zero for all others; all zero if nobody answered."""
    anyone = alive.any(1, keepdim=True)
    masked = scores.masked_fill(~alive & anyone, float("-inf"))  # not where all are out: softmax would be NaN
    return masked.softmax(1) * alive


def weighted_mean(outputs: Tensor, weights: Tensor) -> Tensor:
    """The sum of ``outputs`` (samples x k x ...) by ``weights`` (samples x k): samples x ..., dtype of the outputs."""
    flat = outputs.flatten(2) if outputs.dim() > 2 else outputs.unsqueeze(2)
    with torch.autocast(outputs.device.type, enabled=False):
        return (weights.to(flat.dtype).unsqueeze(1) @ flat).reshape(outputs.shape[0], *outputs.shape[2:])


def load_balancing_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Experts * sum over experts of (share of the samples that chose it * mean probability): 1 if all are equal.

    ``probabilities`` is samples x experts, ``chosen`` samples x k. The share has no gradient, the probability has:
    an expert that is chosen too often becomes less probable. To be added to the loss with a factor of about 0.01.
    From Fedus et al., "Switch Transformers" (2021), equation 4; with k > 1 every choice counts.
    """
    experts = probabilities.shape[1]
    exact = torch.promote_types(probabilities.dtype, torch.float32)  # a division of integers would be of float32
    share = torch.bincount(chosen.reshape(-1), minlength=experts).to(exact) / max(1, chosen.numel())
    return experts * (share.to(probabilities.dtype) * probabilities.mean(0)).sum()


def jittered(x: Tensor, epsilon: float) -> Tensor:
    """``x`` times independent uniform numbers from 1 - epsilon to 1 + epsilon; a new tensor (ibid., section 2.4)."""
    return x * torch.empty_like(x).uniform_(1 - epsilon, 1 + epsilon)


def gating_input(x: Tensor) -> Tensor:
    """What the router reads of samples x ... x features: the mean over all axes between, samples x features."""
    middle: Sequence[int] = range(1, x.dim() - 1)
    return x.mean(dim=tuple(middle)) if middle else x
