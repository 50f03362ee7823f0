"""Wrappers around any cell: a shortcut, zoneout, and dropout with one mask for a whole sequence.

    Residual(Zoneout(nn.LSTMCell(8, 8), 0.1))      a wrapper is a cell, so it can be wrapped again

The wrapped cell is the child ``cell``. A rate is one number for all tensors of floating-point numbers (counters and
masks are left alone), or numbers nested as the value is: ``(0.1, 0.0)`` for a state (h, c) is h at 0.1, c never.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import SpecError, UsageError
from weft.core.pytree import difference, flatten, map_leaves, structure_paths, unflatten
from weft.recurrent.cell import adapt
from weft.recurrent.cells.gated import rate_fault, refuse


class Wrapper(nn.Module):
    """Base of cells around a cell: one of these, one of yours, or one of PyTorch's as it is."""

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


Rates = Any
"""A number from 0 to 1, or such numbers nested as the value that they are for."""


def rates_faults(name: str, rates: Rates) -> list[str]:
    """A fault for every leaf that is no probability, by its path."""
    leaves, structure = flatten(rates)
    paths = structure_paths(structure, name)
    return [fault for path, leaf in zip(paths, leaves, strict=True) for fault in rate_fault(path, leaf)]


def rates_for(name: str, rates: Rates, value: Any) -> list[float]:
    """The rate of every leaf of ``value``.

    Raises ``SpecError`` if rates are nested otherwise than the value, and ``UsageError`` where a rate above 0 meets
    what has no floating-point numbers.
    """
    leaves, structure = flatten(value)
    floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    if isinstance(rates, int | float):
        if rates and not any(floating):
            raise UsageError(f"{name} is {rates}, but there are no floating-point numbers that it could be for")
        return [float(rates) if fits else 0.0 for fits in floating]
    given, form = flatten(rates)
    fault = difference(structure, form, name)
    if fault:
        raise SpecError(f"rates must be one number, or nested as what they are for: {fault}")
    paths = structure_paths(form, name)
    wrong = [path for path, rate, fits in zip(paths, given, floating, strict=True) if rate and not fits]
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: not 0, but for what has no floating-point numbers")
    return [float(rate) for rate in given]


class Residual(Wrapper):
    """``y' = y + x``; the state is the wrapped cell's, without the sum.

    Inputs and outputs have one shape, and if they are nested, one nesting. Wu et al., "Google's neural machine
    translation system" (arXiv 1609.08144), section 3.1; the idea is He et al.'s (arXiv 1512.03385).

    Raises ``SpecError`` if output and input differ in shape or nesting.

    Example:
        >>> from weft.recurrent.cells import GRUCell, Residual
        >>> cell, x = Residual(GRUCell(4, 4)), torch.randn(2, 4)
        >>> y, h = cell(x, cell.initial_state(x))
        >>> torch.equal(y, h + x)
        True
    """

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        """One step: ``(y + x, new_state)``."""
        y, state = self.inner(x, state)
        return map_leaves(_sum, y, x), state


def _sum(y: Any, x: Any) -> Tensor:
    seen = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in (y, x)]
    if not isinstance(y, Tensor) or not isinstance(x, Tensor) or y.shape != x.shape:
        raise SpecError(f"Residual adds input and output of a cell, but the output is {seen[0]}, the input {seen[1]}")
    return y + x


class Zoneout(Wrapper):
    """A cell whose states keep each entry at random, in training; in eval mode their expectation.

        training     new = old where rand < rate, else new           a mask at every step anew
        eval         new = rate * old + (1 - rate) * new             what is expected

    Args:
        cell: the cell around which it is put.
        rate: the probability of keeping an entry, one for all states or nested as the state is: ``(0.5, 0.05)`` for the
            ``(h, c)`` of an LSTM.

    An output that is one of the states, as an LSTM's ``h`` is, is zoned out with it. A state that the cell returns
    untouched stays untouched. Krueger et al., "Zoneout" (arXiv 1606.01305).

    Raises ``UsageError`` for rates outside 0 to 1 or for states without floating-point numbers, ``SpecError`` if rates
    are nested otherwise than the state.

    Example:
        >>> from weft.recurrent.cells import LSTMCell, Zoneout
        >>> net = weft.Recurrent(Zoneout(LSTMCell(3, 8), (0.5, 0.05)), backend="eager")
        >>> net(torch.randn(5, 2, 3)).outputs.shape
        torch.Size([5, 2, 8])
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


class Masked(NamedTuple):
    """The state of a cell with dropout."""

    cell: Any
    """The state of the wrapped cell."""
    masks: tuple[Tensor, ...]
    """0 or 1 / (1 - rate), for every tensor of input and state that has a rate, in their order; ones in eval mode."""


class SequenceDropout(Wrapper):
    """Variational dropout: the same entries of inputs and states are dropped at every step of a sequence.

        initial_state(x_0)      draws    state = (the cell's state, masks)
        every step              x * mask,  h * mask  ->  cell  ->  (new state, the same masks)

    So chunks and streams go on with their masks, rows that are reset get back the mask that they began with, and a step
    itself draws nothing: it is a pure function, which can be captured.

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

    Example:
        >>> from weft.recurrent.cells import LSTMCell, SequenceDropout
        >>> net = weft.Recurrent(SequenceDropout(LSTMCell(3, 8), inputs=0.2, states=(0.25, 0)), backend="eager")
        >>> net(torch.randn(5, 2, 3)).outputs.shape
        torch.Size([5, 2, 8])
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
