"""``torchweft serve``, ``status``, ``health``, ``set`` and so on: from parsed options to the modules that do the work.

Those modules need the extra ``experts``, and all but gRPC itself import PyTorch, so they are imported by name here.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from torchweft.cli import TOKEN_VARIABLE
from torchweft.core.errors import UsageError, WeftError, escape

_CLEAR = "\x1b[H\x1b[2J"  # cursor to the first line, and an empty terminal
_SERVING = b"\x08\x01"  # the message of grpc.health.v1 whose field 1, the status, is SERVING


def serve(chosen: Namespace) -> None:
    """Serve, check, or print the configuration of a file and of options, which override it."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # by default, gRPC logs two lines for each failed handshake
    server = _load("torchweft.experts.server.command")
    config: Any = _load("torchweft.experts.server.config")
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
    if chosen.print_config:
        print(_load("torchweft.experts.server.config_text").to_toml(config.ServeConfig.parse(table)), end="")
    elif chosen.check:
        checked = config.ServeConfig.parse(table)
        print(f"the configuration is valid: {len(checked.check())} experts at {checked.address}")
    else:
        server.serve(table, log_level=chosen.log_level)


def print_status(chosen: Namespace) -> None:
    """Print the status of a server, once or until Ctrl-C."""
    client = _load("torchweft.experts.client.status")
    ask = {**_credentials(chosen), "as_json": chosen.json, "timeout": chosen.timeout}
    if chosen.watch is None:
        print(client.status(chosen.address, **ask))
        return
    with suppress(KeyboardInterrupt):  # the usual end
        for text in client.watch(chosen.address, chosen.watch, **ask):
            # JSON stays one line per status, for programs. A terminal shows the newest text alone.
            start = "" if chosen.json else _CLEAR if sys.stdout.isatty() else "\n"
            print(f"{start}{text}", flush=True)


def operate(chosen: Namespace) -> None:
    """Change or copy an expert of a living server, and print its progress."""
    client, uid = _load("torchweft.experts.client.status"), chosen.uid
    with _load("torchweft.experts.client").GrpcTransport(chosen.address, **_credentials(chosen)) as transport:
        if chosen.name == "export":
            steps = client.export(transport, uid, chosen.file, chosen.timeout)
            print(f"expert {escape(uid)!r}: step {steps} is in {chosen.file}")
            return
        if chosen.name == "set":
            values = dict(map(_parse_setting, chosen.settings))
            results = client.set_hyperparameters(transport, uid, values, chosen.group, chosen.timeout)
        else:
            arguments = {"step": chosen.step} if chosen.name == "rollback" else {}
            operation = client.Operation(chosen.name, uid, arguments)
            results, _ = transport.operate(operation, chosen.timeout)
    saved = "no checkpoint" if results["durable"] is None else f"step {results['durable']} is saved"
    print(f"{chosen.name} of expert {escape(uid)!r} done: it is at step {results['steps']}, {saved}")


def check_health(chosen: Namespace) -> None:
    """Ask for gRPC's standard health check, without PyTorch: probes run it every few seconds."""
    grpc = _load("grpc")
    pems = [None if path is None else _read_bytes(path) for path in _pems(chosen)]
    options = [] if chosen.server_name is None else [("grpc.ssl_target_name_override", chosen.server_name)]
    if any(pems):
        channel = grpc.secure_channel(chosen.address, grpc.ssl_channel_credentials(*pems), options)
    else:
        channel = grpc.insecure_channel(chosen.address)
    with channel:
        try:
            answer = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=chosen.timeout)
        except grpc.RpcError as error:
            raise WeftError(f"{chosen.address} has not answered: {error.code().name}: {error.details()}") from None
    if answer != _SERVING:
        raise WeftError(f"{chosen.address} refuses new work, because it is ending")
    print(f"{chosen.address} takes work")


def _parse_setting(word: str) -> tuple[str, Any]:
    """``lr=1e-4`` or ``betas=[0.9,0.99]``: the value is JSON."""
    name, equals, text = word.partition("=")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if not (name and equals) or (isinstance(value, str) and not text.startswith('"')):
        raise UsageError(f"a setting is {word!r}, wanted NAME=VALUE with a value in JSON, such as lr=1e-4")
    return name, value


def _credentials(chosen: Namespace) -> dict[str, Any]:
    tls_type = _load("torchweft.experts.client").ClientTls
    tls = tls_type(*_pems(chosen), chosen.server_name) if any(_pems(chosen)) else None
    return {"tls": tls, "token": _read_token(chosen)}


def _pems(chosen: Namespace) -> Sequence[Path | None]:
    return chosen.authority, chosen.key, chosen.certificate


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"the certificate or key {str(path)!r} cannot be read: {error}") from None


def _read_token(chosen: Namespace) -> str | None:
    """The token from the command line, a file, or the environment."""
    if chosen.token is not None and chosen.token_file is not None:
        raise UsageError("--token and --token-file both set the token; use one of them")
    if chosen.token_file is None:
        return chosen.token if chosen.token is not None else os.environ.get(TOKEN_VARIABLE)
    try:
        return chosen.token_file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token from {str(chosen.token_file)!r}: {error}") from None


def _load(module: str) -> Any:
    """Import a module that needs the extra ``experts``. Raises ``UsageError`` with the missing packages."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"this command cannot run: {error}") from None
