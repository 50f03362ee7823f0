"""Cells whose state is one hidden state: Elman, the GRU and its variants, recurrent highways; and the bases of cells.

Most cells have two weight matrices, cut into blocks of H rows, and a state that begins with zeros:

    weight_ih   (GATES * H) x D     of the input             x_t      N x D
    weight_hh   (GATES * H) x H     of the hidden state      h_{t-1}  N x H

    F.linear(x_t, weight_ih).chunk(GATES, -1)   one block for each gate, in the order that the cell's docstring gives

Names and layout are those of ``torch.nn.LSTMCell`` and its kin. A GRU's state is moved by a gate part of the way to a
candidate n, h' = (1 - z) * n + z * h:

    GRU, reset after     n = tanh(W x + b + r * (U h + d))    torch.nn.GRU's form, and cuDNN's
    GRU, reset before    n = tanh(W x + b + U (r * h))        as it was published
    minimal gated        the gate f is both: n = tanh(W x + b + U (f * h)), h' = (1 - f) * h + f * n
    light GRU            no reset:         n = relu(W x + b + U h)
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import UsageError, listed

Device = torch.device | str | int | None
"""Device and dtype of parameters, as PyTorch's own modules take them."""


def size_faults(**sizes: int) -> list[str]:
    """A fault for every size below 1, by its argument's name."""
    return [f"{name} is {size}, wanted at least 1" for name, size in sizes.items() if size < 1]


def rate_fault(name: str, rate: object) -> list[str]:
    """A fault if ``rate`` is no probability."""
    if isinstance(rate, int | float) and 0 <= rate <= 1:
        return []
    return [f"{name} is {rate!r}, wanted a number from 0 to 1"]


def refuse(cell: object, faults: Sequence[str]) -> None:
    """Raise ``UsageError`` that lists the faults, if there are any."""
    if faults:
        raise UsageError(listed(f"invalid arguments of {type(cell).__name__}:", faults))


class GatedCell(nn.Module):
    """Base of cells over rows: ``x_t`` N x D, hidden state N x H; the rows' axis may be missing.

    Raises ``UsageError`` for a size below 1.
    """

    GATES: ClassVar[int]

    def __init__(self, input_size: int, hidden_size: int, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        refuse(self, size_faults(input_size=input_size, hidden_size=hidden_size))
        self.input_size = input_size
        self.hidden_size = hidden_size
        rows = self.GATES * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size, device=device, dtype=dtype))
        self.weight_hh = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))

    def parameter(self, *shape: int) -> nn.Parameter:
        """One more parameter with the dtype and device of the weights, its values still open."""
        return nn.Parameter(self.weight_ih.new_empty(shape))

    def biases(self, wanted: bool) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """The two biases that PyTorch's cells have, GATES * H values each; or none."""
        rows = len(self.weight_ih)
        return (self.parameter(rows), self.parameter(rows)) if wanted else (None, None)

    def reset_parameters(self) -> None:
        """Uniform between plus and minus ``1 / sqrt(H)``, as PyTorch's cells begin."""
        bound = self.hidden_size**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def zeros(self, x: Tensor) -> Tensor:
        """N x H zeros with the weights' dtype and device, for the rows of ``x``."""
        return self.weight_hh.new_zeros((*x.shape[:-1], self.hidden_size))

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.input_size}, {self.hidden_size}"


class HiddenCell(GatedCell):
    """Base of cells whose state is the hidden state alone, which is also the output."""

    def initial_state(self, x: Tensor) -> Tensor:
        """``h``: N x H zeros."""
        return self.zeros(x)


class MemoryCell(GatedCell):
    """Base of the LSTM's kin: the state is ``(h, c)``, hidden state and cell state, and the output is ``h``."""

    GATES = 4

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(h, c)``: N x H zeros each."""
        return self.zeros(x), self.zeros(x)


class ElmanCell(HiddenCell):
    """``h' = tanh(W_ih x + b_ih + W_hh h + b_hh)``, or with relu.

    ``x_t`` N x D; state and output ``h`` N x H. Parameters as ``torch.nn.RNNCell``'s, which load both ways.
    Elman, "Finding structure in time", Cognitive Science 14 (1990).

    Raises ``UsageError`` for a size below 1 or another nonlinearity.

    Example:
        >>> from weft.recurrent.cells import ElmanCell
        >>> cell, x = ElmanCell(3, 8), torch.randn(2, 3)
        >>> y, h = cell(x, cell.initial_state(x))
        >>> y.shape
        torch.Size([2, 8])
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


class GRUCell(HiddenCell):
    """The GRU in the form that PyTorch has: the reset gate acts after the product ("reset after").

    ``x_t`` N x D; state and output ``h`` N x H. Parameters as ``torch.nn.GRUCell``'s, which load both ways; blocks in
    the order r, z, n. ``recurrent_dropout`` drops entries of the candidate n, at every step anew and in training only
    (Semeniuta, Severyn and Barth, arXiv 1603.05118).

    Raises ``UsageError`` for a size below 1 or a rate outside 0 to 1.

    Example:
        >>> from weft.recurrent.cells import GRUCell
        >>> cell, x = GRUCell(3, 8), torch.randn(2, 3)
        >>> y, h = cell(x, cell.initial_state(x))
        >>> y.shape
        torch.Size([2, 8])
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

    Example:
        >>> from weft.recurrent.cells import ResetBeforeGRUCell
        >>> cell, x = ResetBeforeGRUCell(3, 8), torch.randn(2, 3)
        >>> y, h = cell(x, cell.initial_state(x))
        >>> y.shape
        torch.Size([2, 8])
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

    Example:
        >>> from weft.recurrent.cells import MinimalGatedCell
        >>> cell, x = MinimalGatedCell(3, 8), torch.randn(2, 3)
        >>> y, h = cell(x, cell.initial_state(x))
        >>> y.shape
        torch.Size([2, 8])
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

    Example:
        >>> from weft.recurrent.cells import LightGRUCell
        >>> cell, x = LightGRUCell(3, 8), torch.randn(2, 3)
        >>> y, h = cell(x, cell.initial_state(x))
        >>> y.shape
        torch.Size([2, 8])
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


class RHNCell(HiddenCell):
    """A recurrent highway network with coupled gates, ``depth`` layers within a step; the first sees the input.

    ``x_t`` N x D; state and output ``h`` N x H. ``weight_hh`` is L x 2H x H and ``bias`` L x 2H, one for each layer;
    blocks in the order t, n. The bias of t begins with -2, so that a step changes little at first. Zilly, Srivastava,
    Koutnik and Schmidhuber, "Recurrent highway networks" (arXiv 1607.03474).

    Raises ``UsageError`` for a size or depth below 1.

    Example:
        >>> from weft.recurrent.cells import RHNCell
        >>> cell, x = RHNCell(3, 8), torch.randn(2, 3)
        >>> y, h = cell(x, cell.initial_state(x))
        >>> y.shape
        torch.Size([2, 8])
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
