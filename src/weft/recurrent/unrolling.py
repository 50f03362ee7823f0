"""One call of a recurrent network: arguments in, checked and in one form; through the loop; results out.

    inputs (packed?)  ->  Inputs: time first                 unroll            outputs   (packed?)
    lengths, mask, reset  ->  Rows: T x N                  ---------->         last
    state | own initial   ->  one row per row of inputs                        states

All faults of the arguments are told at once, before the cell runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from weft.core.errors import SpecError
from weft.core.tree import difference, flatten, map_leaves, unflatten
from weft.recurrent import eager
from weft.recurrent.backends import Plans
from weft.recurrent.cell import Cell
from weft.recurrent.faults import Faults, whole
from weft.recurrent.packed import pack_like, unpack
from weft.recurrent.rows import Lengths, Rows, read_rows, replaced, stand_ins
from weft.recurrent.sequence import Inputs, batch_first_again, read_inputs
from weft.recurrent.states import spread


class Result(NamedTuple):
    """What a recurrent network returns. Its tensors may share memory: read them, do not write into them."""

    outputs: Any
    """Nested as ``y_t``, T x N x ...; zero where a row does not count. Packed if the inputs were."""
    last: Any
    """Nested as the state, N x ...: the state after each row's last step that counts."""
    states: Any
    """Nested as the state, T x N x ...: the state after every step (not the initial one). None where ``memory`` is such
    that not all are kept ("sqrt", or a number of bytes that is too small for them)."""

    @property
    def all(self) -> Any:
        """The same as ``states``; the name that Caffe2 had for it."""
        return self.states


@dataclass(frozen=True)
class Initial:
    """Where states begin: a function of the first input, and whether it returns the state of a single row."""

    make: Callable[[Any], Any]
    for_one_row: bool = False


@dataclass(frozen=True)
class Settings:
    """How a network runs, whatever it runs on."""

    initial: Initial | None = None
    batch_first: bool = False
    truncate: int | None = None
    plans: Plans | None = None


def run(
    cell: Cell,
    settings: Settings,
    inputs: Any,
    state: Any,
    *,
    lengths: Lengths | None,
    mask: Tensor | None,
    reset: Tensor | None,
    start: int,
) -> Result:
    """See :class:`weft.recurrent.Recurrent`, whose ``forward`` this is."""
    faults = Faults()
    packed = inputs if isinstance(inputs, PackedSequence) else None
    if packed is not None:
        if lengths is not None:
            faults.usage.append("lengths were given, but the inputs are a PackedSequence, which has its own")
        inputs, lengths = unpack(packed)
    by_row = any(each is not None for each in (lengths, mask, reset))
    batch_first = settings.batch_first and packed is None
    read = read_inputs(inputs, batch_first=batch_first, certain=batch_first or by_row, faults=faults)
    rows = read_rows(read, lengths, mask, reset, batch_first=settings.batch_first, faults=faults)
    if not whole(start) or start < 0:
        faults.usage.append(f"start is {start!r}, wanted the number of the first step, 0 or more")
    begin = _given(cell, settings, state, read, faults)
    faults.check(f"the recurrent network of cell {cell.name} cannot run on these arguments:")
    assert read is not None
    fresh = None
    if state is None or (reset is not None and settings.initial is not None):
        fresh = _own(cell, settings, read, rows)
        _alike(cell, begin, fresh)
    begin = fresh if state is None else begin
    job = eager.Job(cell, read, rows, begin, fresh, start, settings.truncate)
    outputs, last, states = job.run() if settings.plans is None else settings.plans.run(job)
    if settings.batch_first and states is not None:
        states = map_leaves(partial(batch_first_again, rows=read.rows), states)
    if packed is not None and isinstance(lengths, Tensor):
        outputs = map_leaves(partial(pack_like, lengths=lengths, packed=packed), outputs)
    elif settings.batch_first:
        outputs = map_leaves(partial(batch_first_again, rows=read.rows), outputs)
    axis = 2 if settings.batch_first else 1
    return Result(outputs, cell.leave(last), None if states is None else cell.leave(states, axis))


def initial_state(cell: Cell, initial: Initial, x: Any, inputs: Inputs) -> Any:
    """The network's own initial state in the loop's form, for the rows of ``inputs``; ``x`` is its first step."""
    faults = Faults()
    state = spread(cell.enter(initial.make(x), faults), inputs, faults, for_one_row=initial.for_one_row)
    faults.check(f"the initial state of the recurrent network of cell {cell.name} does not fit its inputs:")
    return state


def _given(cell: Cell, settings: Settings, state: Any, inputs: Inputs | None, faults: Faults) -> Any:
    """The state that came with the call, in the loop's form; ``None`` if none came."""
    if state is None:
        if settings.initial is None:
            faults.usage.append(
                f"there is no initial state: give state=, or initial= to the network, or give {cell.name} a method "
                "initial_state(first input)"
            )
        return None
    before = len(faults.spec)
    entered = cell.enter(state, faults)
    return entered if inputs is None or len(faults.spec) > before else spread(entered, inputs, faults)


def _alike(cell: Cell, given: Any, own: Any) -> None:
    """Raise ``SpecError`` if the state of the call is nested otherwise than the one that a reset brings back."""
    fault = None if given is None else difference(flatten(own)[1], flatten(given)[1], "state")
    if fault:
        raise SpecError(f"the state given to cell {cell.name} is not nested as its initial state: {fault}")


def _own(cell: Cell, settings: Settings, inputs: Inputs, rows: Rows) -> Any:
    """The network's own initial state, made from the first step, in which padding is replaced."""
    assert settings.initial is not None
    step = inputs.first() if inputs.steps else inputs.blank()
    if inputs.steps and rows.valid is not None:
        step = replaced(step, rows.valid[0], stand_ins(inputs, rows.valid))
    return initial_state(cell, settings.initial, unflatten(inputs.structure, step), inputs)
