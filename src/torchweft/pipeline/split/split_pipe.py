"""The layout of an ordinary model: ``weft.Pipe(model, chunks=8, devices=[...], split=["transformer.h.6"])``.

    mini-batch --> micro-batches --> key (structure, shapes, arguments, flags) --> guards on inputs --> program
                                       |                                                              |
                                       +-- not found: record, verify on another micro-batch  <--------+

One program per model would be wrong, because Python in forward() can branch on shapes and flags. Stages keep one wiring
for all programs: all values that go from stage s to stage t for one micro-batch are one bundle.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchweft.core.errors import PartitionError, SpecError, SplitError, UsageError, add_advice
from torchweft.core.pytree import Structure, broadcast_prefix, flatten, register_dataclasses, unflatten
from torchweft.core.validation import Validator
from torchweft.pipeline.batchnorm import convert_deferred_batch_norm
from torchweft.pipeline.config import BatchDims, Layers, cuda_devices, places_of, reject_lazy, reject_other_axes
from torchweft.pipeline.microbatch import NoChunk, plan_split
from torchweft.pipeline.pipe_runtime import NO_LOSS, PipeCall
from torchweft.pipeline.pipeline_plan import Crossing
from torchweft.pipeline.sequential import (
    CurrentRuntime,
    Cuts,
    FixedSettings,
    LayoutArguments,
    MakePipe,
    PipeLayout,
    PipeSettings,
)
from torchweft.pipeline.skip import Skippable
from torchweft.pipeline.split.auto import Arguments, automatic_split
from torchweft.pipeline.split.axes import check_axes
from torchweft.pipeline.split.huggingface import accepts, without_cache
from torchweft.pipeline.split.isolation import place_tensor
from torchweft.pipeline.split.modules import check_names, named_modules
from torchweft.pipeline.split.open_state import PLAIN
from torchweft.pipeline.split.output_join import OutputJoin, Quiet, Reduction, run_quietly
from torchweft.pipeline.split.program import (
    Copies,
    CrossingValue,
    Devices,
    InterBlockParameters,
    Owned,
    Program,
    ProgramGroup,
    SplitCall,
    SplitStage,
    StepPrograms,
    bundle,
    tensor_of,
)
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.split.verify import verify
from torchweft.pipeline.stage import Stage
from torchweft.pipeline.tracing import Observer
from torchweft.pipeline.weights import map_tensors

PROGRAMS = 256  # that a pipe keeps
_ENOUGH = 3  # compared programs of a group


class SplitLayout(PipeLayout):
    """The layout of a model that `split` cuts. The pipe has the model's own tables."""

    _model: nn.Module

    def __init__(self) -> None:
        self._split_model: SplitModel | None = None

    def resolve(self, check: Validator, module: Any, dims: BatchDims | None, given: LayoutArguments) -> Cuts:
        split = given.split
        if check.call(_checked_model, module, split, given.balance, given.verify) is None:
            return Cuts(0, [], [])
        if dims is not None:
            check.call(reject_other_axes, list(module.named_children()), dims)
        auto = split == "auto"
        available = cuda_devices() or [torch.device("cpu")] * (2 if auto else len(split) + 1)
        available = available if auto else available[: len(split) + 1]
        places = check.call(places_of, available if given.devices is None else given.devices)
        if auto:
            return Cuts(len(places or ()), [], places or [])
        check.call(check_names, module, split)
        return Cuts(len(split) + 1, [], []) if places is None else _cuts(check, len(split) + 1, places)

    def check_cuts(self, check: Validator, settings: PipeSettings, layers: Layers) -> Cuts:
        stages = len(split_of(settings)) + 1
        places = check.call(places_of, settings.devices)
        return Cuts(stages, [1] * stages, settings.devices) if places is None else _cuts(check, stages, places)

    def take_model(self, fixed: FixedSettings, settings: PipeSettings, model: nn.Module, *, deferred: bool) -> Layers:
        """See `PipeLayout.take_model`. There are no layers, because the model keeps its own children."""
        self._fixed, self._model = fixed, model
        if deferred:
            convert_deferred_batch_norm(model)
        return ()

    def split_points(self, settings: PipeSettings, sample: Any, make_pipe: MakePipe) -> list[str]:
        split = split_of(settings)
        return self._automatic_split(settings, sample, make_pipe) if split == "auto" else list(split)

    def _automatic_split(self, settings: PipeSettings, sample: Any, make_pipe: MakePipe) -> list[str]:
        call = self._sample_call(sample)
        return automatic_split(self._model, settings.devices, call, self._fixed.dims, make_pipe)

    def _sample_call(self, sample: Any) -> Arguments | None:
        if sample is None:
            return None
        if isinstance(sample, Mapping):
            return without_cache(self._model, (), dict(cast("Mapping[str, Any]", sample)))
        return without_cache(self._model, cast(Any, sample) if isinstance(sample, tuple) else (sample,), {})

    def place(self, settings: PipeSettings, current_runtime: CurrentRuntime, sample: Any) -> None:
        """See `PipeLayout.place`. Records the sample first, which shows the first stage of each parameter."""
        current_runtime()
        self._current_model(settings).place()
        if (call := self._sample_call(sample)) is not None:
            self._record_sample(self._current_model(settings), call)

    def _record_sample(self, model: "SplitModel", call: Arguments) -> None:
        rows = self._fixed.dims.of_call(len(call[0]), call[1].keys(), target=False, nested=True)
        model.choose(*call, 1, rows, check=False, graph=False, joins=False)

    def key(self, settings: PipeSettings) -> tuple[Any, ...]:
        return tuple(split_of(settings)), None if self._split_model is None else self._split_model.members.version

    def stages(self, settings: PipeSettings, layers: Layers) -> tuple[list[Stage], Crossing]:
        return self._current_model(settings).stages()

    def _current_model(self, settings: PipeSettings) -> "SplitModel":
        model = self._split_model
        if model is None or model.split != list(split_of(settings)) or model.devices != settings.devices:
            self._split_model = model = self._new_model(settings)
        return model

    def _new_model(self, settings: PipeSettings) -> "SplitModel":
        fixed = self._fixed
        return SplitModel(self._model, split_of(settings), settings.devices, fixed.dims, fixed.number_reduction)

    def run_step(
        self,
        settings: PipeSettings,
        current_runtime: CurrentRuntime,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...],
        observer: Observer | None,
        /,
    ) -> Any:
        """Choose or record programs for one step, and run it. `targets` is empty, or holds the target of the loss."""
        current_runtime()  # ranks compare their settings before they record, because recordings depend on them
        if "target" in kwargs and not accepts(self._model, "target"):
            raise UsageError(NO_LOSS)
        args, kwargs = without_cache(self._model, args, kwargs)
        axis = self.axes(args, kwargs, target=bool(targets))
        of_input = axis[0] if targets and not isinstance(axis, int) else axis
        rows = of_input if of_input is None or isinstance(of_input, int) else of_input[1:]
        model = self._current_model(settings)
        options = {"check": cast(Any, settings).verify, "graph": settings.executor == "graph", "joins": not targets}
        main, scalars = model.choose(args, kwargs, settings.chunks, rows, **options)
        # A new program can need stages with more blocks or crossings than the earlier ones. Ranks do not compare their
        # settings for it, because no setting has changed.
        runtime = current_runtime(compare=False)
        owners = model.members.set_copies(runtime.stages, main.choice)
        of_step, given = (self._fixed.loss_scale, scalars, owners, settings.batch_tag), (args, kwargs)
        request = PipeCall(main, targets, axis, settings.chunks, settings.schedule, observer, *of_step, given)
        return runtime.serve(request, training=self._model.training)

    def axes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, target: bool) -> Any:
        """See `PipeLayout.axes`, for a `SplitCall`."""
        dims = self._fixed.dims
        if dims.whole is not None:
            return dims.whole
        axes = dims.of_call(len(args), kwargs.keys(), target=target, nested=True)
        return ((None, *axes[0]), axes[1]) if target else (None, *axes)

    @property
    def routes(self) -> list[CrossingValue]:
        if self._split_model is None or self._split_model.latest is None:
            raise UsageError("nothing was recorded yet, so what crosses is not known; call the pipe, or give sample=")
        return self._split_model.latest.routes

    def partitions(self, settings: PipeSettings, layers: Layers) -> list[nn.Sequential]:
        raise UsageError("a pipe with split= has no partitions; see its statistics()['blocks'] and routes")

    def statistics(self, settings: PipeSettings) -> dict[str, Any]:
        model = self._current_model(settings)
        return {"blocks": [list(blocks.values()) for blocks in model.members.blocks], "recordings": model.recordings}

    def devices_by_tensor(self, settings: PipeSettings, layers: Layers) -> dict[int, torch.device]:
        """See `PipeLayout.devices_by_tensor`, and `SplitModel.homes`."""
        return {key: settings.devices[stage] for key, stage in self._current_model(settings).homes().items()}

    def __getstate__(self) -> dict[str, Any]:
        # Without programs, whose keys hold ids of objects. A copy of the pipe records again.
        return {**self.__dict__, "_split_model": None}


class ProgramCache:
    """The programs of a model by key. Beyond `PROGRAMS`, the least recently used one is dropped."""

    def __init__(self, model: str) -> None:
        self._model, self._warned = model, False
        # Several programs can have one key: their guards decide which one fits a micro-batch.
        self._programs: dict[Hashable, list[Program]] = {}
        self._groups: dict[Hashable, ProgramGroup] = {}
        # Key and anchors of each program, in the order of their last use. A key holds the id() of arguments that it
        # cannot compare. The anchors are these arguments, so that no other object gets their id().
        self._used: dict[Program, tuple[Hashable, Sequence[Any]]] = {}

    def find(self, key: Hashable, leaves: Sequence[Any], owned: Owned) -> Program | None:
        """A program of this key with guards that accept the leaves of a micro-batch."""
        program = next((known for known in self._programs.get(key, ()) if known.fits(leaves, owned)), None)
        if program is not None:
            self._used[program] = self._used.pop(program)
        return program

    def add(self, key: Hashable, program: Program, form: Hashable, leaves: Sequence[Any]) -> Program | None:
        """Add a program to the group of its form. Returns the program to drop if there are too many."""
        # A group only saves comparisons, so it can be forgotten at any time.
        if len(self._groups) >= PROGRAMS:
            self._groups.clear()
        program.join_group(self._groups.setdefault(form, program.group))
        self._programs.setdefault(key, []).append(program)
        self._used[program] = key, [x for x in leaves if not isinstance(x, Tensor)]
        if len(self._used) <= PROGRAMS:
            return None
        if not self._warned:
            warnings.warn(
                f"more than {PROGRAMS} programs of {self._model} were recorded, and old ones are dropped: shapes, "
                "arguments, or values that the code between blocks reads from its inputs change at nearly every step. "
                "Pad to a few lengths, pass numbers that change as tensors without dimensions, or move such decisions "
                "into a submodule",
                stacklevel=2,
            )
        self._warned = True
        return next(iter(self._used))

    def drop(self, program: Program) -> None:
        """Remove a program, unless it was removed before."""
        if program in self._used:
            key = self._used.pop(program)[0]
            self._programs[key].remove(program)
            if not self._programs[key]:
                del self._programs[key]


class StageMembers:
    """The blocks, parameters and crossing values of each stage: all that the programs so far need.

    They only grow, because stages for one program would have to be built again whenever another one runs.
    """

    def __init__(self, model: nn.Module, devices: Devices) -> None:
        self._model, self._devices = model, devices
        self.find = partial(tensor_of, model)
        self.version = 0  # changes whenever the stages must be built again
        self.blocks: list[dict[nn.Module, str]] = [{} for _ in devices]
        self.owned: list[set[str]] = [set() for _ in devices]
        self._order: list[str] = []
        self._pairs: set[tuple[int, int]] = set()
        self._away: list[list[nn.Parameter]] = [[] for _ in devices]

    def add(self, program: Program) -> bool:
        """Add all that a program needs. Returns whether stages must be built again."""
        if self._order and program.order != self._order:
            raise SplitError(
                f"forward called the split points in the order {program.order}, and before in the order {self._order}; "
                "split at modules that are always called in one order"
            )
        before = [len(entries) for entries in (*self.blocks, *self.owned, self._pairs)]
        for s, part in enumerate(program.parts):
            self.blocks[s].update(part.blocks)
            self.owned[s] |= part.owned
            self._pairs |= {(s, reader) for reader in part.gives}
        has_grown = not self.version or before != [len(entries) for entries in (*self.blocks, *self.owned, self._pairs)]
        self._order = program.order
        self.version += has_grown
        return has_grown

    def build(self, stage_type: type[SplitStage]) -> tuple[list[Stage], Crossing]:
        """The stages, and the bundles that cross between them."""
        # Counted once per stage, however often its blocks contain the module.
        callers = Counter(m for blocks in self.blocks for m in {m for block in blocks for m in block.modules()})
        # A module that several stages call has the parameters of one device at a time, so these stages take turns.
        lock = RLock()
        stages: list[Stage] = []
        for s, (blocks, names, device) in enumerate(zip(self.blocks, self.owned, self._devices, strict=True)):
            shared = any(callers[module] > 1 for block in blocks for module in block.modules())
            turns = lock if shared and any(self._away) else nullcontext()
            # Sorted: ranks number the parameters that they lend in this order, and that of a set differs per process.
            code = InterBlockParameters(self._model, sorted(names))
            stages.append(stage_type(s, blocks, code, device, self._pairs, turns))
        return stages, [(bundle(s, t), s, (t,)) for s, t in sorted(self._pairs)]

    def homes(self, split: Sequence[str]) -> dict[int, int]:
        """The first stage that uses each parameter and buffer, by its id(). Modules that no program has used yet are
        assumed to run in the order in which they were registered."""
        homes: dict[int, int] = {}
        for s, tensors in enumerate(self._tensors()):
            for tensor in tensors:
                homes.setdefault(id(tensor), s)
        stage = 0
        starts = {name: s + 1 for s, name in enumerate(self._order or split)}
        for path, module in named_modules(self._model):
            stage = starts.get(path, stage)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                homes.setdefault(id(tensor), stage)
        return homes

    def place(self, homes: Mapping[int, int]) -> None:
        """Move parameters and buffers to the device of their stage. Those on the meta device stay."""
        map_tensors(self._model, lambda tensor: place_tensor(tensor, self._devices[homes[id(tensor)]]))
        for s, (tensors, device) in enumerate(zip(self._tensors(), self._devices, strict=True)):
            parameters = {id(p): p for p in tensors if isinstance(p, nn.Parameter)}.values()
            self._away[s] = [p for p in parameters if is_elsewhere(p, device, homes[id(p)], s)]

    def programs_of_step(self, chosen: Sequence[Program], *, graph: bool) -> StepPrograms:
        """The programs of a step, with copies of parameters for the stages on other devices than theirs."""
        copies = [_copied(away, device, graph) for away, device in zip(self._away, self._devices, strict=True)]
        return StepPrograms(chosen, copies, chain(*self._away))

    def set_copies(self, stages: Iterable[Stage], choice: StepPrograms) -> dict[int, Tensor]:
        """Give the copies of this step to the stages. Return the original parameter by the id() of its copy."""
        owners: dict[int, Tensor] = {}
        for stage, away, copies in zip(stages, self._away, choice.copies, strict=True):
            cast(SplitStage, stage).set_tied_copies(copies)
            owners.update({id(copies[id(p)]): p for p in away})
        return owners

    def _tensors(self) -> Iterator[list[Tensor]]:
        for blocks, names in zip(self.blocks, self.owned, strict=True):
            yield [*(x for block in blocks for x in (*block.parameters(), *block.buffers())), *map(self.find, names)]


class SplitModel:
    """A model with split points: its programs, and its stages. Raises SplitError for names that are not modules."""

    _stage_type = SplitStage
    _foreign: Collection[str] = frozenset()  # see `Program`

    def __init__(
        self, model: nn.Module, split: Sequence[str], devices: Devices, dims: BatchDims, stated: Reduction | None = None
    ) -> None:
        if any(isinstance(module, Skippable) for module in model.modules()):
            raise SplitError("skippable layers declare the values that cross; leave split= out, and give balance=")
        self.model, self.split, self.devices = model, list(split), list(devices)
        self._dims = dims
        self._stated: Reduction | None = stated
        self._joins: dict[Hashable, OutputJoin] = {}
        self.recordings = 0
        self.latest: Program | None = None
        self.members = StageMembers(model, self.devices)
        self._recorder = self._new_recorder()
        self._programs = ProgramCache(type(model).__name__)

    def _new_recorder(self) -> ForwardRecorder:
        return ForwardRecorder(self.model, self.split, self.devices)

    def choose(
        self, args: Any, kwargs: dict[str, Any], chunks: int, axis: Any, *, check: bool, graph: bool, joins: bool
    ) -> tuple[SplitCall, str | None]:
        """The call for the first stage, with a program for each micro-batch. Programs that are missing are recorded.

        Also returns the reduction of numbers in the output, such as a loss: "mean" by rows, "sum", or None without
        `joins`. `axis` is the axis of the rows, an int or nested as ``(args, kwargs)``. With `check`, new programs are
        compared with the plain forward. With `graph`, copies stay connected with their originals. Raises BatchError if
        the mini-batch cannot be cut or its numbers cannot be combined, SplitError for code that cannot be recorded and
        for programs that compute other values.
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
            program = self._programs.find((settings, keys[rows]), piece, self.members.find)
            if program is None:
                program = self._add_program(unflatten(plan.structure, piece), piece, keys[rows], plan.axes)
                settings = self._settings()  # the first run can have changed some
                recorded[program] = i
            chosen.append(program)
        if check:
            self._verify(chosen, recorded, plan.structure, pieces)
        self.latest = chosen[0]
        scalars = None
        if joins:
            join = self._join_of(_kind(settings, plan.structure, pieces[0]))
            for program in recorded:
                join.add_marks(program.recording)
            scalars = join.reduction(plan, leaves, numbers=chosen[0].recording.has_scalars)
        return SplitCall(self.members.programs_of_step(chosen, graph=graph), args, kwargs), scalars

    def _add_program(self, call: Any, piece: Sequence[Any], shape: Hashable, axes: Sequence[int | None]) -> Program:
        program = self._recorded(call, axes)
        settings = self._settings()
        steps = [(step.name, step.where, id(step.module)) for step in program.recording.steps]
        form = _kind(settings, program.recording.structure, piece), *steps
        if (oldest := self._programs.add((settings, shape), program, form, piece)) is not None:
            self._drop(oldest)
        return program

    def _recorded(self, call: Any, axes: Sequence[int | None]) -> Program:
        """Record a new program for one micro-batch, and prepare the stages for it."""
        self.recordings += 1
        recording = self._recorder.record(*call)
        check_axes(recording, axes, self._dims)
        program = Program(recording, self.devices, self._foreign)
        self._compare(program)
        if self.members.add(program):
            self.place()
        return program

    def _compare(self, program: Program) -> None:
        """Raise SplitError if another process has recorded another program."""

    def _run(self, call: Any, quiet: Quiet) -> tuple[Any, bool]:
        return run_quietly(self._recorder, call, quiet)

    def _verify_on(self, program: Program, call: Any) -> None:
        verify(self._recorder, program, *call)

    def _drop(self, program: Program) -> None:
        self._programs.drop(program)

    def _verify(
        self, chosen: Sequence[Program], recorded: dict[Program, int], structure: Structure, pieces: Sequence[Any]
    ) -> None:
        """Compare new programs with the plain forward, on another micro-batch than the recorded one. If the mini-batch
        has no other, compare on the recorded one now, and again on the next micro-batch."""
        # A few programs of a group are compared for all of it: each has its own recording, and a comparison only shows
        # state that no recording sees. Later changes of such state show in the steps 10, 100, 1,000, ... of a group.
        new = dict.fromkeys(chosen)
        due = [program for program in new if not program.verified and program.group.verified < _ENOUGH]
        for group, program in {program.group: program for program in chosen}.items():
            if group.count_step():
                due += [program] * (program not in due)
        for program in due:
            at = [i for i, of_micro_batch in enumerate(chosen) if of_micro_batch is program]
            other = [i for i in at if i != recorded.get(program)]
            try:
                self._verify_on(program, unflatten(structure, pieces[(other or at)[-1]]))
            # An interrupt too: a program whose comparison did not end must not be trusted.
            except BaseException as error:
                add_advice(error)
                if program.group.steps > 1:
                    error.add_note(f"torchweft: found at step {program.group.steps}, and not at the comparison before")
                self._drop(program)
                program.group.restart()
                raise
            if other:
                program.mark_verified()

    def _settings(self) -> Hashable:
        """State that the code between blocks can depend on in addition to its arguments."""
        seen: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()]
        seen += [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
        # Hooks of open modules are recorded as code between blocks. Their handles have keys that are never reused.
        for module in self._recorder.modules.open:
            seen += [module.training, *map(id, module._modules.values())]
            seen += [*module._forward_hooks, *module._forward_pre_hooks]
        return *seen, self._recorder.state.key()

    def stages(self) -> tuple[list[Stage], Crossing]:
        return self.members.build(self._stage_type)

    def homes(self) -> dict[int, int]:
        return self.members.homes(self.split)

    def place(self) -> None:
        self.members.place(self.homes())

    def _join_of(self, kind: Hashable) -> OutputJoin:
        if kind not in self._joins:
            while len(self._joins) >= PROGRAMS:
                del self._joins[next(iter(self._joins))]
            self._joins[kind] = OutputJoin(self._recorder, self._run, self._dims.outputs, self._stated)
        return self._joins[kind]


def split_of(settings: PipeSettings) -> Any:
    """The split points. Only a pipe with a wrapped model has them, because a layer can be named ``split``."""
    return cast(Any, settings).split


def _cuts(check: Validator, stages: int, places: list[torch.device]) -> Cuts:
    if len(places) != stages:
        points = "1 split point makes" if stages == 2 else f"{stages - 1} split points make"
        check.errors.append(
            PartitionError(
                f"{points} {stages} stages, but there are {len(places)} devices; give {stages} devices, one for each "
                f"stage (one can repeat: devices=['cpu'] * {stages}), or name {len(places) - 1} split points in split="
            )
        )
    return Cuts(stages, [1] * stages, places)


def is_elsewhere(parameter: Tensor, device: torch.device, home: int, stage: int) -> bool:
    """Whether a stage must use a copy of a parameter that an earlier stage has on another device."""
    return home != stage and parameter.device != device and not parameter.is_meta


def _copied(away: Iterable[nn.Parameter], device: torch.device, graph: bool) -> Copies:
    # Under one graph for the whole step, autograd brings gradients to the original itself. Otherwise a copy is a leaf,
    # and the step adds its gradient to the original, once for all micro-batches.
    copies = {id(p): (p if graph else p.detach()).to(device, copy=True) for p in away}
    return copies if graph else {id(p): copies[id(p)].requires_grad_(p.requires_grad) for p in away}


def _kind(settings: Hashable, structure: Structure, leaves: Sequence[Any]) -> Hashable:
    """The kind of a call. Calls that differ only in sizes have the same kind."""
    kinds = [(x.dtype, x.dim()) if isinstance(x, Tensor) else cast("type[Any]", type(x)) for x in leaves]
    return settings, structure, *kinds


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad, leaf.device
    # The type too, because 1 == True. Other objects count by identity: their contents could change unnoticed.
    return cast("type[Any]", type(leaf)), leaf if isinstance(leaf, PLAIN) else id(leaf)


def _broadcast_whole(call: Arguments, axis: Any) -> Arguments:
    """Wrap tensors with one row in `NoChunk` if others have more, such as one mask for all rows."""
    leaves, structure = flatten(call)
    pairs = zip(leaves, broadcast_prefix(axis, structure), strict=True)
    rows: list[int] = [x.shape[k] if isinstance(x, Tensor) and k is not None and x.dim() > k else 0 for x, k in pairs]
    if 1 not in rows or max(rows) == 1:
        return call
    return unflatten(structure, [NoChunk(x) if count == 1 else x for x, count in zip(leaves, rows, strict=True)])


def _checked_model(module: Any, split: Any, balance: Any, verify: Any) -> nn.Module:
    """Return `module`. Raises SpecError if it is not an `nn.Module`, UsageError that lists every invalid argument."""
    if not isinstance(module, nn.Module):
        raise SpecError(f"Pipe takes a model, an nn.Module, but this is {type(module).__name__}")
    reject_lazy(module)
    names = cast("list[Any]", split) if isinstance(split, list | tuple) else []
    named = bool(names) and all(isinstance(name, str) for name in names)
    with Validator("these arguments of Pipe do not fit together") as check:
        check.require(split == "auto" or named, f"split is {split!r}; give 'auto', or a list of names of submodules")
        check.require(not named or len(set(names)) == len(names), f"split is {split!r}, with a name twice")
        check.require(balance is None, "balance cannot be given with split; it counts the layers of an nn.Sequential")
        check.boolean("verify", verify)
    return module
