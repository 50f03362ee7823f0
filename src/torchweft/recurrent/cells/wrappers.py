"""Wrappers around any cell: a shortcut, zoneout, and dropout with one mask for a whole sequence.

    Residual(Zoneout(nn.LSTMCell(8, 8), 0.1))      a wrapper is a cell, so it can be wrapped again

Options of each cell would not apply to PyTorch's cells or to those of users. The wrapped cell is the child ``cell``.

A rate is one number for all floating-point tensors of a value, or numbers with the nesting of that value. For a state
(h, c), ``(0.1, 0.0)`` means h at 0.1 and c never. Counters and masks have no rate. ``UsageError`` is raised for rates
outside 0 to 1 and for rates of other tensors, and ``SpecError`` for another nesting.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweft.core.errors import SpecError, UsageError
from torchweft.core.pytree import difference, flatten, map_leaves, structure_paths, unflatten
from torchweft.core.validation import Validator
from torchweft.recurrent.cell import adapt
from torchweft.recurrent.cells.gated import check_arguments


class Wrapper(nn.Module):
    """Base of cells that wrap a cell: one of this package, a custom one, or one of PyTorch's."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    @property
    def initial_state(self) -> Callable[..., Any] | None:
        """The wrapped cell's function of the first input, or ``None`` if that cell has no initial state."""
        return adapt(self.cell).own_initial()


Rates = Any  # A number from 0 to 1, or such numbers with the nesting of the value


def check_rates(name: str, rates: Rates, check: Validator) -> None:
    """Report every leaf that is not a probability, by its path."""
    leaves, structure = flatten(rates)
    for path, leaf in zip(structure_paths(structure, name), leaves, strict=True):
        check.number(path, leaf, most=1.0)


def rates_for(name: str, rates: Rates, value: Any) -> list[float]:
    """The rate of every leaf of ``value``."""
    leaves, structure = flatten(value)
    floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    if isinstance(rates, int | float):
        if rates and not any(floating):
            raise UsageError(f"{name} is {rates}, but there are no floating-point numbers to apply it to")
        return [float(rates) if is_floating else 0.0 for is_floating in floating]
    each_rate, nesting = flatten(rates)
    fault = difference(structure, nesting, name)
    if fault:
        raise SpecError(f"rates must be one number, or have the nesting of their value: {fault}")
    triples = zip(structure_paths(nesting, name), each_rate, floating, strict=True)
    wrong = [path for path, rate, is_floating in triples if rate and not is_floating]
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: not 0, but the tensor has no floating-point numbers")
    return [float(rate) for rate in each_rate]


class Residual(Wrapper):
    """``y' = y + x``. The state is the wrapped cell's, without the sum.

    Wu et al., "Google's neural machine translation system" (arXiv 1609.08144), section 3.1, after He et al. (arXiv
    1512.03385). Raises ``SpecError`` if output and input differ in shape or nesting.

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.Residual(nn.GRUCell(4, 4)))
    """

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        y, state = adapt(self.cell)(x, state, 0)
        return map_leaves(_add_leaves, y, x), state


def _add_leaves(y: Any, x: Any) -> Tensor:
    if not isinstance(y, Tensor) or not isinstance(x, Tensor) or y.shape != x.shape:
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in (y, x)]
        raise SpecError(
            f"Residual adds input and output of a cell, but the output is {shapes[0]}, the input {shapes[1]}"
        )
    return y + x


class Zoneout(Wrapper):
    """A cell that keeps random entries of the previous state in training, and their expectation in eval mode.

        training     new = old where rand < rate, else new           another mask at every step
        eval         new = rate * old + (1 - rate) * new             the expectation

    ``rate`` is the probability of keeping an entry. An output that is one of the states, such as an LSTM's ``h``, is
    zoned out with it. A state that the cell returns unchanged stays unchanged. Krueger et al., "Zoneout"
    (arXiv 1606.01305).

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.Zoneout(nn.LSTMCell(3, 8), (0.5, 0.05)))
    """

    def __init__(self, cell: nn.Module, rate: Rates) -> None:
        super().__init__(cell)
        with check_arguments(self) as check:
            check_rates("rate", rate, check)
        self.rate = rate

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        y, new = adapt(self.cell)(x, state, 0)
        before, structure = flatten(state)
        after, seen = flatten(new)
        fault = difference(structure, seen, "state")
        if fault:
            raise SpecError(f"the cell in Zoneout returned a state with another nesting than its argument: {fault}")
        rates = rates_for("rate", self.rate, state)
        mixed = [self._mix_states(*leaves) for leaves in zip(before, after, rates, strict=True)]
        # By identity: an output that is the very tensor of a new state must change with it.
        replacements = {id(leaf): mix for leaf, mix in zip(after, mixed, strict=True)}
        outputs, nesting = flatten(y)
        return unflatten(nesting, [replacements.get(id(leaf), leaf) for leaf in outputs]), unflatten(structure, mixed)

    def _mix_states(self, old: Tensor, new: Tensor, rate: float) -> Tensor:
        if not rate or old is new:
            return new
        if self.training:
            # A choice, not a weighted sum: NaN in the dropped value times zero would be NaN.
            return torch.where(torch.rand_like(new) < rate, old, new)
        return new + rate * (old - new)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class Masked(NamedTuple):
    """The state of a cell with dropout."""

    cell: Any
    """The state of the wrapped cell."""
    masks: tuple[Tensor, ...]
    """0 or 1 / (1 - rate), for every tensor of input and state with a rate, in this order; ones in eval mode."""


class SequenceDropout(Wrapper):
    """Variational dropout: the same entries of inputs and states are dropped at every step of a sequence.

        initial_state(x_0)      draws    state = (the cell's state, masks)
        every step              x * mask,  h * mask  ->  cell  ->  (new state, the same masks)

    Masks are part of the state, so a step draws nothing: it is a pure function, which can be captured. Chunks and
    streams continue with their masks, and a reset row gets back its first mask. Every row has masks of its own. In eval
    mode nothing is dropped. The state is :class:`Masked`. For another initial state of the cell, pass
    ``initial_state(x_0, state)``. Gal and Ghahramani, "A theoretically grounded application of dropout in recurrent
    neural networks" (arXiv 1512.05287). As in that paper, ``states=(0.25, 0)`` drops only ``h`` of an LSTM's ``(h,
    c)``.

    Example:
        >>> net = weft.Recurrent(weft.recurrent.cells.SequenceDropout(nn.LSTMCell(3, 8), inputs=0.2, states=(0.25, 0)))
    """

    def __init__(self, cell: nn.Module, *, inputs: Rates = 0.0, states: Rates = 0.0) -> None:
        super().__init__(cell)
        with check_arguments(self) as check:
            check_rates("inputs", inputs, check)
            check_rates("states", states, check)
        self.inputs = inputs
        self.states = states

    @property
    def initial_state(self) -> Callable[..., Masked]:
        """A function of the first input, and optionally of the wrapped cell's initial state."""
        return self._draw_masks

    def _draw_masks(self, x: Any, state: Any = None) -> Masked:
        initial_state = super().initial_state
        if state is None and initial_state is None:
            raise UsageError(
                f"{type(self.cell).__name__} in SequenceDropout has no initial state: "
                "give the network state=dropout.initial_state(x[0], state)"
            )
        state = initial_state(x) if initial_state is not None and state is None else state
        pairs = self._with_rates(x, state)
        # Dropout of ones gives the masks with their scale, by PyTorch's own numbers. In eval mode they stay ones.
        masks = [F.dropout(torch.ones_like(leaf), rate, self.training) for leaf, rate in pairs if rate]
        return Masked(state, tuple(masks))

    def forward(self, x: Any, state: Masked) -> tuple[Any, Masked]:
        before = state.cell
        # The state can come from training, with masks that eval mode must not apply.
        if self.training:
            masks = iter(state.masks)
            dropped = [leaf * next(masks) if rate else leaf for leaf, rate in self._with_rates(x, before)]
            x, before = unflatten(flatten((x, before))[1], dropped)
        y, new = adapt(self.cell)(x, before, 0)
        return y, Masked(new, state.masks)

    def _with_rates(self, x: Any, state: Any) -> list[tuple[Any, float]]:
        """All tensors of input and state, each with its rate."""
        rates = [*rates_for("inputs", self.inputs, x), *rates_for("states", self.states, state)]
        return list(zip(flatten((x, state))[0], rates, strict=True))

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, states={self.states}"
