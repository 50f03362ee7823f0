"""Configuration of ``weft serve``: a TOML file, or options on the command line that say the same.

    address = "0.0.0.0:7070"                     checkpoints = "/var/lib/weft"

    [[experts]]
    name = "ffn.{}"                              with count: ffn.0 ffn.1 ffn.2 ffn.3
    count = 4
    kind = "ffn"
    arguments = { hidden = 512 }
    optimizer = "Adam"                           of torch.optim; left out: the expert is not trained
    optimizer_arguments = { lr = 0.001 }

docs/experts.md tells every name. The author of this file runs the server: it may name any module to import.
"""

import re
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
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

from weft.core.errors import UsageError, WeftError, unlisted
from weft.core.validation import Validator
from weft.experts.address import address_fault, is_loopback, parse_address
from weft.experts.checkpoint import CheckpointStore, folder_name
from weft.experts.discovery.etcd import EtcdTls, open_directory
from weft.experts.expert import ExpertBackend
from weft.experts.gradients import AccumulationOptions, Guards
from weft.experts.graph_cache import GraphBudget
from weft.experts.idempotency import IdempotencyOptions
from weft.experts.journal import Journal
from weft.experts.registry import make_expert
from weft.experts.replication import ReplicaOptions
from weft.experts.server.auth import OPEN, Access, Grant, Role
from weft.experts.server.options import ServerOptions, listen_faults
from weft.experts.server.server import Server
from weft.experts.status_page.http import PanelOptions
from weft.experts.task_pool import PoolOptions
from weft.experts.tls import ClientTls, Pem, ServerTls
from weft.experts.wire.frame import Limits

Made = TypeVar("Made")
_TITLE = "invalid configuration of the server"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_Text = Annotated[str, Field(min_length=1)]
_Role = Annotated[Literal["forward", "train", "admin"], AfterValidator(lambda word: Role[word.upper()])]
_IN_A_FILE: dict[Any, Any] = {Pem: str, Pem | None: str | None, Sequence[str]: list[_Text], Role: _Role}
"""How a file says what a dataclass takes."""


class _From:
    """Reads a dataclass from a table with its fields; ``without``: fields that no table may have."""

    def __init__(self, kind: type, *without: str) -> None:
        self._kind = kind
        hints, wanted = get_type_hints(kind), dict[str, Any]()
        for field in fields(kind):
            if field.name not in without:
                needed = field.default is MISSING and field.default_factory is MISSING
                hint = hints[field.name]
                wanted[field.name] = (_IN_A_FILE.get(hint, hint), ... if needed else None)
        self._table = create_model(kind.__name__, __base__=_Table, **wanted)
        self.model_fields = self._table.model_fields

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._made, handler.generate_schema(self._table))

    def _made(self, table: BaseModel) -> Any:
        return self._kind(**{name: getattr(table, name) for name in table.model_fields_set})


_IN_A_FILE[ClientTls | None] = Annotated[ClientTls, _From(ClientTls)]


class JournalTable(_Table):
    """The log of batches of each expert of an entry, in a folder of all, which is made if it is missing."""

    folder: _Text
    max_file_bytes: int = 64 << 20
    max_files: int = 4

    def open(self, name: str) -> Journal:
        """The file of one expert."""
        folder = Path(self.folder)
        for each in (*reversed(folder.parents), folder):
            each.mkdir(0o700, exist_ok=True)
        path = folder / f"{folder_name(name)}.journal"
        return Journal(path, max_file_bytes=self.max_file_bytes, max_files=self.max_files)


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
    options: Annotated[PoolOptions, _From(PoolOptions)] = PoolOptions()
    guards: Annotated[Guards, _From(Guards)] | None = None
    keep_graphs: Annotated[GraphBudget, _From(GraphBudget)] | None = None
    idempotency: Annotated[IdempotencyOptions, _From(IdempotencyOptions)] | None = None
    mini_batches: Annotated[AccumulationOptions, _From(AccumulationOptions)] | None = None
    journal: JournalTable | None = None

    @model_validator(mode="after")
    def _check(self) -> "ExpertTable":
        needs = dict.fromkeys(("optimizer_arguments", "schedule", "clip_grad_norm"), "optimizer")
        given, numbered = self.model_fields_set, "{}" in self.name
        with Validator("an expert") as check:
            for name, other in {**needs, "schedule_arguments": "schedule"}.items():
                check.that(name not in given or other in given, f"there is {name} and no {other}")
            how = f"it is called {self.name!r} and has no count: say how many there are, or take {{}} out"
            check.that(not numbered or self.count is not None, how)
            how = f"it is {self.count} experts all called {self.name!r}; write {{}} where their number goes"
            check.that(numbered or (self.count or 1) == 1, how)
        return self

    @property
    def names(self) -> list[str]:
        """What the experts of this entry are called."""
        return [self.name] if self.count is None else [self.name.replace("{}", str(i)) for i in range(self.count)]

    def make(self, name: str) -> ExpertBackend:
        """One expert of this entry. Raises whatever its kind and its optimizer raise."""
        named = ("guards", "keep_graphs", "idempotency", "mini_batches", "clip_grad_norm")
        more = {**vars(self.options), **{each: getattr(self, each) for each in named if each in self.model_fields_set}}
        # before the module, which may take long
        optimizer = _factory(torch.optim, Optimizer, self.optimizer, self.optimizer_arguments, "optimizer", "params")
        kind, arguments = lr_scheduler.LRScheduler, self.schedule_arguments
        if (schedule := _factory(lr_scheduler, kind, self.schedule, arguments, "schedule", "optimizer")) is not None:
            more["schedule"] = schedule
        expert = make_expert(self.kind, **self.arguments)
        with ExitStack() as opened:
            journal = None if self.journal is None else opened.enter_context(closing(self.journal.open(name)))
            backend = expert.backend(name, optimizer, journal=journal, **more)
            opened.pop_all()
            return backend


class PanelTable(_Table):
    """Address of the status page, and its readers. The token stands in a file of its own."""

    address: str
    allowed_hosts: list[_Text] = []
    token_file: str | None = None

    def options(self) -> PanelOptions:
        """Raises ``UsageError`` if the file cannot be read; the line break at its end does not count."""
        try:
            token = None if self.token_file is None else Path(self.token_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"token_file {self.token_file!r} cannot be read: {error}") from None
        return PanelOptions(self.address, self.allowed_hosts, token)


class ServeConfig(_Table):
    """The whole file. `parse` reads it, `server` makes what it describes."""

    address: str = "127.0.0.1:7070"
    advertise: str | None = None
    insecure: bool = False
    panel: PanelTable | None = None
    directory: str | None = None
    directory_tls: Annotated[EtcdTls, _From(EtcdTls)] | None = None
    checkpoints: _Text | None = None
    keep: Annotated[int, Field(ge=1)] = 3
    imports: list[_Text] = []
    experts: list[ExpertTable] = []
    options: Annotated[ServerOptions, _From(ServerOptions, "limits")] = ServerOptions()
    limits: Annotated[Limits, _From(Limits)] = Limits()
    tls: Annotated[ServerTls, _From(ServerTls)] | None = None
    replicas: Annotated[ReplicaOptions, _From(ReplicaOptions)] | None = None
    tokens: dict[str, str] = {}
    grants: list[Annotated[Grant, _From(Grant)]] | None = None

    @field_validator("panel", mode="before")
    @classmethod
    def _panel(cls, entry: Any) -> Any:
        return {"address": entry} if isinstance(entry, str) else entry

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> "ServeConfig":
        """Check the form of a table: nothing is made, imported or opened. Raises ``UsageError`` that lists all faults.

        Values that go together are checked whatever else is wrong with them.
        """
        with Validator(_TITLE) as check:
            check.add(*_relation_faults(table))
            try:
                return cls.model_validate(dict(table))
            except ValidationError as error:
                check.add(*(fault for each in error.errors(include_url=False) for fault in _told(each)))
        raise AssertionError("an invalid table has faults")

    def server(self) -> Server:
        """The server, not started. Raises ``UsageError`` that lists all that went wrong while its parts were made."""
        with Validator(_TITLE) as check:  # without them there is no telling which kinds of experts there are
            for name in self.imports:
                _make(check, f"the module {name!r} of imports cannot be imported", partial(_import, name))
        parts: dict[str, Any] = {"options": replace(self.options, limits=self.limits), "replicas": self.replicas}
        with ExitStack() as opened:
            with Validator(_TITLE) as check:
                grants = OPEN if self.grants is None else self.grants
                parts["access"] = _make(check, "tokens", partial(Access, grants, self.tokens))
                if self.panel is not None:
                    parts["panel"] = _make(check, "panel", self.panel.options)
                experts = self._experts(check, opened)
                if self.directory is not None:
                    to_open = partial(open_directory, self.directory, tls=self.directory_tls)
                    parts["directory"] = directory = _make(check, "directory", to_open)
                    if directory is not None:
                        opened.callback(directory.close)
                if self.checkpoints is not None and not check.faults:  # it makes the folder
                    store = partial(CheckpointStore, self.checkpoints, keep=self.keep)
                    parts["checkpoints"] = _make(check, "checkpoints", store)
            server = Server(experts, address=self.address, advertise=self.advertise, tls=self.tls, **parts)
            server.own(opened.pop_all().close)
            return server

    def _experts(self, check: Validator, opened: ExitStack) -> list[ExpertBackend]:
        """The experts of all entries; of an entry the first fault, since all of its experts would have it."""
        made: list[ExpertBackend] = []
        seen: set[str] = set()
        for number, entry in enumerate(self.experts):
            names = entry.names
            if twice := [name for name in names if name in seen]:
                check.add(f"experts[{number}] is called {twice[0]!r}, as another is; give each expert its own name")
                continue
            seen.update(names)
            for name in names:
                backend = _make(check, f"experts[{number}], called {name!r}", partial(entry.make, name))
                if backend is None:
                    break
                made.append(backend)
                if backend.journal is not None:
                    opened.callback(backend.journal.close)
        return made


def read_config(path: Path) -> dict[str, Any]:
    """The table in a file. Raises ``UsageError`` if it cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        what = "cannot be read" if isinstance(error, OSError) else "is no TOML"
        # without the keys that the parser names: those of [tokens] are secrets
        why = re.sub(r"(key|declare|namespace) ['(].*(?= twice| \(at )", r"\1 ...", str(error))
        raise UsageError(f"the configuration {str(path)!r} {what}: {why}") from None


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


def build(table: Mapping[str, Any]) -> Server:
    """The server that a table describes, not started. Raises as `ServeConfig.parse` and `ServeConfig.server`."""
    return ServeConfig.parse(table).server()


def _told(error: ErrorDetails) -> list[str]:
    """A fault that pydantic found, in words: place, what was seen unless that may be a secret, what is wanted."""
    loc, kind, seen, where = error["loc"], error["type"], error["input"], _path(error["loc"])
    *table, name = loc or [""]
    if "tokens" in table:  # the name of the place is the token
        return ["tokens has a client that is no text, wanted a secret and the name of its client"]
    if kind == "extra_forbidden":
        return [f"{_path(table) or 'the configuration'} has {name!r}, known are {', '.join(_names(table))}"]
    if kind == "missing":
        return [f"{_path(table)} has no {name}"]
    if kind == "value_error":
        return [f"{where}: {fault}" for fault in unlisted(str(error.get("ctx", {}).get("error", error["msg"])))]
    secret = name in ("token", "tokens", "replicas")
    shown = f"of type {type(seen).__name__}" if secret else repr(seen)
    rule = error["msg"].partition(" should ")[2].removeprefix("be ").removeprefix("have ")
    wanted = "a table" if kind in ("dict_type", "model_type") else rule
    how = f", which [[{where}]] begins" if kind == "list_type" and isinstance(seen, Mapping) else ""
    return [f"{where} is {shown}, wanted {wanted}{how}"]


def _path(loc: Sequence[int | str]) -> str:
    """Such as ``experts[0].guards.max_norm``."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in loc).lstrip(".")


def _names(loc: Sequence[int | str]) -> list[str]:
    """The names that the table at this place may have."""
    table: Any = ServeConfig
    for name in [each for each in loc if isinstance(each, str)]:
        hints: list[Any] = [table.model_fields[name].annotation, *table.model_fields[name].metadata]
        while not hasattr(table := hints.pop(), "model_fields"):
            hints += get_args(table)
    return list(table.model_fields)


def _relation_faults(table: Mapping[str, Any]) -> list[str]:
    """Faults of values that go together."""
    faults: list[str] = []
    address, advertise = table.get("address", "127.0.0.1:7070"), table.get("advertise")
    if isinstance(address, str) and isinstance(advertise, str | None):
        faults += listen_faults(address, advertise, "directory" in table)
        tls = table.get("tls")
        closed = "grants" in table or (isinstance(tls, dict) and "authority" in tls)
        spoken_of = closed or table.get("insecure") is True or address_fault("address", address, free=True)
        if not (spoken_of or is_loopback(parse_address(address)[0])):
            faults.append(
                f"address is {address!r}, where others reach it, and there is neither [[grants]] nor an authority= in "
                "[tls], so that whoever connects may read and train everything; say who may do what, or insecure = "
                "true (--insecure) if that is meant"
            )
    panel: Any = table.get("panel")
    panel = cast("dict[str, Any]", panel).get("address") if isinstance(panel, dict) else panel
    faults += address_fault("panel", panel, free=True) if isinstance(panel, str) else []
    goes_with = {
        "replicas": ("directory", "which says who owns them"),
        "directory_tls": ("directory", "which would be reached with it"),
        "keep": ("checkpoints", "of which so many would stay"),
        "tokens": ("grants", "without which everybody might do everything; say by [[grants]] who may do what"),
    }
    for name, (other, why) in goes_with.items():
        if name in table and other not in table:
            faults.append(f"there {'are' if name[-1] == 's' else 'is'} [{name}] and no {other}, {why}")
    return faults if table.get("experts") else [*faults, "there are no experts, wanted at least one"]


def _make(check: Validator, where: str, make: Callable[[], Made]) -> Made | None:
    """What ``make`` returns; None if it raised, which is noted."""
    try:
        return make()
    except Exception as error:  # also what users' modules raise: it is their configuration that names these
        if isinstance(error, WeftError):
            faults = unlisted(str(error))
        else:  # with the line that raised it, for a reader without a traceback
            last = traceback.extract_tb(error.__traceback__)[-1]
            faults = [f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"]
        check.add(*(f"{where}: {fault}" for fault in faults))
        return None


def _factory(
    module: ModuleType, base: type, name: str | None, arguments: dict[str, Any] | None, what: str, own: str
) -> Callable[..., Any] | None:
    """A class of torch's by its name, with its arguments, of which the expert itself gives the one called ``own``."""
    if name is None:
        return None
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, base)) or kind is base:
        raise UsageError(f"{module.__name__} has no {what} {name!r}")
    if own in (arguments or {}):
        raise UsageError(f"{what}_arguments has {own!r}, but that is the expert's own")
    return partial(kind, **arguments) if arguments else kind


def _import(name: str) -> None:
    if name.startswith("."):
        raise UsageError("wanted its full name, such as my_package.my_experts")
    import_module(name)


def _number(word: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word
