"""The experts that a configuration describes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from weft.core.errors import UsageError
from weft.experts.backend import ExpertBackend
from weft.experts.kept import GraphBudget
from weft.experts.optimizers import OptimizerLike
from weft.experts.registry import make_expert
from weft.experts.server.config_faults import Faults
from weft.experts.server.config_form import names_of


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
    optimizer = _optimizer(entry)  # before the module, which may take long
    return make_expert(entry["kind"], **entry.get("arguments", {})).backend(name, optimizer, **more)


def _optimizer(entry: Mapping[str, Any]) -> OptimizerLike | None:
    name = entry.get("optimizer")
    if name is None:
        return None
    kind = getattr(torch.optim, name, None)
    base = torch.optim.Optimizer
    if not (isinstance(kind, type) and issubclass(kind, base)) or kind is base:
        raise UsageError(f"torch.optim has no optimizer {name!r}")
    made: Callable[..., torch.optim.Optimizer] = kind
    arguments = entry.get("optimizer_arguments", {})
    if "params" in arguments:
        raise UsageError("optimizer_arguments has 'params', but these are the expert's own")
    return partial(made, **arguments) if arguments else made
