"""The command line: ``python -m weft demo`` shows it all, ``python -m weft plan`` looks at a schedule."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft import demo
from weft.core.errors import ScheduleError, UsageError, WeftError
from weft.core.forecast import StageCost, forecast
from weft.pipeline.schedules import SCHEDULES, build

_DEFAULTS = demo.Options(Path("weft-report"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for misuse, 1 for what failed otherwise."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = chosen.command
    try:
        command(chosen)
    except (UsageError, ScheduleError) as error:
        parser.exit(2, f"weft: {error}\n")
    except (WeftError, OSError) as error:
        parser.exit(1, f"weft: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nweft: interrupted\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("weft", description="Trains PyTorch models in parts.")
    parser.add_argument("--version", action="version", version=f"weft {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train a U-Net in stages and write a report"))
    _add_plan(commands.add_parser("plan", help="print a schedule, what it keeps alive, and its forecast"))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=_DEFAULTS.out, metavar="DIR", help="of the report (%(default)s)")
    parser.add_argument("--steps", type=_count, default=_DEFAULTS.steps, help="training steps at most (%(default)s)")
    parser.add_argument("--seconds", type=_cost, default=_DEFAULTS.seconds, help="of training at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=_DEFAULTS.seed, help="of all random numbers (%(default)s)")
    parser.add_argument(
        "--threads", type=_count, default=_DEFAULTS.threads, help="CPU threads per operator (%(default)s)"
    )
    parser.set_defaults(command=_demo)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=_count, required=True)
    parser.add_argument("--chunks", type=_count, required=True, help="micro-batches")
    names = f"{', '.join(SCHEDULES)}, or the file of a table (%(default)s)"
    parser.add_argument("--schedule", default="1f1b", metavar="NAME|FILE", help=names)
    for name, cost in (("forward", 1.0), ("backward", 2.0), ("recompute", 0.0)):
        parser.add_argument(f"--{name}", type=_cost, default=cost, metavar="COST", help="per micro-batch (%(default)s)")
    parser.set_defaults(command=_plan)


def _demo(chosen: argparse.Namespace) -> None:
    options = demo.Options(chosen.out, chosen.steps, chosen.seconds, chosen.seed, chosen.threads)
    demo.run(options)


def _plan(chosen: argparse.Namespace) -> None:
    named = chosen.schedule in SCHEDULES or not Path(chosen.schedule).is_file()
    table = build(chosen.schedule if named else Path(chosen.schedule).read_text("utf-8"), chosen.stages, chosen.chunks)
    cost = StageCost(chosen.forward, chosen.backward, chosen.recompute)
    seen = forecast(table, [cost] * chosen.stages)
    print(table.text())
    print(f"live micro-batches of each stage: {' '.join(map(str, table.live()))}")
    print(f"forecast: takes {seen.total:g}, idle {seen.bubble:.1%} of the time of {len(table.workers)} workers")


def _count(word: str) -> int:
    if not (word.isdecimal() and int(word) > 0):
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 1 up")
    return int(word)


def _cost(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is no number from 0 up")
    return value


def _version() -> str:
    try:
        return version("weft")
    except PackageNotFoundError:
        return "(run from its sources, not installed)"


if __name__ == "__main__":
    sys.exit(main())
