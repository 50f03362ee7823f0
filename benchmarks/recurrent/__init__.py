"""Benchmarks of recurrent networks on the CPU, by name.

work.py     the timed work: one training step        racing.py   races with a time limit
cells.py    cells as users write them                apart.py    a job in a fresh process
zoo.py      every cell of the zoo, by name
"""

from collections.abc import Callable

from benchmarks.recurrent import first, grid, lengths, memory, small
from benchmarks.table import Table

BENCHMARKS: dict[str, Callable[[bool], Table]] = {
    "grid": grid.run,
    "small": small.run,
    "lengths": lengths.run,
    "memory": memory.run,
    "first": first.run,
}
