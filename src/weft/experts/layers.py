"""Two kinds of experts that come with weft: the feed-forward and the transformer layer of the demo.

They are ordinary users of `register_expert`; look here for how to add one of your own.
"""

import torch
from torch import Tensor, nn

from weft.core.errors import UsageError, listed
from weft.core.spec import TensorSpec
from weft.experts.checks import count_fault, is_number
from weft.experts.registry import Blueprint, register_expert


class FeedForward(nn.Module):
    """The position-wise layer of a transformer: N x hidden to N x hidden, ``x + W2 gelu(W1 norm(x))``."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, inner)
        self.contract = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(nn.functional.gelu(self.expand(self.norm(x))))


@register_expert("ffn")
def feed_forward(hidden: int, inner: int | None = None) -> Blueprint:
    """Rows x ``hidden``, float32; ``inner`` is 4 times that unless given. Raises ``UsageError`` for sizes below 1."""
    faults = count_fault("hidden", hidden) + count_fault("inner", inner, none=True)
    if faults:
        raise UsageError(listed("a feed-forward layer cannot be made like this:", faults))
    return Blueprint(
        FeedForward(hidden, 4 * hidden if inner is None else inner), (TensorSpec((None, hidden), torch.float32),)
    )


class TransformerLayer(nn.Module):
    """Self-attention and a feed-forward layer: N x length x hidden to the same, with an optional padding mask."""

    def __init__(self, hidden: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            hidden, heads, inner, dropout, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=padding)


@register_expert("transformer")
def transformer(hidden: int, heads: int = 8, inner: int | None = None, dropout: float = 0.0) -> Blueprint:
    """Rows x length x ``hidden``, float32, of any length; keyword ``padding``: rows x length bool, True where padded.

    Raises ``UsageError`` for sizes below 1, a dropout that is none, and if ``hidden`` is no multiple of ``heads``.
    """
    faults = count_fault("hidden", hidden) + count_fault("heads", heads) + count_fault("inner", inner, none=True)
    if not (is_number(dropout) and 0 <= dropout <= 1):
        faults.append(f"dropout is {dropout!r}, wanted a number from 0 to 1")
    if faults:
        raise UsageError(listed("a transformer layer cannot be made like this:", faults))
    if hidden % heads:
        raise UsageError(f"a transformer layer of width {hidden} cannot have {heads} heads: wanted a divisor of it")
    return Blueprint(
        TransformerLayer(hidden, heads, 4 * hidden if inner is None else inner, dropout),
        (TensorSpec((None, None, hidden), torch.float32),),
        {"padding": TensorSpec((None, None), torch.bool)},
    )
