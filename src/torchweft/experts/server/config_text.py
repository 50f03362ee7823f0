"""``torchweft serve --print-config``: a configuration as TOML, with the options and defaults that apply.

The text is a file for ``torchweft serve`` again, except that secrets are left out. Python reads TOML and does not write
it. The values here are those of `ServeConfig`, which need a small part of the format.
"""

import json
import re
from collections.abc import Mapping, Sequence
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
    table = {name: value for name, value in table.items() if value not in ([], {})}
    # Plain values come first, because they would belong to the table above them.
    lines = [f"{name} = {_format(value)}" for name, value in table.items() if not _is_table(value)]
    for name, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{name}]", *_assignments(cast("dict[str, Any]", value))]
        elif _is_table(value):
            lines += [line for entry in value for line in ("", f"[[{name}]]", *_assignments(entry))]
    return "\n".join([*lines, ""])


def _to_plain(value: Any) -> Any:
    """Tables as dicts, without entries of None, which TOML cannot express."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    elif is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value).items()
        return {name: _to_plain(entry) for name, entry in entries if entry is not None}
    if isinstance(value, Role):
        return value.name.lower()
    if isinstance(value, str):
        return _SECRET if "-----BEGIN" in value else value  # a key in place of its path
    return [_to_plain(entry) for entry in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else value


def _is_table(value: Any) -> bool:
    return isinstance(value[0] if isinstance(value, list) and value else value, dict)


def _assignments(table: Mapping[str, Any]) -> list[str]:
    return [f"{_format_key(name)} = {_format(value)}" for name, value in table.items()]


def _format(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(_assignments(cast("dict[str, Any]", value)))
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format, cast('list[Any]', value)))}]"
    # JSON and TOML write text, booleans and numbers alike, but for infinity and NaN.
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)


def _format_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
