"""Row masks: lengths, masks with holes, and resets, in the eager loop and in a captured step.

                 t  0  1  2  3  4  5
    row 0  length 6   x  x  x  x  x  x
    row 1  length 3   x  x  x  .  .  .      past the end: the state is kept, the output is 0, no gradient
    row 2  mask       x  .  .  x  x  .      a hole is the same, and the row goes on after it
    row 3  reset      x  x  R  x  x  x      before step 2 the state becomes the initial state

The cell still runs on all rows, since it may read other tensors with N rows. It must not see the content of padding:
NaN times a gradient of zero is NaN, and a cell may be singular at zero. So a row that does not count gets a *stand-in*:
its first valid input, which the cell is known to accept. ``torch.where`` then drops its results.

In a captured step the masks, truncation and the step number are further inputs, so that a plan does not depend on T:

    x, valid, reset, cut, t         inputs
    state, fresh, references, held  states; the last three (what a reset restores, what a step net reads besides, the
                                    stand-ins) are loop-invariant
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor

from weft.core.pytree import flatten, map_leaves, unflatten
from weft.core.validation import Validator
from weft.recurrent.capture import CaptureError, present, result_of
from weft.recurrent.cell import Cell, StepNetCell
from weft.recurrent.sequence import SequenceInputs, some


@dataclass(frozen=True)
class RowMasks:
    """``valid`` and ``reset``, T x N bool each, or ``None`` where all rows count, or none starts anew."""

    valid: Tensor | None = None
    reset: Tensor | None = None

    def each(self, steps: int) -> "zip[tuple[Tensor | None, Tensor | None]]":
        """For every step the rows that count, and those that start anew."""
        tables = [[None] * steps if each is None else each.unbind(0) for each in (self.valid, self.reset)]
        return zip(*tables, strict=True)


ALL_ROWS = RowMasks()
"""Every row counts at every step."""


def read_rows(
    inputs: SequenceInputs | None, lengths: object, mask: object, reset: object, *, batch_first: bool, check: Validator
) -> RowMasks:
    """The two tables, out of whatever was given for them.

    A reset past a row's length is dropped, since its state must stay; one in a hole counts.
    """
    if lengths is None and mask is None and reset is None:
        return ALL_ROWS
    if inputs is None or inputs.rows is None:
        if inputs is not None:
            check.mismatch("lengths, mask and reset are per row, but no input has two axes, T x N")
        return ALL_ROWS
    within = None if lengths is None else _within(lengths, inputs, check)
    table = None if mask is None else _table("mask", mask, inputs, batch_first, check)
    anew = None if reset is None else _table("reset", reset, inputs, batch_first, check)
    valid = _both(within, table)
    return RowMasks(valid, None if anew is None else _both(within, anew))


def pick(flags: Tensor, yes: Tensor, no: Tensor, dtype: torch.dtype) -> Tensor:
    """Per row ``yes`` or ``no``, both N x ..., in ``dtype``. ``flags``: N bool."""
    return torch.where(flags.view(-1, *[1] * (yes.dim() - 1)), yes.to(dtype), no.to(dtype))


def padding_values(inputs: SequenceInputs, valid: Tensor) -> list[Tensor]:
    """For every leaf with rows one step that the cell can bear, N x ...

    That is each row's first that counts, or another row's, or a blank.
    """
    pairs = zip(inputs.leaves, inputs.blank(), strict=True)
    pairs = [(leaf, blank) for leaf, blank in pairs if isinstance(leaf, Tensor) and leaf.dim() >= 2]
    if not valid.numel():
        return [blank for _, blank in pairs]
    present = valid.any(0)
    row = torch.where(present, torch.arange(len(present), device=valid.device), present.int().argmax())
    time = valid.int().argmax(0)[row]
    return [torch.where(present.any(), leaf.detach()[time, row], blank.detach()) for leaf, blank in pairs]


def replaced(step: list[Any], valid: Tensor, held: Sequence[Tensor]) -> list[Any]:
    """The inputs of a step with stand-ins where they do not count; no gradient goes there."""
    rest = iter(held)
    return [
        pick(valid, leaf, next(rest).detach(), leaf.dtype) if isinstance(leaf, Tensor) and leaf.dim() else leaf
        for leaf in step
    ]


def _within(lengths: object, inputs: SequenceInputs, check: Validator) -> Tensor | None:
    """T x N: whether the step is before the row's end."""
    try:
        given = lengths if isinstance(lengths, Tensor) else torch.as_tensor(cast(Any, lengths))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        check.mismatch(f"lengths is {lengths!r}, wanted a tensor or a sequence of {inputs.rows} integers")
        return None
    given = given.long() if not given.numel() else given  # an empty list has no dtype of its own
    if given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
        check.mismatch(f"lengths has dtype {given.dtype}, wanted integers")
    elif given.shape != (inputs.rows,):
        check.mismatch(f"lengths has shape {tuple(given.shape)}, wanted ({inputs.rows},): one for each row")
    else:
        numbers = enumerate(cast("list[int]", given.tolist()))
        wrong = [f"row {row} has {n}" for row, n in numbers if not 0 <= n <= inputs.steps]
        if not wrong:
            return torch.arange(inputs.steps, device=inputs.device)[:, None] < given.to(inputs.device)
        check.mismatch(f"lengths go from 0 to T = {inputs.steps}, but {some(wrong)}")
    return None


def _table(name: str, table: object, inputs: SequenceInputs, batch_first: bool, check: Validator) -> Tensor | None:
    """A user's table of truth values, time first."""
    if not isinstance(table, Tensor):
        check.mismatch(f"{name} is of type {type(table).__name__}, wanted a tensor of torch.bool")
        return None
    wanted = (inputs.rows, inputs.steps) if batch_first else (inputs.steps, inputs.rows)
    axes = "N x T" if batch_first else "T x N"
    if table.dtype != torch.bool:
        check.mismatch(f"{name} has dtype {table.dtype}, wanted torch.bool")
    if tuple(table.shape) != wanted:
        check.mismatch(f"{name} has shape {tuple(table.shape)}, wanted {axes} = {wanted}")
    if table.dtype != torch.bool or tuple(table.shape) != wanted:
        return None
    return (table.t() if batch_first else table).to(inputs.device)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


_tracer = cast("Callable[[], object | None]", proxy_tensor.get_proxy_mode)


class Conditions(NamedTuple):
    """Which of them a call has. A plan is made for one such set."""

    valid: bool
    reset: bool
    cut: bool
    time: bool


@dataclass(frozen=True)
class MaskedStep:
    """A step as it is captured: ``((x, more), (state, fresh, references, held)) -> (y, (new, and these))``.

    `fresh` is () without resets, `references` () without references, `held` () without rows that do not count.
    """

    cell: Cell
    on: Conditions

    def __call__(
        self, inputs: tuple[Any, Sequence[Tensor]], states: tuple[Any, Any, Any, Sequence[Tensor]]
    ) -> tuple[Any, tuple[Any, Any, Any, Sequence[Tensor]]]:
        (x, more), (state, fresh, references, held) = inputs, states
        cell = self.cell.bound(references) if isinstance(self.cell, StepNetCell) and references != () else self.cell
        rest = iter(more)
        valid = next(rest) if self.on.valid else None
        if valid is not None:
            leaves, structure = flatten(x)
            x = unflatten(structure, replaced(leaves, valid, held))
        flags = next(rest) if self.on.reset else None
        if self.on.cut:  # before the reset: what that brings back keeps its gradient
            cut = next(rest)
            leaves, structure = flatten(state)
            state = unflatten(structure, [torch.where(cut, leaf.detach(), leaf) for leaf in leaves])
        if flags is not None:
            state = choose_rows(flags, fresh, state)
        t: Any = next(rest) if self.on.time else 0
        if self.on.time and _tracer() is None:
            t = int(t)  # as the eager loop has it: what the check compares with, and 1 / t has more digits so
        y, new = result_of(cell(x, state, t))
        if valid is not None:
            if any(leaf.shape[:1] != valid.shape for leaf in (*present(flatten(y)[0]), *flatten(new)[0])):
                raise CaptureError("rows are masked, but not all that the cell returns has rows")
            new, y = choose_rows(valid, new, state), choose_rows(valid, y)
        return y, (new, fresh, references, held)


def choose_rows(flags: Tensor, yes: Any, *no: Any) -> Any:
    """Row by row one value or the other, which is zero if it is not given."""

    def one(new: Tensor | None, *old: Tensor) -> Tensor | None:
        return None if new is None else pick(flags, new, old[0] if old else torch.zeros_like(new), new.dtype)

    return map_leaves(one, yes, *no)


def check_number(number: fx.Node, leaves: Sequence[Tensor]) -> None:
    """Refuses what rounds the step's number, a tensor of integers in a graph, to float32 where others are float64.

    `leaves` are the inputs and states. Raises CaptureError.
    """
    made = [user.meta.get("val") for user in number.users if user.target is not torch.ops.aten._to_copy.default]
    rounded = any(isinstance(each, Tensor) and not each.dim() and each.dtype == torch.float32 for each in made)
    if rounded and any(each.dtype == torch.float64 for each in leaves):
        raise CaptureError(
            "the cell computes in float64 with the number t of the step, which a plan would round to float32; make it "
            "a tensor first, as by torch.as_tensor(t, dtype=x.dtype)"
        )
