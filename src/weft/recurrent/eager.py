"""The exact loop: one call of the cell for each step, under plain autograd.

    state 0 = initial state
    for every step t:
        truncate?   cut the state's gradient                      (at every k-th step)
        reset?      rows that start anew get the initial state
        padding?    rows that do not count get a stand-in as input
                    y_t, new = cell(x_t, state, t)
        padding?    rows that do not count keep their state, and their output is zero
        state = new

It runs what no faster way can (double backward, forward mode, ``vmap``), and every faster way is compared with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.errors import SpecError
from weft.core.pytree import Structure, flatten, map_leaves, unflatten
from weft.recurrent.cell import Cell, InputWidthError, StepSpec, fit
from weft.recurrent.masking import ALL_ROWS, RowMasks, padding_values, pick, replaced
from weft.recurrent.sequence import SequenceInputs

Unrolled = tuple[Any, Any, Any]
"""Outputs (T x N x ...), the last state (N x ...), and all states (rows 1 to T, T x N x ...)."""


@dataclass(frozen=True, eq=False)
class SequenceRun:
    """One sequence to run.

    Attributes:
        fresh: the state that a reset brings back; ``initial`` if it is ``None``.
        start: the number of the first step.
        truncate: the number of steps between two places where the states' gradients stop.
    """

    cell: Cell
    inputs: SequenceInputs
    rows: RowMasks
    initial: Any
    fresh: Any
    start: int
    truncate: int | None

    def run(self) -> Unrolled:
        """By the eager loop. An output that is also a state is stacked once: both results are then one tensor.

        Raises ``SpecError`` if the cell returns something else than ``(y, new_state)``, or values that change their
        nesting, shape or dtype from step to step. Errors of the cell get a note that names the step.
        """
        cell, inputs, rows = self.cell, self.inputs, self.rows
        if not inputs.steps:
            return self._no_steps()
        chosen = inputs.rows if rows.valid is not None or rows.reset is not None else None
        border, outputs = StepSpec.of_states(self.initial, chosen), StepSpec("output", chosen)
        again = flatten(self.initial if self.fresh is None else self.fresh)[0]
        state: list[Tensor] = flatten(self.initial)[0]
        states, collected = list[list[Tensor]](), list[list[Any]]()
        held = None if rows.valid is None else padding_values(inputs, rows.valid)
        steps = zip(inputs.each(), rows.each(inputs.steps), strict=True)
        for t, (step, (valid, reset)) in enumerate(steps, self.start):
            if stops(t, self.truncate):
                state = [leaf.detach() for leaf in state]
            if reset is not None:
                state = [pick(reset, new, old, old.dtype) for new, old in zip(again, state, strict=True)]
            if held is not None and valid is not None:
                step = replaced(step, valid, held)
            y, new = call(cell, unflatten(inputs.structure, step), unflatten(border.structure, state), t)
            after, ys = border.accept(new, t), outputs.accept(y, t)
            if valid is not None:
                after = [pick(valid, leaf, fit(old, leaf), leaf.dtype) for leaf, old in zip(after, state, strict=True)]
                ys = [y if y is None else pick(valid, y, torch.zeros_like(y), y.dtype) for y in ys]
            state = after
            states.append(after)
            collected.append(ys)
        return _stacked(outputs.structure, collected, border.structure, states)

    def head(self, steps: int) -> "SequenceRun":
        """The first `steps` of its steps, of which there must be as many."""
        leaves = [leaf[:steps] if isinstance(leaf, Tensor) else leaf for leaf in self.inputs.leaves]
        rows = RowMasks(*(None if each is None else each[:steps] for each in (self.rows.valid, self.rows.reset)))
        return replace(self, inputs=replace(self.inputs, leaves=leaves, steps=steps), rows=rows)

    def _no_steps(self) -> Unrolled:
        """T = 0: the cell runs once, on a blank step, for the shapes of its results; the generators are restored."""
        blank = [leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf for leaf in self.inputs.blank()]
        device = self.inputs.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            run = replace(self, inputs=replace(self.inputs, leaves=blank, steps=1), rows=ALL_ROWS)
            outputs, _, states = run.run()

        def none(leaf: Any) -> Any:
            return leaf if leaf is None else leaf[:0]

        return map_leaves(none, outputs), self.initial, map_leaves(none, states)


def stops(t: int, truncate: int | None) -> bool:
    """Whether the states' gradients stop before step ``t``. They never stop before step 0."""
    return truncate is not None and t > 0 and t % truncate == 0


def call(cell: Cell, x: Any, state: Any, t: int) -> tuple[Any, Any]:
    """One step: ``(y, new_state)``. Raises ``SpecError`` if the cell returned anything but such a pair, and
    ``InputWidthError`` if it failed on an input of another width than it says."""
    try:
        pair = cell(x, state, t)
    except Exception as error:
        fault = cell.width_fault(x)
        if fault is not None:
            raise InputWidthError(f"{fault}, in step {t}") from error
        refuse_form(cell, x, error)
        error.add_note(f"weft: in step {t} of cell {cell.name}, x {_shapes(x)}, state {_shapes(state)}")
        raise
    values = cast("tuple[Any, ...]", pair) if isinstance(pair, tuple) else (pair,)
    if len(values) != 2:
        kinds = ", ".join(type(each).__name__ for each in values)
        raise SpecError(f"cell {cell.name} returned ({kinds}) at step {t}, wanted a pair (y, new_state)")
    return values[0], values[1]


def refuse_form(cell: Cell, x: Any, error: Exception) -> None:
    """Raise ``SpecError`` if the input, on which the cell failed with ``error``, has a form that few cells take."""
    leaves = flatten(x)[0]
    if isinstance(x, list):
        what = "a list, which a cell gets as it is; if it holds the steps, stack them: torch.stack(steps)"
    elif leaves and all(isinstance(leaf, Tensor) and leaf.dim() < 2 for leaf in leaves):
        what = f"x {_shapes(x)}, which has no batch axis; give inputs of T x N x D, such as inputs.unsqueeze(1)"
    else:
        return
    raise SpecError(f"cell {cell.name} failed on {what} ({error})") from error


def _shapes(value: Any) -> str:
    """A value's leaves in short, such as ``[float32 (4, 3), None]``."""
    words = [
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in flatten(value)[0]
    ]
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def _stacked(
    form: Structure, outputs: Sequence[list[Any]], state_form: Structure, states: Sequence[list[Tensor]]
) -> Unrolled:
    """Time in front. Columns of the very same tensors are stacked once."""
    done: dict[tuple[int, ...], Tensor] = {}

    def stack(column: tuple[Any, ...]) -> Any:
        if column[0] is None:
            return None
        key = tuple(map(id, column))
        if key not in done:
            done[key] = torch.stack(column)
        return done[key]

    return (
        unflatten(form, [stack(column) for column in zip(*outputs, strict=True)]),
        unflatten(state_form, states[-1]),
        unflatten(state_form, [stack(column) for column in zip(*states, strict=True)]),
    )
