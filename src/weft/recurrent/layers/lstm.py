"""``torch.nn.LSTM`` with another engine: the same arguments, parameters, keys, results."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.recurrent.layers.drop_in import DropIn
from weft.recurrent.layers.steps import LSTMStep


class LSTM(DropIn, nn.LSTM):
    """A drop-in for ``torch.nn.LSTM`` (Hochreiter and Schmidhuber, 1997; projection: Sak et al., arXiv 1402.1128).

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype: as
            torch's, with the same errors.
        how: handed to :class:`weft.recurrent.Recurrent` for every layer and direction, such as ``backend=``.

    The class is a ``torch.nn.LSTM``: weights load both ways, and initialisation is torch's. Gates are in the order
    i, f, g, o. Dropout between layers draws the numbers that torch draws on the CPU. See `forward` for the call.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype
        )
        self.begin(how)

    def make_step(self, weights: Mapping[str, Tensor | None]) -> LSTMStep:
        """The cell of one layer and direction."""
        return LSTMStep(weights)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the hidden state and of the cell state."""
        return (self.proj_size or self.hidden_size, self.hidden_size)
