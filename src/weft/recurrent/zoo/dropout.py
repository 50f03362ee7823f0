"""Dropout with one mask for a whole sequence, drawn where the sequence begins and carried in the state.

    initial_state(x_0)      draws    state = (the cell's state, masks)
    every step              x * mask,  h * mask  ->  cell  ->  (new state, the same masks)

So chunks and streams go on with their masks, rows that are reset get back the mask that they began with, and a step
itself draws nothing: it is a pure function, which can be captured.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import UsageError
from weft.core.tree import flatten, unflatten
from weft.recurrent.zoo.arguments import refuse
from weft.recurrent.zoo.rates import Rates, rates_faults, rates_for
from weft.recurrent.zoo.wrapper import Wrapper


class Masked(NamedTuple):
    """The state of a cell with dropout."""

    cell: Any
    """The state of the wrapped cell."""
    masks: tuple[Tensor, ...]
    """0 or 1 / (1 - rate), for every tensor of input and state that has a rate, in their order; ones in eval mode."""


class SequenceDropout(Wrapper):
    """Variational dropout: the same entries of inputs and states are dropped at every step of a sequence.

    Args:
        cell: the cell around which it is put.
        inputs: the rate for ``x_t``; one for all its tensors, or nested as it is.
        states: the rate for the state that a step gets; one for all its tensors, or nested as it is: ``(0.25, 0)``
            drops of an LSTM's ``(h, c)`` only ``h``, as the paper does.

    Every row has masks of its own. In eval mode nothing is dropped. The state is :class:`Masked`; to begin with a
    state of your own, give ``initial_state(x_0, state)``. Gal and Ghahramani, "A theoretically grounded application of
    dropout in recurrent neural networks" (arXiv 1512.05287).

    Raises ``UsageError`` for rates outside 0 to 1, or for tensors without floating-point numbers, and ``SpecError`` if
    rates are nested otherwise than what they are for.
    """

    def __init__(self, cell: nn.Module, *, inputs: Rates = 0.0, states: Rates = 0.0) -> None:
        super().__init__(cell)
        refuse(self, rates_faults("inputs", inputs) + rates_faults("states", states))
        self.inputs = inputs
        self.states = states

    @property
    def initial_state(self) -> Callable[..., Masked]:
        """A function of the first input, and of the wrapped cell's state where that is not to be its own first one."""
        return self._begin

    def _begin(self, x: Any, state: Any = None) -> Masked:
        if state is None:
            own = super().initial_state
            if own is None:
                raise UsageError(
                    f"{type(self.cell).__name__} in SequenceDropout has no initial state: "
                    "give the network state=dropout.initial_state(x[0], state)"
                )
            state = own(x)
        leaves, rates = self._leaves(x, state)
        ones = [torch.ones_like(leaf) for leaf, rate in zip(leaves, rates, strict=True) if rate]
        drawn = [F.dropout(one, rate, self.training) for one, rate in zip(ones, filter(None, rates), strict=True)]
        return Masked(state, tuple(drawn))

    def forward(self, x: Any, state: Masked) -> tuple[Any, Masked]:
        """One step: ``(y, new_state)``."""
        before = state.cell
        if self.training:
            leaves, rates = self._leaves(x, before)
            masks = iter(state.masks)
            kept = [leaf * next(masks) if rate else leaf for leaf, rate in zip(leaves, rates, strict=True)]
            x, before = unflatten(flatten((x, before))[1], kept)
        y, new = self.inner(x, before)
        return y, Masked(new, state.masks)

    def _leaves(self, x: Any, state: Any) -> tuple[list[Any], list[float]]:
        """All tensors of input and state, and the rate of each."""
        rates = [*rates_for("inputs", self.inputs, x), *rates_for("states", self.states, state)]
        return flatten((x, state))[0], rates

    def extra_repr(self) -> str:
        """The rates."""
        return f"inputs={self.inputs}, states={self.states}"
