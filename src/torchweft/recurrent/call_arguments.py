"""The arguments of a call of a network, validated and normalised, and its first state.

    net(x, lengths=[3, 1])     ->   a `SequenceRun`: time first, masks T x N, the first state N x ..., padding values

All faults of the arguments are collected, and raised as one error.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from torchweft.core.errors import SpecError
from torchweft.core.pytree import difference, flatten, structure_paths, unflatten
from torchweft.core.validation import Validator
from torchweft.recurrent import eager
from torchweft.recurrent.cell import Cell, StoredState, expand_state
from torchweft.recurrent.masking import ALL_ROWS, RowMasks, padding_values, read_rows, replace_padding
from torchweft.recurrent.plan_cache import PlanCache
from torchweft.recurrent.prepared_call import form_of
from torchweft.recurrent.sequence import Lengths, SequenceInputs, read_inputs


@dataclass(frozen=True)
class RecurrentSettings:
    """Settings of a network that do not depend on the backend."""

    initial: Callable[[Any], Any] | None = None
    batch_first: bool = False
    truncate: int | None = None
    plans: PlanCache | None = None


def read_call(
    cell: Cell,
    settings: RecurrentSettings,
    inputs: Any,
    state: Any,
    *,
    lengths: Lengths | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    start: int = 0,
    key: Hashable = None,
    made: Any = None,
) -> tuple[eager.SequenceRun, Lengths | None]:
    """The validated and normalised arguments of a call, and the lengths, which a PackedSequence brings itself."""
    # `key` is that of a prepared call, and `made` the network's own initial state, if it was computed already.
    packed = inputs if isinstance(inputs, PackedSequence) else None
    with Validator(f"the recurrent network of cell {cell.name} cannot run on these arguments") as check:
        if packed is not None:
            check.require(lengths is None, "lengths were given, but the inputs are a PackedSequence, which has its own")
            inputs, lengths = pad_packed_sequence(packed)
        by_row = not (lengths is mask is reset is None)
        batch_first = settings.batch_first and packed is None
        read = read_inputs(inputs, batch_first=batch_first, certain=batch_first or by_row, check=check)
        rows = ALL_ROWS
        if by_row:
            rows = read_rows(read, lengths, mask, reset, batch_first=settings.batch_first, check=check)
        if type(start) is not int or start < 0:
            valid = is_integer(start) and start >= 0
            check.require(valid, f"start is {start!r}, wanted the number of the first step, 0 or more")
        initial = given_state(cell, settings, state, read, check)
    assert read is not None
    fresh, form = None, None
    padding = None if rows.valid is None else padding_values(read, rows.valid)
    # With a state and a reset, rows start from `state` and return to the network's own state, so both are needed.
    if state is None or (reset is not None and settings.initial is not None):
        made = make_own_state(cell, settings, read, rows, padding) if made is None else made
        form = form_of(made)
        fresh = expand_own_state(cell, settings, made, read)
        fault = None if initial is None else difference(flatten(fresh)[1], flatten(initial)[1], "state")
        if fault:
            raise SpecError(f"the state given to cell {cell.name} is not nested as its initial state: {fault}")
    initial = fresh if state is None else initial
    run = eager.SequenceRun(cell, read, rows, initial, fresh, start, settings.truncate, padding)
    return replace(run, call_key=key, own_form=form), lengths


def given_state(
    cell: Cell, settings: RecurrentSettings, state: Any, inputs: SequenceInputs | None, check: Validator
) -> Any:
    if state is None:
        if settings.initial is None:
            check.add(
                f"there is no initial state: give state=, or initial= to the network, or give {cell.name} a method "
                "initial_state(first input)"
            )
        return None
    # A state with a fault could raise another, misleading one when it is expanded.
    before = len(check.faults)
    entered = cell.enter_loop(state, check)
    if inputs is None or len(check.faults) > before:
        return entered
    _check_layer_axis(cell, settings, entered, inputs, check)
    return expand_state(entered, inputs, check)


def _check_layer_axis(
    cell: Cell, settings: RecurrentSettings, state: Any, inputs: SequenceInputs, check: Validator
) -> None:
    """Reject states as nn.GRU takes them, 1 x N x H, for a cell whose own are N x H. They would become N x N x H."""
    leaves, structure = flatten(state)
    shapes = [leaf.shape if isinstance(leaf, Tensor) else () for leaf in leaves]
    if settings.initial is None or not any([len(s) > 2 and s[0] == 1 and s[1] == inputs.rows for s in shapes]):
        return
    # The initial state can draw random numbers, and this one is not used.
    with torch.no_grad(), torch.random.fork_rng([inputs.device] if inputs.device.type == "cuda" else []):
        own, own_structure = flatten(own_state(cell, settings, inputs, ALL_ROWS, None))
    if own_structure != structure:
        return
    names = structure_paths(structure, "state")
    check.mismatch(
        *(
            f"{name} has shape {tuple(shape)}, but the cell's own has shape {tuple(of_own.shape)}: the first axis is "
            "that of the layers of nn.GRU or nn.LSTM, which a cell does not have; give h0[0]"
            for name, shape, of_own in zip(names, shapes, own, strict=True)
            if shape[:2] == (1, inputs.rows) and of_own.dim() < len(shape)
        )
    )


def own_state(
    cell: Cell, settings: RecurrentSettings, inputs: SequenceInputs, rows: RowMasks, padding: Sequence[Tensor] | None
) -> Any:
    """The network's own initial state for the rows of ``inputs``, computed from the first step."""
    return expand_own_state(cell, settings, make_own_state(cell, settings, inputs, rows, padding), inputs)


def make_own_state(
    cell: Cell, settings: RecurrentSettings, inputs: SequenceInputs, rows: RowMasks, padding: Sequence[Tensor] | None
) -> Any:
    make = settings.initial
    assert make is not None
    step = inputs.first_step() if inputs.steps else inputs.placeholder_step()
    if inputs.steps and rows.valid is not None and padding is not None:
        # A row of length 0 has padding in its first step already, which can hold NaN.
        step = replace_padding(step, rows.valid[0], padding)
    x = unflatten(inputs.structure, step)
    try:
        return make(x)
    except Exception as error:
        eager.raise_input_form(cell, x, error)
        raise


def expand_own_state(cell: Cell, settings: RecurrentSettings, made: Any, inputs: SequenceInputs) -> Any:
    with Validator(f"the initial state of the recurrent network of cell {cell.name} does not fit its inputs") as check:
        entered = cell.enter_loop(made, check)
        return expand_state(entered, inputs, check, for_one_row=isinstance(settings.initial, StoredState))


def is_integer(value: object) -> bool:
    # SymInt: a symbolic integer of a graph that is being traced.
    return type(value) is not bool and isinstance(value, Integral | torch.SymInt)
