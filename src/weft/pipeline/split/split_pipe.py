"""A Pipe around an ordinary model: ``weft.Pipe(model, chunks=8, devices=[...], split=["transformer.h.6"])``.

    mini-batch --> micro-batches --> key (structure, shapes, arguments, flags) --> guards on inputs --> program
                                       |                                                              |
                                       +-- none there: record, verify on another micro-batch  <-------+

The pipe has the model's own tables of children, parameters and buffers: same keys, same objects, same ties. Stages keep
one wiring for all programs: what goes from stage s to stage t for one micro-batch is one bundle.
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, count, islice
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.core.autograd import forbid_tracing
from weft.core.errors import BatchError, PartitionError, SpecError, SplitError, UsageError
from weft.core.pytree import flatten, register_dataclasses, spread, unflatten
from weft.core.validation import Validator
from weft.pipeline.batchnorm import convert_deferred_batch_norm
from weft.pipeline.config import BatchDims, cuda_devices, forbid_lazy, forbid_other_axes, places_of
from weft.pipeline.engine import PipeCall
from weft.pipeline.microbatch import NoChunk, SplitPlan, plan_split
from weft.pipeline.pipe import Pipe, allocate, frozen, map_tensors
from weft.pipeline.plan import Crossing
from weft.pipeline.skip import Skippable
from weft.pipeline.split.auto import automatic_split
from weft.pipeline.split.axes import check_axes
from weft.pipeline.split.program import (
    Choice,
    Copies,
    CrossingValue,
    OpenCode,
    Program,
    SplitCall,
    SplitStage,
    bundle,
    tensor_of,
)
from weft.pipeline.split.record import PLAIN, ForwardRecorder, check_names, named_modules
from weft.pipeline.split.recording_group import RecordingGroups
from weft.pipeline.split.verify import ITEMS, check_order, divides, verify
from weft.pipeline.stage import TABLES, Stage

PROGRAMS = 64
"""How many programs a pipe keeps; the least recently used one goes first."""
VARIANTS = 256
"""How many more it keeps of those that differ from others only in sizes."""

_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_MOST = 64  # entries of a list or dict among a module's attributes that are compared


class SplitPipe(Pipe):
    """See `Pipe`, which makes one where `split` is given. `module` is the model itself."""

    def _lay_out(self, check: Validator, module: Any, dims: BatchDims | None, **given: Any) -> int:
        if check.call(_checked_model, module, given["split"], given["balance"], given["verify"]) is None:
            return 0
        if dims is not None:
            check.call(forbid_other_axes, list(module.named_children()), dims)
        self.split, self.verify, devices = given["split"], given["verify"], given["devices"]
        auto = self.split == "auto"
        here = cuda_devices() or [torch.device("cpu")] * (2 if auto else len(self.split) + 1)
        places = here if devices is None else check.call(places_of, devices)
        self.devices = places or []
        if auto:
            return len(self.devices)
        check.call(check_names, module, self.split)
        return len(self.split) + 1 if places is None else self._check_layout(check)

    def _adopt(self, module: nn.Module, sample: Any, *, deferred_batch_norm: bool) -> None:
        if deferred_batch_norm:
            convert_deferred_batch_norm(module)
        self.__dict__["module"] = module  # no child: its keys would get a prefix
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = getattr(module, table)
        self._model: SplitModel | None = None
        call = None if sample is None else self._without_cache(*_arguments(sample))
        if self.split == "auto":
            self.split = automatic_split(module, self.devices, call, self._dims)
        self.split = list(self.split)
        self._made_runtime()  # checks the settings
        self._cut().place()
        if call is not None:
            rows = self._dims.of_call(len(call[0]), call[1].keys(), target=False, nested=True)
            self._cut().choose(*call, 1, rows, check=False, graph=False, joins=False)

    def _check_layout(self, check: Validator) -> int:
        stages = len(self.split) + 1
        places = check.call(places_of, self.devices)
        if places is not None and len(places) < stages:
            check.errors.append(
                PartitionError(
                    f"{stages - 1} split points make {stages} stages, but there are {len(places)} devices; one may be "
                    f"there more than once, as in devices=['cpu'] * {stages}"
                )
            )
        self.devices = places[:stages] if places else self.devices
        self.balance = [1] * stages
        return stages

    def _settings(self) -> tuple[Any, ...]:
        layout = None if self._model is None else self._model.layout
        return (*super()._settings(), frozen(self.split), layout)

    def _built_stages(self) -> tuple[list[Stage], Crossing]:
        return self._cut().stages()

    def _cut(self) -> "SplitModel":
        """The model with its split points, as they are now."""
        if self._model is None or self._model.split != list(self.split) or self._model.devices != self.devices:
            self._model = SplitModel(self.module, self.split, self.devices, self._dims)
        return self._model

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forbid_tracing(args, kwargs)
        self._made_runtime()
        targets = self._targets(kwargs)
        args, kwargs = self._without_cache(args, kwargs)
        rows: Any = self._dims.whole
        axis = rows
        if rows is None:
            found = self._dims.of_call(len(args), kwargs.keys(), target=bool(targets), nested=True)
            rows, target = found if targets else (found, None)
            axis = ((None, *rows), target) if targets else (None, *rows)
        model = self._cut()
        how = {"check": self.verify, "graph": self.executor == "graph", "joins": not targets}
        call, scalars = model.choose(args, kwargs, self.chunks, rows, **how)
        runtime = self._made_runtime()  # anew if a program was recorded that needs more than the others
        owners = model.lend(runtime.stages, call.choice)
        request = PipeCall(
            call, targets, axis, self.chunks, self.schedule, self._watcher, self._loss_scale, scalars, owners
        )
        return runtime.serve(request, training=self.module.training)

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with ``use_cache=False`` where forward() would hand a cache of keys and values from block to
        block, which no training needs."""
        wanted = getattr(getattr(self.module, "config", None), "use_cache", False) is True
        if wanted and "use_cache" in inspect.signature(self.module.forward).parameters:
            kwargs = {"use_cache": False, **kwargs}
        return args, kwargs

    @property
    def routes(self) -> list[CrossingValue]:
        """The values that cross between stages: name, bytes per micro-batch, source, readers. Of the step before, or of
        `sample`; raises UsageError before either."""
        if self._model is None or self._model.latest is None:
            raise UsageError("nothing was recorded yet, so what crosses is not known; call the pipe, or give sample=")
        return self._model.latest.routes

    @property
    def partitions(self) -> list[nn.Sequential]:
        """There are none: between the blocks of a stage is the model's own code."""
        raise UsageError("a pipe with split= has no partitions; see its statistics()['blocks'] and routes")

    def statistics(self) -> dict[str, Any]:
        """As of any pipe; also the blocks of each stage, and how often forward() was recorded."""
        model = self._cut()
        found = super().statistics()
        del found["balance"]
        return {**found, "blocks": [list(each.values()) for each in model.blocks], "recordings": model.recordings}

    def materialize(self, initialize: Callable[[nn.Module], None] | None = None) -> Pipe:
        """See `Pipe.materialize`, and `SplitModel.homes` for where."""
        homes = self._cut().homes()
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        allocate(self.module, lambda each: self.devices[homes[id(each)]], initialize, seed)
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
        return f"split={self.split}, {super().extra_repr()}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in self.__dict__:
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": None}


class SplitModel:
    """A model with split points: its programs, and its stages. Raises SplitError for names that are no modules."""

    def __init__(
        self, model: nn.Module, split: Sequence[str], devices: Sequence[torch.device], dims: BatchDims
    ) -> None:
        if any(isinstance(each, Skippable) for each in model.modules()):
            raise SplitError("skippable layers say themselves what crosses; leave split= out, and give balance=")
        self.model, self.split, self.devices = model, list(split), list(devices)
        self._dims = dims
        self.recordings = 0
        self.layout = 0  # changes whenever stages have to be built anew
        self.latest: Program | None = None
        self.blocks: list[dict[nn.Module, str]] = [{} for _ in devices]
        self._recorder = ForwardRecorder(model, split, devices)
        self._programs: dict[Hashable, list[Program]] = {}
        self._groups = RecordingGroups()
        self._uses = count()
        self._churns = False
        self._order: list[str] = []
        self._owned: list[set[str]] = [set() for _ in devices]
        self._pairs: set[tuple[int, int]] = set()
        self._away: list[list[nn.Parameter]] = [[] for _ in devices]
        self._owner = partial(tensor_of, model)
        parameters = inspect.signature(model.forward).parameters.values()
        self._positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, _EITHER)]

    def choose(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        chunks: int,
        axis: Any,
        *,
        check: bool,
        graph: bool,
        joins: bool,
    ) -> tuple[SplitCall, str | None]:
        """The call as the first stage gets it, with a program for each micro-batch; recorded where there is none. And
        how numbers per micro-batch in the output, such as a loss, are combined where it `joins` them: "mean" by rows,
        or "sum".

        `axis` holds the rows: an int, or nested as ``(args, kwargs)``. `check`: compare new programs with the plain
        forward. `graph`: copies stay connected with their originals.
        Raises BatchError when the mini-batch cannot be cut or its numbers not combined, SplitError for what cannot be
        recorded or differs.
        """
        register_dataclasses((args, kwargs))
        args, kwargs = _broadcast_whole((args, kwargs), axis)
        plan, leaves = plan_split((args, kwargs), chunks, axis=axis)
        pieces = plan.split(leaves)
        settings = self._settings()
        keys: dict[int, Hashable] = {}
        chosen: list[Program] = []
        recorded: dict[Program, int] = {}
        for i, (rows, piece) in enumerate(zip(plan.sizes, pieces, strict=True)):
            if rows not in keys:
                keys[rows] = (plan.structure, *map(_leaf_key, piece))
            program = self._found((settings, keys[rows]), piece)
            if program is None:
                program = self._record(unflatten(plan.structure, piece), piece, keys[rows], plan.axes)
                settings = self._settings()  # a first run may set some
                self._groups.join(program, piece, (settings, plan.structure))
                self._bound(program)
                recorded[program] = i
            chosen.append(program)
        if check and not all(program.verified for program in chosen):
            self._verify(chosen, recorded, plan, leaves, joins=joins)
        self.latest = chosen[0]
        scalars = self._scalars(chosen[0], plan, leaves, pieces[0]) if joins else None
        copies = [_copied(away, device, graph) for away, device in zip(self._away, self.devices, strict=True)]
        return SplitCall(Choice(chosen, copies, chain(*self._away)), args, kwargs), scalars

    def _found(self, key: Hashable, piece: Sequence[Any]) -> Program | None:
        found = next((each for each in self._programs.get(key, ()) if each.fits(piece, self._owner)), None)
        if found is not None:
            found.used = next(self._uses)
        return found

    def _record(self, call: Any, piece: Sequence[Any], shape: Hashable, axes: Sequence[int | None]) -> Program:
        self.recordings += 1
        recording = self._recorder.record(*call)
        check_axes(recording, axes, self._dims)
        program = Program(recording, self.devices)
        program.used = next(self._uses)
        program.anchors = [x for x in piece if not isinstance(x, Tensor)]  # while it lives, their ids stay theirs
        if self._order and program.order != self._order:
            raise SplitError(
                f"forward called the split points in the order {program.order}, and before in the order {self._order}; "
                "split at modules that are always called in one order"
            )
        self._order = program.order
        self._extend(program)
        self._programs.setdefault((self._settings(), shape), []).append(program)
        return program

    def _bound(self, program: Program) -> None:
        """Drop the least recently used program of the kind of this new one, if there are too many."""
        is_variant = self._groups[program].is_common
        limit = VARIANTS if is_variant else PROGRAMS
        alike = [x for x in chain(*self._programs.values()) if self._groups[x].is_common == is_variant]
        if len(alike) > limit:
            self._drop(min(alike, key=lambda each: each.used))
            if not self._churns:
                warnings.warn(
                    f"more than {limit} programs of {type(self.model).__name__} were recorded, and old ones are "
                    "dropped: shapes, arguments, or what the code between blocks reads out of its inputs change at "
                    "nearly every step. Pad to a few lengths, give numbers that change as tensors without dimensions, "
                    "or move such decisions into a submodule",
                    stacklevel=2,
                )
            self._churns = True

    def _drop(self, program: Program) -> None:
        kept = {key: [each for each in programs if each is not program] for key, programs in self._programs.items()}
        self._programs = {key: programs for key, programs in kept.items() if programs}

    def _verify(
        self,
        chosen: Sequence[Program],
        recorded: dict[Program, int],
        plan: SplitPlan,
        leaves: Sequence[Any],
        *,
        joins: bool,
    ) -> None:
        """Compare new programs with the plain forward: on another micro-batch than the recorded one. If there is
        none, on that one now, and again on the next one that comes."""
        calls = [unflatten(plan.structure, piece) for piece in plan.split(leaves)]
        joined = joins and len(calls) > 1
        for program in dict.fromkeys(each for each in chosen if not each.verified):
            group = self._groups[program]
            if group.is_proven(joined=joined):
                program.verified = True
                continue
            at = [i for i, each in enumerate(chosen) if each is program]
            other = [i for i in at if i != recorded.get(program)]
            try:
                args, kwargs = calls[(other or at)[-1]]
                found = verify(self._recorder, program, args, kwargs)
                tensors = [x for k, x in found.items() if k.startswith("output") and isinstance(x, Tensor) and x.dim()]
                if joined and any(len(x) > plan.sizes[at[0]] for x in tensors):
                    check_order(self._recorder, plan, leaves, self._dims.outputs)
            except BaseException:
                self._drop(program)
                group.verified.clear()
                raise
            program.verified = bool(other)
            group.verified[joined] += program.verified

    def _settings(self) -> Hashable:
        """What the code between blocks may go by besides its arguments."""
        seen: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()]
        seen += [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
        configs: dict[int, Any] = {}
        for module in self._recorder.open:
            seen += [module.training, *map(id, module._modules.values())]
            seen += [*module._forward_hooks, *module._forward_pre_hooks]
            held = vars(module)
            seen += [(key, _comparable(value)) for key, value in islice(held.items(), TABLES, None)]
            configs[id(held.get("config"))] = held.get("config")
        return (*seen, *(_comparable(x) for each in configs.values() for x in getattr(each, "__dict__", {}).values()))

    def _extend(self, program: Program) -> None:
        """Let the stages have what this program needs."""
        before = [len(each) for each in (*self.blocks, *self._owned, self._pairs)]
        for s, part in enumerate(program.parts):
            self.blocks[s].update(program.blocks(s))
            self._owned[s] |= program.owned(s)
            self._pairs |= {(s, reader) for reader in part.gives}
        if not self.layout or before != [len(each) for each in (*self.blocks, *self._owned, self._pairs)]:
            self.layout += 1
            self.place()

    def stages(self) -> tuple[list[Stage], Crossing]:
        """The stages, and the bundles that cross between them, as `PipeRuntime` takes them."""
        callers = Counter(module for blocks in self.blocks for module in {m for each in blocks for m in each.modules()})
        lock = RLock()  # modules that several stages call have the parameters of one device at a time
        codes = [OpenCode(self.model, names) for names in self._owned]
        made: list[Stage] = []
        for s, (blocks, code, device) in enumerate(zip(self.blocks, codes, self.devices, strict=True)):
            shared = any(callers[module] > 1 for each in blocks for module in each.modules())
            turns = lock if shared and any(self._away) else nullcontext()
            made.append(SplitStage(s, blocks, code, device, self._pairs, turns))
        return made, [(bundle(s, t), s, (t,)) for s, t in sorted(self._pairs)]

    def homes(self) -> dict[int, int]:
        """By the id() of each parameter and buffer, the first stage that uses it. What no program has used yet is taken
        to run in the order in which modules were registered."""
        found: dict[int, int] = {}
        for s, blocks in enumerate(self.blocks):
            used = [each for block in blocks for each in (*block.parameters(), *block.buffers())]
            for each in (*used, *map(self._owner, self._owned[s])):
                found.setdefault(id(each), s)
        stage = 0
        starts = {name: s + 1 for s, name in enumerate(self._order or self.split)}
        for path, module in named_modules(self.model):
            stage = starts.get(path, stage)
            for each in (*module._parameters.values(), *module._buffers.values()):
                found.setdefault(id(each), stage)
        return found

    def place(self) -> None:
        """Bring parameters and buffers to the device of their stage; those on the meta device stay."""
        homes = self.homes()

        def moved(each: Tensor) -> Tensor:
            device = self.devices[homes[id(each)]]
            if each.is_meta or each.device == device:
                return each
            if not isinstance(each, nn.Parameter):
                return each.to(device)
            each.data = each.data.to(device)
            return each

        map_tensors(self.model, moved)
        for s, blocks in enumerate(self.blocks):
            used = [p for block in blocks for p in block.parameters()]
            used += [p for p in map(self._owner, self._owned[s]) if isinstance(p, nn.Parameter)]
            away = {id(p): p for p in used if is_elsewhere(p, self.devices[s], homes[id(p)], s)}
            self._away[s] = list(away.values())

    def lend(self, stages: Iterable[Stage], choice: Choice) -> dict[int, Tensor]:
        """Let the stages work with the copies of this step. By the id() of a copy, whose it is."""
        owners: dict[int, Tensor] = {}
        for stage, away, copies in zip(stages, self._away, choice.copies, strict=True):
            cast(SplitStage, stage).copies = copies
            owners.update({id(copies[id(p)]): p for p in away})
        return owners

    def _scalars(self, program: Program, plan: SplitPlan, leaves: Sequence[Any], piece: Sequence[Any]) -> str:
        """See `choose`. Where the model is given a number of tokens to divide by, it is run once more to see whether it
        does. Raises BatchError where neither a mean nor a sum is right."""
        if not program.recording.has_scalars:
            return "mean"
        args, kwargs = unflatten(plan.structure, piece)
        if {**dict(zip(self._positional, args, strict=False)), **kwargs}.get(ITEMS) is not None:
            if program.divides is None:
                program.divides = divides(self._recorder, args, kwargs, self._positional)
            if program.divides is not False:
                return "sum"
        if len(plan.sizes) > 1:
            names = [value.key for value in program.recording.inputs]
            for name, leaf, axis in zip(names, leaves, plan.axes, strict=True):
                if isinstance(leaf, Tensor) and axis is not None and leaf.dtype in _INTEGERS:
                    _forbid_unequal(name, leaf.movedim(axis, 0) != -100, plan.sizes)
        return "mean"


def _forbid_unequal(name: str, counts: Tensor, sizes: Sequence[int]) -> None:
    """Raise BatchError for labels of which unequal numbers count in the micro-batches: the model's loss is a mean."""
    if bool(counts.all()):
        return
    for seen in (counts, counts[:, 1:]) if counts.dim() > 1 else (counts,):  # as a causal model shifts them, too
        parts = cast("Sequence[Tensor]", seen.split(list(sizes)))
        means = [part.sum().item() / size for part, size in zip(parts, sizes, strict=True)]
        if max(means) - min(means) > 1e-9:
            raise BatchError(
                f"labels ({name}) have -100 in unequal numbers: {[round(each, 2) for each in means]} a row count in "
                "the micro-batches, but the model's loss is a mean over those that count, so micro-batches' losses "
                "would not make that of the mini-batch. Give num_items_in_batch=(labels[:, 1:] != -100).sum() "
                "(without [:, 1:] where the model does not shift) if the model takes it, and divides by it; or leave "
                "labels out, and compute the loss of the logits"
            )


def is_elsewhere(parameter: Tensor, device: torch.device, home: int, stage: int) -> bool:
    """Whether a stage has to work with a copy of a parameter that an earlier stage has on another device."""
    return home != stage and parameter.device != device and not parameter.is_meta


def _copied(away: Iterable[nn.Parameter], device: torch.device, graph: bool) -> Copies:
    copies = {id(p): (p if graph else p.detach()).to(device, copy=True) for p in away}
    return copies if graph else {id(p): copies[id(p)].requires_grad_(p.requires_grad) for p in away}


def _comparable(value: Any) -> Any:
    """An attribute as something that changes when it does; None for what cannot be compared."""
    if isinstance(value, PLAIN):
        return cast("type[Any]", type(value)), value
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, list | tuple | set | dict) and len(cast("list[Any]", value)) <= _MOST:
        held = cast("dict[Any, Any]", value)
        inside: Iterable[Any] = [*held.keys(), *held.values()] if isinstance(value, dict) else held
        return tuple(x if isinstance(x, PLAIN) else id(x) for x in inside)
    return None


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad, leaf.device
    return cast("type[Any]", type(leaf)), leaf if isinstance(leaf, PLAIN) else id(leaf)


def _broadcast_whole(call: tuple[tuple[Any, ...], dict[str, Any]], axis: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors with one row among others of more, such as one mask for all rows: every micro-batch gets them whole."""
    leaves, structure = flatten(call)
    pairs = zip(leaves, spread(axis, structure), strict=True)
    rows: list[int] = [x.shape[k] if isinstance(x, Tensor) and k is not None and x.dim() > k else 0 for x, k in pairs]
    if 1 not in rows or max(rows) == 1:
        return call
    return unflatten(structure, [NoChunk(x) if count == 1 else x for x, count in zip(leaves, rows, strict=True)])


def _checked_model(module: Any, split: Any, balance: Any, verify: Any) -> nn.Module:
    """The model. Raises SpecError for what is none, UsageError with all that is wrong among the arguments."""
    if not isinstance(module, nn.Module):
        raise SpecError(f"Pipe takes a model, an nn.Module, but this is {type(module).__name__}")
    forbid_lazy(module)
    names = cast("list[Any]", split) if isinstance(split, list | tuple) else []
    named = bool(names) and all(isinstance(each, str) for each in names)
    with Validator("these arguments of Pipe do not make sense") as check:
        check.that(split == "auto" or named, f"split is {split!r}; it is 'auto', or a list of names of submodules")
        check.that(not named or len(set(names)) == len(names), f"split is {split!r}, with a name twice")
        check.that(balance is None, "balance is given beside split; it counts the layers of an nn.Sequential")
        check.boolean("verify", verify)
    return module


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample as the arguments of a call."""
    if isinstance(sample, Mapping):
        return (), dict(cast("Mapping[str, Any]", sample))
    return (tuple(cast("tuple[Any, ...]", sample)) if isinstance(sample, tuple) else (sample,)), {}
