"""Wrappers around any cell: a shortcut, zoneout, and dropout with one mask for a whole sequence.

    Residual(Zoneout(nn.LSTMCell(8, 8), 0.1))      a wrapper is a cell, so it can be wrapped again

The wrapped cell is the child ``cell``. A rate is one number for all tensors of floating-point numbers (counters and
masks are left alone), or numbers nested as the value is: ``(0.1, 0.0)`` for a state (h, c) is h at 0.1, c never.
Raised are ``UsageError`` for rates outside 0 to 1 or for what has no floating-point numbers, and ``SpecError`` where
rates are nested otherwise than what they are for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import SpecError, UsageError
from weft.core.pytree import difference, flatten, map_leaves, structure_paths, unflatten
from weft.core.validation import Validator
from weft.recurrent.cell import adapt
from weft.recurrent.cells.gated import checking


class Wrapper(nn.Module):
    """Base of cells around a cell: one of these, one of yours, or one of PyTorch's as it is."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    @property
    def initial_state(self) -> Callable[..., Any] | None:
        """The wrapped cell's function of the first input, or ``None`` if that cell must be given its state."""
        return adapt(self.cell).own_initial()


Rates = Any
"""A number from 0 to 1, or such numbers nested as the value that they are for."""


def check_rates(name: str, rates: Rates, check: Validator) -> None:
    """Note every leaf that is no probability, by its path."""
    leaves, structure = flatten(rates)
    for path, leaf in zip(structure_paths(structure, name), leaves, strict=True):
        check.number(path, leaf, most=1.0)


def rates_for(name: str, rates: Rates, value: Any) -> list[float]:
    """The rate of every leaf of ``value``."""
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

    Wu et al., "Google's neural machine translation system" (arXiv 1609.08144), section 3.1; the idea is He et al.'s
    (arXiv 1512.03385). Raises ``SpecError`` if output and input differ in shape or nesting.

    Example:
        >>> cell = weft.recurrent.cells.Residual(nn.GRUCell(4, 4))
        >>> weft.Recurrent(cell, backend="eager")(torch.randn(5, 2, 4)).outputs.shape
        torch.Size([5, 2, 4])
    """

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        y, state = adapt(self.cell)(x, state, 0)
        return map_leaves(_sum, y, x), state


def _sum(y: Any, x: Any) -> Tensor:
    if not isinstance(y, Tensor) or not isinstance(x, Tensor) or y.shape != x.shape:
        seen = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in (y, x)]
        raise SpecError(f"Residual adds input and output of a cell, but the output is {seen[0]}, the input {seen[1]}")
    return y + x


class Zoneout(Wrapper):
    """A cell whose states keep each entry at random, in training; in eval mode their expectation.

        training     new = old where rand < rate, else new           a mask at every step anew
        eval         new = rate * old + (1 - rate) * new             what is expected

    ``rate`` is the probability of keeping an entry. An output that is one of the states, as an LSTM's ``h`` is, is
    zoned out with it. A state that the cell returns untouched stays untouched. Krueger et al., "Zoneout"
    (arXiv 1606.01305).

    Example:
        >>> cell = weft.recurrent.cells.Zoneout(nn.LSTMCell(3, 8), (0.5, 0.05))
        >>> weft.Recurrent(cell, backend="eager")(torch.randn(5, 2, 3)).outputs.shape
        torch.Size([5, 2, 8])
    """

    def __init__(self, cell: nn.Module, rate: Rates) -> None:
        super().__init__(cell)
        with checking(self) as check:
            check_rates("rate", rate, check)
        self.rate = rate

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        y, new = adapt(self.cell)(x, state, 0)
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
    itself draws nothing: it is a pure function, which can be captured. Every row has masks of its own. In eval mode
    nothing is dropped. The state is :class:`Masked`; to begin with a state of your own, give
    ``initial_state(x_0, state)``. Gal and Ghahramani, "A theoretically grounded application of dropout in recurrent
    neural networks" (arXiv 1512.05287); ``states=(0.25, 0)`` drops of an LSTM's ``(h, c)`` only ``h``, as they do.

    Example:
        >>> cell = weft.recurrent.cells.SequenceDropout(nn.LSTMCell(3, 8), inputs=0.2, states=(0.25, 0))
        >>> weft.Recurrent(cell, backend="eager")(torch.randn(5, 2, 3)).outputs.shape
        torch.Size([5, 2, 8])
    """

    def __init__(self, cell: nn.Module, *, inputs: Rates = 0.0, states: Rates = 0.0) -> None:
        super().__init__(cell)
        with checking(self) as check:
            check_rates("inputs", inputs, check)
            check_rates("states", states, check)
        self.inputs = inputs
        self.states = states

    @property
    def initial_state(self) -> Callable[..., Masked]:
        """A function of the first input, and of the wrapped cell's state where that is not to be its own first one."""
        return self._begin

    def _begin(self, x: Any, state: Any = None) -> Masked:
        own = super().initial_state
        if state is None and own is None:
            raise UsageError(
                f"{type(self.cell).__name__} in SequenceDropout has no initial state: "
                "give the network state=dropout.initial_state(x[0], state)"
            )
        state = own(x) if own is not None and state is None else state
        drawn = [F.dropout(torch.ones_like(leaf), rate, self.training) for leaf, rate in self._rated(x, state) if rate]
        return Masked(state, tuple(drawn))

    def forward(self, x: Any, state: Masked) -> tuple[Any, Masked]:
        before = state.cell
        if self.training:
            masks = iter(state.masks)
            kept = [leaf * next(masks) if rate else leaf for leaf, rate in self._rated(x, before)]
            x, before = unflatten(flatten((x, before))[1], kept)
        y, new = adapt(self.cell)(x, before, 0)
        return y, Masked(new, state.masks)

    def _rated(self, x: Any, state: Any) -> list[tuple[Any, float]]:
        """All tensors of input and state, each with its rate."""
        rates = [*rates_for("inputs", self.inputs, x), *rates_for("states", self.states, state)]
        return list(zip(flatten((x, state))[0], rates, strict=True))

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, states={self.states}"
