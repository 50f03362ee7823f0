"""All faults of one call, gathered and told at once.

Whoever reads a part of the arguments appends what is wrong with it and goes on, so that one run of the program
shows everything that there is to repair.
"""

from dataclasses import dataclass, field
from numbers import Integral

import torch
from torch import nn

from weft.core.errors import SpecError, UsageError, listed


@dataclass(frozen=True)
class Faults:
    """``spec``: values that do not look as they should. ``usage``: arguments that do not make sense together."""

    spec: list[str] = field(default_factory=list[str])
    usage: list[str] = field(default_factory=list[str])

    def check(self, headline: str) -> None:
        """Raise if there is any: ``SpecError`` where a value is at fault, else ``UsageError``."""
        if self.spec or self.usage:
            kind = SpecError if self.spec else UsageError
            raise kind(listed(headline, [*self.usage, *self.spec]))


def whole(value: object) -> bool:
    """Whether it is a whole number: Python's, numpy's, or the symbol of one in a graph that is being traced."""
    return type(value) is not bool and isinstance(value, Integral | torch.SymInt)


def cell_fault(cell: object) -> list[str]:
    """What is wrong with a cell by itself."""
    if isinstance(cell, nn.RNNBase):
        kind = cell.mode.partition("_")[0]  # RNN_TANH and RNN_RELU are both an RNN
        return [
            f"cell is {cell!r}, which runs over time by itself, wanted a module or a function of one time step: "
            f"nn.{kind}Cell, or weft.recurrent.{kind} in the place of both"
        ]
    return [] if callable(cell) else [f"cell is {cell!r}, wanted a module or a function of one time step"]


def truncate_fault(truncate: object) -> list[str]:
    """What is wrong with a window of truncated backpropagation."""
    if truncate is None or (whole(truncate) and truncate >= 1):  # pyright: ignore[reportOperatorIssue]
        return []
    return [f"truncate is {truncate!r}, wanted at least 1 step, or None"]
