"""The scalar memory of xLSTM: an LSTM with exponential gates, kept in range by two more states.

    weighted sum    c' = f * c + i * z          i = exp(i~)     may overflow ...
    its weights     n' = f * n + i              f = sigmoid(f~)
    shown           h' = o * c' / n'            a weighted mean of all z so far

    ... so c and n are kept divided by exp(m), where m follows the largest weight; h does not change by that:
                    m' = max(log f + m, i~)     i = exp(i~ - m'),   f = exp(log f + m - m')

A cell that has seen nothing has no weight yet: m begins with a number so low that the first step takes m' = i~.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.recurrent.zoo.arguments import Device, refuse
from weft.recurrent.zoo.gated import GatedCell

State = tuple[Tensor, Tensor, Tensor, Tensor]


class SLSTMCell(GatedCell):
    """xLSTM's sLSTM: exponential input gate, normaliser ``n``, stabiliser ``m``; heads mix only within themselves.

    ``x_t`` N x D; state ``(h, c, n, m)``, N x H each; output ``h``. ``weight_ih`` 4H x D and ``bias`` 4H have the
    blocks i, f, z, o; ``weight_hh`` holds the blocks of a block diagonal matrix for each of them, 4 x heads x
    (H / heads) x (H / heads), the old hidden state along the last axis but one.
    The forget gate is a sigmoid, one of the two forms of the paper. Norm, convolution and projections around the cell
    belong to xLSTM's block, not to the cell. Beck et al., "xLSTM: Extended long short-term memory" (arXiv 2405.04517).

    Raises ``UsageError`` for a size below 1, or heads that do not divide ``hidden_size``.
    """

    GATES = 4

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        heads: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, device, dtype)
        if heads < 1 or hidden_size % heads:
            refuse(self, [f"heads is {heads}, wanted a divisor of hidden_size, which is {hidden_size}"])
        self.heads = heads
        width = hidden_size // heads
        self.weight_hh = self.parameter(4, heads, width, width)
        self.bias = self.parameter(4 * hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights as other cells'; biases zero, those of the forget gate one, so that it begins open."""
        super().reset_parameters()
        with torch.no_grad():
            self.bias.zero_()
            self.bias[self.hidden_size : 2 * self.hidden_size] = 1.0

    def initial_state(self, x: Tensor) -> State:
        """``(h, c, n, m)``, N x H each: zeros, but ``m`` half the lowest number of its dtype."""
        h, c, n, m = (self.zeros(x) for _ in range(4))
        return h, c, n, m + torch.finfo(m.dtype).min / 2

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step: ``(h', (h', c', n', m'))``."""
        h, c, n, m = state
        of_h = torch.einsum("...hd,ghde->...ghe", h.unflatten(-1, (self.heads, -1)), self.weight_hh)
        i, f, z, o = (F.linear(x, self.weight_ih, self.bias) + of_h.flatten(-3)).chunk(4, -1)
        kept = F.logsigmoid(f) + m
        m = torch.maximum(kept, i)
        i, f = torch.exp(i - m), torch.exp(kept - m)
        c = f * c + i * z.tanh()
        n = f * n + i
        h = o.sigmoid() * c / n
        return h, (h, c, n, m)
