"""An ordinary model, cut at named modules: its programs, which one a micro-batch runs, and the stages that run them.

    mini-batch --> micro-batches --> key (structure, shapes, arguments, flags) --> guards on inputs --> program
                                       |                                                              |
                                       +-- none there: record, verify on another micro-batch  <-------+

Stages keep one wiring for all programs: what goes from stage s to stage t for one micro-batch is one bundle.
"""

import warnings
from collections.abc import Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.core.errors import BatchError, SplitError
from weft.core.pytree import flatten, register_dataclasses, spread, unflatten
from weft.core.segment import MicroBatchContext
from weft.pipeline.microbatch import NoChunk, micro_sizes, plan_split
from weft.pipeline.skip import Skippable
from weft.pipeline.split.program import OpenCode, Program, Ref, Values
from weft.pipeline.split.record import PLAIN, ForwardRecorder, named_modules
from weft.pipeline.split.verify import verify
from weft.pipeline.stage import ModuleScan, Skip, Stage

PROGRAMS = 64
"""How many programs a pipe keeps; the least recently used one goes first."""

_TABLES = len(vars(nn.Module()))  # attributes that every module begins with
_MOST = 64  # entries of a list or dict among a module's attributes that are compared

Copies = dict[int, Tensor]
"""By the id() of a parameter that an earlier stage has on another device: its copy on this stage's, for one step."""


class Choice:
    """What one step runs: a program per micro-batch, and copies of parameters for each stage.

    It goes from stage to stage beside the values, so a recomputation finds what its forward found.
    """

    __slots__ = ("copies", "programs")

    def __init__(self, programs: Sequence[Program], copies: Sequence[Copies]) -> None:
        self.programs, self.copies = programs, copies

    @property
    def lent(self) -> list[Tensor]:
        """All copies: trainable tensors that stages work with and do not have."""
        return [copy for copies in self.copies for copy in copies.values()]


class SplitCall(NamedTuple):
    """The main value of the first stage."""

    choice: Choice
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SplitStage(Stage):
    """A stage that runs its share of a program instead of a chain of layers."""

    def __init__(
        self,
        index: int,
        blocks: dict[nn.Module, str],
        code: OpenCode,
        device: torch.device,
        pairs: set[tuple[int, int]],
    ) -> None:
        layers = [(name, block) for block, name in blocks.items()]
        popped = [_skip(*pair) for pair in sorted(pairs) if pair[1] == index]
        stashed = [_skip(*pair) for pair in sorted(pairs) if pair[0] == index]
        super().__init__(index, [*layers, ("the code between blocks", code)], device, popped, stashed)
        self.code, self.copies = code, Copies()
        self._copies_input = False

    def _tracked(self, visit: MicroBatchContext, main: Any, skips: Any) -> tuple[Any, dict[Skip, Any]]:
        choice: Choice = main if self.index else main.choice
        program = choice.programs[visit.micro_batch]
        part = program.parts[self.index]
        values: Values = {}
        if not self.index:
            values = {Ref("in", k): leaf for k, leaf in enumerate(flatten((main.args, main.kwargs))[0])}
        for source, refs in part.takes.items():
            values.update(zip(refs, skips[_skip(source, self.index)], strict=True))
        stashed: dict[Skip, Any] = dict.fromkeys(self.stashed, ())
        with self._substituted(choice.copies[self.index]):
            values = program.run(self.index, values, self.code.get)
            for reader, refs in part.gives.items():
                stashed[_skip(self.index, reader)] = tuple(values[ref] for ref in refs)
            last = self.index == program.stages - 1
            return (program.result(values, self.code.get) if last else choice), stashed

    def survey(self) -> ModuleScan:
        """As of any stage, with copies in the place of parameters that another device owns."""
        self.code.refresh()
        with self._substituted(self.copies):
            return super().survey()

    @contextmanager
    def _substituted(self, copies: Copies) -> Generator[None]:
        """Let the stage's modules have these copies."""
        modules = [module for _, layer in self.layers for module in layer.modules()] if copies else []
        before = [(m, k, p) for m in modules for k, p in m._parameters.items() if p is not None and id(p) in copies]
        try:
            for module, key, parameter in before:
                module._parameters[key] = cast(nn.Parameter, copies[id(parameter)])
            yield
        finally:
            for module, key, parameter in before:
                module._parameters[key] = parameter


class SplitModel:
    """A model with split points: its programs, and its stages. Raises SplitError for names that are no modules."""

    def __init__(self, model: nn.Module, split: Sequence[str], devices: Sequence[torch.device]) -> None:
        if any(isinstance(each, Skippable) for each in model.modules()):
            raise SplitError("skippable layers say themselves what crosses; leave split= out, and give balance=")
        self.model, self.split, self.devices = model, list(split), list(devices)
        self.recordings = 0
        self.layout = 0  # changes whenever stages have to be built anew
        self.latest: Program | None = None
        self.blocks: list[dict[nn.Module, str]] = [{} for _ in devices]
        self._recorder = ForwardRecorder(model, split, devices)
        self._programs: dict[Hashable, list[Program]] = {}  # the one that was used least recently comes first
        self._churns = False
        self._order: list[str] = []
        self._owned: list[set[str]] = [set() for _ in devices]
        self._pairs: set[tuple[int, int]] = set()
        self._away: list[list[nn.Parameter]] = [[] for _ in devices]
        self._code = OpenCode(model, ())

    # -- which program -------------------------------------------------------------------------------------------------

    def choose(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int, axis: Any, *, check: bool, graph: bool
    ) -> SplitCall:
        """The call as the first stage gets it, with a program for each micro-batch; recorded where there is none.

        `axis` holds the rows: an int, or nested as ``(args, kwargs)``. `check`: compare new programs with the plain
        forward. `graph`: copies stay connected with their originals.
        Raises BatchError when the mini-batch cannot be cut, SplitError for what cannot be recorded or differs.
        """
        register_dataclasses((args, kwargs))
        args, kwargs = _broadcast_whole((args, kwargs), axis)
        plan, leaves = plan_split((args, kwargs), chunks, axis=axis)
        pieces = plan.split(leaves)
        self._code.refresh()
        settings = self._settings()
        keys: dict[int, Hashable] = {}
        chosen: list[Program] = []
        recorded: dict[Program, int] = {}
        for i, (rows, piece) in enumerate(zip(plan.sizes, pieces, strict=True)):
            if rows not in keys:
                keys[rows] = (plan.structure, *map(_leaf_key, piece))
            program = self._found((settings, keys[rows]), piece)
            if program is None:
                program = self._record(unflatten(plan.structure, piece), piece, keys[rows])
                settings = self._settings()  # a first run may set some
                recorded[program] = i
            chosen.append(program)
        if check and not all(program.verified for program in chosen):
            self._verify(chosen, [unflatten(plan.structure, piece) for piece in pieces], recorded)
        self.latest = chosen[0]
        copies = [_copied(away, device, graph) for away, device in zip(self._away, self.devices, strict=True)]
        return SplitCall(Choice(tuple(chosen), copies), args, kwargs)

    def _found(self, key: Hashable, piece: Sequence[Any]) -> Program | None:
        found = next((each for each in self._programs.get(key, ()) if each.fits(piece, self._code.get)), None)
        if found is not None and len(self._programs) > 1:
            self._programs[key] = self._programs.pop(key)
        return found

    def _record(self, call: Any, piece: Sequence[Any], shape: Hashable) -> Program:
        self.recordings += 1
        program = Program(self._recorder.record(*call), self.devices)
        program.anchors = [x for x in piece if not isinstance(x, Tensor)]  # while it lives, their ids stay theirs
        if self._order and program.order != self._order:
            raise SplitError(
                f"forward called the split points in the order {program.order}, and before in the order {self._order}; "
                "split at modules that are always called in one order"
            )
        self._order = program.order
        self._extend(program)
        self._programs.setdefault((self._settings(), shape), []).append(program)
        if sum(map(len, self._programs.values())) > PROGRAMS:
            key = next(iter(self._programs))
            self._drop(self._programs[key][0])
            if not self._churns:
                self._churns = True
                warnings.warn(
                    f"more than {PROGRAMS} programs of {type(self.model).__name__} were recorded, and old ones are "
                    "dropped: shapes, arguments, or what the code between blocks reads out of its inputs change at "
                    "nearly every step, and each change costs some forwards. Pad to a few lengths, give numbers that "
                    "change as tensors without dimensions, or move such decisions into a submodule",
                    stacklevel=2,
                )
        return program

    def _drop(self, program: Program) -> None:
        kept = {key: [each for each in programs if each is not program] for key, programs in self._programs.items()}
        self._programs = {key: programs for key, programs in kept.items() if programs}

    def _verify(self, chosen: Sequence[Program], calls: Sequence[Any], recorded: dict[Program, int]) -> None:
        """Compare new programs with the plain forward: on another micro-batch than the recorded one. If there is
        none, on that one now, and again on the next one that comes."""
        for program in dict.fromkeys(each for each in chosen if not each.verified):
            at = [i for i, each in enumerate(chosen) if each is program]
            other = [i for i in at if i != recorded.get(program)]
            try:
                args, kwargs = calls[(other or at)[-1]]
                verify(self._recorder, program, args, kwargs, self._code)
            except BaseException:
                self._drop(program)
                raise
            program.verified = bool(other)

    def _settings(self) -> Hashable:
        """What the code between blocks may go by besides its arguments."""
        seen: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()]
        seen += [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
        configs: dict[int, Any] = {}
        for module in self._recorder.open:
            seen += [module.training, *map(id, module._modules.values())]
            seen += [*module._forward_hooks, *module._forward_pre_hooks]
            held = vars(module)
            seen += [(key, _comparable(value)) for key, value in islice(held.items(), _TABLES, None)]
            configs[id(held.get("config"))] = held.get("config")
        return (*seen, *(_comparable(x) for each in configs.values() for x in getattr(each, "__dict__", {}).values()))

    # -- where it runs -------------------------------------------------------------------------------------------------

    def _extend(self, program: Program) -> None:
        """Let the stages have what this program needs."""
        before = [len(each) for each in (*self.blocks, *self._owned, self._pairs)]
        for s, part in enumerate(program.parts):
            self.blocks[s].update(program.blocks(s))
            self._owned[s] |= program.owned(s)
            self._pairs |= {(s, reader) for reader in part.gives}
        if not self.layout or before != [len(each) for each in (*self.blocks, *self._owned, self._pairs)]:
            self.layout += 1
            self._code = OpenCode(self.model, set[str]().union(*self._owned))
            self.place()

    def stages(self) -> tuple[list[Stage], list[tuple[Skip, int, tuple[int, ...]]]]:
        """The stages, and the bundles that cross between them, as `Runtime` takes them."""
        codes = [OpenCode(self.model, names) for names in self._owned]
        parts = enumerate(zip(self.blocks, codes, self.devices, strict=True))
        made = [SplitStage(s, blocks, code, device, self._pairs) for s, (blocks, code, device) in parts]
        return list(made), [(_skip(s, t), s, (t,)) for s, t in sorted(self._pairs)]

    def homes(self) -> dict[int, int]:
        """By the id() of each parameter and buffer, the first stage that uses it. What no program has used yet is taken
        to run in the order in which modules were registered."""
        found: dict[int, int] = {}
        for s, blocks in enumerate(self.blocks):
            used = [each for block in blocks for each in (*block.parameters(), *block.buffers())]
            for each in (*used, *map(self._code.get, self._owned[s])):
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
        moved: dict[int, Tensor] = {}
        for module in self.model.modules():
            for table in cast("list[dict[str, Any]]", [module._parameters, module._buffers]):
                for key, each in table.items():
                    device = self.devices[homes[id(each)]]
                    if each is None or each.is_meta or each.device == device:
                        continue
                    if isinstance(each, nn.Parameter):
                        each.data = each.data.to(device)
                    else:
                        table[key] = moved.setdefault(id(each), each.to(device))
        self._code.refresh()
        for s, blocks in enumerate(self.blocks):
            used = [p for block in blocks for p in block.parameters()]
            used += [p for p in map(self._code.get, self._owned[s]) if isinstance(p, nn.Parameter)]
            away = {id(p): p for p in used if is_elsewhere(p, self.devices[s], homes[id(p)], s)}
            self._away[s] = list(away.values())

    def prepare(self, stages: Iterable[Stage], call: SplitCall) -> dict[int, Tensor]:
        """Let the stages work with the copies of this call, for its survey. By the id() of a copy, whose it is."""
        owners: dict[int, Tensor] = {}
        for stage, away, copies in zip(stages, self._away, call.choice.copies, strict=True):
            cast(SplitStage, stage).copies = copies
            owners.update({id(copies[id(p)]): p for p in away})
        return owners

    def scalars(self, call: SplitCall, chunks: int) -> str:
        """How numbers per micro-batch in the output, such as a loss, are combined: "mean" by rows, or "sum".

        Raises BatchError where the model's loss is a mean over tokens of which some do not count (-100), so that
        neither is right.
        """
        items, labels = call.kwargs.get("num_items_in_batch"), call.kwargs.get("labels")
        if (items.value if isinstance(items, NoChunk) else items) is not None:
            return "sum"
        if call.choice.programs[0].recording.scalars and isinstance(labels, Tensor) and labels.dim() > 1:
            _refuse_uneven(labels, micro_sizes(len(labels), chunks))
        return "mean"


def is_elsewhere(parameter: Tensor, device: torch.device, home: int, stage: int) -> bool:
    """Whether a stage has to work with a copy of a parameter that an earlier stage has on another device."""
    return home != stage and parameter.device != device and not parameter.is_meta


def _copied(away: Iterable[nn.Parameter], device: torch.device, graph: bool) -> Copies:
    if graph:
        return {id(p): p.to(device, copy=True) for p in away}
    return {id(p): p.detach().to(device, copy=True).requires_grad_(p.requires_grad) for p in away}


def _refuse_uneven(labels: Tensor, rows: Sequence[int]) -> None:
    if len(rows) < 2 or not bool((labels == -100).any()):
        return
    counts = labels != -100
    for seen in (counts, counts[:, 1:]):  # as they are, and as a causal model shifts them
        parts = zip(cast("Sequence[Tensor]", seen.flatten(1).split(list(rows))), rows, strict=True)
        means = [part.sum().item() / size for part, size in parts]
        if max(means) - min(means) > 1e-9:
            raise BatchError(
                f"labels have -100 in unequal numbers: {[round(each, 2) for each in means]} tokens a row count in the "
                "micro-batches, but the model's loss is a mean over the tokens that it sees, so micro-batches' losses "
                "would not make that of the mini-batch. Give num_items_in_batch=(labels[:, 1:] != -100).sum() (without "
                "[:, 1:] where the model does not shift) if the model takes it; or leave labels out, and compute the "
                "loss of the logits"
            )


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
    axes = list(zip(leaves, spread(axis, structure), strict=True))
    whole = [not isinstance(x, Tensor) or k is None or x.dim() <= k for x, k in axes]
    rows: list[int] = [0 if skip else x.shape[k] for (x, k), skip in zip(axes, whole, strict=True)]
    if 1 not in rows or max(rows) == 1:
        return call
    return unflatten(structure, [NoChunk(x) if count == 1 else x for x, count in zip(leaves, rows, strict=True)])


def _skip(source: int, reader: int) -> Skip:
    return None, f"{source} to {reader}"
