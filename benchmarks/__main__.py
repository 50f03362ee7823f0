"""The command line of the benchmarks.

    python -m benchmarks                     all
    python -m benchmarks pipeline            those of one capability
    python -m benchmarks pipeline.overhead   one
    python -m benchmarks --quick ...         small sizes: shows that they run, measures nothing
    python -m benchmarks gpu [options]       checks, tests and figures on a GPU; see `benchmarks.gpu.command`

Each prints a table. A figure that misses the required value is marked "falls short". The exit code is still 0, because
other load on the machine can make any figure fall short.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

import torch

from benchmarks.gpu import command as gpu
from benchmarks.harness import progress
from benchmarks.table import Table, environment


@cache
def benchmarks() -> dict[str, Callable[[bool], Table]]:
    """All benchmarks by name, imported on demand because those of experts need more packages than `gpu`."""
    return {
        f"{capability}.{name}": benchmark
        for capability in ("pipeline", "recurrent", "experts")
        for name, benchmark in import_module(f"benchmarks.{capability}").BENCHMARKS.items()
    }


def chosen(names: Sequence[str]) -> list[str]:
    """Return the benchmarks that these names select, in order, or all without names. Exit if a name is unknown."""
    unknown = [name for name in names if not _matches(name)]
    if unknown:
        sys.exit(f"unknown benchmark {', '.join(unknown)}; there are: gpu, {', '.join(benchmarks())}")
    return list(dict.fromkeys(benchmark for name in names or [""] for benchmark in _matches(name)))


def _matches(name: str) -> list[str]:
    """Benchmarks with this name or of this capability; all for an empty name."""
    return [key for key in benchmarks() if not name or key == name or key.startswith(f"{name}.")]


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["gpu"]:
        sys.exit(gpu.main(argv[1:]))
    parser = argparse.ArgumentParser(prog="benchmarks", description="Tables of ratios against peers.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"gpu, pipeline, recurrent, experts, or one of {', '.join(benchmarks())}",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; shows that they run, measures nothing")
    options = parser.parse_args(argv)
    names = chosen(options.names)
    # One worker is one core, so that stages gain only by running at the same time.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        print(environment(), end="\n\n", flush=True)
        for name in names:
            progress(name)
            print(f"{name}: {benchmarks()[name](options.quick)}", flush=True)
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()
