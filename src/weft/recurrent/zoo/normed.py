"""LSTMs that mix input and hidden state in another way than by adding their projections.

LSTM          W_ih x + W_hh h + b
layer norm    LN(W_ih x) + LN(W_hh h) + b                             and LN(c) before the output
MI            alpha * (W_ih x) * (W_hh h) + beta_ih * (W_ih x) + beta_hh * (W_hh h) + b
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.recurrent.zoo.arguments import Device
from weft.recurrent.zoo.gated import MemoryCell


class LayerNormLSTMCell(MemoryCell):
    """An LSTM with layer norm on both projections, over all four gates at once, and on the cell state that is shown.

    ``x_t`` N x D; state ``(h, c)``, N x H each; output ``h``. Gates in the order i, f, g, o. The norms ``norm_ih`` and
    ``norm_hh`` have gains only: their biases would add up with ``bias``. Ba, Kiros and Hinton, "Layer normalization"
    (arXiv 1607.06450), equations 20 to 22.

    Raises ``UsageError`` for a size below 1.
    """

    def __init__(
        self, input_size: int, hidden_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(input_size, hidden_size, device, dtype)
        self.bias = self.parameter(4 * hidden_size)
        self.norm_ih = nn.LayerNorm(4 * hidden_size, bias=False, device=device, dtype=dtype)
        self.norm_hh = nn.LayerNorm(4 * hidden_size, bias=False, device=device, dtype=dtype)
        self.norm_cell = nn.LayerNorm(hidden_size, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights and bias as an LSTM's; gains one, the bias of the cell's norm zero."""
        super().reset_parameters()
        for norm in (self.norm_ih, self.norm_hh, self.norm_cell):
            norm.reset_parameters()

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One step: ``(h', (h', c'))``."""
        h, c = state
        gates = self.norm_ih(F.linear(x, self.weight_ih)) + self.norm_hh(F.linear(h, self.weight_hh)) + self.bias
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * self.norm_cell(c).tanh()
        return h, (h, c)


class MILSTMCell(MemoryCell):
    """An LSTM with multiplicative integration: the projections of input and hidden state gate each other.

    ``x_t`` N x D; state ``(h, c)``, N x H each; output ``h``. Gates in the order i, f, g, o. ``alpha``, ``beta_ih`` and
    ``beta_hh``, 4H each, begin with one. Wu, Zhang, Zhang, Bengio and Salakhutdinov, "On multiplicative integration
    with recurrent neural networks" (arXiv 1606.06630).

    Raises ``UsageError`` for a size below 1.
    """

    def __init__(
        self, input_size: int, hidden_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(input_size, hidden_size, device, dtype)
        self.bias, self.alpha, self.beta_ih, self.beta_hh = (self.parameter(4 * hidden_size) for _ in range(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights and bias as an LSTM's; alpha and both betas one."""
        super().reset_parameters()
        for scale in (self.alpha, self.beta_ih, self.beta_hh):
            nn.init.ones_(scale)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One step: ``(h', (h', c'))``."""
        h, c = state
        of_x, of_h = F.linear(x, self.weight_ih), F.linear(h, self.weight_hh)
        gates = self.alpha * of_x * of_h + self.beta_ih * of_x + self.beta_hh * of_h + self.bias
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, (h, c)
