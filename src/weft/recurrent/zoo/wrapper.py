"""What wrappers of a cell share: the cell is the child ``cell``, and they begin where it begins.

Residual(Zoneout(nn.LSTMCell(8, 8), 0.1))      a wrapper is a cell, so it can be wrapped again
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from weft.recurrent.cells import adapt


class Wrapper(nn.Module):
    """Base of cells around a cell: one of the zoo, one of yours, or one of PyTorch's as it is."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def inner(self, x: Any, state: Any) -> tuple[Any, Any]:
        """One step of the wrapped cell: ``(y, new_state)``."""
        return adapt(self.cell)(x, state, 0)

    @property
    def initial_state(self) -> Callable[[Any], Any] | None:
        """The wrapped cell's function of the first input, or ``None`` if that cell must be given its state."""
        return adapt(self.cell).own_initial()
