"""The LSTM and its variants: a cell state c, which gates forget, feed and show.

c ------- * f ------ + ------------------ c'        f  forget gate      i  input gate
                     |              |               g  candidate        o  output gate
                   i * g          tanh
                                    |
                                  * o --- h'        y_t = h'

The gates of the variants are made of the input x and the hidden state h by

    LSTM          W_ih x + W_hh h + b
    layer norm    LN(W_ih x) + LN(W_hh h) + b                             and LN(c) before the output
    MI            alpha * (W_ih x) * (W_hh h) + beta_ih * (W_ih x) + beta_hh * (W_hh h) + b
    convolution   the same as the LSTM, with convolutions instead of products: x and h are images

Inputs are N x D, ``h`` and ``c`` N x H each, unless said otherwise. Constructors raise ``UsageError`` as in `gated`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.recurrent.cells.gated import GatedCell, MemoryCell, OneBiasCell, TorchGatedCell, checking


class LSTMCell(TorchGatedCell, MemoryCell):
    """The LSTM with a forget gate.

    ``torch.nn.LSTMCell``'s parameters; blocks in the order i, f, g, o. ``recurrent_dropout``: see `TorchGatedCell`.
    Hochreiter and Schmidhuber (1997); Gers, Schmidhuber and Cummins (2000).

    Example:
        >>> weft.Recurrent(weft.recurrent.cells.LSTMCell(3, 8), backend="eager")(torch.randn(5, 2, 3)).last[0].shape
        torch.Size([2, 8])
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
    """An LSTM whose gates see the cell state: i and f the old one, o the new one, each entry its own.

    ``peephole`` is 3 x H, for i, f, o; ``bias`` has the blocks i, f, g, o. Gers, Schraudolph and Schmidhuber, "Learning
    precise timing with LSTM recurrent networks", JMLR 3 (2002).

    Example:
        >>> cell = weft.recurrent.cells.PeepholeLSTMCell(3, 8)
        >>> weft.Recurrent(cell, backend="eager")(torch.randn(5, 2, 3)).last[0].shape
        torch.Size([2, 8])
    """

    def add_parameters(self) -> None:
        self.peephole = self.parameter(3, self.hidden_size)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, g, o = (F.linear(x, self.weight_ih, self.bias) + F.linear(h, self.weight_hh)).chunk(4, -1)
        see_i, see_f, see_o = self.peephole.unbind(0)
        c = torch.sigmoid(f + see_f * c) * c + torch.sigmoid(i + see_i * c) * g.tanh()
        h = torch.sigmoid(o + see_o * c) * c.tanh()
        return h, (h, c)


class LayerNormLSTMCell(OneBiasCell, MemoryCell):
    """An LSTM with layer norm on both projections, over all four gates at once, and on the cell state that is shown.

    Gates in the order i, f, g, o. The norms ``norm_ih`` and ``norm_hh`` have gains only: their biases would add up with
    ``bias``. Ba, Kiros and Hinton, "Layer normalization" (arXiv 1607.06450), equations 20 to 22.

    Example:
        >>> cell = weft.recurrent.cells.LayerNormLSTMCell(3, 8)
        >>> weft.Recurrent(cell, backend="eager")(torch.randn(5, 2, 3)).last[0].shape
        torch.Size([2, 8])
    """

    def add_parameters(self) -> None:
        self.norm_ih, self.norm_hh = (nn.LayerNorm(4 * self.hidden_size, bias=False) for _ in range(2))
        self.norm_cell = nn.LayerNorm(self.hidden_size)
        self.to(self.weight_ih.device, self.weight_ih.dtype)

    def reset_parameters(self) -> None:
        """Weights and bias as an LSTM's; gains one, the bias of the cell's norm zero."""
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

    Gates in the order i, f, g, o. ``alpha``, ``beta_ih`` and ``beta_hh``, 4H each, begin with one. Wu, Zhang, Zhang,
    Bengio and Salakhutdinov, "On multiplicative integration with recurrent neural networks" (arXiv 1606.06630).

    Example:
        >>> weft.Recurrent(weft.recurrent.cells.MILSTMCell(3, 8), backend="eager")(torch.randn(5, 2, 3)).last[0].shape
        torch.Size([2, 8])
    """

    def add_parameters(self) -> None:
        self.alpha, self.beta_ih, self.beta_hh = (self.parameter(4 * self.hidden_size) for _ in range(3))

    def reset_parameters(self) -> None:
        """Weights and bias as an LSTM's; alpha and both betas one."""
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
    """xLSTM's sLSTM: exponential input gate, normaliser ``n``, stabiliser ``m``; heads mix only within themselves.

        weighted sum    c' = f * c + i * z          i = exp(i~)     may overflow ...
        its weights     n' = f * n + i              f = sigmoid(f~)
        shown           h' = o * c' / n'            a weighted mean of all z so far

        ... so c and n are kept divided by exp(m), where m follows the largest weight; h does not change by that:
                        m' = max(log f + m, i~)     i = exp(i~ - m'),   f = exp(log f + m - m')

    A cell that has seen nothing has no weight yet: m begins with a number so low that the first step takes m' = i~.

    State ``(h, c, n, m)``, N x H each. ``weight_ih`` 4H x D and ``bias`` 4H have the blocks i, f, z, o; ``weight_hh``
    holds the blocks of a block diagonal matrix for each of them, 4 x heads x (H / heads) x (H / heads), the old hidden
    state along the last axis but one. The forget gate is a sigmoid, one of the two forms of the paper. Norm,
    convolution and projections around the cell belong to xLSTM's block. Beck et al., "xLSTM: Extended long short-term
    memory" (arXiv 2405.04517).

    Example:
        >>> weft.Recurrent(weft.recurrent.cells.SLSTMCell(3, 8), backend="eager")(torch.randn(5, 2, 3)).last[0].shape
        torch.Size([2, 8])
    """

    GATES = 4

    def __init__(self, input_size: int, hidden_size: int, heads: int = 1, **factory: Any) -> None:
        super().__init__(input_size, hidden_size, **factory)
        with checking(self) as check:
            fault = f"heads is {heads}, wanted a divisor of hidden_size, which is {hidden_size}"
            check.that(heads > 0 and hidden_size % heads == 0, fault)
        self.heads = heads
        self.weight_hh = self.parameter(4, heads, hidden_size // heads, hidden_size // heads)
        self.bias = self.parameter(4 * hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights as other cells'; biases zero, those of the forget gate one, so that it begins open."""
        super().reset_parameters()
        with torch.no_grad():
            self.bias.zero_()
            self.bias[self.hidden_size : 2 * self.hidden_size] = 1.0

    def initial_state(self, x: Tensor) -> tuple[Tensor, ...]:
        """``(h, c, n, m)``, N x H each: zeros, but ``m`` half the lowest number of its dtype."""
        h, c, n, m = (self.zeros(x) for _ in range(4))
        return h, c, n, m + torch.finfo(m.dtype).min / 2

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
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


class ConvLSTMCell(nn.Module):
    """An LSTM whose states are images, N x H x height x width, like its inputs, N x D x height x width.

    ``input_size`` and ``hidden_size`` are the channels D and H. ``conv_ih`` has the bias, ``conv_hh`` none; both keep
    height and width by zero padding, so kernels are odd, and give the channels of i, f, g, o, H each. Shi et al.,
    "Convolutional LSTM network" (arXiv 1506.04214), without its peephole weights, which would tie the cell to one size
    of image.

    Example:
        >>> cell = weft.recurrent.cells.ConvLSTMCell(1, 4)
        >>> weft.Recurrent(cell, backend="eager")(torch.randn(5, 2, 1, 8, 8)).outputs.shape
        torch.Size([5, 2, 4, 8, 8])
    """

    def __init__(self, input_size: int, hidden_size: int, kernel_size: int = 3, **factory: Any) -> None:
        super().__init__()
        with checking(self) as check:
            check.count("input_size", input_size)
            check.count("hidden_size", hidden_size)
            fault = f"kernel_size is {kernel_size}, wanted an odd number, so that images keep their size"
            check.that(kernel_size > 0 and kernel_size % 2 == 1, fault)
        self.hidden_size = hidden_size
        options: dict[str, Any] = {"padding": kernel_size // 2, **factory}
        self.conv_ih = nn.Conv2d(input_size, 4 * hidden_size, kernel_size, **options)
        self.conv_hh = nn.Conv2d(hidden_size, 4 * hidden_size, kernel_size, bias=False, **options)

    def reset_parameters(self) -> None:
        """Draw the weights anew, as convolutions begin in PyTorch."""
        self.conv_ih.reset_parameters()
        self.conv_hh.reset_parameters()

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(h, c)``: N x H x height x width zeros each, as large as the first image, with the weights' dtype."""
        zeros = self.conv_hh.weight.new_zeros((*x.shape[:-3], self.hidden_size, *x.shape[-2:]))
        return zeros, zeros

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, g, o = (self.conv_ih(x) + self.conv_hh(h)).chunk(4, -3)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, (h, c)
