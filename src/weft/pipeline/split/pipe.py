"""A Pipe around an ordinary model: ``weft.Pipe(model, chunks=8, devices=[...], split=["transformer.h.6"])``.

The pipe has the model's own tables of children, parameters and buffers: same keys, same objects, same ties. What it
adds, programs, stages and workers, is made at the first step and goes when the pipe goes.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weft.core.autograd import forbid_tracing
from weft.core.errors import PartitionError, SpecError, UsageError, listed
from weft.pipeline.batchnorm import convert_deferred_batch_norm
from weft.pipeline.config import BatchDims, Faults, check_batch_dims, check_settings, places_of, reduction_of
from weft.pipeline.engine import PipeCall, Runtime
from weft.pipeline.loss import LossScale
from weft.pipeline.pipe import Pipe, frozen
from weft.pipeline.schedule import build
from weft.pipeline.split.auto import automatic_split
from weft.pipeline.split.model import SplitModel
from weft.pipeline.split.program import CrossingValue


class SplitPipe(Pipe):
    """See `Pipe`, which makes one where `split` is given. `module` is the model itself."""

    def __init__(
        self,
        module: nn.Module,
        *,
        chunks: int,
        split: Any = None,
        batch_dim: Any = None,
        output_batch_dim: Any = None,
        devices: Any = None,
        balance: Any = None,
        checkpoint: Any = "never",
        deferred_batch_norm: bool = False,
        schedule: Any = "gpipe",
        loss: Any = None,
        loss_reduction: Any = None,
        loss_weight: Any = None,
        loss_scale: Any = None,
        executor: Any = "auto",
        sample: Any = None,
        verify: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        faults = Faults()
        faults.of(_check_model, module, split, balance, verify)
        dims = faults.of(BatchDims, batch_dim, output_batch_dim)
        if isinstance(cast(Any, module), nn.Module) and dims is not None and batch_dim is None:
            faults.of(check_batch_dims, list(module.named_children()), None, dims)
        places = None if devices is None else faults.of(places_of, devices)
        reduction = faults.of(reduction_of, loss, loss_reduction, loss_weight)
        scale = faults.of(LossScale, loss_scale, loss)
        check_settings(faults, 0, chunks, executor, loss, loss_reduction, schedule, checkpoint, deferred_batch_norm)
        faults.raise_all()
        assert dims is not None and reduction is not None and scale is not None  # else there was a fault
        self._dims, self._loss, self._loss_weight, self._loss_scale = dims, (loss, reduction), loss_weight, scale
        if deferred_batch_norm:
            convert_deferred_batch_norm(module)
        self.__dict__["module"] = module  # no child: its keys would get a prefix
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = getattr(module, table)
        self.training = module.training
        self.chunks, self.checkpoint, self.schedule, self.executor = chunks, checkpoint, schedule, executor
        self.verify = verify
        self._watcher = self._runtime = self._checked = self._recipe = None
        self._model: SplitModel | None = None
        call = None if sample is None else _arguments(sample)
        if call is not None and _caches(module):
            call[1].setdefault("use_cache", False)
        places = places or _devices(2 if split == "auto" else len(split) + 1)
        self.split: list[str] = automatic_split(module, places, call) if split == "auto" else list(split)
        self.devices = places
        self._check()
        self._cut().place()
        if call is not None:
            self._cut().choose(*call, 1, 0, check=False, graph=False)

    def _check(self) -> None:
        """Raise what is wrong with the settings as they are now."""
        stages, self.devices = len(self.split) + 1, places_of(self.devices)
        faults = Faults()
        check_settings(faults, stages, self.chunks, self.executor, *self._loss, self.schedule, self.checkpoint)
        faults.raise_all()
        if len(self.devices) < stages:
            raise PartitionError(
                f"{len(self.split)} split points make {stages} stages, but there are {len(self.devices)} devices; one "
                f"may be there more than once, as in devices=['cpu'] * {stages}"
            )
        self.devices = self.devices[:stages]
        self.balance = [1] * stages

    def _cut(self) -> SplitModel:
        """The model with its split points, as they are now."""
        model = self._model
        if model is None or model.split != self.split or model.devices != self.devices:
            model = self._model = SplitModel(self.module, self.split, self.devices)
            self._runtime = None
        return model

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forbid_tracing(args, kwargs)
        if self._checked != self._settings():
            self._check()
            self._checked = self._settings()
        targets: tuple[Any, ...] = ()
        if self._loss[0] is not None and "target" in kwargs:
            targets = (kwargs.pop("target"),)
        model = self._cut()
        if "use_cache" not in kwargs and _caches(self.module):
            kwargs["use_cache"] = False
        axis, target_axis = self._axes(args, kwargs, target=bool(targets))
        call = model.choose(args, kwargs, self.chunks, axis, check=self.verify, graph=self.executor == "graph")
        runtime = self._made_runtime()
        owners = model.prepare(runtime.stages, call)
        scalars = None if targets else model.scalars(call, self.chunks)
        if not isinstance(axis, int):
            axis = ((None, *axis), target_axis) if targets else (None, *axis)
        request = PipeCall(
            call, targets, axis, self.chunks, self.schedule, self._watcher, self._loss_scale, scalars, owners
        )
        return runtime.serve(request, training=self.module.training)

    def _axes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, target: bool) -> tuple[Any, Any]:
        """Of the arguments, an int or nested as ``(args, kwargs)``, and of the target."""
        axes: Any = self._dims.of_call(len(args), kwargs.keys(), target=target)
        if isinstance(axes, int):
            return axes, axes
        axis, target_axis = axes if target else (axes, None)
        return (((axis,), {}) if len(args) == 1 and not kwargs else axis), target_axis

    def _settings(self) -> tuple[Any, ...]:
        lists = map(frozen, (self.split, self.devices, self.checkpoint))
        return type(self.chunks), self.chunks, self.executor, self.schedule, *lists

    def _made_runtime(self) -> Runtime:
        model = self._cut()
        splits = build(self.schedule, len(self.devices), self.chunks).splits
        recipe = (*self._settings()[2:], splits, model.layout)
        if self._runtime is None or self._recipe != recipe:
            self._runtime = Runtime(
                *model.stages(),
                self.checkpoint,
                self.executor,
                *self._loss,
                self._loss_weight,
                self._dims,
                splits=splits,
            )
            self._recipe = recipe
        return self._runtime

    @property
    def routes(self) -> list[CrossingValue]:
        """The values that cross between stages: name, bytes per micro-batch, source, readers.

        Of the step before, or of `sample`. Raises UsageError before either.
        """
        if self._model is None or self._model.latest is None:
            raise UsageError("nothing was recorded yet, so what crosses is not known; call the pipe, or give sample=")
        return self._model.latest.routes

    @property
    def partitions(self) -> list[nn.Sequential]:
        """There are none: between the blocks of a stage is the model's own code."""
        raise UsageError(
            "a pipe that was made with split= has no partitions; see its statistics()['blocks'] and routes"
        )

    def statistics(self) -> dict[str, Any]:
        """As of any pipe; also the blocks of each stage, and how often forward() was recorded."""
        model = self._cut()
        found = super().statistics()
        del found["balance"]
        return {**found, "blocks": [list(each.values()) for each in model.blocks], "recordings": model.recordings}

    def materialize(self, initialize: Callable[[nn.Module], None] | None = None) -> Pipe:
        """See `Pipe.materialize`. Parameters that are tied stay tied. Until a forward has shown where modules run, they
        are taken to do so in the order in which they were registered."""
        model = self._cut()
        made: dict[int, Any] = {}
        homes = model.homes()
        for module in self.module.modules():
            tables = cast("list[dict[str, Any]]", [module._parameters, module._buffers])
            meta = [(table, key, x) for table in tables for key, x in table.items() if x is not None and x.is_meta]
            for table, key, each in meta:
                empty = made.get(id(each))
                if empty is None:
                    empty = torch.empty_like(each, device=self.devices[homes[id(each)]])
                    empty = nn.Parameter(empty, each.requires_grad) if isinstance(each, nn.Parameter) else empty
                    made[id(each)] = empty
                table[key] = empty
            reset: Any = initialize or getattr(cast(Any, type(module)), "reset_parameters", None)
            if meta and reset is not None:
                reset(module)
        self._runtime = None
        return self

    def train(self, mode: bool = True) -> "SplitPipe":
        """Set the mode of the model."""
        self.module.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the model itself."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def extra_repr(self) -> str:
        """What stands behind the class name when the pipe is printed."""
        devices = list(map(str, self.devices))
        return f"split={self.split}, devices={devices}, chunks={self.chunks}, executor={self.executor!r}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in self.__dict__:
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": None}


def _check_model(module: Any, split: Any, balance: Any, verify: Any) -> None:
    """Raise SpecError for what is no model, UsageError with all that is wrong among the arguments."""
    if not isinstance(module, nn.Module):
        raise SpecError(f"Pipe takes a model, an nn.Module, but this is {type(module).__name__}")
    if lazy := [name for name, each in (*module.named_parameters(), *module.named_buffers()) if is_lazy(each)]:
        raise SpecError(
            listed("lazy layers have no sizes yet, and cannot be spread; run the model once before Pipe gets it:", lazy)
        )
    faults: list[str] = []
    listed_names = cast("list[Any]", split) if isinstance(split, list | tuple) else []
    if split != "auto" and not (listed_names and all(isinstance(each, str) for each in listed_names)):
        faults.append(f"split is {split!r}; it is 'auto', or a list of names of submodules")
    elif split != "auto" and len(set(listed_names)) < len(listed_names):
        faults.append(f"split is {split!r}, with a name twice; the model is cut before the first call of each")
    if balance is not None:
        faults.append("balance is given beside split; it counts the layers of an nn.Sequential, so leave one out")
    if not isinstance(verify, bool):
        faults.append(f"verify is {verify!r}; it is True or False")
    if faults:
        raise UsageError(listed("these arguments of Pipe do not make sense:", faults))


def _caches(model: nn.Module) -> bool:
    """Whether forward() would hand a cache of keys and values from block to block, which no training needs."""
    wanted = getattr(getattr(model, "config", None), "use_cache", False)
    return wanted is True and "use_cache" in inspect.signature(model.forward).parameters


def _devices(count: int) -> list[torch.device]:
    """Every CUDA device, or the CPU so many times."""
    if torch.cuda.is_available():
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu")] * count


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample as the arguments of a call."""
    if isinstance(sample, Mapping):
        return (), dict(cast("Mapping[str, Any]", sample))
    return (tuple(cast("tuple[Any, ...]", sample)) if isinstance(sample, tuple) else (sample,)), {}
