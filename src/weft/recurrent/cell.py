"""Cells: the user's step function in the form that the loop calls, and the states it passes on.

    the user writes      cell(x_t, state) -> (y_t, new_state)             or with the step number as third argument
    torch has            nn.LSTMCell(x_t, (h, c)) -> (h, c)               y is h
                         nn.GRUCell(x_t, h) -> h,   nn.RNNCell
    a step net           step(inputs, states) -> outputs, and links       see links.py

    the loop calls       cell(x_t, state, t) -> (y_t, new_state)          a `Cell`

An adapter owns no tensors: parameters stay in the user's module, under its own names.

The initial state is broadcast over the batch:

    given                   x_t            becomes
    N x H                   N x D          unchanged
    1 x H                   N x D          N x H, the gradient is summed over the rows
    H                       N x D          N x H: fewer axes than the input, so no rows yet
    H                       D              unchanged: a sequence without rows

A state has one shape and dtype through all steps. Only the first step may settle them, as in a plain loop: the cell may
return a larger shape that the initial state broadcasts to, and floats where the initial state holds integers. Two
different floating dtypes are an error, except under autocast.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError, listed
from weft.core.pytree import difference, flatten, map_leaves, structure_paths, unflatten
from weft.core.validation import Validator
from weft.recurrent.sequence import SequenceInputs


class InputWidthError(SpecError, RuntimeError):
    """An input of another width than the cell says; PyTorch's own cells raise a RuntimeError for it.

    Example:
        >>> weft.Recurrent(nn.GRUCell(3, 8))(torch.ones(5, 2, 4))
        Traceback (most recent call last):
        weft.errors.InputWidthError: ...
    """


class Cell:
    """A function or module that already has the form ``(x_t, state) -> (y_t, new_state)``."""

    def __init__(self, function: Callable[..., Any], *, time_step: bool = False) -> None:
        self.function = function
        self.time_step = time_step
        self.form: Hashable = (type(self), time_step)
        """The part of a plan's key beside the function."""

    def __call__(self, x: Any, state: Any, t: int | Tensor) -> Any:
        """One step. What comes back is checked by the loop."""
        return self.function(x, state, t) if self.time_step else self.function(x, state)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def width_fault(self, x: Any) -> str | None:
        """A message if the input has the wrong width, for cells that declare theirs, as PyTorch's do."""
        wanted, weight = (getattr(self.function, name, None) for name in ("input_size", "weight_ih"))
        if isinstance(weight, Tensor) and isinstance(x, Tensor) and x.shape[-1:] != weight.shape[1:] == (wanted,):
            return f"x has shape {tuple(x.shape)}, but cell {self.name} wants {wanted} (input_size) as its last size"
        return None

    def own_initial(self) -> Callable[[Any], Any] | None:
        """The cell's method ``initial_state(first input)``, if it has one."""
        method = getattr(self.function, "initial_state", None)
        return method if callable(method) else None

    def enter(self, state: Any, check: Validator) -> Any:
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


def spread(state: Any, inputs: SequenceInputs, check: Validator, *, for_one_row: bool = False) -> Any:
    """An initial state with one row per row of the inputs. What does not fit goes to ``check``.

    ``for_one_row``: it was written down before any batch was known, so that a first axis which happens to have
    size N is no batch.
    """
    leaves, structure = flatten(state)
    names = structure_paths(structure, "state")
    return unflatten(
        structure,
        [_spread(name, leaf, inputs, for_one_row, check) for name, leaf in zip(names, leaves, strict=True)],
    )


def _spread(name: str, leaf: Any, inputs: SequenceInputs, for_one_row: bool, check: Validator) -> Any:
    if not isinstance(leaf, Tensor):
        check.mismatch(f"{name} is of type {type(leaf).__name__}, wanted a tensor")
        return leaf
    rows = inputs.rows
    if rows is None:
        return leaf
    first = leaf.shape[0] if leaf.dim() else None
    # A state with fewer axes than this has no rows yet. 0: nothing tells that there are rows, so none are added.
    with_rows = max(inputs.axes, 2) if inputs.certain else inputs.axes if inputs.axes > 1 else 0
    if leaf.dim() < with_rows and (first not in (1, rows) or (for_one_row and leaf.dim() < inputs.axes)):
        return leaf.expand(rows, *leaf.shape)
    if first == 1 and (with_rows or leaf.dim() > 1):
        return leaf.expand(rows, *leaf.shape[1:])
    if first != rows and (inputs.certain or inputs.axes == leaf.dim() == 2):
        check.mismatch(f"{name} has shape {tuple(leaf.shape)}, wanted {rows} rows, or 1 for all of them")
    return leaf


class StateSpec:
    """Structure, shapes and dtypes of the states, checked at every step."""

    def __init__(self, initial: Any, rows: int | None) -> None:
        """``rows``: N where states are chosen per row (masks, resets), so that each must have rows."""
        self.leaves, self.structure = flatten(initial)
        self._rows = rows
        self._settled = False

    def accept(self, new: Any, t: int) -> list[Tensor]:
        """The leaves of the state that step ``t`` returned. Raises ``SpecError`` that lists all that is wrong."""
        leaves, structure = flatten(new)
        if structure is not self.structure:
            fault = difference(self.structure, structure, "state")
            if fault:
                raise SpecError(listed(f"the state that step {t} returned is not as the one that it got:", [fault]))
        if self._settled and all(map(_alike, self.leaves, leaves)):
            return leaves
        return self._settle(leaves, t)

    def _settle(self, leaves: list[Any], t: int) -> list[Tensor]:
        names = structure_paths(self.structure, "state")
        faults = [
            f"{name} {fault}"
            for name, old, leaf in zip(names, self.leaves, leaves, strict=True)
            for fault in self._faults(old, leaf)
        ]
        if faults:
            raise SpecError(listed(f"the state that step {t} returned is not as the one that it got:", faults))
        self.leaves = [fit(old, leaf) for old, leaf in zip(self.leaves, leaves, strict=True)]
        self._settled = True
        return leaves

    def _faults(self, old: Tensor, leaf: Any) -> list[str]:
        if not isinstance(leaf, Tensor):
            return [f"is of type {type(leaf).__name__}, wanted a tensor"]
        faults: list[str] = []
        if not (leaf.shape == old.shape or (not self._settled and _broadcasts(old.shape, leaf.shape))):
            faults.append(f"has shape {tuple(leaf.shape)}, wanted {tuple(old.shape)}")
        if not (leaf.dtype == old.dtype or (not self._settled and _holds(leaf, old.dtype))):
            faults.append(f"has dtype {leaf.dtype}, wanted {old.dtype}; convert it, or begin with {leaf.dtype}")
        return faults + row_faults(leaf, self._rows)


def row_faults(leaf: Tensor, rows: int | None) -> list[str]:
    """Faults of a tensor that is selected per row."""
    if rows is None or leaf.shape[:1] == (rows,):
        return []
    return [f"has shape {tuple(leaf.shape)}, wanted {rows} rows first, since lengths, mask and reset choose by row"]


def fit(old: Tensor, like: Tensor) -> Tensor:
    """``old`` with the shape and dtype of ``like``."""
    return old if _alike(old, like) else old.expand(like.shape).to(like.dtype)


def _alike(old: Tensor, leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.shape == old.shape and leaf.dtype == old.dtype


def _holds(leaf: Tensor, dtype: torch.dtype) -> bool:
    """Whether a first state of that dtype becomes one of the leaf's without losing what it says."""
    if dtype.is_floating_point and leaf.dtype.is_floating_point:
        return torch.is_autocast_enabled(leaf.device.type)
    return torch.can_cast(dtype, leaf.dtype)


def _broadcasts(small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether a tensor of the small shape can be expanded to the large one."""
    tail = large[len(large) - len(small) :]
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(small, tail, strict=True))
