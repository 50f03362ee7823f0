"""What ``weft serve`` reads: a TOML file, or options on the command line that say the same.

    address = "0.0.0.0:7070"                     checkpoints = "/var/lib/weft"
    advertise = "10.0.0.7:7070"                  how others reach it, where a directory lists it
    directory = "etcd://host:2379/weft"          where the experts are listed, with [directory_tls] if it wants TLS
    imports = ["my_package.my_experts"]          modules that register kinds of experts
    panel = "127.0.0.1:9090"                     a status page and metrics, over plain HTTP; beyond loopback
                                                 { address = ..., allowed_hosts = [...], token_file = ... }

    [[experts]]
    name = "ffn.{}"                              with count: ffn.0 ffn.1 ffn.2 ffn.3
    count = 4
    kind = "ffn"
    arguments = { hidden = 512 }
    optimizer = "Adam"                           of torch.optim; left out: the expert is not trained
    optimizer_arguments = { lr = 0.001 }
    schedule = "StepLR"                          of torch.optim.lr_scheduler, with schedule_arguments
    guards = { max_norm = 10.0 }                 see Guards; clip_grad_norm = 1.0 clips
    options = { max_batch_size = 1024 }          of the task pools
    keep_graphs = { nbytes = 268435456 }         and seconds = 30: of forwards whose clients say keep_graph=True
    records = { max_keys = 100000 }              see IdempotencyOptions
    mini_batches = { mini_batches = 16 }         see SumsOptions
    journal = { folder = "/var/log/weft" }       with max_file_bytes and max_files: of its batches, for a replay

    [options]   see ServerOptions     [limits]  see Limits     [tls]  key, certificate, authority
    [replicas]  see ReplicaOptions    experts = ["ffn.*"], token = "secret", tls = { authority = ..., ... }
    [tokens]    secret = "client"     [[grants]]  client, expert, role = "forward" | "train" | "admin"

With neither tokens nor grants everybody may do everything: beyond 127.0.0.1 that wants ``insecure = true``, or [tls]
with an authority. With ``grants = []`` nobody may do anything; a grant without ``client`` is for all who proved a name.

Whoever writes this file runs the server: it may name any module to import.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from weft.core.errors import UsageError
from weft.experts.checkpoint import CheckpointStore
from weft.experts.client.transport import ClientTls
from weft.experts.directory import Directory
from weft.experts.directory.etcd_address import open_directory
from weft.experts.directory.etcd_endpoints import EtcdTls
from weft.experts.panel.http import PanelOptions
from weft.experts.replica import ReplicaOptions
from weft.experts.server.auth import OPEN, Access, Grant
from weft.experts.server.config_experts import backends
from weft.experts.server.config_faults import Faults
from weft.experts.server.config_form import ROLES, form_faults
from weft.experts.server.options import ServerOptions
from weft.experts.server.server import Server
from weft.experts.tls import ServerTls
from weft.experts.wire.limits import Limits


def read_config(path: Path) -> dict[str, Any]:
    """The table in a file. Raises ``UsageError`` if it cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"the configuration {str(path)!r} cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration {str(path)!r} is no TOML: {error}") from None


def parse_expert(word: str) -> dict[str, Any]:
    """``NAME=KIND`` or ``NAME=KIND:hidden=512,inner=64`` as an entry of ``experts``. Raises ``UsageError``."""
    name, _, rest = word.partition("=")
    kind, _, given = rest.partition(":")
    pairs = [pair.partition("=") for pair in given.split(",") if pair]
    if not (name and kind and all(key and value for key, _, value in pairs)):
        raise UsageError(f"an expert is {word!r}, wanted NAME=KIND or NAME=KIND:argument=number,...")
    keys = [key for key, _, _ in pairs]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise UsageError(f"an expert is {word!r}, which says more than once what {', '.join(twice)} is; say it once")
    return {"name": name, "kind": kind, "arguments": {key: _number(value) for key, _, value in pairs}}


def build(config: Mapping[str, Any]) -> Server:
    """The server that a table describes, not started.

    Raises ``UsageError`` that lists all faults of its form; or else all that went wrong while its parts were made.
    """
    faults = Faults()
    faults += form_faults(config)
    faults.check()
    for name in config.get("imports", ()):
        faults.made(f"the module {name!r} of imports cannot be imported", partial(_import, name))
    faults.check()  # without them there is no telling which kinds of experts there are
    options = faults.made("options", lambda: ServerOptions(**config.get("options", {})))
    limits = faults.made("limits", lambda: Limits(**config.get("limits", {})))
    tls = faults.made("tls", lambda: ServerTls(**config["tls"])) if "tls" in config else None
    access = faults.made("tokens", lambda: _access(config))
    replicas = faults.made("replicas", lambda: _replicas(config["replicas"])) if "replicas" in config else None
    panel = faults.made("panel", lambda: _panel(config["panel"])) if "panel" in config else None
    experts = backends(config, faults)
    directory = faults.made("directory", lambda: _directory(config)) if "directory" in config else None
    closing = [backend.journal.close for backend in experts if backend.journal is not None]
    closing += [] if directory is None else [directory.close]
    store = None
    if "checkpoints" in config and not faults:  # it makes the folder
        store = faults.made("checkpoints", lambda: CheckpointStore(config["checkpoints"], keep=config.get("keep", 3)))
    try:
        faults.check()
        server = Server(
            experts,
            address=config.get("address", "127.0.0.1:7070"),
            advertise=config.get("advertise"),
            panel=panel,
            access=access,
            directory=directory,
            tls=tls,
            checkpoints=store,
            replicas=replicas,
            options=replace(options, limits=limits) if options is not None and limits is not None else None,
        )
    except BaseException:
        for close in closing:
            close()
        raise
    for close in closing:
        server.own(close)
    return server


def _directory(config: Mapping[str, Any]) -> Directory:
    tls = EtcdTls(**config["directory_tls"]) if "directory_tls" in config else None
    return open_directory(config["directory"], tls=tls)


def _replicas(given: Mapping[str, Any]) -> ReplicaOptions:
    table = dict(given)
    tls = ClientTls(**table.pop("tls")) if "tls" in table else None
    for name in ("follow_seconds", "first_seconds"):
        if name in table:
            table[name] = float(table[name])
    return ReplicaOptions(**table, tls=tls)


def _panel(entry: str | Mapping[str, Any]) -> PanelOptions:
    """An address, or a table; the token stands in a file of its own, whose line break does not count."""
    if isinstance(entry, str):
        return PanelOptions(entry)
    file = entry.get("token_file")
    try:
        token = None if file is None else Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token_file {file!r} cannot be read: {error}") from None
    return PanelOptions(entry["address"], entry.get("allowed_hosts", ()), token)


def _access(config: Mapping[str, Any]) -> Access:
    if "grants" not in config:
        return Access(OPEN)
    grants = [
        Grant(entry.get("client", Grant.client), entry.get("expert", "*"), ROLES[entry.get("role", "train")])
        for entry in config["grants"]
    ]
    return Access(grants, config.get("tokens", {}))


def _import(name: str) -> None:
    if name.startswith("."):
        raise UsageError("wanted its full name, such as my_package.my_experts")
    import_module(name)


def _number(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
