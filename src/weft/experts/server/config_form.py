"""The form of a configuration: which names there are, of which types, and what goes with what.

Nothing is made, imported or opened here. What passes may still be refused by who is made of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from weft.experts.accumulation import SumsOptions
from weft.experts.address import address_fault, is_loopback, split
from weft.experts.batching import PoolOptions
from weft.experts.checks import count_fault
from weft.experts.client.transport import ClientTls
from weft.experts.directory.etcd_endpoints import EtcdTls
from weft.experts.idempotency import IdempotencyOptions
from weft.experts.server.auth import Role
from weft.experts.server.options import ServerOptions, listen_faults
from weft.experts.tls import ServerTls
from weft.experts.wire.limits import Limits

_NUMBER = (int, float)
_TOP = {
    "address": str,
    "advertise": str,
    "insecure": bool,
    "panel": (str, dict),
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
    "schedule": str,
    "schedule_arguments": dict,
    "options": dict,
    "clip_grad_norm": _NUMBER,
    "guards": dict,
    "keep_graphs": dict,
    "records": dict,
    "mini_batches": dict,
    "journal": dict,
}
_NEEDS = {
    "optimizer_arguments": "optimizer",
    "schedule": "optimizer",
    "schedule_arguments": "schedule",
    "clip_grad_norm": "optimizer",
}
_GUARDS = {"finite": bool, "max_norm": _NUMBER, "max_output_norm": _NUMBER}
_KEPT = {"nbytes": int, "seconds": _NUMBER}
_JOURNAL = {"folder": str, "max_file_bytes": int, "max_files": int}
_REPLICAS = {
    "experts": list,
    "follow_seconds": _NUMBER,
    "follow_steps": int,
    "first_seconds": _NUMBER,
    "state_bytes": int,
    "tls": dict,
    "token": str,
}
_SECRETS = ("tokens", "token", "replicas")
"""What is or holds a token: never printed, however mistyped."""
_PANEL = {"address": str, "allowed_hosts": list, "token_file": str}
_GRANT = {"client": str, "expert": str, "role": str}
_WORDS: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    _NUMBER: "a number",
    bool: "true or false",
    (str, dict): "a text or a table",
    dict: "a table",
    list: "a list",
}
_GOES_WITH = {
    "replicas": ("directory", "which says who owns them"),
    "directory_tls": ("directory", "which would be reached with it"),
    "keep": ("checkpoints", "of which so many would stay"),
    "tokens": ("grants", "without which everybody might do everything; say by [[grants]] who may do what"),
}
ROLES = {role.name.lower(): role for role in Role}


def form_faults(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the form of a configuration, in words."""
    faults = _table_faults(config, _TOP, "the configuration")
    given = {name: config[name] for name, kind in _TOP.items() if name in config and isinstance(config[name], kind)}
    for number, entry in enumerate(given.get("experts", ())):
        faults += _expert_faults(entry, f"experts[{number}]")
    for number, entry in enumerate(given.get("grants", ())):
        faults += _table_faults(entry, _GRANT, f"grants[{number}]")
        role: Any = cast("dict[str, Any]", entry).get("role") if isinstance(entry, dict) else None
        if isinstance(role, str) and role not in ROLES:
            faults.append(f"grants[{number}] has role {role!r}, wanted one of {', '.join(ROLES)}")
    faults += _table_faults(given.get("options", {}), _numbers(ServerOptions), "options")
    faults += _table_faults(given.get("limits", {}), _numbers(Limits), "limits")
    if "tls" in given:
        faults += _table_faults(
            given["tls"], _texts(ServerTls) | {"allow_expired": bool}, "tls", ("key", "certificate")
        )
    faults += _table_faults(given.get("directory_tls", {}), _texts(EtcdTls), "directory_tls")
    replicas = given.get("replicas", {})
    faults += _table_faults(replicas, _REPLICAS, "replicas")
    faults += _text_faults(replicas.get("experts"), "experts of replicas")
    if isinstance(replicas.get("tls"), dict):
        faults += _table_faults(replicas["tls"], _texts(ClientTls) | {"servers": list}, "replicas.tls")
        faults += _text_faults(replicas["tls"].get("servers"), "servers of replicas.tls")
    faults += _text_faults(given.get("imports"), "imports")
    if not all(isinstance(client, str) for client in given.get("tokens", {}).values()):
        faults.append("tokens has a client that is no text, wanted a secret and the name of its client")
    faults += _value_faults(config, given)
    return faults


def _table_faults(entry: Any, kinds: Mapping[str, Any], where: str, needed: Sequence[str] = ()) -> list[str]:
    """Names of a table that are not known, missing, or of something of a wrong type."""
    if not isinstance(entry, Mapping):
        return [f"{where} is {entry!r}, wanted a table"]
    table = cast("Mapping[str, Any]", entry)
    faults = _unknown(table, list(kinds), where)
    faults += [f"{where} has no {name}" for name in needed if name not in table]
    for name, kind in kinds.items():
        if name in table and (not isinstance(table[name], kind) or isinstance(table[name], bool) is not (kind is bool)):
            single = kind is list and isinstance(table[name], Mapping)
            how = f", which [[{name}]] begins" if single else ""
            seen = f"of type {type(table[name]).__name__}" if name in _SECRETS else repr(table[name])
            faults.append(f"{name} of {where} is {seen}, wanted {_WORDS[kind]}{how}")
    return faults


def names_of(entry: Mapping[str, Any]) -> list[str]:
    """What the experts of an entry are called."""
    name, count = entry["name"], entry.get("count")
    return [name] if count is None else [name.replace("{}", str(i)) for i in range(count)]


def _expert_faults(entry: Any, where: str) -> list[str]:
    faults = _table_faults(entry, _EXPERT, where, ("name", "kind"))
    if not isinstance(entry, dict):
        return faults
    table = cast("dict[str, Any]", entry)
    count, name = table.get("count"), table.get("name")
    if count is None and isinstance(name, str) and "{}" in name:
        faults.append(f"{where} is called {name!r} and has no count: say how many there are, or take {{}} out")
    if isinstance(count, int):
        faults += count_fault(f"count of {where}", count)
        if count > 1 and isinstance(name, str) and "{}" not in name:
            faults.append(f"{where} are {count} experts all called {name!r}; write {{}} where their number goes")
    if isinstance(kept := table.get("keep_graphs"), dict):
        faults += _table_faults(kept, _KEPT, f"keep_graphs of {where}", ("nbytes",))
    for name, kinds in {"records": _numbers(IdempotencyOptions), "mini_batches": _numbers(SumsOptions)}.items():
        faults += _table_faults(table.get(name, {}), kinds, f"{name} of {where}")
    if isinstance(journal := table.get("journal"), dict):
        faults += _table_faults(journal, _JOURNAL, f"journal of {where}", ("folder",))
    if isinstance(guards := table.get("guards"), dict):
        faults += _table_faults(guards, _GUARDS, f"guards of {where}")
    if isinstance(options := table.get("options"), dict):
        pool = [field.name for field in fields(PoolOptions)]
        faults += _unknown(cast("dict[str, Any]", options), pool, f"options of {where}")
    return faults + [
        f"{where} has {each} and no {other}" for each, other in _NEEDS.items() if each in table and other not in table
    ]


def _value_faults(config: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Of single values, and of those that go together."""
    faults: list[str] = []
    if not any(name in config and name not in given for name in ("address", "advertise")):
        address = given.get("address", "127.0.0.1:7070")
        faults += listen_faults(address, given.get("advertise"), "directory" in config)
    faults += _open_faults(config, given)
    if isinstance(panel := given.get("panel"), dict):
        table = cast("dict[str, Any]", panel)
        faults += _table_faults(table, _PANEL, "panel", ("address",))
        faults += _text_faults(table.get("allowed_hosts"), "allowed_hosts of panel")
        panel = table.get("address", "127.0.0.1:9090")
    if panel is not None:
        faults += address_fault("panel", panel, free=True)
    if "keep" in given:
        faults += count_fault("keep", given["keep"])
    if not given.get("checkpoints", "folder") or "\0" in given.get("checkpoints", ""):
        faults.append(f"checkpoints is {given['checkpoints']!r}, wanted a folder")
    for name, (other, why) in _GOES_WITH.items():
        if name in config and other not in config:
            faults.append(f"there {'are' if name[-1] == 's' else 'is'} [{name}] and no {other}, {why}")
    if not config.get("experts"):
        faults.append("there are no experts, wanted at least one")
    return faults


def _open_faults(config: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Whether everybody on a network could do everything, which nobody has said in so many words."""
    address = config.get("address", "127.0.0.1")
    named = "authority" in given.get("tls", {})
    if given.get("insecure") or "grants" in config or named or address_fault("address", address, free=True):
        return []
    if is_loopback(split(address)[0]):
        return []
    return [
        f"address is {address!r}, where others reach it, and there is neither [[grants]] nor an authority= in [tls], "
        "so that whoever connects may read and train everything; say who may do what, or insecure = true (--insecure) "
        "if that is meant"
    ]


def _unknown(table: Mapping[str, Any], known: Sequence[str], where: str) -> list[str]:
    return [f"{where} has {name!r}, known are {', '.join(known)}" for name in table if name not in known]


def _text_faults(words: Any, where: str) -> list[str]:
    """Of a list of texts; what is no list is told elsewhere."""
    found = cast("list[Any]", words) if isinstance(words, list) else []
    return [f"{where} has {word!r}, wanted a text" for word in found if not isinstance(word, str) or not word]


def _texts(kind: Any) -> dict[str, Any]:
    return {field.name: str for field in fields(kind)}


def _numbers(kind: Any) -> dict[str, Any]:
    named = [field for field in fields(kind) if field.name != "limits"]  # those have a table of their own
    return {field.name: _NUMBER if field.type is float else int for field in named}
