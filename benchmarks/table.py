"""Tables: rows of named cells, aligned, with the required value and a verdict."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Row = dict[str, str]
"""Text by column name. A row can lack columns of its table."""


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


def at_least(value: float, required: float) -> Row:
    """Columns with a lower limit and whether `value` reaches it."""
    return {"required": f">= {required:g}", "verdict": "holds" if value >= required else "falls short"}


def at_most(value: float, required: float) -> Row:
    """Columns with an upper limit and whether `value` stays within it."""
    return {"required": f"<= {required:g}", "verdict": "holds" if value <= required else "falls short"}


def environment() -> str:
    """Versions, machine and load, for the line above all tables."""
    one, five, _ = os.getloadavg()
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {torch.get_num_threads()} intra-op thread(s), load {one:.2f} {five:.2f}"
    )
