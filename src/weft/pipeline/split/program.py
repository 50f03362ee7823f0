"""A recording, laid over stages: what each stage runs, and which values cross from where to whom.

recording    %0 %1 %2 | %3 %4 | %5 %6         cuts: before the first step of a split point
stage           0        1       2
crossing     %1: 0 -> (1, 2)                  a value goes straight from its source to each stage that reads it
made anew    %2 = mask(in1)                   of inputs alone, and larger than they: stages 1 and 2 make it again
prelude      guards that inputs answer        asked before a step begins; they choose between programs
"""

from bisect import bisect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.core.errors import GuardError, InPlaceError, SplitError
from weft.core.pytree import LEAF, Structure, flatten, unflatten
from weft.core.rng import NextLayer
from weft.core.segment import MicroBatchContext
from weft.pipeline.stage import ModuleScan, Skip, Stage


class Ref(NamedTuple):
    """Where a value comes from: "in" with the number of an input leaf, "v" with the number of a value that was made,
    "own" with the name of a parameter or buffer, "const" with the tensor itself."""

    kind: str
    key: Any


HERE = object()
"""Stands among the constants of a step for the device of the stage that runs it."""


@dataclass(eq=False)
class Step:
    """One instruction. `leaves` are those of its arguments, with None where `reads` says where the value comes from.

    The arguments are `leaves` in order, the last of them by `names`; or nested as `structure` says, if it is set.
    """

    name: str
    call: Callable[..., Any]
    leaves: list[Any]
    reads: list[tuple[int, Ref]] = field(default_factory=list[tuple[int, Ref]])
    names: tuple[str, ...] = ()
    structure: Structure | None = None
    where: str = ""  # file and line of the user's code
    module: nn.Module | None = None
    makes: list[int | None] = field(default_factory=list[int | None])  # by the leaves of the result, then by `writes`
    # Leaves of a block's result that Python may go by, and shapes of result leaves that it went by:
    plain: list[tuple[int, Any]] = field(default_factory=list[tuple[int, Any]])
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    expects: tuple[Any] | None = None  # the answer of a guard
    writes: list[int] = field(default_factory=list[int])  # which argument leaves it wrote into
    stored: set[int] = field(default_factory=set[int])  # the storages that it wrote into
    draws: bool = False
    dynamic: bool = False  # the shape of its result depends on data
    grad: bool | None = None  # another grad mode than that of the whole call
    casts: tuple[tuple[str, torch.dtype, bool], ...] = ()  # another autocast than that of the whole call

    def arguments(self, leaves: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        if self.structure is not None:
            return unflatten(self.structure, leaves)
        count = len(leaves) - len(self.names)
        return leaves[:count], dict(zip(self.names, leaves[count:], strict=True))

    def run(self, leaves: list[Any]) -> Any:
        args, kwargs = self.arguments(leaves)
        if self.grad is None and not self.casts:
            return self.call(*args, **kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() if self.grad is None else self.grad), ExitStack() as stack:
            for kind, dtype, enabled in self.casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            return self.call(*args, **kwargs)

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


@dataclass
class Recording:
    """What one run of forward() did."""

    steps: list[Step] = field(default_factory=list[Step])
    cuts: dict[str, int] = field(default_factory=dict[str, int])  # split point -> the first step at or after its call
    leaves: list[Any] = field(default_factory=list[Any])  # of the result, as those of a step's arguments
    reads: list[tuple[int, Ref]] = field(default_factory=list[tuple[int, Ref]])
    structure: Structure = LEAF
    has_scalars: bool = False  # whether a leaf of the result is one number per micro-batch
    # Read after a write through another tensor: who made it, and who wrote it (-1: an input).
    aliases: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    sizes: dict[Ref, int] = field(default_factory=dict[Ref, int])  # bytes of inputs and values
    storages: dict[Ref, int] = field(default_factory=dict[Ref, int])
    inputs: list[str] = field(default_factory=list[str])  # names of the leaves of the arguments
    values: dict[int | None, Any] = field(default_factory=dict[int | None, Any])  # all, if they were to be kept


Values = dict[Ref, Any]
Owned = Callable[[str], Tensor]
"""The parameter or buffer of that name."""


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that name, as the model has it now."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return cast(Tensor, module._parameters[key] if key in module._parameters else module._buffers[key])


class OpenCode(nn.Module):
    """The parameters and buffers of the model that the code between blocks of one stage reads."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self._sources = {name: partial(tensor_of, model, name) for name in names}
        modules = {model.get_submodule(name.rpartition(".")[0]) for name in names}
        generators = [each for m in modules for each in vars(m).values() if type(each) is torch.Generator]
        vars(self).update({f"generator{id(each)}": each for each in generators})  # where a scan finds them
        self.refresh()

    def refresh(self) -> None:
        """Take the tensors that the model has now."""
        for name, find in self._sources.items():
            each = find()
            (self._parameters if isinstance(each, nn.Parameter) else self._buffers)[name] = cast(Any, each)

    def get(self, name: str) -> Tensor:
        return cast(Tensor, self._parameters[name] if name in self._parameters else self._buffers[name])


class CrossingValue(NamedTuple):
    """A value that goes from one stage to others: `bytes` for one micro-batch, and which stages read it."""

    name: str
    bytes: int
    source: int
    readers: tuple[int, ...]


@dataclass(eq=False)
class Part:
    """One stage's share of a program. `takes` and `gives` are by the stage at the other end."""

    steps: list[tuple[int, Step, list[Any]]] = field(default_factory=list[tuple[int, Step, list[Any]]])  # by number
    takes: dict[int, list[Ref]] = field(default_factory=dict[int, list[Ref]])
    gives: dict[int, list[Ref]] = field(default_factory=dict[int, list[Ref]])
    clones: set[Ref] = field(default_factory=set[Ref])  # that come in, and are written into here
    done: dict[int, list[Ref]] = field(default_factory=dict[int, list[Ref]])  # after which step nobody here needs them


class Program:
    """What stages run for micro-batches of one key. It holds no tensor but constants of the model's code.

    Raises SplitError where a stage would be empty or an object would hide tensors, InPlaceError for a write through a
    view into a tensor of another stage.
    """

    def __init__(self, recording: Recording, devices: Sequence[torch.device]) -> None:
        self.recording = recording
        self.verified = False
        self.anchors: Sequence[Any] = ()
        self.order = sorted(recording.cuts, key=recording.cuts.__getitem__)
        self.parts = [Part() for _ in devices]
        self._device = list(devices) if len(set(devices)) > 1 else None
        steps = recording.steps
        starts = [0, *(recording.cuts[name] for name in self.order)]
        for name, start, before in zip(self.order, starts[1:], starts, strict=False):
            if start == before:
                where = "forward begins with it" if not start else "another split point comes right before it"
                raise SplitError(f"nothing would run in the stage before {name!r}, for {where}; leave it out of split")
        self._stage_at = [bisect(starts, k) - 1 for k in range(len(steps))]
        self._maker = {value: k for k, step in enumerate(steps) for value in step.makes if value is not None}
        self._sizes, self._storages = recording.sizes, recording.storages
        self._written = {storage for step in steps for storage in step.stored}
        self._check_writes()
        members = [{k for k, at in enumerate(self._stage_at) if at == s} for s in range(len(devices))]
        self.prelude = self._prelude(members)
        crossing = self._readers(members)
        for s, part in enumerate(self.parts):
            self._fill(s, part, sorted(members[s]), crossing)
        self.routes = [
            CrossingValue(self._name(ref), self._sizes.get(ref, 0), self._source(ref), tuple(readers))
            for ref, readers in crossing.items()
        ]

    def _check_writes(self) -> None:
        """Stages work on several micro-batches at one time, so what one writes into must be its own."""
        steps = self.recording.steps
        for made, written in self.recording.aliases:
            if self._stage_at[max(made, 0)] != self._stage_at[max(written, 0)]:
                raise InPlaceError(
                    f"{steps[written]} writes through a view into a tensor of another stage "
                    f"({self._stage_at[max(made, 0)]}), which is read afterwards; use the out-of-place form there, or "
                    "split elsewhere"
                )
        readers: dict[Ref, set[int]] = {}
        for s, step in zip(self._stage_at, steps, strict=True):
            for _, ref in step.reads:
                readers.setdefault(ref, set()).add(s)
        for step in steps:
            for k, ref in step.reads:
                if ref.kind == "own" and k in step.writes and len(readers[ref]) > 1:
                    raise InPlaceError(
                        f"{step} writes into {ref.key!r}, which the code between blocks of several stages "
                        f"{readers[ref]} uses; use it in one submodule, or split elsewhere"
                    )

    def _prelude(self, members: Sequence[set[int]]) -> list[Step]:
        """The guards that inputs alone answer, with what they need. Those that also need parameters or buffers, which a
        step may change, are asked again in their stage."""
        ahead: set[int] = set()
        for k, step in enumerate(self.recording.steps):
            guards = step.expects is not None or (step.shapes and step.dynamic)
            if guards and (found := self._from_inputs(k, own=True)) is not None:
                ahead |= found
                if step.expects is not None and self._from_inputs(k) is not None:
                    members[self._stage_at[k]].discard(k)
        return [self.recording.steps[k] for k in sorted(ahead)]

    def _from_inputs(self, last: int, *, own: bool = False) -> set[int] | None:
        """The steps up to this one that make its result of inputs (and `own` parameters) alone, always the same way."""
        found: set[int] = set()
        todo = [last]
        while todo:
            k = todo.pop()
            if k in found:
                continue
            step = self.recording.steps[k]
            pure = step.module is None and not (step.writes or step.draws)
            if not pure or any(self._storages.get(Ref("v", value)) in self._written for value in step.makes):
                return None
            found.add(k)
            for _, ref in step.reads:
                if ref.kind == "v":
                    todo.append(self._maker[ref.key])
                elif (ref.kind == "own" and not own) or (ref.kind == "in" and self._storages.get(ref) in self._written):
                    return None
        return found

    def _readers(self, members: Sequence[set[int]]) -> dict[Ref, list[int]]:
        """Every value that crosses, with its readers. Adds to `members` what a stage makes anew."""
        steps, crossing = self.recording.steps, dict[Ref, list[int]]()
        for s in range(1, len(members)):
            takes: dict[Ref, None] = {}
            reads = [read for k in sorted(members[s]) for read in steps[k].reads] + self._leaves_at(s)
            for _, ref in reads:
                here = ref.kind in ("own", "const") or (ref.kind == "v" and self._maker[ref.key] in members[s])
                if here or ref in takes:
                    continue
                again = self._from_inputs(self._maker[ref.key]) if ref.kind == "v" else None
                inputs = {r for k in again or () for _, r in steps[k].reads if r.kind == "in"}
                if again is not None and sum(self._sizes.get(r, 0) for r in inputs - takes.keys()) < self._sizes[ref]:
                    members[s].update(again)
                    takes.update(dict.fromkeys(sorted(inputs)))
                else:
                    takes[ref] = None
            for ref in takes:
                crossing.setdefault(ref, []).append(s)
        return crossing

    def _leaves_at(self, stage: int) -> list[tuple[int, Ref]]:
        """What forward() returns, if that is the stage which does."""
        return self.recording.reads if stage == len(self.parts) - 1 else []

    def _source(self, ref: Ref) -> int:
        return self._stage_at[self._maker[ref.key]] if ref.kind == "v" else 0

    def _fill(self, stage: int, part: Part, members: Sequence[int], crossing: Mapping[Ref, Sequence[int]]) -> None:
        """What a stage runs, takes, gives, clones and drops."""
        for ref, readers in crossing.items():
            source = self._source(ref)
            if stage in readers:
                part.takes.setdefault(source, []).append(ref)
            for reader in readers if stage == source else ():
                part.gives.setdefault(reader, []).append(ref)
        last: dict[Ref, int] = {}
        stored: set[int] = set()
        for position, k in enumerate(members):
            step = self.recording.steps[k]
            leaves = [self._device[stage] if self._device and leaf is HERE else leaf for leaf in step.leaves]
            part.steps.append((k, step, leaves))
            stored |= step.stored
            last.update({ref: position for _, ref in step.reads if ref.kind in ("in", "v")})
            last.update({Ref("v", value): position for value in step.makes if value is not None})
        stays = {ref for refs in part.gives.values() for ref in refs} | {ref for _, ref in self._leaves_at(stage)}
        for ref, position in last.items():
            if ref not in stays:
                part.done.setdefault(position, []).append(ref)
        comes = [ref for refs in part.takes.values() for ref in refs]
        comes += [ref for ref in last if ref.kind == "in" and not stage]
        part.clones = {ref for ref in comes if self._storages.get(ref) in stored}

    def _name(self, ref: Ref) -> str:
        if ref.kind == "in":
            return f"input {self.recording.inputs[ref.key]}"
        step = self.recording.steps[self._maker[ref.key]]
        return f"{step}[{step.makes.index(ref.key)}]" if len(step.makes) > 1 else str(step)

    def blocks(self, stage: int) -> dict[nn.Module, str]:
        return {step.module: step.name for _, step, _ in self.parts[stage].steps if step.module is not None}

    def owned(self, stage: int) -> set[str]:
        """The parameters and buffers that the code between blocks of a stage reads."""
        steps = [step for _, step, _ in self.parts[stage].steps] + self.prelude * (stage == 0)
        reads = [read for step in steps for read in step.reads] + self._leaves_at(stage)
        return {ref.key for _, ref in reads if ref.kind == "own"}

    def fits(self, leaves: Sequence[Any], owned: Owned) -> bool:
        """Whether forward() would go the way of this program for these inputs, as far as they tell."""
        if not self.prelude:
            return True
        values: Values = {Ref("in", k): leaf for k, leaf in enumerate(leaves)}
        with suppress(GuardError), torch.no_grad():
            for step in self.prelude:
                self.perform(step, step.leaves, values, owned)
            return True
        return False

    def run(self, stage: int, values: Values, owned: Owned, next_layer: NextLayer = None) -> Values:
        """Run one stage on what comes in. Returns the values that it has at its end. Layers, which have random numbers
        of their own, are blocks, and steps that draw."""
        part = self.parts[stage]
        device = None if self._device is None else self._device[stage]
        for ref in part.clones:
            values[ref] = values[ref].clone()
        for position, (number, step, leaves) in enumerate(part.steps):
            try:
                if next_layer is not None and (step.draws or step.module is not None):
                    next_layer(number)
                self.perform(step, leaves, values, owned, device)
            except BaseException as error:
                what = f"block {step.name!r}" if step.module is not None else str(step)
                error.add_note(f"weft: in {what} of stage {stage}")
                raise
            for ref in part.done.get(position, ()):
                values.pop(ref, None)
        return values

    @staticmethod
    def perform(
        step: Step, constants: Sequence[Any], values: Values, owned: Owned, device: torch.device | None = None
    ) -> None:
        """Run one step on what is in `values`, and put there what it makes. Raises GuardError."""
        leaves = _filled(constants, step.reads, values, owned)
        if device is not None:
            leaves = [moved(x, device) for x in leaves]
        result = step.run(leaves)
        if step.expects is not None:
            _agree(step, step.expects[0], result)
            return
        made = [result] if type(result) is Tensor else flatten(result)[0]
        if step.writes:
            made = [*made, *(leaves[k] for k in step.writes)]
        if len(made) != len(step.makes):
            _agree(step, f"{len(step.makes)} values", f"{len(made)} values")
        for k, shape in step.shapes.items():
            _agree(step, shape, tuple(made[k].shape))
        for k, plain in step.plain:
            _agree(step, plain, made[k])
        values.update((Ref("v", value), x) for value, x in zip(step.makes, made, strict=True) if value is not None)

    def replay(self, leaves: Sequence[Any], owned: Owned) -> Any:
        """Run all stages, one after the other, on the leaves of the arguments."""
        values: Values = {Ref("in", k): leaf for k, leaf in enumerate(leaves)}
        sent: list[Values] = [{} for _ in self.parts]
        for s, part in enumerate(self.parts):
            values = self.run(s, values if s == 0 else sent[s], owned)
            for reader, refs in part.gives.items():
                sent[reader].update({ref: values[ref] for ref in refs})
        return self.result(values, owned)

    def result(self, values: Values, owned: Owned) -> Any:
        """What forward() returns, of the values that the last stage has."""
        return unflatten(self.recording.structure, _filled(self.recording.leaves, self.recording.reads, values, owned))


def _filled(constants: Sequence[Any], reads: Iterable[tuple[int, Ref]], values: Values, owned: Owned) -> list[Any]:
    """The constants, with what is read in their places."""
    leaves = list(constants)
    for k, ref in reads:
        leaves[k] = ref.key if ref.kind == "const" else owned(ref.key) if ref.kind == "own" else values[ref]
    return leaves


def moved(leaf: Any, device: torch.device) -> Any:
    """An argument on the device of a stage; tensors without dimensions may lie anywhere."""
    return leaf.to(device) if isinstance(leaf, Tensor) and leaf.dim() and leaf.device != device else leaf


def _agree(step: Step, before: Any, now: Any) -> None:
    """Raise GuardError if Python would see something else than when the step was recorded."""
    if type(now) is not type(before) or now != before:
        raise GuardError(
            f"the model's code between blocks went by {step}, which gave {before!r} when recorded and {now!r} now, so "
            "forward() might go another way; move that decision into a submodule, which may decide as it likes"
        )


Copies = dict[int, Tensor]
"""By the id() of a parameter that an earlier stage has on another device: its copy on this stage's, for one step."""


class Choice:
    """What one step runs: a program per micro-batch, and copies of parameters for each stage.

    It goes from stage to stage beside the values, so a recomputation finds what its forward found. `lent` are the
    copies and their originals: trainable tensors that a stage may work with, whatever its modules have just now.
    """

    __slots__ = ("copies", "lent", "programs")

    def __init__(self, programs: Sequence[Program], copies: Sequence[Copies], originals: Iterable[Tensor]) -> None:
        self.programs, self.copies = programs, copies
        self.lent = [*originals, *(copy for each in copies for copy in each.values())]


class SplitCall(NamedTuple):
    """The main value of the first stage."""

    choice: Choice
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SplitStage(Stage):
    """A stage that runs its share of a program instead of a chain of layers. `turns` is entered while it has copies of
    parameters in the place of modules that other stages call as well."""

    def __init__(
        self,
        index: int,
        blocks: dict[nn.Module, str],
        code: OpenCode,
        device: torch.device,
        pairs: set[tuple[int, int]],
        turns: AbstractContextManager[object],
    ) -> None:
        layers = [(name, block) for block, name in blocks.items()]
        popped = [bundle(*pair) for pair in sorted(pairs) if pair[1] == index]
        stashed = [bundle(*pair) for pair in sorted(pairs) if pair[0] == index]
        super().__init__(index, [*layers, ("the code between blocks", code)], device, popped, stashed)
        self.code, self.turns, self.copies = code, turns, Copies()
        self._copies_input = False

    def _tracked(
        self, context: MicroBatchContext, main: Any, skips: Any, next_layer: NextLayer
    ) -> tuple[Any, dict[Skip, Any]]:
        choice: Choice = main if self.index else main.choice
        program = choice.programs[context.micro_batch]
        part = program.parts[self.index]
        values: Values = {}
        if not self.index:
            values = {Ref("in", k): leaf for k, leaf in enumerate(flatten((main.args, main.kwargs))[0])}
        for source, refs in part.takes.items():
            values.update(zip(refs, skips[bundle(source, self.index)], strict=True))
        stashed: dict[Skip, Any] = dict.fromkeys(self.stashed, ())
        with self._substituted(choice.copies[self.index]):
            values = program.run(self.index, values, self.code.get, next_layer)
            for reader, refs in part.gives.items():
                stashed[bundle(self.index, reader)] = tuple(values[ref] for ref in refs)
            last = self.index == len(program.parts) - 1
            return (program.result(values, self.code.get) if last else choice), stashed

    def scan(self) -> ModuleScan:
        """As of any stage, with copies in the place of parameters that another device owns."""
        self.code.refresh()
        with self._substituted(self.copies):
            return super().scan()

    @contextmanager
    def _substituted(self, copies: Copies) -> Generator[None]:
        """Let the stage's modules have these copies."""
        with self.turns:
            modules = [module for _, layer in self.layers for module in layer.modules()] if copies else []
            before = [(m, k, p) for m in modules for k, p in m._parameters.items() if p is not None and id(p) in copies]
            try:
                for module, key, parameter in before:
                    module._parameters[key] = cast(nn.Parameter, copies[id(parameter)])
                yield
            finally:
                for module, key, parameter in before:
                    module._parameters[key] = parameter


def bundle(source: int, reader: int) -> Skip:
    """The name of all that goes from one stage to another for one micro-batch."""
    return None, f"{source} to {reader}"
