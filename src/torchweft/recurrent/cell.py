"""Cells: the user's step function in the form that the loop calls, and the states that it passes on.

    the user writes      cell(x_t, state) -> (y_t, new_state)             or with the step number as third argument
    torch has            nn.LSTMCell(x_t, (h, c)) -> (h, c)               y is h
    a step net           step(inputs, states) -> outputs, and links       see `StepNetCell`
    the loop calls       cell(x_t, state, t) -> (y_t, new_state)          a `Cell`

Without this layer, the loop and the plans would each distinguish these forms, and would do so at every step.

The initial state is broadcast over the batch:

    given                   x_t            becomes
    N x H                   N x D          unchanged
    1 x H                   N x D          N x H, the gradient is summed over the rows
    H                       N x D          N x H: fewer axes than the input, so no rows yet
    H                       D              unchanged: a sequence without rows

A state has one shape and dtype through all steps. Only the first step can settle them, as in a plain loop. The cell can
return a larger shape that the initial state broadcasts to, and floats where the initial state holds integers. An output
that reads the initial state can therefore change its dtype once, between the first step and the second.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchweft.core.errors import SpecError, join_faults
from torchweft.core.pytree import Structure, difference, flatten, map_leaves, structure_paths, unflatten
from torchweft.core.validation import Validator
from torchweft.recurrent.sequence import SequenceInputs


class InputWidthError(SpecError, RuntimeError):
    """The input's width is not the one that the cell declares. PyTorch's own cells raise a RuntimeError for it."""


class Cell:
    """A function or module that already has the form ``(x_t, state) -> (y_t, new_state)``."""

    def __init__(self, function: Callable[..., Any], *, time_step: bool = False) -> None:
        self.function = function
        self.time_step = time_step
        self.form: Hashable = (type(self), time_step)  # the part of a plan's key that does not come from the function

    def __call__(self, x: Any, state: Any, t: int | Tensor) -> Any:
        """One step. The loop checks the result."""
        return self.function(x, state, t) if self.time_step else self.function(x, state)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def call_form(self) -> str:
        """The call of one step, for errors."""
        return f"cell(x, state{', t' * self.time_step}) -> (y, new_state)"

    def width_fault(self, x: Any) -> str | None:
        """A message if the input has the wrong width, for cells that declare theirs, as PyTorch's do."""
        width, weight = (getattr(self.function, name, None) for name in ("input_size", "weight_ih"))
        if isinstance(weight, Tensor) and isinstance(x, Tensor) and x.shape[-1:] != weight.shape[1:] == (width,):
            return f"x has shape {tuple(x.shape)}, but cell {self.name} wants {width} (input_size) as its last size"
        return None

    def own_initial(self) -> Callable[[Any], Any] | None:
        method = getattr(self.function, "initial_state", None)
        return method if callable(method) else None

    def enter_loop(self, state: Any, check: Validator) -> Any:
        """Convert a state from the user's form to the loop's."""
        return state

    def leave_loop(self, state: Any, axis: int = 0) -> Any:
        """The inverse of :meth:`enter_loop`. ``axis`` is where a window is stacked."""
        return state


class TorchCell(Cell):
    """``nn.LSTMCell``, ``nn.GRUCell`` or ``nn.RNNCell``: the output is the hidden state."""

    def __call__(self, x: Any, state: Any, t: int | Tensor) -> Any:
        new = super().__call__(x, state, t)
        # The same tensor as output and state. The loop and the plans then store it once.
        return (new[0], tuple(new)) if isinstance(self.function, nn.LSTMCell) else (new, new)

    @property
    def call_form(self) -> str:
        return "cell(x, state) -> new_state"

    def own_initial(self) -> Callable[[Any], Any]:
        return self._zero_state

    def _zero_state(self, x: Tensor) -> Any:
        weight = cast("nn.RNNCellBase", self.function).weight_hh
        # In the weights' dtype, not in the input's, which under autocast can be a reduced one.
        zeros = weight.new_zeros((*x.shape[:-1], weight.shape[1]))
        return (zeros, zeros) if isinstance(self.function, nn.LSTMCell) else zeros


class StoredState(nn.Module):
    """An initial state that was given as tensors, stored as parameters and buffers under the names 0, 1, ..."""

    # It therefore moves and is saved with the network, and is trained where it is a parameter.

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
        """The tensors, nested as they were given. The first input is ignored."""
        places, structure = flatten(self._places)
        return unflatten(structure, [getattr(self, str(place)) for place in places])


def adapt(function: Callable[..., Any], *, time_step: bool = False) -> Cell:
    """The form in which the loop calls a cell. Cheap, so a network builds it for every call."""
    if isinstance(function, nn.RNNCellBase):
        return TorchCell(function)
    return Cell(function, time_step=time_step)


def expand_state(state: Any, inputs: SequenceInputs, check: Validator, *, for_one_row: bool = False) -> Any:
    """An initial state with one row per row of the inputs. Faults go to ``check``."""
    # ``for_one_row``: the state was written down before any batch was known. If its first axis has size N by chance,
    # that axis is still not a batch.
    leaves, structure = flatten(state)
    pairs = zip(structure_paths(structure, "state"), leaves, strict=True)
    return unflatten(structure, [_expand_leaf(name, leaf, inputs, for_one_row, check) for name, leaf in pairs])


def _expand_leaf(name: str, leaf: Any, inputs: SequenceInputs, for_one_row: bool, check: Validator) -> Any:
    if not isinstance(leaf, Tensor):
        check.mismatch(f"{name} is of type {type(leaf).__name__}, wanted a tensor")
        return leaf
    rows = inputs.rows
    if rows is None:  # the inputs do not agree on N, so there is nothing to expand to
        return leaf
    first = leaf.shape[0] if leaf.dim() else None
    # A state with fewer axes than this has no rows yet. 0: nothing shows that there are rows, so none are added.
    with_rows = max(inputs.axes, 2) if inputs.certain else inputs.axes if inputs.axes > 1 else 0
    if leaf.dim() < with_rows and (first not in (1, rows) or (for_one_row and leaf.dim() < inputs.axes)):
        return leaf.expand(rows, *leaf.shape)
    if first == 1 and (with_rows or leaf.dim() > 1):
        return leaf.expand(rows, *leaf.shape[1:])
    if first != rows and (inputs.certain or inputs.axes == leaf.dim() == 2):
        check.mismatch(f"{name} has shape {tuple(leaf.shape)}, wanted {rows} rows, or 1 for all of them")
    return leaf


class StepSpec:
    """Structure, shapes and dtypes of states, or of outputs, checked at every step."""

    structure: Structure

    def __init__(self, role: str, rows: int | None, leaves: list[Any] | None = None, settled: bool = False) -> None:
        """``rows``: N where values are chosen per row (masks, resets), so that each must have rows."""
        self.leaves = leaves
        self._role, self._rows = role, rows
        self._settled = settled

    @staticmethod
    def of_states(initial: Any, rows: int | None, settled: bool = False) -> "StepSpec":
        """The spec of states that start as ``initial``. Unless it is ``settled``, the first step can settle it."""
        leaves, structure = flatten(initial)
        spec = StepSpec("state", rows, leaves, settled)
        spec.structure = structure
        return spec

    def accept(self, new: Any, t: int, cell: Cell | None = None) -> list[Any]:
        """The leaves of the value that step ``t`` returned. Raises ``SpecError`` that lists all faults."""
        leaves, structure = flatten(new)
        # An output can still change its dtype in its second step, because its first value can be the initial state.
        settling = self.leaves is not None
        if self.leaves is None:
            self.leaves, self.structure = leaves, structure
        nesting = None if structure is self.structure else difference(self.structure, structure, self._role)
        # The hot path: from the second step on, nothing changes.
        if not nesting and self._settled and all(map(_same_meta, self.leaves, leaves)):
            return leaves
        pairs = zip(structure_paths(structure, self._role), self.leaves, leaves, strict=False)
        faults = [f"{name} {fault}" for name, old, leaf in pairs for fault in self._leaf_faults(old, leaf)]
        faults = [nesting] if nesting else faults
        if faults:
            call = "" if cell is None else f", in {cell.call_form}"
            raise SpecError(
                join_faults(f"the {self._role} that step {t} returned differs from the one before{call}:", faults)
            )
        self.leaves = [expand_like(old, leaf) for old, leaf in zip(self.leaves, leaves, strict=True)]
        self._settled = self._settled or settling
        return leaves

    def _leaf_faults(self, old: Any, leaf: Any) -> list[str]:
        if leaf is old is None:
            return []
        if not isinstance(leaf, Tensor) or old is None:
            return [f"is of type {type(leaf).__name__}, wanted {'None' if old is None else 'a tensor'}"]
        faults: list[str] = []
        grows = self._role == "state" and not self._settled and _broadcasts_to(old.shape, leaf.shape)
        if not (leaf.shape == old.shape or grows):
            faults.append(f"has shape {tuple(leaf.shape)}, wanted {tuple(old.shape)}")
        if not (leaf.dtype == old.dtype or (not self._settled and _can_become(old.dtype, leaf))):
            faults.append(f"has dtype {leaf.dtype}, wanted {old.dtype}; convert it, or begin with {leaf.dtype}")
        if self._rows is not None and leaf.shape[:1] != (self._rows,):
            reason = "because lengths, mask and reset choose by row"
            faults.append(f"has shape {tuple(leaf.shape)}, wanted {self._rows} rows first, {reason}")
        return faults


def expand_like(old: Any, like: Any) -> Any:
    return old if _same_meta(old, like) else old.expand(like.shape).to(like.dtype)


def _same_meta(old: Any, leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or old is None:
        return leaf is old
    return leaf.shape == old.shape and leaf.dtype == old.dtype


def _can_become(dtype: torch.dtype, leaf: Tensor) -> bool:
    # Between floats a change of precision is a mistake of the cell, except under autocast, which makes such changes.
    if dtype.is_floating_point and leaf.dtype.is_floating_point:
        return torch.is_autocast_enabled(leaf.device.type)
    return torch.can_cast(dtype, leaf.dtype)


def _broadcasts_to(small: Sequence[int], large: Sequence[int]) -> bool:
    tail = large[len(large) - len(small) :]
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(small, tail, strict=True))


@dataclass(frozen=True)
class Window:
    """A link to the last ``k`` values of the output ``name``.

    Example:
        >>> def step(inputs, states):  # the sum of an input and of the last two outputs
        ...     return {"y": inputs["x"] + states["past"].sum(0)}
        >>> start = {"past": torch.zeros(2, 1, 1)}
        >>> result = weft.recurrent_net(step, {"x": torch.ones(4, 1, 1)}, start, {"past": weft.Window("y", 2)})
        >>> result.outputs["y"].flatten()
        tensor([1., 2., 4., 7.])
    """

    name: str
    k: int


Links = Mapping[str, str | Window]


def check_links(check: Validator, links: object) -> None:
    if not isinstance(links, Mapping):
        check.add(f"links is of type {type(links).__name__}, wanted a dict: for every state the output that feeds it")
        return
    for state, link in cast("Mapping[object, object]", links).items():
        if isinstance(link, Window):
            check.require(link.k >= 1, f"links[{state!r}] is a window over {link.k} steps, wanted at least 1")
        elif not isinstance(link, str):
            kind = type(link).__name__
            check.add(f"links[{state!r}] is of type {kind}, wanted the name of an output, or a Window over it")


class StepNetCell(Cell):
    """A step net over named values, with its links and references, as a cell."""

    # A window is k x N x ..., oldest first. Inside the loop it is a tuple of k tensors, so that a step drops one and
    # adds one without copying. Each of them has rows, like any other state.

    def __init__(
        self,
        step: Callable[..., Any],
        links: Links,
        *,
        references: Mapping[str, Any] | None = None,
        time_step: bool = False,
    ) -> None:
        super().__init__(step, time_step=time_step)
        self.links = links
        self.references = references
        self.form = (type(self), time_step, *links.items())

    @property
    def call_form(self) -> str:
        references = ", references" * (self.references is not None)
        return f"step(inputs, states{references}{', t' * self.time_step}) -> outputs"

    def __call__(self, x: Any, state: Any, t: int | Tensor) -> Any:
        extra = () if self.references is None else (self.references,)
        named = self.leave_loop(state)
        outputs = self.function(x, named, *extra, t) if self.time_step else self.function(x, named, *extra)
        self._check_outputs(outputs, t)
        return dict(outputs), {name: self._next_state(name, state[name], outputs) for name in self.links}

    def enter_loop(self, state: Any, check: Validator) -> Any:
        """States by name, windows as tuples, in the order of the links."""
        if not isinstance(state, Mapping):
            check.mismatch(f"state is of type {type(state).__name__}, wanted a dict with keys {list(self.links)}")
            return state
        named = cast("Mapping[str, Any]", state)
        check.mismatch(*(f"state[{name!r}] is missing: links have it" for name in self.links if name not in named))
        check.mismatch(*(f"state[{name!r}] is too much: no link feeds it" for name in named if name not in self.links))
        return {name: self._split_window(name, named[name], check) for name in self.links if name in named}

    def leave_loop(self, state: Any, axis: int = 0) -> Any:
        """States by name, windows stacked along ``axis``."""

        def stack_window(*values: Tensor) -> Tensor:
            return torch.stack(values, axis)

        return {
            name: map_leaves(stack_window, *value) if isinstance(self.links[name], Window) else value
            for name, value in state.items()
        }

    def _split_window(self, name: str, value: Any, check: Validator) -> Any:
        link = self.links[name]
        if not isinstance(link, Window):
            return value
        leaves, structure = flatten(value)
        faults = [
            f"{path} has shape {tuple(leaf.shape)}, wanted {link.k} values first: it is a window over {link.k} steps"
            if isinstance(leaf, Tensor)
            else f"{path} is of type {type(leaf).__name__}, wanted a tensor of {link.k} values"
            for path, leaf in zip(structure_paths(structure, f"state[{name!r}]"), leaves, strict=True)
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (link.k,)
        ]
        check.mismatch(*faults)
        if faults:
            return value
        return tuple(unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(link.k))

    def _next_state(self, name: str, old: Any, outputs: Mapping[str, Any]) -> Any:
        link = self.links[name]
        return (*old[1:], outputs[link.name]) if isinstance(link, Window) else outputs[link]

    def _check_outputs(self, outputs: Any, t: int | Tensor) -> None:
        if not isinstance(outputs, Mapping):
            raise SpecError(
                f"the step net {self.name} returned a {type(outputs).__name__} at step {t}, "
                "wanted a dict of outputs by name"
            )
        targets = {state: link.name if isinstance(link, Window) else link for state, link in self.links.items()}
        missing = [f"links[{state!r}] wants {name!r}" for state, name in targets.items() if name not in outputs]
        if missing:
            seen = list(cast("Mapping[str, Any]", outputs))
            raise SpecError(join_faults(f"the step net {self.name} returned {seen} at step {t}, but:", missing))
