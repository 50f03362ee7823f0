"""``torchweft serve --print-config``: a configuration as TOML, with the options and defaults that apply.

The text is a file for ``torchweft serve`` again, except that secrets are left out. Python reads TOML and does not write
it. The values of a `ServeConfig` need a small part of the format.
"""

import json
import re
from dataclasses import fields, is_dataclass
from typing import Any, cast

from pydantic import BaseModel

from torchweft.experts.server.auth import Role
from torchweft.experts.server.config import ServeConfig

_SECRET = "(secret)"


def to_toml(config: ServeConfig) -> str:
    """The configuration as TOML. Keys and certificates are paths, and secrets are replaced by ``(secret)``."""
    table = _to_plain(config)
    table["tokens"] = {f"{_SECRET} {number}": name for number, name in enumerate(config.tokens.values(), 1)}
    if config.replicas is not None and config.replicas.token is not None:
        table["replicas"]["token"] = _SECRET
    del table["options"]["limits"]  # a table of its own in a file
    if config.checkpoints is None:
        del table["keep"]
    # Plain values come first, because they would belong to the table above them.
    lines, tables = list[str](), list[str]()
    for name, value in table.items():
        if isinstance(value, dict) and value:
            tables += ["", f"[{name}]", *_assignments(value)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            tables += [line for entry in cast("list[Any]", value) for line in ("", f"[[{name}]]", *_assignments(entry))]
        elif value not in ([], {}):
            lines.append(f"{name} = {_format(value)}")
    return "\n".join([*lines, *tables, ""])


def _to_plain(value: Any) -> Any:
    """Tables as dicts, without entries of None, which TOML cannot express."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, BaseModel | dict):
        # A model iterates over pairs of its fields, which `dict` takes as well as a dict.
        entries: dict[str, Any] = dict(cast("Any", value))
        return {name: _to_plain(entry) for name, entry in entries.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_to_plain(entry) for entry in cast("list[Any]", value)]
    if isinstance(value, str) and "-----BEGIN" in value:  # a key in place of its path
        return _SECRET
    return value.name.lower() if isinstance(value, Role) else value


def _assignments(table: Any) -> list[str]:
    return [f"{_format_key(name)} = {_format(value)}" for name, value in table.items()]


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(_assignments(value))} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format, cast('list[Any]', value)))}]"
    # JSON and TOML write text, booleans and numbers alike, but for infinity and NaN.
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)


def _format_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
