"""The GRU and its variants: one state, which a gate moves part of the way to a candidate n.

h' = (1 - z) * n + z * h

GRU, reset after     n = tanh(W x + b + r * (U h + d))    torch.nn.GRU's form, and cuDNN's
GRU, reset before    n = tanh(W x + b + U (r * h))        as it was published
minimal gated        the gate f is both: n = tanh(W x + b + U (f * h)), h' = (1 - f) * h + f * n
light GRU            no reset:         n = relu(W x + b + U h)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.recurrent.zoo.arguments import Device, rate_fault, refuse
from weft.recurrent.zoo.gated import HiddenCell


class GRUCell(HiddenCell):
    """The GRU in the form that PyTorch has: the reset gate acts after the product ("reset after").

    ``x_t`` N x D; state and output ``h`` N x H. Parameters as ``torch.nn.GRUCell``'s, which load both ways; blocks in
    the order r, z, n. ``recurrent_dropout`` drops entries of the candidate n, at every step anew and in training only
    (Semeniuta, Severyn and Barth, arXiv 1603.05118).

    Raises ``UsageError`` for a size below 1 or a rate outside 0 to 1.
    """

    GATES = 3

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

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """One step: ``(h', h')``."""
        r_x, z_x, n_x = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, -1)
        r_h, z_h, n_h = F.linear(h, self.weight_hh, self.bias_hh).chunk(3, -1)
        z = torch.sigmoid(z_x + z_h)
        n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
        n = F.dropout(n, self.recurrent_dropout, self.training)
        h = (1 - z) * n + z * h
        return h, h


class OneBiasCell(HiddenCell):
    """Base of those with one ``bias``, GATES * H values. Raises ``UsageError`` for a size below 1."""

    def __init__(
        self, input_size: int, hidden_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(input_size, hidden_size, device, dtype)
        self.bias = self.parameter(len(self.weight_ih))
        self.reset_parameters()


class ResetBeforeGRUCell(OneBiasCell):
    """The GRU as it was published: the reset gate acts on the hidden state, before the product.

    ``x_t`` N x D; state and output ``h`` N x H. One ``bias``; blocks in the order r, z, n. It needs two products per
    step, one after the other, where :class:`GRUCell` needs one. Cho et al., "Learning phrase representations using RNN
    encoder-decoder" (arXiv 1406.1078).

    Raises ``UsageError`` for a size below 1.
    """

    GATES = 3

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """One step: ``(h', h')``."""
        r, z, n = F.linear(x, self.weight_ih, self.bias).chunk(3, -1)
        r_h, z_h = F.linear(h, self.weight_hh[: 2 * self.hidden_size]).chunk(2, -1)
        r, z = torch.sigmoid(r + r_h), torch.sigmoid(z + z_h)
        n = torch.tanh(n + F.linear(r * h, self.weight_hh[2 * self.hidden_size :]))
        h = (1 - z) * n + z * h
        return h, h


class MinimalGatedCell(OneBiasCell):
    """A GRU with one gate, which resets the state before the candidate and then mixes the two.

    ``x_t`` N x D; state and output ``h`` N x H. One ``bias``; blocks in the order f, n. Zhou, Wu, Zhang and Zhou,
    "Minimal gated unit for recurrent neural networks" (arXiv 1603.09420).

    Raises ``UsageError`` for a size below 1.
    """

    GATES = 2

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """One step: ``(h', h')``."""
        f, n = F.linear(x, self.weight_ih, self.bias).chunk(2, -1)
        of_f, of_n = self.weight_hh.chunk(2, 0)
        f = torch.sigmoid(f + F.linear(h, of_f))
        n = torch.tanh(n + F.linear(f * h, of_n))
        h = (1 - f) * h + f * n
        return h, h


class LightGRUCell(OneBiasCell):
    """A GRU without a reset gate and with relu in place of tanh.

    ``x_t`` N x D; state and output ``h`` N x H. One ``bias``; blocks in the order z, n. Ravanelli, Brakel, Omologo and
    Bengio, "Light gated recurrent units for speech recognition" (arXiv 1803.10225).

    The paper puts batch norm on the projections of the input. A norm over the batch of all steps cannot stand inside a
    step, so it is left out, and biases take its place. Without it a relu may let the state grow: the recurrent blocks
    begin orthogonal, which keeps its length.

    Raises ``UsageError`` for a size below 1.
    """

    GATES = 2

    def reset_parameters(self) -> None:
        """As other cells, but each block of ``weight_hh`` orthogonal and the bias zero."""
        super().reset_parameters()
        with torch.no_grad():
            for block in self.weight_hh.chunk(2, 0):
                nn.init.orthogonal_(block)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """One step: ``(h', h')``."""
        z, n = (F.linear(x, self.weight_ih, self.bias) + F.linear(h, self.weight_hh)).chunk(2, -1)
        z = z.sigmoid()
        h = (1 - z) * n.relu() + z * h
        return h, h
