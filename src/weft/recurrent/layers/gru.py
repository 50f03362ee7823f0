"""``torch.nn.GRU`` with another engine: the same arguments, parameters, keys, results."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.recurrent.layers.drop_in import DropIn
from weft.recurrent.layers.steps import GRUStep


class GRU(DropIn, nn.GRU):
    """A drop-in for ``torch.nn.GRU`` (Cho et al., arXiv 1406.1078, with the reset gate behind the projection).

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as torch's, with
            the same errors.
        how: handed to :class:`weft.recurrent.Recurrent` for every layer and direction, such as ``backend=``.

    The class is a ``torch.nn.GRU``: weights load both ways, and initialisation is torch's. Gates are in the order
    r, z, n. Dropout between layers draws the numbers that torch draws on the CPU. See `forward` for the call.
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
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> None:
        options = {"bidirectional": bidirectional, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, **options)
        self.begin(how)

    def make_step(self, weights: Mapping[str, Tensor | None]) -> GRUStep:
        """The cell of one layer and direction."""
        return GRUStep(weights)
