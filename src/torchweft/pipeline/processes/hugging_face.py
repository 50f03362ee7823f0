"""accelerate, Trainer and `save_pretrained` over the ranks of a pipe.

accelerate takes each process for a replica of the model: it gives each process other rows, and wraps the model in
DistributedDataParallel over all of them. The processes of one pipe are one replica together:

    data loader     the rows of its replica, on all ranks of a pipe; a schedule steps once per replica
    model           not wrapped, or in DistributedDataParallel over the ranks of one stage in all replicas
    clipping        by the norm over all ranks of the pipe
    metrics         each row once
    files           the whole model and the whole optimizer, as one process writes them

Neither library has hooks for this, so methods of their classes are extended. An extension does what the library does
unless a pipe over processes takes part. The libraries are never imported here: if a script does not import them before
it makes a pipe, nothing is extended.
"""

import gc
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchweft.core.errors import UsageError
from torchweft.core.pytree import flatten, unflatten
from torchweft.pipeline.checks import shards
from torchweft.pipeline.processes.norm import norm_over_ranks
from torchweft.pipeline.processes.whole_optimizer import RankLayout, WholeOptimizer
from torchweft.pipeline.weights import unwrap_module

_EXTENDED = "_torchweft_extended"
_pipes: WeakSet[nn.Module] = WeakSet()  # those of this process that have a group
_optimizers: WeakKeyDictionary[Optimizer, WholeOptimizer] = WeakKeyDictionary()
_loaders: WeakSet[Any] = WeakSet()  # those with the rows of a replica
_saving: WeakSet[nn.Module] = WeakSet()  # pipes within save_pretrained()
_averaged: WeakSet[nn.Module] = WeakSet()  # pipes within DistributedDataParallel


def connect(pipe: nn.Module) -> None:
    """Let the libraries that were imported know that the ranks of this pipe are one replica."""
    _watch_replicas()
    _pipes.add(pipe)
    extend_libraries()
    model = pipe.__dict__.get("module", pipe)
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        if "save_pretrained" in vars(kind):
            _extend(kind, "save_pretrained", _save_pretrained)


def extend_libraries() -> None:
    for (module, owner), extensions in _EXTENSIONS.items():
        kind = getattr(sys.modules.get(module), owner, None)
        for name, extension in extensions.items():
            if kind is not None and hasattr(kind, name):
                _extend(kind, name, extension)


def _extend(kind: type[Any], name: str, extension: Callable[..., Any]) -> None:
    original = getattr(kind, name)
    if hasattr(original, _EXTENDED):
        return

    @wraps(original)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(original, *args, **kwargs)

    setattr(extended, _EXTENDED, True)
    setattr(kind, name, extended)


@dataclass(frozen=True)
class Replicas:
    """The number of replicas, the ranks of each, and the replica of this rank. accelerate understands it as a mesh:
    tensor-parallel ranks get the same rows."""

    count: int
    ranks: int
    here: int

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        # "dp" makes accelerate refuse to send rows from the first process, which it can do for one replica only.
        return ("dp_replicate", "tp", "dp") if self.count > 1 else ("dp_replicate", "tp")

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(size=lambda: self.ranks if name == "tp" else self.count)

    def firsts(self, gathered: Tensor) -> Tensor:
        """Of rows that were gathered from all processes, those of the first rank of each replica."""
        return torch.cat(gathered.chunk(self.count * self.ranks)[:: self.ranks])


def replicas_here() -> Replicas | None:
    """The replicas of the pipes in this process, or None without pipes over processes."""
    if len(_ranks_of_pipes()) > 1:
        gc.collect()  # a pipe can be kept by a cycle
    layouts = _ranks_of_pipes()
    if not layouts:
        return None
    world = dist.get_world_size()
    ranks = min(layouts)
    first, length = ranks[0], len(ranks)
    if len(layouts) > 1 or ranks != tuple(range(first, first + length)) or first % length or world % length:
        raise UsageError(
            f"accelerate can give rows to pipes only if each is on consecutive ranks of {world}, as many for each, but "
            f"the pipes of this process are on the ranks {sorted(layouts)}; give each Pipe group=mesh['pp'] of "
            "init_device_mesh(device, (replicas, ranks), mesh_dim_names=('dp', 'pp')), or prepare no data loader"
        )
    return Replicas(world // length, length, first // length)


def _ranks_of_pipes() -> set[tuple[int, ...]]:
    return {tuple(get_process_group_ranks(layout_of(pipe).group)) for pipe in _pipes}


def layout_of(pipe: nn.Module) -> RankLayout:
    return cast(RankLayout, pipe.__dict__["_layout"])


def pipe_in(model: Any) -> nn.Module | None:
    """The model itself or the model inside of DistributedDataParallel, if it is a pipe over processes."""
    inner = unwrap_module(model) if isinstance(model, nn.Module) else None
    layout = None if inner is None else inner.__dict__.get("_layout")
    return inner if getattr(layout, "hides_tensors", False) else None


def _pipe_around(module: nn.Module) -> nn.Module | None:
    for pipe in _pipes:
        model = pipe.__dict__.get("module", pipe)
        if module is pipe or any(module is inner for inner in model.modules()):
            return pipe
    return None


def _pipe_of(parameters: Iterable[Any]) -> nn.Module | None:
    """The pipe that has these parameters. Raises UsageError if it has only some of them."""
    wanted = {id(parameter) for parameter in parameters}
    if not wanted:  # a rank can have no parameter that is trained
        return next(iter(_pipes)) if len(_pipes) == 1 else None
    for pipe in _pipes:
        own = {id(parameter) for parameter in pipe.parameters()}
        if wanted <= own:
            return pipe
        if wanted & own:
            raise UsageError(
                "some of these parameters are of a Pipe over processes and some are not; give the Pipe an optimizer, "
                "and a call to clip, of its own"
            )
    return None


def has_replicas(pipe: Callable[[], nn.Module | None]) -> bool:
    """Whether DistributedDataParallel or FSDP2 averages the gradients of a pipe with those of replicas."""
    module = pipe()
    return module is not None and (module in _averaged or shards(module))


@cache  # one hook per process
def _watch_replicas() -> None:
    """Note the pipes in DistributedDataParallel. Let it raise if its group has several ranks of one pipe."""

    def check(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if not isinstance(module, DistributedDataParallel) or submodule is None:
            return
        for pipe in submodule.modules():
            if pipe_in(pipe) is None:
                continue
            ranks = get_process_group_ranks(layout_of(pipe).group)
            averaged = get_process_group_ranks(cast(dist.ProcessGroup, module.process_group))
            if len(shared := sorted({*ranks} & {*averaged})) > 1:
                raise UsageError(
                    f"DistributedDataParallel would average the ranks {shared}, which have different stages of one Pipe"
                    "; give it process_group=, the ranks that have the same stage in all replicas. To let accelerate "
                    "prepare the Pipe, import it before the Pipe is made"
                )
            _averaged.add(pipe)

    register_module_module_registration_hook(cast(Any, check))


def _prepare_data_loader(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    extend_libraries()  # Trainer can have been imported since
    replicas = replicas_here()
    if replicas is None:
        return original(accelerator, *args, **kwargs)
    given = args[0] if args else kwargs["data_loader"]
    for sampler in (given.sampler, getattr(given, "batch_sampler", None)):
        shards = getattr(sampler, "num_replicas", getattr(sampler, "dp_size", None))
        if shards not in (None, replicas.count):
            raise UsageError(
                f"{type(sampler).__name__} divides the rows among {shards} processes, but there are {replicas.count} "
                f"replicas of the Pipe, of {replicas.ranks} ranks each; leave it out, because accelerate divides them"
            )
    state, before = accelerator.state, accelerator.state.device_mesh
    if before is not None:
        raise UsageError("accelerate's parallelism_config cannot be combined with a Pipe over processes; leave it out")
    state.device_mesh = replicas
    try:
        loader = original(accelerator, *args, **kwargs)
    finally:
        state.device_mesh = before
    _loaders.add(loader)
    return loader


def _prepare_model(
    original: Any, accelerator: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
) -> Any:
    extend_libraries()
    pipe = pipe_in(model)
    if pipe is None:
        return original(accelerator, model, device_placement, evaluation_mode)
    if accelerator.scaler is not None:
        raise UsageError(
            "mixed_precision='fp16' of accelerate scales the loss on each rank alone, so ranks of a Pipe would skip "
            "different steps; use 'bf16'"
        )
    if any(loader not in _loaders for loader in accelerator._dataloaders):
        raise UsageError(
            "accelerate prepared a data loader before the Pipe over processes was made, so the ranks of the Pipe get "
            "different rows; make the Pipe first"
        )
    _pipes.add(pipe)  # a copy of a pipe is not known yet
    replicas = replicas_here()
    # In evaluation mode accelerate does not wrap the model in DistributedDataParallel over all processes.
    prepared = original(accelerator, model, device_placement, evaluation_mode=True)
    if replicas is None or replicas.count == 1 or evaluation_mode or prepared is not pipe:
        return prepared
    handler = accelerator.ddp_handler
    options: dict[str, Any] = {} if handler is None else handler.to_kwargs()
    return DistributedDataParallel(prepared, process_group=_same_stage(replicas), **options)


def _same_stage(replicas: Replicas) -> dist.ProcessGroup:
    """The group of the ranks that have the stage of this rank, one in each replica. All processes call this together"""
    world = range(replicas.count * replicas.ranks)
    group, _ = dist.new_subgroups_by_enumeration([[*world[k :: replicas.ranks]] for k in range(replicas.ranks)])
    return cast(dist.ProcessGroup, group)


def _prepare_optimizer(original: Any, accelerator: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    prepared = original(accelerator, optimizer, *args, **kwargs)
    inner = _innermost(prepared)
    if inner not in _optimizers:
        pipe = _pipe_of(parameter for group in inner.param_groups for parameter in group["params"])
        if pipe is not None:
            _optimizers[inner] = WholeOptimizer(layout_of(pipe), pipe, inner)
    return prepared


def _innermost(optimizer: Any) -> Optimizer:
    while not hasattr(optimizer, "register_state_dict_post_hook") or "optimizer" in vars(optimizer):
        optimizer = optimizer.optimizer  # that of accelerate wraps one
    return optimizer


@contextmanager
def _whole_optimizers(optimizers: Iterable[Any]) -> Generator[None]:
    with ExitStack() as stack:
        for optimizer in map(_innermost, optimizers):
            if optimizer in _optimizers:
                stack.enter_context(_optimizers[optimizer].whole(optimizer))
        yield


def _clip(original: Any, accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
    parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    pipe = _pipe_of(parameters)
    if pipe is None:
        return original(accelerator, parameters, max_norm, norm_type)
    layout, device = layout_of(pipe), cast(Any, pipe).devices[0]
    with layout.telling():
        exchange = partial(layout.exchange_reports, "clip_grad_norm_")
        total = norm_over_ranks(parameters, exchange, device, float(norm_type))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _gather_for_metrics(original: Any, accelerator: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    replicas = replicas_here()
    if replicas is None:
        return original(accelerator, input_data, use_gather_object)
    if use_gather_object or not all(isinstance(leaf, Tensor) for leaf in flatten(input_data)[0]):
        first = dist.get_rank() % replicas.ranks == 0
        return original(accelerator, input_data if first else [], True)
    # All ranks of a replica have the same rows, so each row is counted once.
    leaves, structure = flatten(input_data if replicas.count == 1 else accelerator.gather(input_data))
    rows = leaves if replicas.count == 1 else [replicas.firsts(leaf) for leaf in leaves]
    # The last batches are filled up with rows from the start, so that all replicas have as many.
    rest = accelerator.gradient_state.remainder if accelerator.gradient_state.end_of_dataloader else 0
    return unflatten(structure, [leaf[:rest] for leaf in rows] if rest > 0 else rows)


def _step_scheduler(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    replicas = replicas_here()
    if replicas is None:
        return original(scheduler, *args, **kwargs)
    # accelerate steps a schedule once for each process, because as many batches were used.
    state = sys.modules["accelerate.state"].PartialState()
    before, state.num_processes = state.num_processes, replicas.count
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        state.num_processes = before


def _get_state_dict(original: Any, accelerator: Any, model: Any, unwrap: bool = True) -> Any:
    pipe = pipe_in(model)
    if pipe is None:
        return original(accelerator, model, unwrap)
    with layout_of(pipe).whole_model(pipe, "accelerator.get_state_dict()"):
        return original(accelerator, pipe, unwrap)


def _save_state(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    with _whole_optimizers(accelerator._optimizers):
        return original(accelerator, *args, **kwargs)


def _save_model(original: Any, trainer: Any, output_dir: Any = None, state_dict: Any = None) -> None:
    pipe = pipe_in(trainer.model)
    if pipe is None or state_dict is not None:
        return original(trainer, output_dir, state_dict)
    with layout_of(pipe).whole_model(pipe, "Trainer.save_model()") as first:
        if first:
            original(trainer, output_dir, pipe.state_dict())


def _save_optimizer(original: Any, trainer: Any, *args: Any) -> None:
    with _whole_optimizers([trainer.optimizer]):
        original(trainer, *args)


def _processes_per_replica(original: Any, trainer: Any) -> int:
    pipe = pipe_in(trainer.model)
    return original(trainer) * (1 if pipe is None else layout_of(pipe).group.size())


def _save_pretrained(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    pipe = _pipe_around(module)
    # A method that was overridden calls that of its base, which is extended too.
    if pipe is None or pipe in _saving or kwargs.get("state_dict") is not None:
        return original(module, *args, **kwargs)
    _saving.add(pipe)
    try:
        with layout_of(pipe).whole_model(pipe, "save_pretrained()") as first:
            return original(module, *args, **kwargs) if first else None
    finally:
        _saving.discard(pipe)


_EXTENSIONS: dict[tuple[str, str], dict[str, Callable[..., Any]]] = {
    ("accelerate.accelerator", "Accelerator"): {
        "prepare_data_loader": _prepare_data_loader,
        "prepare_model": _prepare_model,
        "prepare_optimizer": _prepare_optimizer,
        "clip_grad_norm_": _clip,
        "gather_for_metrics": _gather_for_metrics,
        "get_state_dict": _get_state_dict,
        "save_state": _save_state,
    },
    ("accelerate.scheduler", "AcceleratedScheduler"): {"step": _step_scheduler},
    ("transformers.trainer", "Trainer"): {
        "_save": _save_model,
        "_save_optimizer_and_scheduler": _save_optimizer,
        "get_tp_size": _processes_per_replica,
    },
}
