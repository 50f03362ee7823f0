"""The command line of the benchmarks.

    python -m benchmarks                     all of them
    python -m benchmarks pipeline            those of one capability
    python -m benchmarks pipeline.overhead   one
    python -m benchmarks --quick ...         small and few: shows that they run, measures nothing

Each prints a table; a figure that misses what was wanted says "falls short". The exit code is 0 all the same,
for a shared machine can make any figure fall short.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks import experts, pipeline, recurrent
from benchmarks.harness import progress
from benchmarks.table import Table, environment

BENCHMARKS: dict[str, Callable[[bool], Table]] = {
    f"{capability}.{name}": benchmark
    for capability, benchmarks in (
        ("pipeline", pipeline.BENCHMARKS),
        ("recurrent", recurrent.BENCHMARKS),
        ("experts", experts.BENCHMARKS),
    )
    for name, benchmark in benchmarks.items()
}


def chosen(names: Sequence[str]) -> list[str]:
    """The benchmarks that go by these names, in order; all without names. Exits when one is unknown."""
    unknown = [each for each in names if not _named(each)]
    if unknown:
        sys.exit(f"no benchmark is named {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
    return list(dict.fromkeys(each for name in names or [""] for each in _named(name)))


def _named(name: str) -> list[str]:
    return [each for each in BENCHMARKS if not name or each == name or each.startswith(f"{name}.")]


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Ratios against peers, as tables.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"pipeline, recurrent, experts, or one of {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--quick", action="store_true", help="small and few; shows that they run")
    options = parser.parse_args(argv)
    names = chosen(options.names)
    # One worker is one core: what a stage gains must come from running beside others.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        print(environment(), end="\n\n", flush=True)
        for name in names:
            progress(name)
            print(f"{name}: {BENCHMARKS[name](options.quick)}", flush=True)
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()
