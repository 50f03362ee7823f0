"""Lengths, masks, resets, truncation and the step number, as part of the step that is captured.

    x, valid, reset, cut, t        more inputs of a step, so that a plan knows nothing of T
    state, fresh, references, held the state that a reset brings back, what a step net reads besides, and what stands in
                                   for padding, are handed on from step to step as they are

    x = where(valid, x, held)
    state = where(cut, state without gradient, state)
    state = where(reset, fresh, state)
    y, new = cell(x, state, t)
    new = where(valid, new, state),  y = where(valid, y, 0)

The same order as in the eager loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor

from weft.core.tree import flatten, map_leaves, unflatten
from weft.recurrent.capture import CaptureError, present, result_of
from weft.recurrent.cell import Cell
from weft.recurrent.links import Linked
from weft.recurrent.rows import Rows, pick, stand_ins
from weft.recurrent.sequence import Inputs

_tracer = cast("Callable[[], object | None]", proxy_tensor.get_proxy_mode)


@dataclass(frozen=True)
class Conditions:
    """Which of them a call has. Hashable: a plan is made for one such set."""

    valid: bool
    reset: bool
    cut: bool
    time: bool

    def step(self, cell: Cell, rows: int | None) -> "Step":
        """The cell with what they add."""
        return Step(cell, self, rows)


@dataclass(frozen=True)
class Step:
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


def conditions_of(cell: Cell, rows: Rows, truncate: int | None) -> Conditions:
    """What a call has. Tables that change nothing count as absent, where that can be seen without waiting."""
    return Conditions(
        valid=rows.valid is not None and not _all(rows.valid, True),
        reset=rows.reset is not None and not _all(rows.reset, False),
        cut=truncate is not None,
        time=cell.time_step,
    )


def more_inputs(on: Conditions, inputs: Inputs, rows: Rows, start: int, truncate: int | None) -> list[Tensor]:
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


def held_inputs(inputs: Inputs, valid: Tensor) -> list[Tensor]:
    """What stands in for padding: for every leaf with rows, the first input of each row that counts, N x ..."""
    found = zip(inputs.leaves, stand_ins(inputs, valid), strict=True)
    return [held for leaf, held in found if isinstance(leaf, Tensor) and leaf.dim() >= 2]


def nested(structure: Any, leaves: Sequence[Any], more: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """One step's inputs in the form that a `Step` takes."""
    return unflatten(structure, leaves), list(more)


def _all(table: Tensor, value: bool) -> bool:
    return table.device.type == "cpu" and bool((table == value).all())
