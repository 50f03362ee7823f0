"""Row masks: lengths, masks with holes, and resets, in the eager loop and in a captured step.

                 t  0  1  2  3  4  5
    row 0  length 6   x  x  x  x  x  x
    row 1  length 3   x  x  x  .  .  .      past the end: the state is kept, the output is 0, no gradient
    row 2  mask       x  .  .  x  x  .      a hole is the same, and the row continues after it
    row 3  reset      x  x  R  x  x  x      before step 2 the state becomes the initial state

Running the cell on the valid rows alone would not work, because it can read other tensors with N rows. It therefore
runs on all rows, but must not see the content of padding: NaN times a gradient of zero is NaN, and a cell can be
singular at zero. A padded row gets a *padding value* instead: its first valid input, which the cell is known to accept.
``torch.where`` then discards its results.

In a captured step the masks, truncation and the step number are further inputs, so that a plan does not depend on T:

    x, valid, reset, cut, t            inputs
    state, fresh, references, padding  states. The last three (restored by a reset, read by a step net, put in place of
                                       padding) are loop-invariant
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from torchweft.core.pytree import flatten, map_leaves, unflatten
from torchweft.core.validation import Validator
from torchweft.recurrent.capture import CaptureError, check_pair, tensor_outputs
from torchweft.recurrent.cell import Cell, StepNetCell
from torchweft.recurrent.pytorch_internals import current_tracer
from torchweft.recurrent.sequence import SequenceInputs, list_some


@dataclass(frozen=True)
class RowMasks:
    """``valid`` and ``reset``, T x N bool each. ``None``: all rows are valid, or none is reset."""

    valid: Tensor | None = None
    reset: Tensor | None = None

    def each_step(self, steps: int) -> "zip[tuple[Tensor | None, Tensor | None]]":
        tables = [[None] * steps if table is None else table.unbind(0) for table in (self.valid, self.reset)]
        return zip(*tables, strict=True)

    def apply(self, function: Callable[[Tensor], Tensor]) -> "RowMasks":
        return RowMasks(*(None if table is None else function(table) for table in (self.valid, self.reset)))


ALL_ROWS = RowMasks()  # every row is valid at every step


def read_rows(
    inputs: SequenceInputs | None, lengths: object, mask: object, reset: object, *, batch_first: bool, check: Validator
) -> RowMasks:
    """The two tables, from lengths, mask and reset."""
    # A reset past a row's length is dropped, because its state must stay. A reset in a hole of the mask counts.
    if lengths is None and mask is None and reset is None:
        return ALL_ROWS
    if inputs is None or inputs.rows is None:
        if inputs is not None:
            check.mismatch("lengths, mask and reset are per row, but no input has two axes, T x N")
        return ALL_ROWS
    # All three are read before any fault is raised, so that one error lists all faults.
    within = None if lengths is None else _steps_within(lengths, inputs, check)
    valid = None if mask is None else _read_table("mask", mask, inputs, batch_first, check)
    resets = None if reset is None else _read_table("reset", reset, inputs, batch_first, check)
    return RowMasks(_and_if_given(within, valid), None if resets is None else _and_if_given(within, resets))


def select_rows(flags: Tensor, yes: Tensor, no: Tensor, dtype: torch.dtype) -> Tensor:
    """Per row ``yes`` or ``no``, both N x ..., in ``dtype``. ``flags``: N bool."""
    # `where`, not a product: NaN in the other branch times zero would be NaN.
    return torch.where(flags.view(-1, *[1] * (yes.dim() - 1)), yes.to(dtype), no.to(dtype))


def select_nested_rows(flags: Tensor, yes: Any, *no: Any) -> Any:
    """`select_rows` for every leaf of nested values. Without ``no``, the other rows are zero."""

    def select_leaf(new: Tensor | None, *old: Tensor) -> Tensor | None:
        return None if new is None else select_rows(flags, new, old[0] if old else torch.zeros_like(new), new.dtype)

    return map_leaves(select_leaf, yes, *no)


def padding_values(inputs: SequenceInputs, valid: Tensor) -> list[Tensor]:
    """For every leaf with rows, one step that the cell accepts, N x ..."""
    # A row's value is its first valid input, else that of another row, else a placeholder.
    pairs = zip(inputs.leaves, inputs.placeholder_step(), strict=True)
    pairs = [(leaf, blank) for leaf, blank in pairs if isinstance(leaf, Tensor) and leaf.dim() >= 2]
    if not valid.numel():
        return [blank for _, blank in pairs]
    # All by tensor operators: reading a value would wait for a GPU, and is impossible under tracing.
    any_valid = valid.any(0)
    source = torch.where(any_valid, torch.arange(len(any_valid), device=valid.device), any_valid.int().argmax())
    time = valid.int().argmax(0)[source]
    return [torch.where(any_valid.any(), leaf.detach()[time, source], blank.detach()) for leaf, blank in pairs]


def replace_padding(step: list[Any], valid: Tensor, padding: Sequence[Tensor]) -> list[Any]:
    """The inputs of a step with `padding` in the rows that are not valid. No gradient flows there."""
    values = iter(padding)
    return [
        select_rows(valid, leaf, next(values).detach(), leaf.dtype) if isinstance(leaf, Tensor) and leaf.dim() else leaf
        for leaf in step
    ]


def _steps_within(lengths: object, inputs: SequenceInputs, check: Validator) -> Tensor | None:
    # T x N: whether the step is before the row's end.
    try:
        counts = lengths if isinstance(lengths, Tensor) else torch.as_tensor(cast(Any, lengths))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        check.mismatch(f"lengths is {lengths!r}, wanted a tensor or a sequence of {inputs.rows} integers")
        return None
    counts = counts.long() if not counts.numel() else counts  # an empty list becomes a tensor of floats
    if counts.dtype == torch.bool or counts.is_floating_point() or counts.is_complex():
        check.mismatch(f"lengths has dtype {counts.dtype}, wanted integers")
    elif counts.shape != (inputs.rows,):
        check.mismatch(f"lengths has shape {tuple(counts.shape)}, wanted ({inputs.rows},): one for each row")
    else:
        # Under export they have no values yet.
        numbers = enumerate([] if torch.compiler.is_exporting() else cast("list[int]", counts.tolist()))
        outside = [f"row {row} has {n}" for row, n in numbers if not 0 <= n <= inputs.steps]
        if not outside:
            return torch.arange(inputs.steps, device=inputs.device)[:, None] < counts.to(inputs.device)
        check.mismatch(f"lengths go from 0 to T = {inputs.steps}, but {list_some(outside)}")
    return None


def _read_table(name: str, table: object, inputs: SequenceInputs, batch_first: bool, check: Validator) -> Tensor | None:
    # A user's table of truth values, time first.
    if not isinstance(table, Tensor):
        check.mismatch(f"{name} is of type {type(table).__name__}, wanted a tensor of torch.bool")
        return None
    shape = (inputs.rows, inputs.steps) if batch_first else (inputs.steps, inputs.rows)
    axes = "N x T" if batch_first else "T x N"
    if table.dtype != torch.bool:
        check.mismatch(f"{name} has dtype {table.dtype}, wanted torch.bool")
    if tuple(table.shape) != shape:
        check.mismatch(f"{name} has shape {tuple(table.shape)}, wanted {axes} = {shape}")
    if table.dtype != torch.bool or tuple(table.shape) != shape:
        return None
    return (table.t() if batch_first else table).to(inputs.device)


def _and_if_given(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


class Conditions(NamedTuple):
    """The conditions that a call has. A plan is made for one such set."""

    valid: bool
    reset: bool
    cut: bool
    time: bool


@dataclass(frozen=True)
class MaskedStep:
    """A step as it is captured: ``((x, flags), (state, fresh, references, padding)) -> (y, (new, and these))``."""

    # `fresh` is () without resets, `references` () without references, `padding` () if all rows are valid.

    cell: Cell
    on: Conditions

    def __call__(
        self, inputs: tuple[Any, Sequence[Tensor]], states: tuple[Any, Any, Any, Sequence[Tensor]]
    ) -> tuple[Any, tuple[Any, Any, Any, Sequence[Tensor]]]:
        (x, flags), (state, fresh, references, padding) = inputs, states
        cell = self.cell
        if isinstance(cell, StepNetCell) and references != ():
            cell = StepNetCell(cell.function, cell.links, references=references, time_step=cell.time_step)
        remaining = iter(flags)
        valid = next(remaining) if self.on.valid else None
        if valid is not None:
            leaves, structure = flatten(x)
            x = unflatten(structure, replace_padding(leaves, valid, padding))
        reset = next(remaining) if self.on.reset else None
        if self.on.cut:
            # The cut comes before the reset, because the restored state keeps its gradient.
            cut = next(remaining)
            leaves, structure = flatten(state)
            state = unflatten(structure, [torch.where(cut, leaf.detach(), leaf) for leaf in leaves])
        if reset is not None:
            state = select_nested_rows(reset, fresh, state)
        t: Any = next(remaining) if self.on.time else 0
        if self.on.time and current_tracer() is None:
            # The verification runs this step without tracing. The eager loop passes an int there, and 1 / t of an int
            # is computed in double precision.
            t = int(t)
        y, new = check_pair(cell(x, state, t))
        if valid is not None:
            if any(leaf.shape[:1] != valid.shape for leaf in (*tensor_outputs(flatten(y)[0]), *flatten(new)[0])):
                raise CaptureError("rows are masked, but some results of the cell have no rows")
            new, y = select_nested_rows(valid, new, state), select_nested_rows(valid, y)
        return y, (new, fresh, references, padding)


def check_step_number(number: fx.Node, leaves: Sequence[Tensor]) -> None:
    """Raise CaptureError if the graph rounds the step's number, an integer tensor, to float32 in a float64 cell."""
    # PyTorch gives an integer tensor divided by a Python number the default dtype, where a Python int gives a double.
    values = [user.meta.get("val") for user in number.users if user.target is not torch.ops.aten._to_copy.default]
    rounded = any(isinstance(value, Tensor) and not value.dim() and value.dtype == torch.float32 for value in values)
    if rounded and any(leaf.dtype == torch.float64 for leaf in leaves):
        raise CaptureError(
            "the cell computes in float64 with the number t of the step, which a plan would round to float32; make it "
            "a tensor first, as by torch.as_tensor(t, dtype=x.dtype)"
        )
