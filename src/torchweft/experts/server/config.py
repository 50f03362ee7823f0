"""Configuration of ``torchweft serve``: a TOML file, or options of the command line with the same meaning.

    address = "0.0.0.0:7070"                     checkpoints = "/var/lib/torchweft"

    [[experts]]
    name = "ffn.{}"                              with count: ffn.0 ffn.1 ffn.2 ffn.3
    count = 4
    kind = "ffn"
    arguments = { hidden = 512 }
    optimizer = "Adam"                           of torch.optim; without it the expert is not trained
    optimizer_arguments = { lr = 0.001 }

docs/experts.md lists every key. The author of the file runs the server, so it can import any module.
"""

import os
import re
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import MISSING, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from torch.optim import Optimizer, lr_scheduler

from torchweft.core.errors import UsageError, WeftError, split_faults
from torchweft.core.validation import Validator, suggest
from torchweft.experts.accumulation import AccumulationOptions
from torchweft.experts.address import address_fault, is_loopback, parse_address, probe_address
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.discovery.etcd import EtcdTls, open_directory
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.gradients import Guards
from torchweft.experts.graph_cache import GraphBudget
from torchweft.experts.idempotency import IdempotencyOptions
from torchweft.experts.registry import make_expert
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.server.auth import OPEN, Access, Grant, Role
from torchweft.experts.server.options import ServerOptions, listen_faults
from torchweft.experts.server.server import Server
from torchweft.experts.status_page.http import PanelOptions
from torchweft.experts.task import PoolOptions
from torchweft.experts.tls import ClientTls, Pem, ServerTls
from torchweft.experts.wire.frame import Limits

Made = TypeVar("Made")
Checked = TypeVar("Checked", bound=BaseModel)
_TITLE = "invalid configuration of the server"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_Text = Annotated[str, Field(min_length=1)]
_Role = Annotated[Literal["forward", "train", "admin"], AfterValidator(lambda word: Role[word.upper()])]
_FILE_TYPES: dict[Any, Any] = {Pem: str, Pem | None: str | None, Sequence[str]: list[_Text], Role: _Role}
"""Types of fields, and the types that stand for them in a file."""


class _DataclassTable:
    """Pydantic schema that reads a dataclass from a table of its fields. ``without``: fields that are not allowed."""

    def __init__(self, kind: type, *without: str) -> None:
        self._kind = kind
        hints, columns = get_type_hints(kind), dict[str, Any]()
        for field in fields(kind):
            if field.name not in without:
                required = field.default is MISSING and field.default_factory is MISSING
                hint = hints[field.name]
                columns[field.name] = (_FILE_TYPES.get(hint, hint), ... if required else None)
        self._table = create_model(kind.__name__, __base__=_Table, **columns)
        self.model_fields = self._table.model_fields

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._build, handler.generate_schema(self._table))

    def _build(self, table: BaseModel) -> Any:
        # Only the given fields, so that the dataclass applies its own defaults.
        return self._kind(**{name: getattr(table, name) for name in table.model_fields_set})


_FILE_TYPES[ClientTls | None] = Annotated[ClientTls, _DataclassTable(ClientTls)]


class ExpertTable(_Table):
    """An entry of ``[[experts]]``: one expert, or ``count`` of them."""

    name: str
    kind: str
    count: Annotated[int, Field(ge=1)] | None = None
    arguments: dict[str, Any] = {}
    optimizer: str | None = None
    optimizer_arguments: dict[str, Any] | None = None
    schedule: str | None = None
    schedule_arguments: dict[str, Any] | None = None
    clip_grad_norm: float | None = None
    prefer: Literal["checkpoint", "file"] = "checkpoint"
    options: Annotated[PoolOptions, _DataclassTable(PoolOptions)] = PoolOptions()
    guards: Annotated[Guards, _DataclassTable(Guards)] | None = None
    keep_graphs: Annotated[GraphBudget, _DataclassTable(GraphBudget)] | None = None
    idempotency: Annotated[IdempotencyOptions, _DataclassTable(IdempotencyOptions)] | None = None
    mini_batches: Annotated[AccumulationOptions, _DataclassTable(AccumulationOptions)] | None = None

    @model_validator(mode="after")
    def _check_relations(self) -> "ExpertTable":
        needs = dict.fromkeys(("optimizer_arguments", "schedule", "clip_grad_norm"), "optimizer")
        given, numbered = self.model_fields_set, "{}" in self.name
        with Validator("an expert") as check:
            for name, other in {**needs, "schedule_arguments": "schedule"}.items():
                check.require(name not in given or other in given, f"there is {name} and no {other}")
            trained = self.prefer == "checkpoint" or "optimizer" in given
            check.require(trained, 'there is prefer = "file" and no optimizer')
            fault = f"it is called {self.name!r} and has no count: give the number of experts, or remove {{}}"
            check.require(not numbered or self.count is not None, fault)
            fault = f"it is {self.count} experts all called {self.name!r}; write {{}} in place of their number"
            check.require(numbered or (self.count or 1) == 1, fault)
        return self

    @property
    def names(self) -> list[str]:
        return [self.name] if self.count is None else [self.name.replace("{}", str(i)) for i in range(self.count)]

    def make(self, name: str) -> ExpertBackend:
        named = ("guards", "keep_graphs", "idempotency", "mini_batches", "clip_grad_norm")
        more = {
            **vars(self.options),
            **{option: getattr(self, option) for option in named if option in self.model_fields_set},
        }
        more["prefer_configured"] = self.prefer == "file"
        # Checked before the module is made, because that can take long.
        optimizer = _find_factory(
            torch.optim, Optimizer, self.optimizer, self.optimizer_arguments, "optimizer", "params"
        )
        kind, arguments = lr_scheduler.LRScheduler, self.schedule_arguments
        if (
            schedule := _find_factory(lr_scheduler, kind, self.schedule, arguments, "schedule", "optimizer")
        ) is not None:
            more["schedule"] = schedule
        expert = make_expert(self.kind, **self.arguments)
        return expert.backend(name, optimizer, **more)


class ExpertFile(_Table):
    """The file ``loadable``: experts that an administrator can load while the server runs, with their modules."""

    imports: list[_Text] = []
    experts: list[ExpertTable]

    @classmethod
    def read(cls, path: str) -> "ExpertFile":
        """The present file. Raises ``UsageError`` that lists all its faults."""
        table = read_config(Path(path))
        with Validator(f"invalid file of loadable experts, {path!r}") as check:
            if (checked := _validate(cls, table, check)) is not None:
                _import_all(check, checked.imports)
                return checked
        raise AssertionError("an invalid table has faults")

    @classmethod
    def make(cls, path: str, uid: str) -> ExpertBackend:
        # Read again each time, so that experts can be added to the file while the server runs.
        for entry in (loadable := cls.read(path)).experts:
            if uid in entry.names:
                return entry.make(uid)
        known = [name for entry in loadable.experts for name in entry.names]
        raise UsageError(f"{path!r} has no expert {uid!r}, known are {', '.join(known[:10])}{suggest(uid, known)}")


class PanelTable(_Table):
    """Address and readers of the status page. The token is in a separate file, so that this one can be shared."""

    address: str
    allowed_hosts: list[_Text] = []
    token_file: str | None = None

    def read_options(self) -> PanelOptions:
        """The options with the token, without the line break at its end. Raises ``UsageError`` if it cannot be read."""
        try:
            token = None if self.token_file is None else Path(self.token_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"token_file {self.token_file!r} cannot be read: {error}") from None
        return PanelOptions(self.address, self.allowed_hosts, token)


class ServeConfig(_Table):
    """The whole file. `parse` checks it, `server` makes the server."""

    address: str = "127.0.0.1:7070"
    advertise: str | None = None
    insecure: bool = False
    panel: PanelTable | None = None
    directory: str | None = None
    directory_tls: Annotated[EtcdTls, _DataclassTable(EtcdTls)] | None = None
    checkpoints: _Text | None = None
    keep: Annotated[int, Field(ge=1)] = 3
    imports: list[_Text] = []
    experts: list[ExpertTable] = []
    loadable: _Text | None = None
    options: Annotated[ServerOptions, _DataclassTable(ServerOptions, "limits")] = ServerOptions()
    limits: Annotated[Limits, _DataclassTable(Limits)] = Limits()
    tls: Annotated[ServerTls, _DataclassTable(ServerTls)] | None = None
    replicas: Annotated[ReplicaOptions, _DataclassTable(ReplicaOptions)] | None = None
    tokens: dict[str, str] = {}
    grants: list[Annotated[Grant, _DataclassTable(Grant)]] | None = None

    @field_validator("panel", mode="before")
    @classmethod
    def _expand_panel(cls, entry: Any) -> Any:
        return {"address": entry} if isinstance(entry, str) else entry

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> "ServeConfig":
        """Check the form of a table, without creating, importing or opening anything.

        Raises ``UsageError`` that lists every fault. Faulty values do not prevent the checks of combinations.
        """
        with Validator(_TITLE) as check:
            check.add(*_relation_faults(table))
            if (checked := _validate(cls, table, check)) is not None:
                return checked
        raise AssertionError("an invalid table has faults")

    def server(self) -> Server:
        """The server, not started. Raises ``UsageError`` that lists the errors of all its parts."""
        # A failed import raises here: without it, the kinds of experts below would be unknown, too.
        with Validator(_TITLE) as check:
            _import_all(check, self.imports)
        parts: dict[str, Any] = {"options": replace(self.options, limits=self.limits), "replicas": self.replicas}
        with ExitStack() as opened:
            with Validator(_TITLE) as check:
                grants = OPEN if self.grants is None else self.grants
                parts["access"] = _try_make(check, "tokens", partial(Access, grants, self.tokens))
                if self.panel is not None:
                    parts["panel"] = _try_make(check, "panel", self.panel.read_options)
                experts = _make_experts(check, self.experts, "experts")
                if self.directory is not None:
                    to_open = partial(open_directory, self.directory, tls=self.directory_tls)
                    parts["directory"] = directory = _try_make(check, "directory", to_open)
                    if directory is not None:
                        opened.callback(directory.close)
                if self.checkpoints is not None and not check.faults:  # last, because it creates the folder
                    store = partial(FolderCheckpointStore, self.checkpoints, keep=self.keep)
                    parts["checkpoints"] = _try_make(check, "checkpoints", store)
            # From here on the server closes the opened resources. Before, the stack closes them if anything raises.
            if self.loadable is not None:
                parts["loadable"] = partial(ExpertFile.make, self.loadable)
            server = Server(experts, address=self.address, advertise=self.advertise, tls=self.tls, **parts)
            server.own(opened.pop_all().close)
            return server

    def check(self) -> list[str]:
        """The names of the experts. Raises ``UsageError`` that lists all that would prevent a start.

        Makes the experts and reads all certificates. Creates no folder, writes no file, and leaves no port open.
        """
        dry_run = self.model_copy(update={"checkpoints": None})  # because making them creates their folder
        names: list[str] = []
        with Validator(_TITLE) as check:
            try:
                server = dry_run.server()
            except UsageError as error:
                check.add(*split_faults(str(error)))
            else:
                names = server.experts
                server.shutdown()  # closes the directory
            if self.tls is not None:
                _try_make(check, "tls", self.tls.credentials)
            if self.replicas is not None and self.replicas.tls is not None:
                _try_make(check, "replicas.tls", self.replicas.tls.credentials)
            if self.loadable is not None and (found := _try_make(check, "loadable", self._read_loadable)) is not None:
                _make_experts(check, found.experts, "experts of loadable")
            _try_make(check, "address", partial(probe_address, self.address))
            if self.panel is not None:
                _try_make(check, "panel", partial(probe_address, self.panel.address))
            check.add(*([] if self.checkpoints is None else _folder_faults("checkpoints", self.checkpoints)))
        return names

    def _read_loadable(self) -> ExpertFile:
        assert self.loadable is not None
        return ExpertFile.read(self.loadable)


def _make_experts(check: Validator, entries: Sequence[ExpertTable], where: str) -> list[ExpertBackend]:
    """The experts of all entries. Of an entry only the first fault is listed: its experts share them."""
    backends: list[ExpertBackend] = []
    seen: set[str] = set()
    for number, entry in enumerate(entries):
        names = entry.names
        if twice := [name for name in names if name in seen]:
            check.add(f"{where}[{number}] has the name {twice[0]!r} of another expert; give each its own name")
            continue
        seen.update(names)
        for name in names:
            backend = _try_make(check, f"{where}[{number}], called {name!r}", partial(entry.make, name))
            if backend is None:
                break
            backends.append(backend)
    return backends


def read_config(path: Path) -> dict[str, Any]:
    """The table in a file. Raises ``UsageError`` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        what = "cannot be read" if isinstance(error, OSError) else "is not TOML"
        # Without the keys that the parser quotes, because those of [tokens] are secrets.
        why = re.sub(r"(key|declare|namespace) ['(].*(?= twice| \(at )", r"\1 ...", str(error))
        raise UsageError(f"the configuration {str(path)!r} {what}: {why}") from None


def parse_expert(word: str) -> dict[str, Any]:
    """``NAME=KIND`` or ``NAME=KIND:hidden=512,inner=64`` as an entry of ``experts``. Raises ``UsageError``."""
    name, _, rest = word.partition("=")
    kind, _, arguments = rest.partition(":")
    pairs = [pair.partition("=") for pair in arguments.split(",") if pair]
    if not (name and kind and all(key and value for key, _, value in pairs)):
        raise UsageError(f"an expert is {word!r}, wanted NAME=KIND or NAME=KIND:argument=number,...")
    keys = [key for key, _, _ in pairs]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise UsageError(f"an expert is {word!r}, which repeats {', '.join(twice)}; give each argument once")
    return {"name": name, "kind": kind, "arguments": {key: _parse_number(value) for key, _, value in pairs}}


def build(table: Mapping[str, Any]) -> Server:
    """The server that a table describes, not started. Raises as `ServeConfig.parse` and `ServeConfig.server`."""
    return ServeConfig.parse(table).server()


def _validate(kind: type[Checked], table: Mapping[str, Any], check: Validator) -> Checked | None:
    """The table as ``kind``, or None: then its faults were added to ``check``."""
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        check.add(*(fault for item in error.errors(include_url=False) for fault in _describe_fault(kind, item)))
        return None


def _describe_fault(whole: type[BaseModel], error: ErrorDetails) -> list[str]:
    """A fault that pydantic found: the place, the value unless it could be a secret, and the expected one."""
    loc, kind, seen, where = error["loc"], error["type"], error["input"], _path(error["loc"])
    *table, name = loc or [""]
    if "tokens" in table:  # the key is the token itself, so it must not be quoted
        return ["tokens has a client that is not text, wanted a secret and the name of its client"]
    if kind == "extra_forbidden":
        known = _known_names(whole, table)
        where = _path(table) or "the configuration"
        return [f"{where} has {name!r}, known are {', '.join(known)}{suggest(str(name), known)}"]
    if kind == "missing":
        return [f"{_path(table)} has no {name}"]
    if kind == "value_error":
        return [f"{where}: {fault}" for fault in split_faults(str(error.get("ctx", {}).get("error", error["msg"])))]
    secret = name in ("token", "tokens", "replicas")
    shown = f"of type {type(seen).__name__}" if secret else repr(seen)
    rule = error["msg"].partition(" should ")[2].removeprefix("be ").removeprefix("have ")
    wanted = "a table" if kind in ("dict_type", "model_type") else rule
    hint = f"; start each with [[{where}]]" if kind == "list_type" and isinstance(seen, Mapping) else ""
    return [f"{where} is {shown}, wanted {wanted}{hint}"]


def _path(loc: Sequence[int | str]) -> str:
    """Such as ``experts[0].guards.max_norm``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _known_names(whole: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    table: Any = whole
    for name in [part for part in loc if isinstance(part, str)]:
        hints: list[Any] = [table.model_fields[name].annotation, *table.model_fields[name].metadata]
        while not hasattr(table := hints.pop(), "model_fields"):
            hints += get_args(table)
    return list(table.model_fields)


def _relation_faults(table: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    address, advertise = table.get("address", "127.0.0.1:7070"), table.get("advertise")
    if isinstance(address, str) and isinstance(advertise, str | None):
        faults += listen_faults(address, advertise, "directory" in table)
        tls = table.get("tls")
        closed = "grants" in table or (isinstance(tls, dict) and "authority" in tls)
        skip = closed or table.get("insecure") is True or address_fault("address", address, free=True)
        if not (skip or is_loopback(parse_address(address)[0])):
            faults.append(
                f"address is {address!r}, which other machines can reach, and there is neither [[grants]] nor an "
                "authority= in [tls], so every client can read and train everything; add grants, or insecure = true "
                "(--insecure) if that is intended"
            )
    panel: Any = table.get("panel")
    panel = cast("dict[str, Any]", panel).get("address") if isinstance(panel, dict) else panel
    faults += address_fault("panel", panel, free=True) if isinstance(panel, str) else []
    goes_with = {
        "replicas": ("directory", "which records their owners"),
        "directory_tls": ("directory", "which it would be used for"),
        "keep": ("checkpoints", "whose number it limits"),
        "tokens": ("grants", "without which every client could do everything; add [[grants]]"),
    }
    for name, (other, why) in goes_with.items():
        if name in table and other not in table:
            faults.append(f"there {'are' if name[-1] == 's' else 'is'} [{name}] and no {other}, {why}")
    return faults if table.get("experts") else [*faults, "there are no experts, wanted at least one"]


def _folder_faults(name: str, folder: str) -> list[str]:
    """The fault of a folder that this user cannot write to, or, if it is missing, could not create."""
    path = Path(folder).absolute()
    nearest = next(part for part in (path, *path.parents) if part.exists())
    if not nearest.is_dir():
        return [f"{name} is {folder!r}, but {str(nearest)!r} is a file; wanted a folder"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [f"{name} is {folder!r}, and this user cannot write to {str(nearest)!r}"]
    return []


def _try_make(check: Validator, where: str, make: Callable[[], Made]) -> Made | None:
    """The result of ``make``, or None if it raised. The error is added to ``check``."""
    try:
        return make()
    except Exception as error:  # also from users' modules, which their configuration has chosen
        if isinstance(error, WeftError):
            faults = split_faults(str(error))
        else:  # with the line that raised it, because the reader gets no traceback
            last = traceback.extract_tb(error.__traceback__)[-1]
            faults = [f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"]
        check.add(*(f"{where}: {fault}" for fault in faults))
        return None


def _find_factory(
    module: ModuleType, base: type, name: str | None, arguments: dict[str, Any] | None, what: str, own: str
) -> Callable[..., Any] | None:
    """A class of torch by its name, with its arguments except ``own``, which the expert itself passes."""
    if name is None:
        return None
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, base)) or kind is base:
        known = [name for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, base)]
        raise UsageError(f"{module.__name__} has no {what} {name!r}{suggest(name, known)}")
    if own in (arguments or {}):
        raise UsageError(f"{what}_arguments has {own!r}, but that is the expert's own")
    return partial(kind, **arguments) if arguments else kind


def _import_all(check: Validator, names: Sequence[str]) -> None:
    for name in names:
        _try_make(check, f"the module {name!r} of imports cannot be imported", partial(_import_module, name))


def _import_module(name: str) -> None:
    if name.startswith("."):
        raise UsageError("wanted its full name, such as my_package.my_experts")
    import_module(name)


def _parse_number(word: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word
