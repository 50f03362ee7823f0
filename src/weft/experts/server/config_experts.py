"""The experts that a configuration describes."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer, lr_scheduler

from weft.core.errors import UsageError
from weft.experts.accumulation import SumsOptions
from weft.experts.checkpoint.names import folder_name
from weft.experts.expert import ExpertBackend
from weft.experts.gradient_guards import Guards
from weft.experts.graph_cache import GraphBudget
from weft.experts.idempotency import IdempotencyOptions
from weft.experts.journal import Journal
from weft.experts.registry import make_expert
from weft.experts.server.config_faults import Faults
from weft.experts.server.config_form import names_of

Options = TypeVar("Options")


def backends(config: Mapping[str, Any], faults: Faults) -> list[ExpertBackend]:
    """The experts of all entries; what is wrong with one is noted in ``faults``, once for each entry."""
    made: list[ExpertBackend] = []
    seen: set[str] = set()
    for number, entry in enumerate(config["experts"]):
        names = names_of(entry)
        twice = [name for name in names if name in seen]
        if twice:
            faults.append(f"experts[{number}] is called {twice[0]!r}, as another is; give each expert its own name")
        seen.update(names)
        for name in [] if twice else names:
            backend = faults.made(f"experts[{number}], called {name!r}", partial(_backend, entry, name))
            if backend is None:  # it would be the same for all
                break
            made.append(backend)
    return made


def _backend(entry: Mapping[str, Any], name: str) -> ExpertBackend:
    more: dict[str, Any] = dict(entry.get("options", {}))
    if "clip_grad_norm" in entry:
        more["clip_grad_norm"] = float(entry["clip_grad_norm"])
    if "keep_graphs" in entry:
        kept = entry["keep_graphs"]
        more["keep_graphs"] = GraphBudget(kept["nbytes"], float(kept.get("seconds", GraphBudget.seconds)))
    if "guards" in entry:
        more["guards"] = _guards(**entry["guards"])
    if "records" in entry:
        more["records"] = _options(IdempotencyOptions, entry["records"])
    if "mini_batches" in entry:
        more["mini_batches"] = _options(SumsOptions, entry["mini_batches"])
    optimizer = _factory(entry, "optimizer", torch.optim, Optimizer, "params")  # before the module, which may take long
    schedule = _factory(entry, "schedule", lr_scheduler, lr_scheduler.LRScheduler, "optimizer")
    if schedule is not None:
        more["schedule"] = schedule
    expert = make_expert(entry["kind"], **entry.get("arguments", {}))
    journal = _journal(name, **entry["journal"]) if "journal" in entry else None
    try:
        return expert.backend(name, optimizer, journal=journal, **more)
    except BaseException:
        if journal is not None:
            journal.close()
        raise


def _journal(name: str, folder: str, max_file_bytes: int = 64 << 20, max_files: int = 4) -> Journal:
    """A file of this expert's own in ``folder``, which is made if it is missing."""
    Path(folder).mkdir(0o700, parents=True, exist_ok=True)
    path = Path(folder) / f"{folder_name(name)}.journal"
    return Journal(path, limit=0, max_file_bytes=max_file_bytes, max_files=max_files)


def _options(kind: Callable[..., Options], given: Mapping[str, Any]) -> Options:
    """A dataclass of numbers; a file may say a whole number where a float is wanted."""
    wanted: dict[str, Any] = {field.name: field.type for field in fields(cast("Any", kind))}
    return kind(**{name: float(value) if wanted[name] is float else value for name, value in given.items()})


def _guards(finite: bool = True, **norms: Any) -> Guards:
    return Guards(finite, **{name: float(norm) for name, norm in norms.items()})


def _factory(
    entry: Mapping[str, Any], what: str, module: ModuleType, base: type, own: str
) -> Callable[..., Any] | None:
    """A class of torch's by its name, with its arguments, of which the expert itself gives the one called ``own``."""
    name = entry.get(what)
    if name is None:
        return None
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, base)) or kind is base:
        raise UsageError(f"{module.__name__} has no {what} {name!r}")
    arguments = entry.get(f"{what}_arguments", {})
    if own in arguments:
        raise UsageError(f"{what}_arguments has {own!r}, but that is the expert's own")
    return partial(kind, **arguments) if arguments else kind
