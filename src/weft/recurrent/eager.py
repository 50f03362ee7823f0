"""The exact loop: one call of the cell for each step, under plain autograd.

    state 0 = initial state
    for every step t:
        truncate?   cut the state's gradient                      (at every k-th step)
        reset?      rows that start anew get the initial state
        padding?    rows that do not count get a stand-in as input
                    y_t, new = cell(x_t, state, t)
        padding?    rows that do not count keep their state, and their output is zero
        state = new

Every operator that the cell may use works here, and so does all that autograd offers: double backward, forward
mode, ``vmap``, autocast. It is what runs where no faster way exists, and what every faster way is compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.errors import SpecError, listed
from weft.core.pytree import Structure, difference, flatten, structure_paths, unflatten
from weft.recurrent.cell import Cell, InputWidthError, StateSpec, fit, row_faults
from weft.recurrent.masking import RowMasks, pick, replaced, stand_ins
from weft.recurrent.sequence import SequenceInputs

Unrolled = tuple[Any, Any, Any]
"""Outputs (T x N x ...), the last state (N x ...), and all states (rows 1 to T, T x N x ...)."""


@dataclass(frozen=True, eq=False)
class SequenceRun:
    """One sequence to run: what `unroll` takes."""

    cell: Cell
    inputs: SequenceInputs
    rows: RowMasks
    initial: Any
    fresh: Any
    start: int
    truncate: int | None

    def run(self) -> Unrolled:
        """By the eager loop."""
        return unroll(
            self.cell, self.inputs, self.rows, self.initial, self.fresh, start=self.start, truncate=self.truncate
        )


def unroll(
    cell: Cell,
    inputs: SequenceInputs,
    rows: RowMasks,
    initial: Any,
    fresh: Any = None,
    *,
    start: int = 0,
    truncate: int | None = None,
) -> Unrolled:
    """Run ``cell`` over ``inputs`` from the state ``initial``.

    ``fresh`` is the state that a reset brings back (``initial`` if ``None``); ``start`` the number of the first
    step; ``truncate`` the number of steps between two places where the states' gradients stop.

    An output that is also a state is stacked once: both results are then one tensor.

    Raises ``SpecError`` if the cell returns something else than ``(y, new_state)``, or values that change their
    nesting, shape or dtype from step to step. Errors of the cell get a note that names the step.
    """
    if not inputs.steps:
        return _no_steps(cell, inputs, initial, start)
    chosen = inputs.rows if rows.valid is not None or rows.reset is not None else None
    border, outputs = StateSpec(initial, chosen), OutputCollector(chosen)
    again = flatten(initial if fresh is None else fresh)[0]
    state = border.leaves
    states: list[list[Tensor]] = []
    held = None if rows.valid is None else stand_ins(inputs, rows.valid)
    tables = zip(rows.valid_steps(inputs.steps), rows.reset_steps(inputs.steps), strict=True)
    for t, (step, (valid, reset)) in enumerate(zip(inputs.each(), tables, strict=True), start):
        if stops(t, truncate):
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
        outputs.steps.append(ys)
    return _stacked(outputs.structure, outputs.steps, border.structure, states)


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
        error.add_note(f"weft: in step {t} of cell {cell.name}, x {_shapes(x)}, state {_shapes(state)}")
        raise
    values = cast("tuple[Any, ...]", pair) if isinstance(pair, tuple) else ()
    if len(values) != 2:
        what = (
            f"a tuple of {len(values)}" if isinstance(pair, tuple) else f"a {cast('object', pair).__class__.__name__}"
        )
        raise SpecError(f"cell {cell.name} returned {what} at step {t}, wanted a pair (y, new_state)")
    return values[0], values[1]


class OutputCollector:
    """Collects the outputs of the steps; all must match the first in structure, shape and dtype."""

    def __init__(self, rows: int | None) -> None:
        self.steps: list[list[Any]] = []
        self.structure: Structure | None = None
        self._rows = rows

    def accept(self, y: Any, t: int) -> list[Any]:
        """The leaves of an output, tensors or ``None``. Raises ``SpecError`` that lists all that is wrong."""
        leaves, structure = flatten(y)
        first = self.steps[0] if self.steps else leaves
        if self.structure is None:
            self.structure = structure
        nesting = None if structure is self.structure else difference(self.structure, structure, "output")
        faults = [nesting] if nesting else []
        if not faults and not (self.steps and all(map(_same, first, leaves))):
            names = structure_paths(structure, "output")
            faults = [
                f"{name} {fault}"
                for name, leaf, other in zip(names, leaves, first, strict=True)
                for fault in self._faults(leaf, other)
            ]
        if faults:
            raise SpecError(listed(f"the output of step {t} cannot be stacked with those of the other steps:", faults))
        return leaves

    def _faults(self, leaf: Any, first: Any) -> list[str]:
        if leaf is None and first is None:
            return []
        if not isinstance(leaf, Tensor):
            return [f"is of type {type(leaf).__name__}, wanted a tensor, or None at every step"]
        if not _same(first, leaf):
            return [f"is {_shapes(leaf)}, but it began as {_shapes(first)}"]
        return row_faults(leaf, self._rows)


def _same(first: Any, leaf: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(first, Tensor):
        return leaf.shape == first.shape and leaf.dtype == first.dtype
    return leaf is first


def _shapes(value: Any) -> str:
    """A value's leaves in short, such as ``[float32 (4, 3), None]``."""
    words = [
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in flatten(value)[0]
    ]
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def _stacked(
    form: Structure | None, outputs: Sequence[list[Any]], state_form: Structure, states: Sequence[list[Tensor]]
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

    assert form is not None
    return (
        unflatten(form, [stack(column) for column in zip(*outputs, strict=True)]),
        unflatten(state_form, states[-1]),
        unflatten(state_form, [stack(column) for column in zip(*states, strict=True)]),
    )


def _no_steps(cell: Cell, inputs: SequenceInputs, initial: Any, start: int) -> Unrolled:
    """T = 0: the cell runs once, on a blank step, for the shapes of its results; the generators are restored."""
    border, outputs = StateSpec(initial, None), OutputCollector(None)
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        y, new = call(cell, unflatten(inputs.structure, inputs.blank()), initial, start)
    leaves, ys = border.accept(new, start), outputs.accept(y, start)
    assert outputs.structure is not None
    nothing = [None if leaf is None else leaf.unsqueeze(0)[:0] for leaf in [*ys, *leaves]]
    return (
        unflatten(outputs.structure, nothing[: len(ys)]),
        initial,
        unflatten(border.structure, nothing[len(ys) :]),
    )
