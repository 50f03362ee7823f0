"""In which order a settled function runs, and which of its loops threads may share: what text and explanation tell.

split    every thread takes rows of the batch through all steps, and never waits for another
shared   rows meet within a step: the first thread computes, and only products are by all
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.recurrent.native.function import Function
from weft.recurrent.native.groups import grouped
from weft.recurrent.native.rows import Axes, row_axes
from weft.recurrent.native.values import Value

ROWS = 4
"""A batch of fewer rows is not shared out."""


@dataclass(frozen=True)
class Step:
    """A phase: bulk work, then a loop, whose values are in groups, each of which is one pass over memory."""

    bulk: Sequence[Value]
    groups: Sequence[Sequence[Value]]
    main: bool


@dataclass(frozen=True)
class Order:
    """All phases that do something; `axes` is given if rows are split in the main loop."""

    steps: Sequence[Step]
    axes: Axes | None
    rows: int


def order(function: Function) -> Order:
    """How a settled function runs."""
    rows, axes = 1, None
    main = next((each for each in function.phases.phases if each.main), None)
    if main is not None:
        first = function.carried[0][0].shape
        rows = first[0] if first else 1
        axes = row_axes(main.loop, [start for start, _ in function.carried]) if rows >= ROWS else None
    steps = [
        Step(each.bulk, grouped(each.loop, axes if each.main else None), each.main)
        for each in function.phases.phases
        if each.bulk or each.loop or each.main
    ]
    return Order(steps, axes, rows)
