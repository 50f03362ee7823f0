"""Which steps of which rows count: lengths, masks with holes, resets.

                 t  0  1  2  3  4  5
    row 0  length 6   x  x  x  x  x  x
    row 1  length 3   x  x  x  .  .  .      past the end: the state stays, the output is 0, no gradient
    row 2  mask       x  .  .  x  x  .      a hole is the same, and time goes on behind it
    row 3  reset      x  x  R  x  x  x      before step 2 the state becomes the initial state

All of it is two tables of T x N truth values, ``valid`` and ``reset``. The cell still runs on all rows, because
it may read other things that have N rows. What it must not see is the content of padding: NaN times a gradient
of zero is NaN, and a cell may be singular at zero. So a row that does not count gets a *stand-in*: its first
input that counts, which the cell is known to bear. ``torch.where`` then drops what came of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.recurrent.faults import Faults
from weft.recurrent.sequence import Inputs, some

Lengths = Tensor | Sequence[int]


@dataclass(frozen=True)
class Rows:
    """``valid`` and ``reset``, T x N bool each, or ``None`` where all rows count, or none starts anew."""

    valid: Tensor | None = None
    reset: Tensor | None = None

    def valid_steps(self, steps: int) -> list[Tensor | None]:
        """For every step the rows that count; ``None`` where that is known to be all of them."""
        return _each(self.valid, steps, plain=True)

    def reset_steps(self, steps: int) -> list[Tensor | None]:
        """For every step the rows that start anew; ``None`` where that is known to be none."""
        return _each(self.reset, steps, plain=False)


def read_rows(
    inputs: Inputs | None,
    lengths: object,
    mask: object,
    reset: object,
    *,
    batch_first: bool,
    faults: Faults,
) -> Rows:
    """The two tables, out of whatever was given for them.

    A reset past a row's length is dropped, since its state must stay; one in a hole counts.
    """
    if lengths is None and mask is None and reset is None:
        return Rows()
    if inputs is None or inputs.rows is None:
        if inputs is not None:
            faults.spec.append("lengths, mask and reset speak of rows, but no input has two axes, T x N")
        return Rows()
    within = None if lengths is None else _within(lengths, inputs, faults)
    table = None if mask is None else _table("mask", mask, inputs, batch_first, faults)
    anew = None if reset is None else _table("reset", reset, inputs, batch_first, faults)
    valid = _both(within, table)
    return Rows(valid, None if anew is None else _both(within, anew))


def pick(flags: Tensor, yes: Tensor, no: Tensor, dtype: torch.dtype) -> Tensor:
    """Per row ``yes`` or ``no``, both N x ..., in ``dtype``. ``flags``: N bool."""
    return torch.where(flags.view(-1, *[1] * (yes.dim() - 1)), yes.to(dtype), no.to(dtype))


def stand_ins(inputs: Inputs, valid: Tensor) -> list[Any]:
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


def _within(lengths: object, inputs: Inputs, faults: Faults) -> Tensor | None:
    """T x N: whether the step is before the row's end."""
    try:
        given = lengths if isinstance(lengths, Tensor) else torch.as_tensor(cast(Any, lengths))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        faults.spec.append(f"lengths is {lengths!r}, wanted a tensor or a sequence of {inputs.rows} integers")
        return None
    given = given.long() if not given.numel() else given  # an empty list has no dtype of its own
    if given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
        faults.spec.append(f"lengths has dtype {given.dtype}, wanted integers")
        return None
    if given.shape != (inputs.rows,):
        faults.spec.append(f"lengths has shape {tuple(given.shape)}, wanted ({inputs.rows},): one for each row")
        return None
    numbers = cast("list[int]", given.tolist())
    wrong = [f"row {row} has {n}" for row, n in enumerate(numbers) if not 0 <= n <= inputs.steps]
    if wrong:
        faults.spec.append(f"lengths go from 0 to T = {inputs.steps}, but {some(wrong)}")
        return None
    return torch.arange(inputs.steps, device=inputs.device)[:, None] < given.to(inputs.device)


def _table(name: str, table: object, inputs: Inputs, batch_first: bool, faults: Faults) -> Tensor | None:
    """A user's table of truth values, time first."""
    if not isinstance(table, Tensor):
        faults.spec.append(f"{name} is of type {type(table).__name__}, wanted a tensor of torch.bool")
        return None
    wanted = (inputs.rows, inputs.steps) if batch_first else (inputs.steps, inputs.rows)
    axes = "N x T" if batch_first else "T x N"
    fine = True
    if table.dtype != torch.bool:
        faults.spec.append(f"{name} has dtype {table.dtype}, wanted torch.bool")
        fine = False
    if tuple(table.shape) != wanted:
        faults.spec.append(f"{name} has shape {tuple(table.shape)}, wanted {axes} = {wanted}")
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

    That is looked up only on the CPU: elsewhere the look would make the host wait.
    """
    if table is None:
        return [None] * steps
    rows = table.unbind(0)
    if table.device.type != "cpu":
        return list(rows)
    alike = cast("list[bool]", (table == plain).all(1).tolist())
    return [None if same else row for same, row in zip(alike, rows, strict=True)]
