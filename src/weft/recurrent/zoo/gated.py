"""What most cells of the zoo share: two weight matrices, cut into blocks of H rows, and a state that begins with zeros.

    weight_ih   (GATES * H) x D     of the input             x_t      N x D
    weight_hh   (GATES * H) x H     of the hidden state      h_{t-1}  N x H

    F.linear(x_t, weight_ih).chunk(GATES, -1)   one block for each gate, in the order that the cell's docstring tells

Names and layout are those of ``torch.nn.LSTMCell`` and its kin. What makes a cell that cell stands in its ``forward``.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from weft.recurrent.zoo.arguments import Device, refuse, size_faults


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
