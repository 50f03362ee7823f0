"""The LSTM and its variants: a cell state c, and gates that decide how much of it is kept, added and shown.

c ------- * f ------ + ------------------ c'        f  forget gate      i  input gate
                     |              |               g  candidate        o  output gate
                   i * g          tanh
                                    |
                                  * o --- h'        y_t = h'

The variants compute their gates from the input x and the hidden state h by

    LSTM          W_ih x + W_hh h + b
    layer norm    LN(W_ih x) + LN(W_hh h) + b                             and LN(c) before the output
    MI            alpha * (W_ih x) * (W_hh h) + beta_ih * (W_ih x) + beta_hh * (W_hh h) + b
    convolution   the same as the LSTM, with convolutions instead of products: x and h are images

Unless noted otherwise, inputs are N x D, ``h`` and ``c`` N x H each. Constructors raise ``UsageError`` as in `gated`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweft.recurrent.cells.gated import GatedCell, MemoryCell, OneBiasCell, TorchGatedCell, check_arguments


class LSTMCell(TorchGatedCell, MemoryCell):
    """The LSTM with a forget gate.

    ``torch.nn.LSTMCell``'s parameters, with blocks in the order i, f, g, o. ``recurrent_dropout``: see
    `TorchGatedCell`. Hochreiter and Schmidhuber (1997); Gers, Schmidhuber and Cummins (2000).

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.LSTMCell(3, 8))
    """

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        gates = F.linear(x, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        i, f, g, o = gates.chunk(4, -1)
        g = F.dropout(g.tanh(), self.recurrent_dropout, self.training)
        c = f.sigmoid() * c + i.sigmoid() * g
        h = o.sigmoid() * c.tanh()
        return h, (h, c)


class PeepholeLSTMCell(OneBiasCell, MemoryCell):
    """An LSTM with gates that also read the cell state, entry by entry: i and f the old one, o the new one.

    ``peephole`` is 3 x H, for i, f, o. ``bias`` has the blocks i, f, g, o. Gers, Schraudolph and Schmidhuber, "Learning
    precise timing with LSTM recurrent networks", JMLR 3 (2002).

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.PeepholeLSTMCell(3, 8))
    """

    def add_parameters(self) -> None:
        self.peephole = self.new_parameter(3, self.hidden_size)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, g, o = (F.linear(x, self.weight_ih, self.bias) + F.linear(h, self.weight_hh)).chunk(4, -1)
        see_i, see_f, see_o = self.peephole.unbind(0)
        c = torch.sigmoid(f + see_f * c) * c + torch.sigmoid(i + see_i * c) * g.tanh()
        h = torch.sigmoid(o + see_o * c) * c.tanh()
        return h, (h, c)


class LayerNormLSTMCell(OneBiasCell, MemoryCell):
    """An LSTM with layer norm on both projections, over all four gates at once, and on the shown cell state.

    Gates in the order i, f, g, o. The norms ``norm_ih`` and ``norm_hh`` have gains only, because ``bias`` already does
    the work of their biases. Ba, Kiros and Hinton, "Layer normalization" (arXiv 1607.06450), equations 20 to 22.

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.LayerNormLSTMCell(3, 8))
    """

    def add_parameters(self) -> None:
        self.norm_ih, self.norm_hh = (nn.LayerNorm(4 * self.hidden_size, bias=False) for _ in range(2))
        self.norm_cell = nn.LayerNorm(self.hidden_size)
        # Layer norms are created with the default dtype and device.
        self.to(self.weight_ih.device, self.weight_ih.dtype)

    def reset_parameters(self) -> None:
        """Draw weights and bias as an LSTM does. Gains are 1, and the bias of the cell's norm is 0."""
        super().reset_parameters()
        for norm in (self.norm_ih, self.norm_hh, self.norm_cell):
            norm.reset_parameters()

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        gates = self.norm_ih(F.linear(x, self.weight_ih)) + self.norm_hh(F.linear(h, self.weight_hh)) + self.bias
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * self.norm_cell(c).tanh()
        return h, (h, c)


class MILSTMCell(OneBiasCell, MemoryCell):
    """An LSTM with multiplicative integration: the projections of input and hidden state gate each other.

    Gates in the order i, f, g, o. ``alpha``, ``beta_ih`` and ``beta_hh``, 4H each, are 1 at first. Wu, Zhang, Zhang,
    Bengio and Salakhutdinov, "On multiplicative integration with recurrent neural networks" (arXiv 1606.06630).

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.MILSTMCell(3, 8))
    """

    def add_parameters(self) -> None:
        self.alpha, self.beta_ih, self.beta_hh = (self.new_parameter(4 * self.hidden_size) for _ in range(3))

    def reset_parameters(self) -> None:
        """Draw weights and bias as an LSTM does. Alpha and both betas are 1."""
        super().reset_parameters()
        for scale in (self.alpha, self.beta_ih, self.beta_hh):
            nn.init.ones_(scale)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        of_x, of_h = F.linear(x, self.weight_ih), F.linear(h, self.weight_hh)
        gates = self.alpha * of_x * of_h + self.beta_ih * of_x + self.beta_hh * of_h + self.bias
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, (h, c)


class SLSTMCell(GatedCell):
    """xLSTM's sLSTM: exponential input gate, normaliser ``n``, stabiliser ``m``, and heads that do not mix.

        weighted sum    c' = f * c + i * z          i = exp(i~)     may overflow ...
        its weights     n' = f * n + i              f = sigmoid(f~)
        output          h' = o * c' / n'            a weighted mean of all z so far

        ... so c and n are stored divided by exp(m), where m follows the largest weight. This does not change h:
                        m' = max(log f + m, i~)     i = exp(i~ - m'),   f = exp(log f + m - m')

    Before the first step there is no weight. The initial m is so low that the first step computes m' = i~.

    State ``(h, c, n, m)``, N x H each. ``weight_ih`` 4H x D and ``bias`` 4H have the blocks i, f, z, o. ``weight_hh``
    holds a block diagonal matrix for each of them, 4 x heads x (H / heads) x (H / heads), with the old hidden state
    along the second to last axis. The forget gate is a sigmoid, one of the two forms of the paper. Norm, convolution
    and projections around the cell belong to xLSTM's block. Beck et al., "xLSTM: Extended long short-term memory"
    (arXiv 2405.04517).

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.SLSTMCell(3, 8))
    """

    GATES = 4

    def __init__(self, input_size: int, hidden_size: int, heads: int = 1, **factory: Any) -> None:
        super().__init__(input_size, hidden_size, **factory)
        with check_arguments(self) as check:
            fault = f"heads is {heads}, wanted a divisor of hidden_size, which is {hidden_size}"
            check.require(heads > 0 and hidden_size % heads == 0, fault)
        self.heads = heads
        self.weight_hh = self.new_parameter(4, heads, hidden_size // heads, hidden_size // heads)
        self.bias = self.new_parameter(4 * hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as other cells do. Biases are 0, those of the forget gate are 1, so that it is open at first."""
        super().reset_parameters()
        with torch.no_grad():
            self.bias.zero_()
            self.bias[self.hidden_size : 2 * self.hidden_size] = 1.0

    def initial_state(self, x: Tensor) -> tuple[Tensor, ...]:
        """``(h, c, n, m)``, N x H each: zeros, and for ``m`` half the lowest number of its dtype."""
        # Half of it, because the first step adds log f, and the sum must not overflow to -inf.
        h, c, n, m = (self.zero_state(x) for _ in range(4))
        return h, c, n, m + torch.finfo(m.dtype).min / 2

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        h, c, n, m = state
        of_h = torch.einsum("...hd,ghde->...ghe", h.unflatten(-1, (self.heads, -1)), self.weight_hh)
        i, f, z, o = (F.linear(x, self.weight_ih, self.bias) + of_h.flatten(-3)).chunk(4, -1)
        log_f = F.logsigmoid(f) + m
        m = torch.maximum(log_f, i)
        # One of the two exponents is 0 and the other is negative, so neither factor overflows.
        i, f = torch.exp(i - m), torch.exp(log_f - m)
        c = f * c + i * z.tanh()
        n = f * n + i
        h = o.sigmoid() * c / n
        return h, (h, c, n, m)


class ConvLSTMCell(nn.Module):
    """An LSTM with images as states, N x H x height x width, and as inputs, N x D x height x width.

    ``input_size`` and ``hidden_size`` are the channels D and H. Only ``conv_ih`` has a bias. Both convolutions keep
    height and width by zero padding, so kernels are odd. Their results are the channels of i, f, g, o, H each. Shi et
    al., "Convolutional LSTM network" (arXiv 1506.04214), without its peephole weights, which would restrict the cell to
    one size of image.

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.ConvLSTMCell(1, 4))
    """

    def __init__(self, input_size: int, hidden_size: int, kernel_size: int = 3, **factory: Any) -> None:
        super().__init__()
        with check_arguments(self) as check:
            check.count("input_size", input_size)
            check.count("hidden_size", hidden_size)
            fault = f"kernel_size is {kernel_size}, wanted an odd number, so that images keep their size"
            check.require(kernel_size > 0 and kernel_size % 2 == 1, fault)
        self.hidden_size = hidden_size
        options: dict[str, Any] = {"padding": kernel_size // 2, **factory}
        self.conv_ih = nn.Conv2d(input_size, 4 * hidden_size, kernel_size, **options)
        self.conv_hh = nn.Conv2d(hidden_size, 4 * hidden_size, kernel_size, bias=False, **options)

    def reset_parameters(self) -> None:
        """Draw the weights as PyTorch's convolutions do."""
        self.conv_ih.reset_parameters()
        self.conv_hh.reset_parameters()

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(h, c)``: N x H x height x width zeros each, for the size of the first image, with the weights' dtype."""
        # The axes from the back: that of rows can be missing.
        zeros = self.conv_hh.weight.new_zeros((*x.shape[:-3], self.hidden_size, *x.shape[-2:]))
        return zeros, zeros

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, g, o = (self.conv_ih(x) + self.conv_hh(h)).chunk(4, -3)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, (h, c)
