"""What ``weft serve`` reads: a TOML file, or options on the command line that say the same.

    address = "0.0.0.0:7070"                     checkpoints = "/var/lib/weft"
    directory = "etcd://host:2379/weft"          where the experts are listed, with [directory_tls] if it wants TLS
    imports = ["my_package.my_experts"]          modules that register kinds of experts
    panel = "127.0.0.1:9090"                     a status page and metrics, over plain HTTP

    [[experts]]
    name = "ffn.{}"                              with count: ffn.0 ffn.1 ffn.2 ffn.3
    count = 4
    kind = "ffn"
    arguments = { hidden = 512 }
    optimizer = "Adam"                           of torch.optim; left out: the expert is not trained
    optimizer_arguments = { lr = 0.001 }
    options = { max_batch_size = 1024 }          of the task pools
    keep_graphs = { nbytes = 268435456 }         and seconds = 30: of forwards whose clients say keep_graph=True

    [options]   see ServerOptions     [limits]  see Limits     [tls]  key, certificate, authority
    [replicas]  see ReplicaOptions    experts = ["ffn.*"], token = "secret", tls = { authority = ..., ... }
    [tokens]    secret = "client"     [[grants]]  client, expert, role = "forward" | "train" | "admin"

Whoever writes this file runs the server: it may name any module to import.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from weft.core.errors import UsageError, listed
from weft.experts.backend import ExpertBackend
from weft.experts.checkpoint import CheckpointStore
from weft.experts.client.channel import ClientTls
from weft.experts.directory import Directory
from weft.experts.directory.etcd_address import open_directory
from weft.experts.directory.etcd_endpoints import EtcdTls
from weft.experts.kept import GraphBudget
from weft.experts.optimizers import OptimizerLike
from weft.experts.registry import make_expert
from weft.experts.replica import ReplicaOptions
from weft.experts.server.access import OPEN, Access, Grant, Role
from weft.experts.server.options import ServerOptions, ServerTls
from weft.experts.server.server import Server
from weft.experts.wire.limits import Limits

_TOP = {
    "address": str,
    "advertise": str,
    "panel": str,
    "directory": str,
    "directory_tls": dict,
    "checkpoints": str,
    "keep": int,
    "imports": list,
    "experts": list,
    "options": dict,
    "limits": dict,
    "tls": dict,
    "replicas": dict,
    "tokens": dict,
    "grants": list,
}
_EXPERT = {
    "name": str,
    "count": int,
    "kind": str,
    "arguments": dict,
    "optimizer": str,
    "optimizer_arguments": dict,
    "options": dict,
    "clip_grad_norm": (int, float),
    "keep_graphs": dict,
}
_KEPT = {"nbytes": int, "seconds": (int, float)}
_REPLICAS = {
    "experts": list,
    "follow_seconds": (int, float),
    "follow_steps": int,
    "first_seconds": (int, float),
    "state_bytes": int,
    "tls": dict,
    "token": str,
}
_GRANT = {"client": str, "expert": str, "role": str}
_ROLES = {role.name.lower(): role for role in Role}


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
    return {"name": name, "kind": kind, "arguments": {key: _number(value) for key, _, value in pairs}}


def build(config: Mapping[str, Any]) -> Server:
    """The server that a table describes, not started. Raises ``UsageError`` that lists all faults of its form."""
    faults = _faults(config, _TOP, "the configuration")
    for number, entry in enumerate(config.get("experts", ())):
        faults += _faults(entry, _EXPERT, f"experts[{number}]", ("name", "kind"))
        if isinstance(entry, dict) and isinstance(kept := cast("dict[str, Any]", entry).get("keep_graphs"), dict):
            faults += _faults(kept, _KEPT, f"keep_graphs of experts[{number}]", ("nbytes",))
    for number, entry in enumerate(config.get("grants", ())):
        faults += _faults(entry, _GRANT, f"grants[{number}]")
        role = cast("dict[str, Any]", entry).get("role", "train") if isinstance(entry, dict) else "train"
        faults += [] if role in _ROLES else [f"grants[{number}] has role {role!r}, wanted one of {', '.join(_ROLES)}"]
    faults += _unknown(
        config.get("options", {}), [f.name for f in fields(ServerOptions) if f.name != "limits"], "options"
    )
    faults += _unknown(config.get("limits", {}), [f.name for f in fields(Limits)], "limits")
    faults += _unknown(config.get("directory_tls", {}), [f.name for f in fields(EtcdTls)], "directory_tls")
    faults += _unknown(config.get("tls", {}), [f.name for f in fields(ServerTls)], "tls")
    faults += _faults(config.get("replicas", {}), _REPLICAS, "replicas")
    if "replicas" in config and "directory" not in config:
        faults.append("there are [replicas] and no directory, which says who owns them")
    if not config.get("experts"):
        faults.append("there are no experts, wanted at least one")
    if faults:
        raise UsageError(listed("the server cannot be made:", faults))
    for name in config.get("imports", ()):
        _import(name)
    directory = _directory(config)
    server = Server(
        [backend for entry in config["experts"] for backend in _backends(entry)],
        address=config.get("address", "127.0.0.1:7070"),
        advertise=config.get("advertise"),
        panel=config.get("panel"),
        access=_access(config),
        directory=directory,
        tls=ServerTls(**config["tls"]) if "tls" in config else None,
        checkpoints=CheckpointStore(config["checkpoints"], keep=config.get("keep", 3))
        if "checkpoints" in config
        else None,
        replicas=_replicas(config),
        options=ServerOptions(limits=Limits(**config.get("limits", {})), **config.get("options", {})),
    )
    if directory is not None:
        server.own(directory.close)
    return server


def _directory(config: Mapping[str, Any]) -> Directory | None:
    if "directory" not in config:
        return None
    tls = EtcdTls(**config["directory_tls"]) if "directory_tls" in config else None
    return open_directory(config["directory"], tls=tls)


def _replicas(config: Mapping[str, Any]) -> ReplicaOptions | None:
    if "replicas" not in config:
        return None
    table = dict(config["replicas"])
    faults = _unknown(table.get("tls", {}), [f.name for f in fields(ClientTls)], "replicas.tls")
    if faults:
        raise UsageError(listed("the server cannot be made:", faults))
    tls = ClientTls(**table.pop("tls")) if "tls" in table else None
    for name in ("follow_seconds", "first_seconds"):
        if name in table:
            table[name] = float(table[name])
    return ReplicaOptions(**table, tls=tls)


def _backends(entry: Mapping[str, Any]) -> list[ExpertBackend]:
    name, count = entry["name"], entry.get("count")
    names = [name] if count is None else [name.replace("{}", str(i)) for i in range(count)]
    if len(set(names)) < len(names):
        raise UsageError(f"{len(names)} experts are all called {name!r}; write {{}} where their number goes")
    more: dict[str, Any] = {}
    if "clip_grad_norm" in entry:
        more["clip_grad_norm"] = float(entry["clip_grad_norm"])
    if "keep_graphs" in entry:
        kept = entry["keep_graphs"]
        more["keep_graphs"] = GraphBudget(kept["nbytes"], float(kept.get("seconds", GraphBudget.seconds)))
    made: list[ExpertBackend] = []
    for each in names:
        blueprint = make_expert(entry["kind"], **entry.get("arguments", {}))
        made.append(blueprint.backend(each, _optimizer(entry), **{**entry.get("options", {}), **more}))
    return made


def _optimizer(entry: Mapping[str, Any]) -> OptimizerLike | None:
    name = entry.get("optimizer")
    if name is None:
        return None
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UsageError(f"torch.optim has no optimizer {name!r}, which expert {entry['name']!r} names")
    made: Callable[..., torch.optim.Optimizer] = kind
    arguments = entry.get("optimizer_arguments", {})
    return partial(made, **arguments) if arguments else made


def _access(config: Mapping[str, Any]) -> Access:
    grants = [
        Grant(entry.get("client", "*"), entry.get("expert", "*"), _ROLES[entry.get("role", "train")])
        for entry in config.get("grants", ())
    ]
    return Access(grants or OPEN, config.get("tokens", {}))


def _faults(entry: Any, kinds: Mapping[str, Any], where: str, needed: Sequence[str] = ()) -> list[str]:
    if not isinstance(entry, Mapping):
        return [f"{where} is {entry!r}, wanted a table"]
    table = cast("Mapping[str, Any]", entry)
    faults = _unknown(table, list(kinds), where)
    faults += [f"{where} has no {name}" for name in needed if name not in table]
    for name, kind in kinds.items():
        if name in table and (not isinstance(table[name], kind) or isinstance(table[name], bool)):
            faults.append(f"{name} of {where} is {table[name]!r}, which is of a wrong type")
    return faults


def _unknown(table: Mapping[str, Any], known: Sequence[str], where: str) -> list[str]:
    return [f"{where} has {name!r}, known are {', '.join(known)}" for name in table if name not in known]


def _import(name: str) -> None:
    try:
        import_module(name)
    except ImportError as error:
        raise UsageError(f"the module {name!r} of the configuration cannot be imported: {error}") from None


def _number(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
