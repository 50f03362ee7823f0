"""Zoneout: now and then an entry of the state sleeps through a step.

training     new = old where rand < rate, else new           a mask at every step anew
eval         new = rate * old + (1 - rate) * new             what is expected
"""

from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.core.tree import difference, flatten, unflatten
from weft.recurrent.zoo.arguments import refuse
from weft.recurrent.zoo.rates import Rates, rates_faults, rates_for
from weft.recurrent.zoo.wrapper import Wrapper


class Zoneout(Wrapper):
    """A cell whose states keep each entry at random, in training; in eval mode their expectation.

    Args:
        cell: the cell around which it is put.
        rate: the probability of keeping an entry, one for all states or nested as the state is: ``(0.5, 0.05)`` for the
            ``(h, c)`` of an LSTM.

    An output that is one of the states, as an LSTM's ``h`` is, is zoned out with it. A state that the cell returns
    untouched stays untouched. Krueger et al., "Zoneout" (arXiv 1606.01305).

    Raises ``UsageError`` for rates outside 0 to 1 or for states without floating-point numbers, ``SpecError`` if rates
    are nested otherwise than the state.
    """

    def __init__(self, cell: nn.Module, rate: Rates) -> None:
        super().__init__(cell)
        refuse(self, rates_faults("rate", rate))
        self.rate = rate

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        """One step: ``(y, new_state)``."""
        y, new = self.inner(x, state)
        before, structure = flatten(state)
        after, seen = flatten(new)
        fault = difference(structure, seen, "state")
        if fault:
            raise SpecError(f"the cell in Zoneout returned a state that is not nested as the one that it got: {fault}")
        rates = rates_for("rate", self.rate, state)
        mixed = [self._mixed(*each) for each in zip(before, after, rates, strict=True)]
        instead = {id(leaf): mix for leaf, mix in zip(after, mixed, strict=True)}
        ys, form = flatten(y)
        return unflatten(form, [instead.get(id(leaf), leaf) for leaf in ys]), unflatten(structure, mixed)

    def _mixed(self, old: Tensor, new: Tensor, rate: float) -> Tensor:
        if not rate or old is new:
            return new
        if self.training:
            return torch.where(torch.rand_like(new) < rate, old, new)
        return new + rate * (old - new)

    def extra_repr(self) -> str:
        """The rates."""
        return f"rate={self.rate}"
