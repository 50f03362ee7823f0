"""The recurrent highway network: several layers within one step, each a gated correction of the one before.

x_t --+
      v
h --> s_1 --> s_2 --> ... --> s_L = h'         s_l = t * tanh(U_n s_{l-1}) + (1 - t) * s_{l-1}
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.recurrent.zoo.arguments import Device, refuse, size_faults
from weft.recurrent.zoo.gated import HiddenCell


class RHNCell(HiddenCell):
    """A recurrent highway network with coupled gates, ``depth`` layers within a step; the first sees the input.

    ``x_t`` N x D; state and output ``h`` N x H. ``weight_hh`` is L x 2H x H and ``bias`` L x 2H, one for each layer;
    blocks in the order t, n. The bias of t begins with -2, so that a step changes little at first. Zilly, Srivastava,
    Koutnik and Schmidhuber, "Recurrent highway networks" (arXiv 1607.03474).

    Raises ``UsageError`` for a size or depth below 1.
    """

    GATES = 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        depth: int = 3,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, device, dtype)
        refuse(self, size_faults(depth=depth))
        self.depth = depth
        self.weight_hh = self.parameter(depth, 2 * hidden_size, hidden_size)
        self.bias = self.parameter(depth, 2 * hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights as other cells'; biases zero, those of the transform gate t -2."""
        super().reset_parameters()
        with torch.no_grad():
            self.bias.zero_()
            self.bias[:, : self.hidden_size] = -2.0

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """One step: ``(h', h')``."""
        layers = zip(self.weight_hh.unbind(0), self.bias.unbind(0), strict=True)
        for layer, (weight, bias) in enumerate(layers):
            mixed = F.linear(h, weight, bias)
            t, n = (mixed + F.linear(x, self.weight_ih) if layer == 0 else mixed).chunk(2, -1)
            t = t.sigmoid()
            h = t * n.tanh() + (1 - t) * h
        return h, h
