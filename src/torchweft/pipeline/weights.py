"""Weights of a model: built without storage, given storage, initialised, or read from files of safetensors.

    build_on_meta --> Pipe(group=) --> allocate --> WeightFiles.fill | initialize_modules

A rank of a pipe never holds more than its share of the parameters and one layer. Loading the whole model before the cut
would need the memory of the whole model on every rank.
"""

import json
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from torchweft.core.errors import WeightsError
from torchweft.core.rng import derive_seed, generators_of, seed_generators

Initialize = Callable[[nn.Module], object]  # initialises the parameters of one module


@contextmanager
def build_on_meta() -> Generator[None]:
    """Build modules with their parameters on the meta device, without memory. Ties between parameters stay.

    `Pipe.materialize` gives storage to the parameters afterwards. Only modules that the calling thread builds are
    affected.

    Example:
        >>> with weft.build_on_meta():
        ...     model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        >>> model[0].weight.device, model[1].running_mean.device
        (device(type='meta'), device(type='cpu'))
        >>> pipe = weft.Pipe(model, chunks=2, devices=["cpu", "cpu"], deferred_batch_norm=True).materialize()
        >>> pipe[0].weight.device
        device(type='cpu')
    """
    # Buffers stay real: those that are not persistent, such as rotary frequencies, are in no file.
    thread = threading.get_ident()
    replaced: Any = WeakIdKeyDictionary()  # a parameter that is registered twice stays tied

    def replace_by_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        # A parameter on meta can be a tie to one that was replaced before. Another object would untie it.
        if threading.get_ident() != thread or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return None
        if parameter not in replaced:
            replaced[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return replaced[parameter]

    handle = register_module_parameter_registration_hook(cast(Any, replace_by_meta))
    try:
        yield
    finally:
        handle.remove()


def typed_like(tensor: Tensor, storage: Tensor) -> Tensor:
    return nn.Parameter(storage, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else storage


def map_tensors(root: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    changed: dict[int, Tensor] = {}
    for module in root.modules():
        for table in tables_of(module):
            for key, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in changed:
                        changed[id(tensor)] = change(tensor)
                    table[key] = changed[id(tensor)]


Slot = tuple[dict[str, Any], str]  # a place of a tensor: the table of a module, and the name in it


@contextmanager
def replaced_in(slots: Iterable[tuple[Slot, Any]]) -> Generator[None]:
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (table, key), tensor in slots:
            before.append((table, key, table[key]))
            table[key] = tensor
        yield
    finally:
        for table, key, tensor in reversed(before):  # a slot can be named twice
            table[key] = tensor


def tables_of(module: nn.Module) -> list[dict[str, Any]]:
    return [cast("dict[str, Any]", module._parameters), cast("dict[str, Any]", module._buffers)]


def own_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for table in tables_of(module) for tensor in table.values() if tensor is not None]


def unwrap_module(module: nn.Module) -> nn.Module:
    return unwrap_module(cast(nn.Module, module.module)) if isinstance(module, DistributedDataParallel) else module


def names_by_tensor(module: nn.Module) -> dict[int, tuple[Tensor, list[str]]]:
    """The tensors of the state_dict, each with its keys, by id(). A tied tensor has several keys."""
    names: dict[int, tuple[Tensor, list[str]]] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), (value, []))[1].append(key)
    return names


def allocate(roots: Sequence[nn.Module], device_of: Mapping[int, torch.device]) -> set[int]:
    """Give storage to all tensors on the meta device. Returns the id() of the new tensors."""
    allocated: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        allocated.append(typed_like(tensor, torch.empty_like(tensor, device=device_of[id(tensor)])))
        return allocated[-1]

    map_tensors(nn.ModuleList(roots), change)
    return {id(tensor) for tensor in allocated}


def find_uninitializable(roots: Sequence[nn.Module]) -> list[str]:
    return [
        f"layer {number}, {name or 'itself'}: {type(module).__name__} has no reset_parameters()"
        for number, root in enumerate(roots)
        for name, module in cast("Iterable[tuple[str, nn.Module]]", root.named_modules())
        if any(tensor.is_meta for tensor in own_tensors(module)) and _reset_of(module) is None
    ]


def initialize_modules(
    roots: Sequence[nn.Module], fresh: set[int], initialize: Initialize | None, seed: int, device: torch.device
) -> None:
    """Initialise the modules that have a `fresh` tensor, inner modules first, each from a seed of its own."""
    # The seed of a module depends on its place only, and all its draws are made even if another rank has some of its
    # tensors. So the ranks together have the weights of a single process.
    numbered = [(n, k, module) for n, root in enumerate(roots) for k, module in enumerate(root.modules())]
    # Reversed: outer modules overwrite inner ones, and of modules that share a tensor the first one counts.
    for n, k, module in reversed(numbered):
        tensors = [tensor for inner in module.modules() for tensor in own_tensors(inner)]
        devices = {tensor.device for tensor in tensors if id(tensor) in fresh}
        run = initialize or _reset_of(module)
        if devices and run is not None:
            with seed_generators(generators_of(devices), derive_seed(seed, n, k)), _scratch(module, device):
                run(module)


def _scratch(module: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    items = [((table, key), tensor) for table in tables_of(module) for key, tensor in table.items()]
    return replaced_in(
        (slot, typed_like(x, torch.empty_like(x, device=device))) for slot, x in items if x is not None and x.is_meta
    )


def _reset_of(module: nn.Module) -> Initialize | None:
    for name in ("reset_parameters", "_reset_parameters"):  # the latter of nn.MultiheadAttention
        if callable(getattr(module, name, None)):
            return lambda module: getattr(module, name)()
    return None


class WeightFiles:
    """The tensors of a safetensors file, or of the files that an index lists. Only headers are read before `fill`.
    Raises ModuleNotFoundError without safetensors, OSError or WeightsError for a path that is not one of these."""

    def __init__(self, source: str | PathLike[str]) -> None:
        try:
            from safetensors import safe_open  # noqa: PLC0415 - an optional package
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "weights are read with the package safetensors, which cannot be found: "
                "pip install 'torchweft[weights]'",
                name="safetensors",
            ) from error
        self._open: Any = safe_open
        path = Path(source)
        if path.is_dir():
            path = _only_file(path)
        if path.suffix == ".json":
            names: dict[str, str] = json.loads(path.read_text("utf-8"))["weight_map"]
            self._files = {key: path.parent / name for key, name in names.items()}
        else:
            with self._open(path, "pt") as file:
                self._files = dict.fromkeys(file.keys(), path)

    def match(self, model: nn.Module, known: set[str]) -> tuple[dict[str, str], list[str]]:
        """The key in the files by key of the model, once for each tensor; and a list of faults."""
        faults = [f"{key}: in the files, but not in the model" for key in self._files if key not in known]
        chosen: dict[str, str] = {}
        tensors = names_by_tensor(model)
        faults += [
            f"{name}: in no file, because it is not persistent; build the model under weft.build_on_meta()"
            for name, buffer in model.named_buffers()
            if buffer.is_meta and id(buffer) not in tensors
        ]
        shapes = self._shapes_of({key for _, names in tensors.values() for key in names if key in self._files})
        for tensor, names in tensors.values():
            key = next((name for name in names if name in self._files), None)
            if key is None:
                faults.append(f"{' or '.join(names)}: in the model, but not in the files")
            elif shapes[key] != list(tensor.shape):
                faults.append(f"{key}: {shapes[key]} in the files, but {list(tensor.shape)} in the model")
            else:
                chosen[names[0]] = key
        return chosen, faults

    def fill(self, model: nn.Module, chosen: Mapping[str, str]) -> None:
        state = model.state_dict()
        for name, key in chosen.items():
            # Opened for each tensor, because the pages of a mapped file stay resident until it is closed. With one
            # opening per file a rank would hold its share twice.
            with self._open(self._files[key], "pt") as file:
                state[name].copy_(file.get_tensor(key))

    def _shapes_of(self, keys: set[str]) -> dict[str, list[int]]:
        shapes: dict[str, list[int]] = {}
        for path in {self._files[key] for key in keys}:
            with self._open(path, "pt") as file:
                here = [key for key in keys if self._files[key] == path]
                shapes |= {key: list(file.get_slice(key).get_shape()) for key in here}
        return shapes


def _only_file(folder: Path) -> Path:
    paths = sorted(folder.glob("*.safetensors.index.json")) or sorted(folder.glob("*.safetensors"))
    if len(paths) != 1:
        raise WeightsError(
            f"{folder} has {[path.name for path in paths]}, wanted one *.safetensors.index.json, or else one "
            "*.safetensors; give the path of the file itself"
        )
    return paths[0]
