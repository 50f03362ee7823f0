"""Command line: ``torchweft plan`` prints a schedule, ``torchweft serve`` serves experts, ``torchweft status`` queries
a server.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from torchweft import Pipe
from torchweft.core.errors import ScheduleError, UsageError, WeftError, escape
from torchweft.pipeline.schedule import SCHEDULES, build
from torchweft.pipeline.simulate import StageCost, forecast

_TOKEN = "TORCHWEFT_TOKEN"
"""Environment variable with the token of `torchweft status`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for misuse, 1 for other failures."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = chosen.command
    try:
        command(chosen)
    except (WeftError, OSError) as error:
        misuse = isinstance(error, UsageError | ScheduleError)
        parser.exit(2 if misuse else 1, f"torchweft: {escape(error, lines=True)}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nweft: interrupted\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("torchweft", description="Trains PyTorch models in parts.")
    parser.add_argument("--version", action="version", version=f"torchweft {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands.add_parser("plan", help="print a schedule, what it keeps alive, and its forecast"))
    _add_serve(commands.add_parser("serve", help="serve experts until SIGTERM"))
    _add_status(commands.add_parser("status", help="print a server's status"))
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=_count)
    parser.add_argument("--chunks", type=_count, help="micro-batches")
    pipe = "a function that returns a Pipe; if made with split= and sample=, crossing values are drawn"
    parser.add_argument("--pipe", metavar="MODULE:FUNCTION", help=pipe)
    names = f"{', '.join(SCHEDULES)}, or the file of a table (%(default)s)"
    parser.add_argument("--schedule", default="1f1b", metavar="NAME|FILE", help=names)
    for name, cost in (("forward", 1.0), ("backward", 2.0), ("recompute", 0.0)):
        parser.add_argument(f"--{name}", type=_cost, default=cost, metavar="COST", help="per micro-batch (%(default)s)")
    parser.set_defaults(command=_plan)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="a TOML file, which options override")
    parser.add_argument(
        "--expert", action="append", default=[], metavar="NAME=KIND[:argument=number,...]", help="may be repeated"
    )
    parser.add_argument("--optimizer", metavar="NAME", help="of torch.optim, for each --expert (none: not trained)")
    parser.add_argument("--lr", type=_cost, help="the learning rate")
    parser.add_argument("--address", metavar="HOST:PORT", help="to listen at (127.0.0.1:7070)")
    insecure = "allow every client at the address everything, if neither grants nor TLS are configured"
    parser.add_argument("--insecure", action="store_true", help=insecure)
    parser.add_argument("--checkpoints", metavar="DIR", help="folder to save experts to, and to restore them from")
    parser.add_argument("--panel", metavar="HOST:PORT", help="for a status page and metrics, over plain HTTP (none)")
    parser.add_argument("--import", action="append", default=[], dest="imports", metavar="MODULE", help="with kinds")
    parser.set_defaults(command=_serve)


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--json", action="store_true", help="the whole status, as JSON")
    parser.add_argument("--token", help=f"of the client; visible to others on this machine, so prefer {_TOKEN}")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=f"with the token (else: {_TOKEN})")
    client = "of this client"
    for name, text in {"authority": "that signed the server", "key": client, "certificate": client}.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PEM", help=text)
    parser.set_defaults(command=_status)


def _serve(chosen: argparse.Namespace) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # by default, gRPC logs two lines for each failed handshake
    server = _experts("torchweft.experts.server.command")
    config: Any = _experts("torchweft.experts.server.config")
    table: dict[str, Any] = {} if chosen.config is None else config.read_config(chosen.config)
    for name in ("address", "checkpoints", "panel", "insecure"):
        table |= {name: getattr(chosen, name)} if getattr(chosen, name) not in (None, False) else {}
    training = {} if chosen.optimizer is None else {"optimizer": chosen.optimizer}
    training |= {} if chosen.lr is None else {"optimizer_arguments": {"lr": chosen.lr}}
    if training and not chosen.expert:
        raise UsageError("--optimizer and --lr configure the experts of --expert, but there is none")
    if chosen.lr is not None and chosen.optimizer is None:
        raise UsageError("--lr is the learning rate of an optimizer, but there is no --optimizer")
    experts = [{**config.parse_expert(word), **training} for word in chosen.expert]
    for name, more in {"experts": experts, "imports": chosen.imports}.items():
        configured = table.get(name, [])
        if isinstance(configured, list):  # a value of another type stays, so that the configuration check rejects it
            table[name] = [*cast("list[Any]", configured), *more]
    server.serve(table)


def _status(chosen: argparse.Namespace) -> None:
    client = _experts("torchweft.experts.client.status")
    pems = (chosen.authority, chosen.key, chosen.certificate)
    tls = None if pems == (None, None, None) else _experts("torchweft.experts.client").ClientTls(*pems)
    print(client.status(chosen.address, tls=tls, token=_token(chosen), as_json=chosen.json))


def _token(chosen: argparse.Namespace) -> str | None:
    """The token from the command line, a file, or the environment."""
    if chosen.token is not None and chosen.token_file is not None:
        raise UsageError("--token and --token-file both set the token; use one of them")
    if chosen.token_file is None:
        return chosen.token if chosen.token is not None else os.environ.get(_TOKEN)
    try:
        return chosen.token_file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token from {str(chosen.token_file)!r}: {error}") from None


def _experts(module: str) -> Any:
    """Import a module with further dependencies, only for the commands that use it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"this command cannot run: {error}") from None


def _plan(chosen: argparse.Namespace) -> None:
    if chosen.pipe is not None:
        pipe = _load_pipe(chosen.pipe)
        chosen.stages, chosen.chunks = chosen.stages or len(pipe.devices), chosen.chunks or pipe.chunks
        if hasattr(pipe, "routes"):  # made with split=
            _draw_routes(pipe)
    if chosen.stages is None or chosen.chunks is None:
        raise UsageError("plan needs --stages and --chunks, or --pipe")
    is_name = chosen.schedule in SCHEDULES or not Path(chosen.schedule).is_file()
    try:
        schedule = chosen.schedule if is_name else Path(chosen.schedule).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--schedule {chosen.schedule} is not UTF-8 text, so it holds no table: {error}") from None
    table = build(schedule, chosen.stages, chosen.chunks)
    cost = StageCost(chosen.forward, chosen.backward, chosen.recompute)
    expected = forecast(table, [cost] * chosen.stages)
    print(table.text())
    print(f"live micro-batches of each stage: {' '.join(map(str, table.live()))}")
    print(f"forecast: takes {expected.total:g}, idle {expected.bubble:.1%} of the time of {len(table.workers)} workers")


def _load_pipe(name: str) -> Pipe:
    """Import the function of that name, and return its pipe."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    message = f"--pipe {name}: wanted MODULE:FUNCTION, a function that returns a Pipe"
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{message}; {error}") from None
    pipe = make()
    if not isinstance(pipe, Pipe):
        raise UsageError(f"{message}; {function}() returned {type(pipe).__name__}")
    return pipe


def _draw_routes(pipe: Any) -> None:
    """Draw each crossing value as a line from its source (o) to its readers (>)."""
    stages = len(pipe.devices)
    print("".join(f"{stage:<4}" for stage in range(stages)) + "stage")
    for value in pipe.routes:
        ends = range(max(value.readers) + 1)
        marks = ["o" if stage == value.source else ">" if stage in value.readers else "-" for stage in ends]
        line = "---".join(marks[value.source :])
        print(f"{' ' * 4 * value.source + line:<{4 * stages}}{value.bytes} bytes  {value.name}")


def _count(word: str) -> int:
    if not (word.isdecimal() and int(word) > 0):
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 up")
    return int(word)


def _cost(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 0 up")
    return value


def _version() -> str:
    try:
        return version("torchweft")
    except PackageNotFoundError:
        return "(run from its sources, not installed)"
