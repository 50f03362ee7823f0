"""Checkpoints of training: model and optimizer, saved by any number of stages and loaded by any other number.

    weft.checkpoint.save("run/latest", pipe, optimizer, extra={"step": 100})
    extra = weft.checkpoint.load("run/latest", pipe, optimizer)

The format is that of `torch.distributed.checkpoint`. Each tensor is stored once, under a key of the plain model, and
the optimizer's state by parameter, under the keys of PyTorch's ``flatten_optimizer_state_dict``:

    model.<key>    optimizer.state.<key>.<name>    optimizer.param_groups.<key>.<option>    extra

A checkpoint therefore does not depend on the cut, and a plain module can load that of a `Pipe`, or the reverse.
PyTorch's `get_optimizer_state_dict` is not used: it steps the optimizer to create state, and knows one name per tensor.
Metadata and plain values are pickles: load only checkpoints that you trust.
"""

import fcntl
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from torchweft.core.errors import UsageError, WeightsError, join_faults, split_faults, text_of
from torchweft.pipeline.pipe import Pipe
from torchweft.pipeline.processes.store_exchange import StoreExchange
from torchweft.pipeline.weights import names_by_tensor, unwrap_module

__all__ = ["load", "save"]

Result = TypeVar("Result")
_dcp: Any = torch.distributed.checkpoint  # it is typed in part
_MODEL, _STATE, _GROUPS, _EXTRA = "model.", "optimizer.state.", "optimizer.param_groups.", "extra"
Report = list[Any] | None  # the failure of one process, if any: whether it is a UsageError, and its faults
Agree = Callable[[Report], list[Report]]  # the exchange of the reports of all processes
RunOnAll = Callable[[Callable[[], Any]], Any]  # `_run_on_all` with its first arguments


def save(
    folder: str | PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    group: ProcessGroup | None = None,
) -> None:
    """Save a `Pipe`, or any module, and the state of its optimizer, into a folder that all processes share.

    Args:
        folder: it is written under a hidden name and renamed when all is there. An earlier checkpoint in `folder` is
            replaced then, and stays whole if the save is interrupted.
        module: the pipe, the DistributedDataParallel around it, or a plain module.
        optimizer: that of the module's parameters; with a pipe over processes that of this rank.
        extra: plain values, such as the step number and a scheduler's state; those of the first process count.
        group: the processes that call this together. Default: all of them, if `torch.distributed` is initialised.
            Tensors that several of them have are written once.

    Raises UsageError for a folder of something else, for one into which another job is saving, and for parameters of
    another module. If one of several processes fails, all raise the same WeightsError or UsageError. If one dies, the
    others raise RankLostError: at once if it is a rank of a pipe, else after the timeout of the group.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> weft.checkpoint.save(f"{tempfile.mkdtemp()}/latest", model, optimizer, extra={"step": 1})
    """
    target, module = Path(folder).absolute(), unwrap_module(module)
    exchange = _exchange_of(group, f"the save of a checkpoint in {target}", module)
    first = exchange is None or exchange.rank == 0
    agree: Agree = partial(_gather, exchange)
    headline = f"the checkpoint in {target} cannot be saved:"
    lock = SaveLock(target)
    try:

        def prepare() -> dict[str, Any]:
            if first:
                _clear_way(target, lock)
            state = {_MODEL + key: value for key, value in _model_state(module).items()}
            state |= {} if optimizer is None else _optimizer_state(module, optimizer)
            return state if extra is None or not first else {**state, _EXTRA: extra}

        state = _run_on_all(agree, headline, prepare)
        _write(state, _hidden_name(target, "tmp"), exchange, partial(_run_on_all, agree, headline))
        _run_on_all(agree, headline, lambda: _publish(target) if first else None)
        if exchange is not None:
            exchange.close()
    finally:
        lock.release()


def _write(state: dict[str, Any], folder: Path, exchange: StoreExchange | None, run_on_all: RunOnAll) -> None:
    """Write the state of all processes, in the steps of `torch.distributed.checkpoint.save`. That function exchanges
    the results of the steps by collectives, in which a lost process has no name, and others wait for the timeout."""
    first, rank = exchange is None or exchange.rank == 0, 0 if exchange is None else exchange.rank
    writer: Any = FileSystemWriter(folder)
    planner: Any = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)

    def plan() -> Any:
        planner.set_up_planner(state, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = _gather(exchange, run_on_all(plan))
    # Each process makes the plan of all of them. It depends on the local plans only, so it is equal everywhere.
    plans, metadata = planner.create_global_plan(plans)
    own = writer.prepare_global_plan(plans)[rank]
    written = run_on_all(lambda: writer.write_data(planner.finish_plan(own), planner).wait())
    results = _gather(exchange, written)
    run_on_all(lambda: writer.finish(metadata, results) if first else None)


def load(folder: str | PathLike[str], module: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Load a checkpoint of `save` into a module that can be cut in another way. Returns `extra`, or None.

    Each process reads its own tensors. The ranks of a pipe call this together. A tied weight can be saved under any of
    its names. Tensors are read into spare memory first. Raises WeightsError that lists all missing and unexpected keys
    and wrong shapes, or the damaged files, and UsageError for parameters of another module. All ranks raise the same
    error, before anything has changed.

    Example:
        >>> import tempfile
        >>> folder = f"{tempfile.mkdtemp()}/latest"
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), chunks=2, devices=["cpu", "cpu"])
        >>> weft.checkpoint.save(folder, pipe, extra={"step": 1})
        >>> plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> weft.checkpoint.load(folder, plain)
        {'step': 1}
        >>> torch.equal(plain[1].weight, pipe[1].weight)
        True
    """
    path = Path(folder).absolute()
    if not path.exists() and _hidden_name(path, "old").exists():
        path = _hidden_name(path, "old")  # a save was interrupted between its two renames
    module = unwrap_module(module)
    agree: Agree = _alone
    if isinstance(module, Pipe):
        agree = partial(module._exchange_reports, "torchweft.checkpoint.load")
    reader = FileSystemReader(path)
    headline = f"the checkpoint in {path} cannot be loaded:"
    # Nothing raises before the ranks agree. A rank that left alone would let the others wait until a deadline.
    saved, keys, groups = _run_on_all(agree, headline, lambda: _match(reader, module, optimizer))
    states, options = _keys_by_name(saved, _STATE), _keys_by_name(saved, _GROUPS)

    def read() -> Any:
        # Into spare tensors: the module must not change if any process cannot read its part.
        spares = {saved_key: _spare(local[key]) for key, saved_key in keys.items()}
        state: dict[str, Any] = dict(spares)
        names = [name for group in groups for name in group]
        entries = [key for name in names for key in (*states.get(name, {}).values(), *options[name].values())]
        state |= {key: _empty_like(saved[key]) for key in [*entries, _EXTRA] if key in saved}
        # Each of the two flags would let the planner read plain values into a copy of `state`, which is lost.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _read(reader, state, planner)
        loaded = {**local, **{key: state[saved_key] for key, saved_key in keys.items()}}
        of_optimizer = None if optimizer is None else _optimizer_from(optimizer, groups, states, options, state)
        return loaded, of_optimizer, state.get(_EXTRA)

    local = module.state_dict()
    loaded, of_optimizer, extra = _run_on_all(agree, headline, read)

    def change() -> None:
        module.load_state_dict(loaded)
        if optimizer is not None:
            optimizer.load_state_dict(of_optimizer)

    _run_on_all(agree, headline, change)
    return extra


def _spare(value: Any) -> Any:
    return torch.empty_like(value, requires_grad=False) if isinstance(value, Tensor) else value


def _read(reader: FileSystemReader, state: dict[str, Any], planner: DefaultLoadPlanner) -> None:
    """Read the entries of `state`. Raises WeightsError that names files which are missing, cut off or damaged."""
    entries: dict[Any, Any] = reader.read_metadata().storage_data or {}
    ends: dict[str, int] = {}
    for entry in entries.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    faults: list[str] = []
    folder = Path(cast(str, reader.path))
    for name, end in sorted(ends.items()):
        file = folder / name
        if not file.is_file():
            faults.append(f"the file {name} is missing")
        elif file.stat().st_size < end:
            faults.append(f"the file {name} has {file.stat().st_size:,} bytes, but {end:,} were written")
    if faults:
        raise WeightsError(join_faults("", faults))
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns that its own TypedStorage is deprecated
            _dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    # An exception of PyTorch, which does not derive from Exception.
    except CheckpointException as error:
        reasons = [f"{type(cause).__name__}: {text_of(cause)}" for cause, _ in error.failures.values()]
        names = ", ".join(sorted(ends))
        raise WeightsError(f"one of the files {names} is damaged: {'; '.join(reasons)}") from error


def _match(
    reader: FileSystemReader, module: nn.Module, optimizer: Optimizer | None
) -> tuple[Mapping[str, Any], dict[str, str], list[list[str]]]:
    """The metadata, the key by key of the state_dict, and the names by group of the optimizer. Raises WeightsError."""
    try:
        saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    except Exception as error:  # of a missing file, or of a damaged one
        raise WeightsError(f"it cannot be read: {type(error).__name__}: {error}") from error
    keys, faults = _match_model(module, saved)
    groups: list[list[str]] = []
    if optimizer is not None:
        groups, more = _match_optimizer(module, optimizer, keys, _keys_by_name(saved, _GROUPS).keys())
        faults += more
    if faults:
        raise WeightsError(join_faults("", faults))
    return saved, keys, groups


def _model_state(module: nn.Module) -> dict[str, Any]:
    # Tied tensors once. `torch.distributed.checkpoint` would write one copy per name.
    once = {names[0] for _, names in names_by_tensor(module).values()}
    return {key: x for key, x in module.state_dict().items() if not isinstance(x, Tensor) or key in once}


def _parameter_names(module: nn.Module, optimizer: Optimizer) -> list[list[list[str]]]:
    """The keys of the model by group and parameter of the optimizer. Raises UsageError for parameters of others."""
    tensors = names_by_tensor(module)
    groups: list[list[Any]] = [group["params"] for group in optimizer.param_groups]
    foreign = sum(id(parameter) not in tensors for group in groups for parameter in group)
    if foreign:
        raise UsageError(
            f"the optimizer has {foreign} parameters that are not of this {type(module).__name__}, so they have no "
            "name in a checkpoint; make the optimizer after materialize(), and give other modules their own"
        )
    return [[tensors[id(parameter)][1] for parameter in group] for group in groups]


def _optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for group, names in zip(optimizer.param_groups, _parameter_names(module, optimizer), strict=True):
        # Options are stored by parameter too, because groups can be divided differently where they are loaded.
        for parameter, (name, *_) in zip(group["params"], names, strict=True):
            values: Mapping[str, Any] = optimizer.state.get(parameter, {})
            state |= {f"{_STATE}{name}.{key}": value for key, value in values.items()}
            state |= {f"{_GROUPS}{name}.{key}": value for key, value in group.items() if key != "params"}
    return state


def _match_model(module: nn.Module, saved: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The key in the checkpoint by key of the model's state_dict; and a list of faults."""
    local = module.state_dict()
    with module._with_placeholders() if isinstance(module, Pipe) else nullcontext():
        known = set(module.state_dict())
    keys: dict[str, str] = {}
    faults = [
        f"{key}: in the checkpoint, but not in the model"
        for key in saved
        if key.startswith(_MODEL) and key.removeprefix(_MODEL) not in known
    ]
    tied = [names for _, names in names_by_tensor(module).values()]
    for names in [*tied, *([key] for key, value in local.items() if not isinstance(value, Tensor))]:
        saved_key = next((_MODEL + name for name in names if _MODEL + name in saved), None)
        value = local[names[0]]
        size = list(getattr(saved.get(saved_key or ""), "size", ()))
        if saved_key is None:
            faults.append(f"{' or '.join(names)}: in the model, but not in the checkpoint")
        elif isinstance(value, Tensor) and value.is_meta:
            faults.append(f"{names[0]}: on the meta device; call materialize() first")
        elif isinstance(value, Tensor) and size != list(value.shape):
            faults.append(f"{names[0]}: {size} in the checkpoint, but {list(value.shape)} in the model")
        else:
            keys |= dict.fromkeys(names, saved_key)
    return keys, faults


def _match_optimizer(
    module: nn.Module, optimizer: Optimizer, keys: Mapping[str, str], saved: Collection[str]
) -> tuple[list[list[str]], list[str]]:
    """The name in the checkpoint by group and parameter of the optimizer; and a list of faults."""
    groups = [
        [keys[names[0]].removeprefix(_MODEL) for names in group if names[0] in keys]
        for group in _parameter_names(module, optimizer)
    ]
    current = {name for group in groups for name in group}
    local = {key.removeprefix(_MODEL) for key in keys.values()}
    return groups, [
        *sorted(f"{name}: in the optimizer, but not in that of the checkpoint" for name in current.difference(saved)),
        *(f"{name}: in the optimizer of the checkpoint, but not here" for name in saved if name in local - current),
    ]


def _keys_by_name(saved: Iterable[str], kind: str) -> dict[str, dict[str, str]]:
    keys: dict[str, dict[str, str]] = {}
    for key in saved:
        if key.startswith(kind):
            name, _, entry = key.removeprefix(kind).rpartition(".")
            keys.setdefault(name, {})[entry] = key
    return keys


def _optimizer_from(
    optimizer: Optimizer,
    groups: list[list[str]],
    states: Mapping[str, Mapping[str, str]],
    options: Mapping[str, Mapping[str, str]],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """A state_dict for the optimizer. Raises WeightsError if options of one group differ in the checkpoint."""
    names = [name for group in groups for name in group]
    numbers = {name: number for number, name in enumerate(names)}
    loaded: list[dict[str, Any]] = []
    for group, current in zip(groups, optimizer.param_groups, strict=True):
        of_names = [{entry: values[key] for entry, key in options[name].items()} for name in group]
        # A rank can have no parameter of a group. Its options are then those that it has.
        first = of_names[0] if group else {key: value for key, value in current.items() if key != "params"}
        for name, other in zip(group, of_names, strict=True):
            if str(sorted(other.items())) != str(sorted(first.items())):  # as strings, because values can be tensors
                raise WeightsError(
                    f"{group[0]} and {name} are in one group of the optimizer, but have different options in the "
                    f"checkpoint: {first} and {other}; make the same groups as when it was saved"
                )
        loaded.append({**first, "params": [numbers[name] for name in group]})
    state = {
        numbers[name]: {entry: values[key] for entry, key in states[name].items()} for name in names if name in states
    }
    return {"state": state, "param_groups": loaded}


def _empty_like(saved: Any) -> Tensor | None:
    is_tensor = isinstance(saved, TensorStorageMetadata)
    return torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None


def _hidden_name(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


class SaveLock:
    """Rejects a second job that saves into the same folder at the same time. It ends with its process."""

    def __init__(self, target: Path) -> None:
        self._target, self._path = target, _hidden_name(target, "lock")
        self._file: Any = None

    def take(self) -> None:
        while self._file is None:
            file = self._path.open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise UsageError(
                    f"another job is saving into {self._target}, and the two would mix; give each job its own folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            # The holder of the lock removes the file. A lock on a removed file excludes nobody.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def _clear_way(target: Path, lock: SaveLock) -> None:
    """Remove the remains of interrupted saves. Raises UsageError if the folder is not a checkpoint."""
    old, temporary = _hidden_name(target, "old"), _hidden_name(target, "tmp")
    if target.exists() and not (target / ".metadata").exists() and (target.is_file() or any(target.iterdir())):
        raise UsageError(f"{target} is not a checkpoint, and would be replaced by one; give another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(exist_ok=True)
    except OSError as error:
        error.add_note(f"torchweft: checkpoints are written into {target.parent}; give a folder that can be written to")
        raise
    lock.take()
    if old.exists() and not target.exists():
        old.rename(target)
    for left in (old, temporary):
        if left.exists():
            shutil.rmtree(left)


def _publish(target: Path) -> None:
    # Two renames, because a folder cannot replace one that has files. After an interrupt between them, `load` finds the
    # previous checkpoint by its hidden name.
    old = _hidden_name(target, "old")
    if target.exists():
        target.rename(old)
    _hidden_name(target, "tmp").rename(target)
    if old.exists():
        shutil.rmtree(old)


def _run_on_all(agree: Agree, headline: str, work: Callable[[], Result]) -> Result:
    """The result of the work. If it fails on any process, all raise one error that lists the faults of all of them. A
    process alone raises any other error than a WeightsError as it is."""
    result, error, report = None, None, None
    try:
        result = work()
    # An interrupt too: the other processes wait for this report.
    except BaseException as raised:
        error = raised
        known = isinstance(error, UsageError | WeightsError)
        faults = split_faults(str(error)) if known else [f"{type(error).__name__}: {text_of(error)}"]
        report = [isinstance(error, UsageError), faults]
    reports = agree(report)
    alone = len(reports) == 1 and not isinstance(error, WeightsError)
    if error is not None and (alone or not isinstance(error, Exception)):
        raise error
    ranks: dict[str, list[int]] = {}
    for rank, other in enumerate(reports):
        for fault in other[1] if other else ():
            ranks.setdefault(fault, []).append(rank)
    if ranks:
        kind = UsageError if all(other is None or other[0] for other in reports) else WeightsError
        # A fault that all processes have, such as a key that is in no model, is listed once and without ranks.
        named = [
            fault if len(on) == len(reports) else f"rank {', '.join(map(str, on))}: {fault}"
            for fault, on in ranks.items()
        ]
        raise kind(join_faults(headline, named)) from error
    return cast(Result, result)


def _alone(report: Report) -> list[Report]:
    return [report]


def _exchange_of(group: ProcessGroup | None, what: str, module: nn.Module) -> StoreExchange | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    find_lost: Callable[[], list[str]] = list
    if isinstance(module, Pipe):
        # Connects the ranks of the pipe, so that they notice at once if one of them dies.
        module._exchange_reports("torchweft.checkpoint.save", None)
        find_lost = module._lost_ranks
    return StoreExchange(group or cast(Any, dist.group.WORLD), what, find_lost)


def _gather(exchange: StoreExchange | None, content: Any) -> list[Any]:
    # By pickle, as `torch.distributed.checkpoint` does itself for its plans.
    return [content] if exchange is None else [pickle.loads(x) for x in exchange.gather(pickle.dumps(content))]
