"""Cells with one hidden state (Elman, the GRU and its variants, recurrent highways), and base classes.

Most cells have two weight matrices, divided into blocks of H rows, and an initial state of zeros. One matrix per gate
would be as clear, but then a step needs a product per gate, and weights of PyTorch's cells do not load.

    weight_ih   (GATES * H) x D     of the input             x_t      N x D
    weight_hh   (GATES * H) x H     of the hidden state      h_{t-1}  N x H

    F.linear(x_t, weight_ih).chunk(GATES, -1)   one block for each gate, in the order that the cell's docstring gives

Names and layout are those of ``torch.nn.LSTMCell``. A gate moves a GRU's state part of the way to a candidate n,
h' = (1 - z) * n + z * h:

    GRU, reset after     n = tanh(W x + b + r * (U h + d))    torch.nn.GRU's form, and cuDNN's
    GRU, reset before    n = tanh(W x + b + U (r * h))        the published form
    minimal gated        one gate f: n = tanh(W x + b + U (f * h)), h' = (1 - f) * h + f * n
    light GRU            no reset:         n = relu(W x + b + U h)

Inputs are N x D, states and outputs N x H. The axis of rows can be missing. Constructors take ``device`` and ``dtype``
of the parameters, and raise ``UsageError`` for a size below 1 and for other arguments out of range.
"""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweft.core.validation import Validator

Device = torch.device | str | int | None


def check_arguments(cell: nn.Module) -> Validator:
    """The validator of a constructor's arguments, which raises all faults at once."""
    return Validator(f"invalid arguments of {type(cell).__name__}")


class GatedCell(nn.Module):
    """Base of all cells here: input and hidden size, and two weight matrices with GATES blocks."""

    GATES: ClassVar[int]

    def __init__(self, input_size: int, hidden_size: int, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        with check_arguments(self) as check:
            check.count("input_size", input_size)
            check.count("hidden_size", hidden_size)
        self.input_size = input_size
        self.hidden_size = hidden_size
        rows = self.GATES * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size, device=device, dtype=dtype))
        self.weight_hh = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))

    def new_parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter with the dtype and device of the weights."""
        return nn.Parameter(self.weight_ih.new_empty(shape))

    def reset_parameters(self) -> None:
        """Draw uniformly between plus and minus ``1 / sqrt(H)``, as PyTorch's cells do."""
        bound = self.hidden_size**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def zero_state(self, x: Tensor) -> Tensor:
        """N x H zeros for the rows of ``x``."""
        # In the dtype of the weights, not of the input, which autocast can have reduced.
        return self.weight_hh.new_zeros((*x.shape[:-1], self.hidden_size))

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


class HiddenCell(GatedCell):
    """Base of cells with the hidden state as their only state, which is also the output."""

    def initial_state(self, x: Tensor) -> Tensor:
        """``h``: N x H zeros."""
        return self.zero_state(x)


class MemoryCell(GatedCell):
    """Base of LSTM variants: the state is ``(h, c)``, hidden state and cell state, and the output is ``h``."""

    GATES = 4

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(h, c)``: N x H zeros each."""
        return self.zero_state(x), self.zero_state(x)


class OneBiasCell(GatedCell):
    """Base of cells with one ``bias``, GATES * H values."""

    def __init__(self, input_size: int, hidden_size: int, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__(input_size, hidden_size, device, dtype)
        self.bias = self.new_parameter(len(self.weight_ih))
        self.add_parameters()
        self.reset_parameters()

    def add_parameters(self) -> None:
        """Create further parameters of a subclass, before all are initialised."""


class TorchGatedCell(GatedCell):
    """Base of cells with the parameters of PyTorch's cells, ``bias_ih`` and ``bias_hh``, which load both ways.

    In training, every step drops other entries of the candidate, at the rate ``recurrent_dropout``. The state itself
    loses nothing. Semeniuta, Severyn and Barth, "Recurrent dropout without memory loss" (arXiv 1603.05118).
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
        with check_arguments(self) as check:
            check.number("recurrent_dropout", recurrent_dropout, most=1.0)
        self.recurrent_dropout = recurrent_dropout
        rows = len(self.weight_ih)
        self.bias_ih, self.bias_hh = (self.new_parameter(rows), self.new_parameter(rows)) if bias else (None, None)
        self.reset_parameters()


class ElmanCell(TorchGatedCell, HiddenCell):
    """``h' = tanh(W_ih x + b_ih + W_hh h + b_hh)``, or with relu. The parameters are those of ``torch.nn.RNNCell``.

    Elman, "Finding structure in time" (1990).

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.ElmanCell(3, 8))
    """

    GATES = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        **factory: Any,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, **factory)
        with check_arguments(self) as check:
            check.choice("nonlinearity", nonlinearity, ("tanh", "relu"))
        self.nonlinearity = nonlinearity

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        mixed = F.linear(x, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        h = mixed.tanh() if self.nonlinearity == "tanh" else mixed.relu()
        return h, h


class GRUCell(TorchGatedCell, HiddenCell):
    """The GRU in PyTorch's form: the reset gate acts after the product ("reset after").

    Blocks in the order r, z, n. ``torch.nn.GRUCell``'s parameters. ``recurrent_dropout``: see `TorchGatedCell`.

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.GRUCell(3, 8))
    """

    GATES = 3

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        r_x, z_x, n_x = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, -1)
        r_h, z_h, n_h = F.linear(h, self.weight_hh, self.bias_hh).chunk(3, -1)
        z = torch.sigmoid(z_x + z_h)
        n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
        n = F.dropout(n, self.recurrent_dropout, self.training)
        h = (1 - z) * n + z * h
        return h, h


class ResetBeforeGRUCell(OneBiasCell, HiddenCell):
    """The GRU in the published form: the reset gate acts on the hidden state, before the product.

    Blocks in the order r, z, n. A step needs two dependent products, and that of :class:`GRUCell` only one.
    Cho et al., "Learning phrase representations using RNN encoder-decoder" (arXiv 1406.1078).

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.ResetBeforeGRUCell(3, 8))
    """

    GATES = 3

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        r, z, n = F.linear(x, self.weight_ih, self.bias).chunk(3, -1)
        r_h, z_h = F.linear(h, self.weight_hh[: 2 * self.hidden_size]).chunk(2, -1)
        r, z = torch.sigmoid(r + r_h), torch.sigmoid(z + z_h)
        n = torch.tanh(n + F.linear(r * h, self.weight_hh[2 * self.hidden_size :]))
        h = (1 - z) * n + z * h
        return h, h


class MinimalGatedCell(OneBiasCell, HiddenCell):
    """A GRU with one gate, which resets the state for the candidate and then mixes the two. Blocks in the order f, n.

    Zhou, Wu, Zhang and Zhou, "Minimal gated unit for recurrent neural networks" (arXiv 1603.09420).

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.MinimalGatedCell(3, 8))
    """

    GATES = 2

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        f, n = F.linear(x, self.weight_ih, self.bias).chunk(2, -1)
        of_f, of_n = self.weight_hh.chunk(2, 0)
        f = torch.sigmoid(f + F.linear(h, of_f))
        n = torch.tanh(n + F.linear(f * h, of_n))
        h = (1 - f) * h + f * n
        return h, h


class LightGRUCell(OneBiasCell, HiddenCell):
    """A GRU without a reset gate and with relu in place of tanh. Blocks in the order z, n.

    Ravanelli, Brakel, Omologo and Bengio, "Light gated recurrent units for speech recognition" (arXiv 1803.10225). The
    paper's batch norm over all steps cannot be part of a step, so biases take its place. Without the norm, relu can let
    the state grow. The initial recurrent blocks are therefore orthogonal, which preserves its length.

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.LightGRUCell(3, 8))
    """

    GATES = 2

    def reset_parameters(self) -> None:
        """Draw as other cells do, but with orthogonal blocks of ``weight_hh`` and a bias of zero."""
        super().reset_parameters()
        with torch.no_grad():
            for block in self.weight_hh.chunk(2, 0):
                nn.init.orthogonal_(block)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z, n = (F.linear(x, self.weight_ih, self.bias) + F.linear(h, self.weight_hh)).chunk(2, -1)
        z = z.sigmoid()
        h = (1 - z) * n.relu() + z * h
        return h, h


class RHNCell(HiddenCell):
    """A recurrent highway network with coupled gates and ``depth`` layers within a step. The first reads the input.

    ``weight_hh`` is L x 2H x H and ``bias`` L x 2H, one for each layer, with blocks in the order t, n. The initial bias
    of t is -2, so that a step changes little at first. Zilly, Srivastava, Koutnik and Schmidhuber, "Recurrent highway
    networks" (arXiv 1607.03474).

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.RHNCell(3, 8))
    """

    GATES = 2

    def __init__(self, input_size: int, hidden_size: int, depth: int = 3, **factory: Any) -> None:
        super().__init__(input_size, hidden_size, **factory)
        with check_arguments(self) as check:
            check.count("depth", depth)
        self.depth = depth
        self.weight_hh = self.new_parameter(depth, 2 * hidden_size, hidden_size)
        self.bias = self.new_parameter(depth, 2 * hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as other cells do. Biases are 0, those of the transform gate t are -2."""
        super().reset_parameters()
        with torch.no_grad():
            self.bias.zero_()
            self.bias[:, : self.hidden_size] = -2.0

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        of_x = F.linear(x, self.weight_ih)
        # The input is projected once, outside of the layers, because only the first one reads it.
        for layer, (weight, bias) in enumerate(zip(self.weight_hh, self.bias, strict=True)):
            mixed = F.linear(h, weight, bias)
            t, n = (mixed if layer else mixed + of_x).chunk(2, -1)
            t = t.sigmoid()
            h = t * n.tanh() + (1 - t) * h
        return h, h
