"""Tables: rows of named cells, aligned, with the required value and a verdict."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Row = dict[str, str]
"""Column name -> text. Rows of one table may lack columns."""


@dataclass(frozen=True)
class Table:
    """The result of a benchmark. `notes` are printed below it."""

    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = [columns, *([row.get(name, "") for name in columns] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]
        body = [text[0], "  ".join("-" * width for width in widths), *text[1:]]
        return "\n".join([self.title, "", *(f"  {line}".rstrip() for line in body), *self.notes, ""])


def at_least(value: float, wanted: float) -> Row:
    """The columns that judge a figure which should be large."""
    return {"wanted": f">= {wanted:g}", "verdict": "holds" if value >= wanted else "falls short"}


def at_most(value: float, wanted: float) -> Row:
    """The columns that judge a figure which should be small."""
    return {"wanted": f"<= {wanted:g}", "verdict": "holds" if value <= wanted else "falls short"}


def environment() -> str:
    """The machine of the figures, and its other load."""
    one, five, _ = os.getloadavg()
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {torch.get_num_threads()} intra-op thread(s), load {one:.2f} {five:.2f}"
    )
