"""The simple recurrent network: a state that is mixed with the input and squashed, and no gate at all."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.recurrent.zoo.arguments import Device, refuse
from weft.recurrent.zoo.gated import HiddenCell


class ElmanCell(HiddenCell):
    """``h' = tanh(W_ih x + b_ih + W_hh h + b_hh)``, or with relu.

    ``x_t`` N x D; state and output ``h`` N x H. Parameters as ``torch.nn.RNNCell``'s, which load both ways.
    Elman, "Finding structure in time", Cognitive Science 14 (1990).

    Raises ``UsageError`` for a size below 1 or another nonlinearity.
    """

    GATES = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, device, dtype)
        if nonlinearity not in ("tanh", "relu"):
            refuse(self, [f"nonlinearity is {nonlinearity!r}, wanted 'tanh' or 'relu'"])
        self.nonlinearity = nonlinearity
        self.bias_ih, self.bias_hh = self.biases(bias)
        self.reset_parameters()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """One step: ``(h', h')``."""
        mixed = F.linear(x, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        h = mixed.tanh() if self.nonlinearity == "tanh" else mixed.relu()
        return h, h
