"""The LSTM, and the LSTM whose gates see the cell state.

c ------- * f ------ + ------------------ c'        f  forget gate      i  input gate
                     |              |               g  candidate        o  output gate
                   i * g          tanh
                                    |
                                  * o --- h'        y_t = h'
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.recurrent.zoo.arguments import Device, rate_fault, refuse
from weft.recurrent.zoo.gated import MemoryCell


class LSTMCell(MemoryCell):
    """The LSTM with a forget gate.

    ``x_t`` N x D; state ``(h, c)``, N x H each; output ``h``. Parameters as ``torch.nn.LSTMCell``'s, which load both
    ways; blocks in the order i, f, g, o. Hochreiter and Schmidhuber (1997); Gers, Schmidhuber and Cummins (2000).

    ``recurrent_dropout`` drops entries of the candidate g, at every step anew and in training only, so that what
    ``c`` holds is never lost: Semeniuta, Severyn and Barth, "Recurrent dropout without memory loss" (arXiv 1603.05118).

    Raises ``UsageError`` for a size below 1 or a rate outside 0 to 1.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(input_size, hidden_size, device, dtype)
        refuse(self, rate_fault("recurrent_dropout", recurrent_dropout))
        self.recurrent_dropout = recurrent_dropout
        self.bias_ih, self.bias_hh = self.biases(bias)
        self.reset_parameters()

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One step: ``(h', (h', c'))``."""
        h, c = state
        gates = F.linear(x, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        i, f, g, o = gates.chunk(4, -1)
        g = F.dropout(g.tanh(), self.recurrent_dropout, self.training)
        c = f.sigmoid() * c + i.sigmoid() * g
        h = o.sigmoid() * c.tanh()
        return h, (h, c)


class PeepholeLSTMCell(MemoryCell):
    """An LSTM whose gates see the cell state: i and f the old one, o the new one, each entry its own.

    ``x_t`` N x D; state ``(h, c)``, N x H each; output ``h``. ``peephole`` is 3 x H, for i, f, o; ``bias`` has the
    blocks i, f, g, o. Gers, Schraudolph and Schmidhuber, "Learning precise timing with LSTM recurrent networks", JMLR 3
    (2002).

    Raises ``UsageError`` for a size below 1.
    """

    def __init__(
        self, input_size: int, hidden_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(input_size, hidden_size, device, dtype)
        self.bias = self.parameter(4 * hidden_size)
        self.peephole = self.parameter(3, hidden_size)
        self.reset_parameters()

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One step: ``(h', (h', c'))``."""
        h, c = state
        i, f, g, o = (F.linear(x, self.weight_ih, self.bias) + F.linear(h, self.weight_hh)).chunk(4, -1)
        see_i, see_f, see_o = self.peephole.unbind(0)
        c = torch.sigmoid(f + see_f * c) * c + torch.sigmoid(i + see_i * c) * g.tanh()
        h = torch.sigmoid(o + see_o * c) * c.tanh()
        return h, (h, c)
