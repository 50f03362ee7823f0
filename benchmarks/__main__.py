"""The command line of the benchmarks.

    python -m benchmarks                     all of them
    python -m benchmarks pipeline            those of one capability
    python -m benchmarks pipeline.overhead   one
    python -m benchmarks --quick ...         small and few: shows that they run, measures nothing
    python -m benchmarks gpu [options]       checks, tests and figures on a GPU; see `benchmarks.gpu.command`

Each prints a table; a figure that misses the required value says "falls short". The exit code is 0 all the same,
for a shared machine can make any figure fall short.
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
    """All by name. They are imported here, because those of experts need more packages than `gpu` does."""
    return {
        f"{capability}.{name}": benchmark
        for capability in ("pipeline", "recurrent", "experts")
        for name, benchmark in import_module(f"benchmarks.{capability}").BENCHMARKS.items()
    }


def chosen(names: Sequence[str]) -> list[str]:
    """The benchmarks that go by these names, in order; all without names. Exits when one is unknown."""
    unknown = [each for each in names if not _named(each)]
    if unknown:
        sys.exit(f"no benchmark is named {', '.join(unknown)}; there are: gpu, {', '.join(benchmarks())}")
    return list(dict.fromkeys(each for name in names or [""] for each in _named(name)))


def _named(name: str) -> list[str]:
    return [each for each in benchmarks() if not name or each == name or each.startswith(f"{name}.")]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks that the arguments name."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["gpu"]:
        sys.exit(gpu.main(argv[1:]))
    parser = argparse.ArgumentParser(prog="benchmarks", description="Ratios against peers, as tables.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"gpu, pipeline, recurrent, experts, or one of {', '.join(benchmarks())}",
    )
    parser.add_argument("--quick", action="store_true", help="small and few; shows that they run")
    options = parser.parse_args(argv)
    names = chosen(options.names)
    # One worker is one core, so that a stage gains only by running at the same time as others.
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
