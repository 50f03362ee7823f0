"""A sequence backward in time, each row within its own length.

    t            0  1  2  3  4          flipped      0  1  2  3  4
    row, len 3   a  b  c  .  .                       .  .  c  b  a      mask: . . x x x
    reset              R                             a reset lies between two steps, b | c:
                                                     .  .  c  R  a      so it moves to the step behind it

Flipping all of time puts the padding first. A mask says so, and a row begins when its mask does: there is nothing to
gather, and the flip back restores every place.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.tree import flatten, map_leaves
from weft.recurrent.rows import Lengths


class Axes(NamedTuple):
    """Where time is: how many steps and rows a call has (rows None: unknown), and which of both comes first.

    `deep`: an input has three axes, so there are rows for sure.
    """

    steps: int
    rows: int | None
    batch_first: bool
    deep: bool = False

    @staticmethod
    def of(inputs: Any, batch_first: bool) -> "Axes":
        """Those of nested inputs that have been found right."""
        tensors = [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]
        deepest = max([leaf.dim() for leaf in tensors])  # no max(key=...), at which torch.compile breaks the graph
        most = next(leaf for leaf in tensors if leaf.dim() == deepest)
        if most.dim() < 2:
            return Axes(len(most), None, batch_first)
        time = int(batch_first)
        return Axes(most.shape[time], most.shape[1 - time], batch_first, most.dim() > 2)

    def time_of_input(self, leaf: Tensor) -> int:
        """The time axis of an input: all that have two axes have rows."""
        return int(self.batch_first and leaf.dim() > 1)

    def time_of_result(self, leaf: Tensor, steps: int | None = None) -> int:
        """The time axis of an output or of all states, over all steps or over `steps`; without rows it is axis 0."""
        whole = self.steps if steps is None else steps
        return int(self.batch_first and leaf.dim() > 1 and tuple(leaf.shape[:2]) == (self.rows, whole))


def reverse_inputs(inputs: Any, axes: Axes) -> Any:
    """Nested inputs from the last step to the first; what is no tensor stays."""

    def reverse(leaf: Any) -> Any:
        return leaf.flip(axes.time_of_input(leaf)) if isinstance(leaf, Tensor) else leaf

    return map_leaves(reverse, inputs)


def reverse_results(results: Any, axes: Axes) -> Any:
    """Outputs or states of a reversed sequence, at the places of the steps that they belong to."""

    def reverse(leaf: Any) -> Any:
        return leaf.flip(axes.time_of_result(leaf)) if isinstance(leaf, Tensor) else leaf

    return map_leaves(reverse, results)


def reverse_rows(
    axes: Axes, lengths: Lengths | None, mask: Tensor | None, reset: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and reset of the reversed sequence, for tables that have been found right, with the batch where it was."""
    time = int(axes.batch_first)
    if lengths is not None:
        counts = torch.as_tensor(lengths, dtype=torch.int64, device=device)
        within = torch.arange(axes.steps, device=device).unsqueeze(1 - time) < counts.unsqueeze(time)
        mask = within if mask is None else mask & within
        reset = None if reset is None else reset & within
    return None if mask is None else mask.flip(time), None if reset is None else _moved(reset, time).flip(time)


def _moved(reset: Tensor, time: int) -> Tensor:
    """Each flag one step earlier: what was cut off before a step is cut off behind the one before it."""
    if not reset.shape[time]:
        return reset
    first = torch.zeros_like(reset.narrow(time, 0, 1))
    return torch.cat([reset.narrow(time, 1, reset.shape[time] - 1), first], time)
