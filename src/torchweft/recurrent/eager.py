"""The exact loop: one call of the cell for each step, under plain autograd.

    state 0 = initial state
    for every step t:
        truncate?   cut the state's gradient                      (at every k-th step)
        reset?      reset rows get the initial state
        padding?    padded rows get a valid input as a placeholder
                    y_t, new = cell(x_t, state, t)
        padding?    padded rows keep their state, and their output is zero
        state = new

A plan is faster, but this loop stays. It runs the calls that no plan can (double backward, forward mode, `vmap`), and
every plan is compared with it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from torchweft.core.errors import SpecError
from torchweft.core.pytree import Structure, flatten, map_leaves, unflatten
from torchweft.recurrent.cell import Cell, InputWidthError, StepSpec, expand_like
from torchweft.recurrent.masking import ALL_ROWS, RowMasks, replace_padding, select_rows
from torchweft.recurrent.sequence import SequenceInputs

# Outputs (T x N x ...), the last state (N x ...), and all states (rows 1 to T, T x N x ...).
Unrolled = tuple[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class SequenceRun:
    """One sequence to run."""

    cell: Cell
    inputs: SequenceInputs
    rows: RowMasks
    initial: Any
    fresh: Any  # the state that a reset restores; None for `initial`
    start: int  # the number of the first step
    truncate: int | None  # the number of steps between two places where the states' gradients stop
    padding: Sequence[Tensor] | None = None  # see `padding_values`; None if all rows are valid
    settled: bool = False  # whether `initial` has the dtypes and shapes of all later states
    call_key: Hashable = None  # finds the prepared call again, see `PreparedCall`; None for a part of a sequence
    own_form: Hashable = None  # the form of the network's own initial state before it got rows

    def run(self) -> Unrolled:
        """Run by the eager loop. An output that is also a state is stacked once: both results are then one tensor."""
        # Raises ``SpecError`` if the cell does not return ``(y, new_state)``, or if nesting, shape or dtype change from
        # step to step. Errors of the cell get a note that names the step.
        cell, inputs, rows = self.cell, self.inputs, self.rows
        if not inputs.steps:
            return self._run_no_steps()
        count = inputs.rows if rows.valid is not None or rows.reset is not None else None
        border, outputs = (
            StepSpec.of_states(self.initial, count, self.settled),
            StepSpec("output", count, settled=self.settled),
        )
        fresh = flatten(self.initial if self.fresh is None else self.fresh)[0]
        state: list[Tensor] = flatten(self.initial)[0]
        states, collected = list[list[Tensor]](), list[list[Any]]()
        steps = zip(inputs.each_step(), rows.each_step(inputs.steps), strict=True)
        for t, (x, (valid, reset)) in enumerate(steps, self.start):
            # The cut comes before the reset, because the restored state keeps its gradient.
            if is_cut(t, self.truncate):
                state = [leaf.detach() for leaf in state]
            if reset is not None:
                state = [select_rows(reset, new, old, old.dtype) for new, old in zip(fresh, state, strict=True)]
            if self.padding is not None and valid is not None:
                x = replace_padding(x, valid, self.padding)
            y, new = call_cell(cell, unflatten(inputs.structure, x), unflatten(border.structure, state), t)
            after, ys = border.accept(new, t, cell), outputs.accept(y, t)
            if valid is not None:
                # The first step can settle a larger shape or a float dtype, which the state before it then takes too.
                pairs = zip(after, state, strict=True)
                after = [select_rows(valid, leaf, expand_like(old, leaf), leaf.dtype) for leaf, old in pairs]
                ys = [y if y is None else select_rows(valid, y, torch.zeros_like(y), y.dtype) for y in ys]
            state = after
            states.append(after)
            collected.append(ys)
        return _stack_over_time(outputs.structure, collected, border.structure, states)

    def head(self, steps: int) -> "SequenceRun":
        """The first steps, at most those of the sequence."""
        return self._part(slice(0, steps), steps)

    def after_first_step(self, state: Any) -> "SequenceRun":
        """The same sequence from its second step on, where `state` is the state after the first one."""
        return replace(self._part(slice(1, None), self.inputs.steps - 1).settle(state), start=self.start + 1)

    def settle(self, state: Any) -> "SequenceRun":
        """The same sequence from `state`, which has the dtypes and shapes that all later states must have."""
        fresh = None if self.fresh is None else map_leaves(expand_like, self.fresh, state)
        return replace(self, initial=state, fresh=fresh, settled=True, call_key=None)

    def _part(self, steps: slice, count: int) -> "SequenceRun":
        # `count` is given, because `steps.indices` would turn a symbolic T into a constant of the compiled graph.
        leaves = [leaf[steps] if isinstance(leaf, Tensor) else leaf for leaf in self.inputs.leaves]
        rows = self.rows.apply(lambda table: table[steps])
        return replace(self, inputs=replace(self.inputs, leaves=leaves, steps=count), rows=rows, call_key=None)

    def _run_no_steps(self) -> Unrolled:
        """T = 0: run the cell once on a placeholder to learn the shapes of its results. Generators are restored."""
        leaves = [leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf for leaf in self.inputs.placeholder_step()]
        device = self.inputs.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            one = replace(self, inputs=replace(self.inputs, leaves=leaves, steps=1), rows=ALL_ROWS)
            outputs, _, states = one.run()

        def no_steps(leaf: Any) -> Any:
            return leaf if leaf is None else leaf[:0]

        return map_leaves(no_steps, outputs), self.initial, map_leaves(no_steps, states)


def is_cut(t: int, truncate: int | None) -> bool:
    """Whether the states' gradients stop before step ``t``. They never stop before step 0."""
    return truncate is not None and t > 0 and t % truncate == 0


def call_cell(cell: Cell, x: Any, state: Any, t: int) -> tuple[Any, Any]:
    """One step: ``(y, new_state)``."""
    # Raises ``SpecError`` if the cell does not return such a pair, and ``InputWidthError`` if it failed on an input
    # whose width is not the one that it declares.
    try:
        pair = cell(x, state, t)
    except Exception as error:
        # Only after a failure, so that the check costs nothing per step.
        fault = cell.width_fault(x)
        if fault is not None:
            raise InputWidthError(f"{fault}, in step {t}") from error
        raise_input_form(cell, x, error)
        error.add_note(
            f"torchweft: in step {t} of cell {cell.name}, called as {cell.call_form}: "
            f"x {_shapes_of(x)}, state {_shapes_of(state)}"
        )
        raise
    values = cast("tuple[Any, ...]", pair) if isinstance(pair, tuple) else (pair,)
    if len(values) != 2:
        kinds = ", ".join(type(value).__name__ for value in values)
        raise SpecError(f"cell {cell.name} returned ({kinds}) at step {t}, wanted a pair (y, new_state)")
    return values[0], values[1]


def raise_input_form(cell: Cell, x: Any, error: Exception) -> None:
    """Raise ``SpecError`` if ``x``, on which the cell failed with ``error``, has a form that few cells accept."""
    leaves = flatten(x)[0]
    if isinstance(x, list):
        size = len(cast("list[Any]", x))
        form = f"a list of {size}, wanted one tensor of T x N x ...; if the list holds the steps: torch.stack(steps)"
    elif leaves and all(isinstance(leaf, Tensor) and leaf.dim() < 2 for leaf in leaves):
        form = (
            f"x {_shapes_of(x)}, which has no batch axis, wanted inputs of T x N x D; for one row: inputs.unsqueeze(1)"
        )
    else:
        return
    raise SpecError(f"cell {cell.name} failed on {form} ({error})") from error


def _shapes_of(value: Any) -> str:
    words = [
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in flatten(value)[0]
    ]
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def _stack_over_time(
    form: Structure, outputs: Sequence[list[Any]], state_form: Structure, states: Sequence[list[Tensor]]
) -> Unrolled:
    # Columns of the very same tensors share one stack. Otherwise a hidden state that is also the output would be copied
    # twice, and its gradient would be summed from two stacks.
    stacks: dict[tuple[int, ...], Tensor] = {}

    def stack_column(column: tuple[Any, ...]) -> Any:
        if column[0] is None:
            return None
        key = tuple(map(id, column))
        if key not in stacks:
            stacks[key] = torch.stack(column)
        return stacks[key]

    return (
        unflatten(form, [stack_column(column) for column in zip(*outputs, strict=True)]),
        unflatten(state_form, states[-1]),
        unflatten(state_form, [stack_column(column) for column in zip(*states, strict=True)]),
    )
