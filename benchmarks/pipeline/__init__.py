"""Benchmarks of the pipeline, by name."""

from collections.abc import Callable

from benchmarks.pipeline import (
    calls,
    dropout,
    loading,
    memory,
    operators,
    overhead,
    processes,
    skips,
    sleep,
    split,
    transformer,
)
from benchmarks.table import Table

BENCHMARKS: dict[str, Callable[[bool], Table]] = {
    "sleep": sleep.run,
    "transformer": transformer.run,
    "overhead": overhead.run,
    "calls": calls.run,
    "operators": operators.run,
    "memory": memory.run,
    "skips": skips.run,
    "dropout": dropout.run,
    "split": split.run,
    "processes": processes.run,
    "loading": loading.run,
}
