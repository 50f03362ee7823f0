"""What a cell is, and how the loop sees it.

    the user writes      cell(x_t, state) -> (y_t, new_state)             or with the step number as third argument
    torch has            nn.LSTMCell(x_t, (h, c)) -> (h, c)               y is h
                         nn.GRUCell(x_t, h) -> h,   nn.RNNCell
    a step net           step(inputs, states) -> outputs, and links       see links.py

    the loop calls       cell(x_t, state, t) -> (y_t, new_state)          a `Cell`

An adapter holds no tensor of its own: parameters stay where the user's module has them, under its own names.
"""

from collections.abc import Callable, Hashable
from typing import Any, cast

from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.core.tree import flatten, map_leaves, unflatten
from weft.recurrent.faults import Faults


class InputWidthError(SpecError, RuntimeError):
    """An input of another width than the cell says; PyTorch's own cells raise a RuntimeError for it."""


class Cell:
    """A function or module that already has the form ``(x_t, state) -> (y_t, new_state)``."""

    def __init__(self, function: Callable[..., Any], *, time_step: bool = False) -> None:
        self.function = function
        self.time_step = time_step

    def __call__(self, x: Any, state: Any, t: int | Tensor) -> Any:
        """One step. What comes back is checked by the loop."""
        return self.function(x, state, t) if self.time_step else self.function(x, state)

    @property
    def form(self) -> Hashable:
        """What else than the function decides how a step runs."""
        return (type(self), self.time_step)

    @property
    def name(self) -> str:
        """What messages call it."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def width_fault(self, x: Any) -> str | None:
        """What is wrong with an input's width, where the cell says what it wants, as PyTorch's cells do."""
        wanted, weight = (getattr(self.function, name, None) for name in ("input_size", "weight_ih"))
        if isinstance(weight, Tensor) and isinstance(x, Tensor) and x.shape[-1:] != weight.shape[1:] == (wanted,):
            return f"x has shape {tuple(x.shape)}, but cell {self.name} wants {wanted} (input_size) as its last size"
        return None

    def own_initial(self) -> Callable[[Any], Any] | None:
        """The cell's method ``initial_state(first input)``, if it has one."""
        method = getattr(self.function, "initial_state", None)
        return method if callable(method) else None

    def enter(self, state: Any, faults: Faults) -> Any:
        """The user's form of a state into the loop's."""
        return state

    def leave(self, state: Any, axis: int = 0) -> Any:
        """The inverse of :meth:`enter`; ``axis`` is where a window is stacked."""
        return state


class TorchCell(Cell):
    """``nn.LSTMCell``, ``nn.GRUCell`` or ``nn.RNNCell``: the output is the hidden state."""

    def __call__(self, x: Any, state: Any, t: int | Tensor) -> Any:
        new = super().__call__(x, state, t)
        return (new[0], tuple(new)) if isinstance(self.function, nn.LSTMCell) else (new, new)

    def own_initial(self) -> Callable[[Any], Any]:
        """Zeros, one row of the hidden width for each row of the input, with the weights' dtype and device."""
        return self._zeros

    def _zeros(self, x: Tensor) -> Any:
        weight = cast("nn.RNNCellBase", self.function).weight_hh
        zeros = weight.new_zeros((*x.shape[:-1], weight.shape[1]))
        return (zeros, zeros) if isinstance(self.function, nn.LSTMCell) else zeros


class StoredState(nn.Module):
    """An initial state that was given as tensors, kept as parameters and buffers under the names 0, 1, ...

    So it moves with the network, is saved with it, and is learned where it is a parameter.
    """

    def __init__(self, value: Any) -> None:
        super().__init__()
        leaves, structure = flatten(value)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(str(place), leaf)
            else:
                self.register_buffer(str(place), leaf)
        self._places = unflatten(structure, range(len(leaves)))

    def forward(self, x: Any) -> Any:
        """The tensors, nested as they were given, whatever the first input is."""

        def held(place: int) -> Any:
            return getattr(self, str(place))

        return map_leaves(held, self._places)


def adapt(function: Callable[..., Any], *, time_step: bool = False) -> Cell:
    """The form in which the loop calls a cell. It is cheap, so a network makes it anew for every call."""
    if isinstance(function, nn.RNNCellBase):
        return TorchCell(function)
    return Cell(function, time_step=time_step)
