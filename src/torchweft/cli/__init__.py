"""Command line: ``torchweft COMMAND``, also as ``python -m torchweft COMMAND``.

    plan         a schedule, its memory and its forecast       cli/plan.py
    trace        run a script, and report its pipes' steps     report/
    serve        serve experts until SIGTERM                   experts/server/command.py
    status       counters of a server                          experts/client/status.py
    set          hyperparameters of a served expert            experts/client/status.py
    export       the weights of a served expert, as a file     experts/client/status.py
    rollback     a served expert to a kept checkpoint          experts/client/status.py
    load, unload an expert of a server while it runs           experts/client/status.py
    health       whether a server takes work, for probes       cli/servers.py
    env          versions and devices, for an issue            cli/environment.py
    completion   a script for the shell, written by shtab

This module only parses. PyTorch takes seconds to import, so that a command imports it when it runs, and ``--help``,
``--version``, ``health`` and a misspelt option never do.
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torchweft.core.errors import ScheduleError, UsageError, WeftError, escape
from torchweft.core.validation import suggest
from torchweft.core.version import __version__

SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev")
"""The keys of `weft.pipeline.SCHEDULES`, repeated here because that module imports PyTorch."""
TOKEN_VARIABLE = "TORCHWEFT_TOKEN"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for misuse, 1 for other failures."""
    chosen = parse(sys.argv[1:] if arguments is None else arguments)
    module, _, function = chosen.run.partition(":")
    try:
        return getattr(import_module(module), function)(chosen) or 0
    except (WeftError, OSError) as error:
        print(f"torchweft: {escape(error, lines=True)}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError | ScheduleError) else 1) from None
    except KeyboardInterrupt:
        print("\ntorchweft: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command, and its function as ``run``. Exits with 2 and a suggestion for a misspelt word."""
    words, script_arguments = list(arguments), list[str]()
    if words[:1] == ["trace"] and "--" in words:
        # Separated by hand, because argparse matches options after "--" with those of `trace`.
        end = words.index("--")
        words, script_arguments = words[:end], words[end + 1 :]
    parser, commands = _make_parsers()
    name = next((word for word in words if not word.startswith("-")), None)
    if name not in commands:
        options = parser._option_string_actions
        if name is not None:
            near = suggest(name, [*commands, *options])
            parser.error(f"there is no command {name!r}, known are {', '.join(commands)}{near}")
        if unknown := [word for word in words if word not in options]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{suggest(unknown[0], options)}")
    chosen, unknown = parser.parse_known_args(words)
    if unknown:
        command, option = commands[chosen.name], unknown[0].partition("=")[0]
        near = suggest(option, command._option_string_actions) if option.startswith("--") else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    chosen.script_arguments = script_arguments
    return chosen


def trace(chosen: argparse.Namespace) -> int:
    from torchweft.report.recording import record_script, script_traceback  # noqa: PLC0415  (imports PyTorch)

    script = str(chosen.script)
    try:
        return record_script(script, chosen.script_arguments, str(chosen.out))
    except Exception as error:
        in_script = script_traceback(error, script)
        if in_script is None and not isinstance(error, SyntaxError):
            raise
        # An error of the script, as Python itself would show it. `main` would print the message alone for some types.
        traceback.print_exception(error.with_traceback(in_script))
        return 1


def print_completion(chosen: argparse.Namespace) -> None:
    try:
        shtab: Any = import_module("shtab")
    except ImportError:
        raise UsageError("completion needs the package shtab: pip install 'torchweft[completion]'") from None
    if chosen.shell not in shtab.SUPPORTED_SHELLS:
        raise UsageError(f"this version of shtab cannot write a script for {chosen.shell}: pip install -U shtab")
    parser, commands = _make_parsers()
    for action in [action for command in commands.values() for action in command._actions]:
        if action.type is Path:
            setattr(action, "complete", shtab.FILE)  # noqa: B010  (an attribute that shtab reads and argparse lacks)
    print(shtab.complete(parser, chosen.shell))


def _make_parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of its commands by name."""
    parser = argparse.ArgumentParser("torchweft", description="Trains PyTorch models in parts.")
    parser.add_argument("--version", action="version", version=f"torchweft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="name")

    def add(name: str, run: str, text: str, usage: str | None = None) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, usage=usage)
        command.set_defaults(run=f"torchweft.cli{run}")
        return command

    _add_plan(add("plan", ".plan:print_plan", "print a schedule, what it keeps alive, and its forecast"))
    usage = "torchweft trace [-h] [--out FILE] SCRIPT [-- ARGUMENT ...]"
    tracing = add("trace", ":trace", "run a script and write a report of its pipes' steps", usage)
    tracing.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file; its own arguments follow --")
    out = "an .html report, or a .json trace for Perfetto (%(default)s)"
    tracing.add_argument("--out", type=Path, default=Path("step.html"), metavar="FILE", help=out)
    _add_serve(add("serve", ".servers:serve", "serve experts until SIGTERM"))
    status = add("status", ".servers:print_status", "print a server's status")
    _add_server(status)
    _add_status(status)
    _add_token(status)
    _add_operations(add)
    _add_server(add("health", ".servers:check_health", "exit with 0 if a server takes work, for probes"))
    environment = add("env", ".environment:print_environment", "print versions and devices, for an issue")
    environment.add_argument("--json", action="store_true", help="the same as JSON")
    completion = add("completion", ":print_completion", "print the completion script of a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser, commands.choices


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=_count)
    parser.add_argument("--chunks", type=_count, help="micro-batches")
    pipe = "a function that returns a Pipe; if made with split= and sample=, crossing values are drawn"
    parser.add_argument("--pipe", metavar="MODULE:FUNCTION", help=pipe)
    names = f"{', '.join(SCHEDULE_NAMES)}, or the file of a table (%(default)s)"
    parser.add_argument("--schedule", default="1f1b", metavar="NAME|FILE", help=names)
    for name, cost in (("forward", 1.0), ("backward", 2.0), ("recompute", 0.0)):
        parser.add_argument(f"--{name}", type=_cost, default=cost, metavar="COST", help="per micro-batch (%(default)s)")
    parser.add_argument("--json", action="store_true", help="the same as JSON, with units in the names")


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
    levels, level = ("debug", "info", "warning", "error"), "least level of a log line (%(default)s)"
    parser.add_argument("--log-level", choices=levels, default="info", help=level)
    instead = parser.add_mutually_exclusive_group()
    check = "build the experts and check certificates, ports and folders; exit with 0, or with 2 and all faults"
    instead.add_argument("--check", action="store_true", help=check)
    effective = "print the configuration with options and defaults, without secrets"
    instead.add_argument("--print-config", action="store_true", help=effective)


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the whole status, as JSON")
    watch = "print it again after every interval, until Ctrl-C (%(const)g s)"
    parser.add_argument("--watch", type=_seconds, nargs="?", const=2.0, metavar="SECONDS", help=watch)


def _add_operations(add: Callable[..., argparse.ArgumentParser]) -> None:
    texts = {
        "set": "set hyperparameters of an expert, such as lr=1e-4, while it is served",
        "export": "write the weights of an expert to a safetensors file while it is served",
        "rollback": "return an expert to a kept checkpoint while it is served",
        "load": "serve one more expert, of the file that the server's configuration names as loadable",
        "unload": "finish the accepted work of an expert, save it, and serve it no more",
    }
    parsers = {name: add(name, ".servers:operate", text) for name, text in texts.items()}
    for parser in parsers.values():
        _add_server(parser, timeout=60.0)
        _add_token(parser)
        parser.add_argument("uid", metavar="EXPERT")
    setting = "hyperparameters of its optimizer or schedule, with values in JSON"
    parsers["set"].add_argument("settings", nargs="+", metavar="NAME=VALUE", help=setting)
    parsers["set"].add_argument("--group", type=int, metavar="NUMBER", help="of one group of parameters (all)")
    parsers["export"].add_argument("file", type=Path, metavar="FILE")
    parsers["rollback"].add_argument("--step", type=int, required=True, metavar="N", help="of a kept checkpoint")


def _add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token", help=f"of the client; visible to others on this machine, so prefer {TOKEN_VARIABLE}")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=f"with the token (else: {TOKEN_VARIABLE})")


def _add_server(parser: argparse.ArgumentParser, timeout: float = 10.0) -> None:
    parser.add_argument("address", metavar="HOST:PORT")
    wait = "for an answer (%(default)g)"
    parser.add_argument("--timeout", type=_seconds, default=timeout, metavar="SECONDS", help=wait)
    client = "of this client"
    for name, text in {"authority": "that signed the server", "key": client, "certificate": client}.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PEM", help=text)
    name = "in the server's certificate, if it is not the host in the address"
    parser.add_argument("--server-name", metavar="NAME", help=name)


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


def _seconds(word: str) -> float:
    if not 0 < (value := _cost(word)) < 1e6:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of seconds above 0")
    return value
