"""Row masks: lengths, masks with holes, and resets, in the eager loop and in a captured step.

                 t  0  1  2  3  4  5
    row 0  length 6   x  x  x  x  x  x
    row 1  length 3   x  x  x  .  .  .      past the end: the state is kept, the output is 0, no gradient
    row 2  mask       x  .  .  x  x  .      a hole is the same, and the row goes on after it
    row 3  reset      x  x  R  x  x  x      before step 2 the state becomes the initial state

All of it is two boolean masks, T x N: ``valid`` and ``reset``. The cell still runs on all rows, since it may read other
tensors with N rows. It must not see the content of padding: NaN times a gradient of zero is NaN, and a cell may be
singular at zero. So an invalid row gets a *stand-in*: its first valid input, which the cell is known to accept.
``torch.where`` then drops its results.

In a captured step the masks, truncation and the step number are further inputs, so that a plan does not depend on T:

    x, valid, reset, cut, t         inputs
    state, fresh, references, held  states; the last three (what a reset restores, what a step net reads besides, the
                                    stand-ins) are loop-invariant

    x = where(valid, x, held)
    state = where(cut, state without gradient, state)
    state = where(reset, fresh, state)
    y, new = cell(x, state, t)
    new = where(valid, new, state),  y = where(valid, y, 0)

in the same order as in the eager loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor

from weft.core.pytree import flatten, map_leaves
from weft.core.validation import Validator
from weft.recurrent.capture import CaptureError, present, result_of
from weft.recurrent.cell import Cell
from weft.recurrent.links import Linked
from weft.recurrent.sequence import SequenceInputs, some


@dataclass(frozen=True)
class RowMasks:
    """``valid`` and ``reset``, T x N bool each, or ``None`` where all rows count, or none starts anew."""

    valid: Tensor | None = None
    reset: Tensor | None = None

    def valid_steps(self, steps: int) -> list[Tensor | None]:
        """For every step the rows that count; ``None`` where that is known to be all of them."""
        return _each(self.valid, steps, plain=True)

    def reset_steps(self, steps: int) -> list[Tensor | None]:
        """For every step the rows that start anew; ``None`` where that is known to be none."""
        return _each(self.reset, steps, plain=False)


ALL_ROWS = RowMasks()
"""Every row counts at every step."""


def read_rows(
    inputs: SequenceInputs | None,
    lengths: object,
    mask: object,
    reset: object,
    *,
    batch_first: bool,
    check: Validator,
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


def stand_ins(inputs: SequenceInputs, valid: Tensor) -> list[Any]:
    """One step of inputs that the cell can bear: each row's first that counts, or another row's, or a blank.

    No gradient goes through them. Leaves without rows are left as they are.
    """
    if not valid.numel():
        return inputs.blank()
    present = valid.any(0)
    row = torch.where(present, torch.arange(len(present), device=valid.device), present.int().argmax())
    time = valid.int().argmax(0)[row]

    def stand_in(leaf: Any, blank: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            return leaf
        return torch.where(present.any(), leaf.detach()[time, row], blank.detach())

    return [stand_in(leaf, blank) for leaf, blank in zip(inputs.leaves, inputs.blank(), strict=True)]


def replaced(step: list[Any], valid: Tensor, stand_in: list[Any]) -> list[Any]:
    """The inputs of a step with stand-ins where they do not count."""
    return [
        pick(valid, leaf, other, leaf.dtype) if isinstance(leaf, Tensor) and leaf.dim() else leaf
        for leaf, other in zip(step, stand_in, strict=True)
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
        return None
    if given.shape != (inputs.rows,):
        check.mismatch(f"lengths has shape {tuple(given.shape)}, wanted ({inputs.rows},): one for each row")
        return None
    numbers = cast("list[int]", given.tolist())
    wrong = [f"row {row} has {n}" for row, n in enumerate(numbers) if not 0 <= n <= inputs.steps]
    if wrong:
        check.mismatch(f"lengths go from 0 to T = {inputs.steps}, but {some(wrong)}")
        return None
    return torch.arange(inputs.steps, device=inputs.device)[:, None] < given.to(inputs.device)


def _table(name: str, table: object, inputs: SequenceInputs, batch_first: bool, check: Validator) -> Tensor | None:
    """A user's table of truth values, time first."""
    if not isinstance(table, Tensor):
        check.mismatch(f"{name} is of type {type(table).__name__}, wanted a tensor of torch.bool")
        return None
    wanted = (inputs.rows, inputs.steps) if batch_first else (inputs.steps, inputs.rows)
    axes = "N x T" if batch_first else "T x N"
    fine = True
    if table.dtype != torch.bool:
        check.mismatch(f"{name} has dtype {table.dtype}, wanted torch.bool")
        fine = False
    if tuple(table.shape) != wanted:
        check.mismatch(f"{name} has shape {tuple(table.shape)}, wanted {axes} = {wanted}")
        fine = False
    if not fine:
        return None
    return (table.t() if batch_first else table).to(inputs.device)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _each(table: Tensor | None, steps: int, *, plain: bool) -> list[Tensor | None]:
    """The rows of a table, ``None`` for one that is ``plain`` throughout.

    Tested only on the CPU: elsewhere the test would make the host wait.
    """
    if table is None:
        return [None] * steps
    rows = table.unbind(0)
    if table.device.type != "cpu":
        return list(rows)
    alike = cast("list[bool]", (table == plain).all(1).tolist())
    return [None if same else row for same, row in zip(alike, rows, strict=True)]


_tracer = cast("Callable[[], object | None]", proxy_tensor.get_proxy_mode)


@dataclass(frozen=True)
class Conditions:
    """Which of them a call has. Hashable: a plan is made for one such set."""

    valid: bool
    reset: bool
    cut: bool
    time: bool


UNCONDITIONAL = Conditions(valid=False, reset=False, cut=False, time=False)


@dataclass(frozen=True)
class MaskedStep:
    """A step as it is captured: ``((x, more), (state, fresh, references, held)) -> (y, (new, and these))``.

    `fresh` is () without resets, `references` () without references, `held` () without rows that do not count.
    """

    cell: Cell
    on: Conditions
    rows: int | None

    def __call__(
        self, inputs: tuple[Any, Sequence[Tensor]], states: tuple[Any, Any, Any, Sequence[Tensor]]
    ) -> tuple[Any, tuple[Any, Any, Any, Sequence[Tensor]]]:
        (x, more), (state, fresh, references, held) = inputs, states
        cell = self.cell.bound(references) if isinstance(self.cell, Linked) and references != () else self.cell
        rest = iter(more)
        valid = next(rest) if self.on.valid else None
        if valid is not None:
            x = _covered(valid, x, held)
        flags = next(rest) if self.on.reset else None
        if self.on.cut:  # before the reset: what that brings back keeps its gradient
            state = _cut(next(rest), state)
        if flags is not None:
            state = _picked(flags, fresh, state)
        t: Any = next(rest) if self.on.time else 0
        if self.on.time and _tracer() is None:
            t = int(t)  # as the eager loop has it: what the check compares with, and 1 / t has more digits so
        y, new = result_of(cell(x, state, t))
        if valid is not None:
            self._check(y, new)
            new = _picked(valid, new, state)
            y = _picked(valid, y, map_leaves(_blank, y))
        return y, (new, fresh, references, held)

    def _check(self, y: Any, new: Any) -> None:
        faults = [leaf for leaf in (*present(flatten(y)[0]), *flatten(new)[0]) if leaf.shape[:1] != (self.rows,)]
        if faults:
            raise CaptureError("rows are masked, but not all that the cell returns has rows")


def _covered(valid: Tensor, x: Any, held: Sequence[Tensor]) -> Any:
    """The input with what is held in place of padding; no gradient goes there."""
    rest = iter(held)

    def one(leaf: Any) -> Any:
        return pick(valid, leaf, next(rest).detach(), leaf.dtype) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return map_leaves(one, x)


def _picked(flags: Tensor, yes: Any, no: Any) -> Any:
    def one(new: Tensor | None, old: Any) -> Tensor | None:
        return None if new is None else pick(flags, new, old, new.dtype)

    return map_leaves(one, yes, no)


def _blank(output: Tensor | None) -> Tensor | None:
    return None if output is None else torch.zeros_like(output)


def _cut(flag: Tensor, state: Any) -> Any:
    def one(leaf: Tensor) -> Tensor:
        return torch.where(flag, leaf.detach(), leaf)

    return map_leaves(one, state)


def conditions_of(cell: Cell, rows: RowMasks, truncate: int | None) -> Conditions:
    """The conditions of a call. Masks without effect count as absent, where that is known without a device sync."""
    return Conditions(
        valid=rows.valid is not None and not _all(rows.valid, True),
        reset=rows.reset is not None and not _all(rows.reset, False),
        cut=truncate is not None,
        time=cell.time_step,
    )


def more_inputs(
    on: Conditions, inputs: SequenceInputs, rows: RowMasks, start: int, truncate: int | None
) -> list[Tensor]:
    """The inputs that the conditions add, T x ..."""
    found: list[Tensor] = []
    steps = torch.arange(start, start + inputs.steps, device=inputs.device) if on.cut or on.time else None
    if on.valid:
        assert rows.valid is not None
        found.append(rows.valid)
    if on.reset:
        assert rows.reset is not None
        found.append(rows.reset)
    if on.cut:
        assert truncate is not None and steps is not None
        found.append((steps % truncate == 0) & (steps > 0))
    if on.time:
        assert steps is not None
        found.append(steps)
    return found


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


def held_inputs(inputs: SequenceInputs, valid: Tensor) -> list[Tensor]:
    """The replacement of padding: for every leaf with rows, each row's first valid input, N x ..."""
    found = zip(inputs.leaves, stand_ins(inputs, valid), strict=True)
    return [held for leaf, held in found if isinstance(leaf, Tensor) and leaf.dim() >= 2]


def _all(table: Tensor, value: bool) -> bool:
    return table.device.type == "cpu" and bool((table == value).all())
