"""A recording divided into stages: the instructions of each stage, and the values that cross between stages.

recording    %0 %1 %2 | %3 %4 | %5 %6         cuts: before the first step of a split point
stage           0        1       2
crossing     %1: 0 -> (1, 2)                  a value goes straight from its source to each stage that reads it
remade       %2 = mask(in1)                   depends only on inputs, and is larger than they: stages 1 and 2 remake it
prelude      guards that depend on inputs     evaluated before a step starts, to choose between programs
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchweft.core.errors import GuardError, InPlaceError, SplitError
from torchweft.core.pytree import flatten, unflatten
from torchweft.core.rng import NextLayer
from torchweft.core.segment import MicroBatchContext
from torchweft.pipeline.routing import record_stream
from torchweft.pipeline.split.expected import ExpectedCalls
from torchweft.pipeline.split.isolation import moved_to_device, parameter_slots
from torchweft.pipeline.split.recording import (
    HERE,
    Devices,
    Instruction,
    Owned,
    Reads,
    RecordedValue,
    Recording,
    Values,
    tensor_of,
)
from torchweft.pipeline.split.state_writes import Captured
from torchweft.pipeline.split.tail import Tail
from torchweft.pipeline.stage import ModuleScan, Skip, Stage
from torchweft.pipeline.weights import replaced_in


class InterBlockParameters(nn.Module):
    """The parameters and buffers of the model that the code between blocks of one stage reads."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self._names, self._find = list(names), partial(tensor_of, model)
        # Not a set: its order would differ between ranks.
        modules = dict.fromkeys(model.get_submodule(name.rpartition(".")[0]) for name in self._names)
        generators = [value for m in modules for value in vars(m).values() if type(value) is torch.Generator]
        # As attributes, because the scan of a stage looks for generators there.
        vars(self).update({f"generator{id(generator)}": generator for generator in generators})
        self.refresh()

    def refresh(self) -> None:
        # At every step, because a step, load_state_dict or the user can replace the tensors of the model.
        for name in self._names:
            tensor: Any = self._find(name)
            if tensor is not None:  # or another rank has it
                (self._parameters if isinstance(tensor, nn.Parameter) else self._buffers)[name] = tensor

    def get(self, name: str) -> Tensor:
        return cast(Tensor, self._parameters[name] if name in self._parameters else self._buffers[name])


class CrossingValue(NamedTuple):
    """A value that goes from one stage to others: its `bytes` per micro-batch, and the stages that read it."""

    name: str
    bytes: int
    source: int
    readers: tuple[int, ...]


class StageProgram:
    """The part of a program that one stage runs."""

    def __init__(self) -> None:
        # Each step with its number, the constants among its arguments, and the values that this stage can drop then:
        self.steps: list[tuple[int, Instruction, list[Any], list[RecordedValue]]] = []
        self.takes: dict[int, list[RecordedValue]] = {}  # values from other stages, by source
        self.gives: dict[int, list[RecordedValue]] = {}  # values for other stages, by reader
        self.held: list[RecordedValue] = []  # the model's tensors and constants that it reads
        self.blocks: dict[nn.Module, str] = {}
        self.owned: set[str] = set()  # the parameters and buffers that the code between blocks reads
        self.clones: set[RecordedValue] = set()  # incoming values that this stage writes to


@dataclass(eq=False, slots=True)
class ProgramGroup:
    """Progress of comparing programs with forward(), for programs with the same steps that differ only in sizes."""

    verified: int = 0  # programs that were compared on another micro-batch than their own

    def restart(self) -> None:
        self.verified = 0


class Program:
    """The instructions of all stages for micro-batches of one key. `foreign` names tensors of the model that the first
    stage's process does not have. Raises SplitError for an empty stage, InPlaceError for a write to another stage."""

    def __init__(
        self,
        recording: Recording,
        devices: Devices,
        tail: Tail,
        expected: ExpectedCalls,
        foreign: Collection[str] = frozenset(),
    ) -> None:
        self.recording, self.tail, self.expected, self._foreign = recording, tail, expected, foreign
        self.verified = False
        self.group = ProgramGroup()
        self.number = 0  # identifies the program in messages between ranks
        self.order = sorted(recording.cuts, key=recording.cuts.__getitem__)
        self.parts = [StageProgram() for _ in devices]
        self._device = list(devices) if len(set(devices)) > 1 else [None] * len(devices)
        steps = recording.steps
        starts = [0, *(recording.cuts[name] for name in self.order)]
        for name, start, before in zip(self.order, starts[1:], starts, strict=False):
            if start == before:
                where = "forward begins with it" if not start else "another split point comes right before it"
                raise SplitError(f"the stage before {name!r} would be empty, because {where}; leave it out of split")
        self._stage_at = [bisect(starts, k) - 1 for k in range(len(steps))]
        self._written = {storage for step in steps for storage in step.stored}
        # The tail is a stage of its own, which runs in no worker.
        self._stage_at = [len(devices) if k in tail.steps else at for k, at in enumerate(self._stage_at)]
        self._check_writes()
        outside = tail.steps | tail.state_writes.steps
        members = [{k for k, at in enumerate(self._stage_at) if at == s} - outside for s in range(len(devices))]
        self._reject_empty(members)
        self.prelude = self._prelude(members)
        crossing = self._readers(members)
        for s, part in enumerate(self.parts):
            self._fill(s, part, sorted(members[s]), crossing)
        self.routes = [
            CrossingValue(self._name(value), value.bytes, self._source(value), tuple(readers))
            for value, readers in crossing.items()
        ]

    def _reject_empty(self, members: Sequence[Collection[int]]) -> None:
        for name, of_stage in zip(self.order, members[1:], strict=False):
            if not of_stage:
                raise SplitError(
                    f"the stage that begins with {name!r} would be empty, because it only computes values that join "
                    "rows, such as a loss, and these are computed once for all rows; leave it out of split"
                )

    def join_group(self, group: ProgramGroup) -> None:
        self.group = group

    def mark_verified(self) -> None:
        """Note that the program agreed with forward() on another micro-batch than its own."""
        self.group.verified += not self.verified
        self.verified = True

    def _check_writes(self) -> None:
        # Stages work on several micro-batches at one time, so a stage can write only to its own tensors.
        steps = self.recording.steps
        for made, written in self.recording.aliases:
            if self._stage_at[max(made, 0)] != self._stage_at[max(written, 0)]:
                raise InPlaceError(
                    f"{steps[written]} writes through a view into a tensor of another stage "
                    f"({self._stage_at[max(made, 0)]}), which is read afterwards; use the out-of-place form there, or "
                    "split elsewhere"
                )
        readers: defaultdict[RecordedValue, set[int]] = defaultdict(set)
        # Writes that run in forward(), once per step of training, are seen by all stages.
        in_forward = self.tail.state_writes.steps
        for k, s in enumerate(self._stage_at):
            for value in self._reads(k).values() if k not in in_forward else ():
                readers[value].add(s)
        writers = [step for k, step in enumerate(steps) if k not in in_forward]
        for step, value in [(writer, writer.reads[k]) for writer in writers for k in writer.writes]:
            if value.kind == "own" and len(readers[value]) > 1:
                raise InPlaceError(
                    f"{step} writes into {value.key!r}, which the code between blocks of several stages "
                    f"{readers[value]} uses; use it in one submodule, or split elsewhere"
                )

    def _prelude(self, members: Sequence[set[int]]) -> list[Instruction]:
        """The guards that depend only on inputs, and the steps that they need.

        Guards that also depend on parameters or buffers are evaluated again in their stage, because a step can change
        these. If the process of the first stage lacks them, they are evaluated only there.
        """
        ahead: set[int] = set()
        for k, step in enumerate(self.recording.steps):
            decides = step.expects is not None or (step.shapes and step.dynamic)
            # Decisions by state are made in forward(), after its writes.
            decides = decides and k not in self.tail.steps and not self.tail.is_of_state(k)
            if decides and (needed := self._from_inputs(k, own=True)) is not None:
                ahead |= needed
                if step.expects is not None and self._from_inputs(k) is not None:
                    members[self._stage_at[k]].discard(k)
        return [self.recording.steps[k] for k in sorted(ahead)]

    def _from_inputs(self, last: int, *, own: bool = False) -> set[int] | None:
        """The steps that compute the result of `last` from inputs (and `own` parameters) only, without side effects."""
        needed: set[int] = set()
        todo = [last]
        while todo:
            k = todo.pop()
            step = self.recording.steps[k]
            # A repeated step must neither draw again nor see a tensor before or after a write that it does not repeat.
            pure = step.module is None and not (step.writes or step.draws)
            if not pure or any(value and value.storage in self._written for value in step.makes):
                return None
            needed.add(k)
            for value in step.reads.values():
                if value.kind == "made" and value.step not in needed:
                    todo.append(value.step)
                barred = value.kind == "own" and (not own or value.key in self._foreign)
                if barred or (value.kind == "in" and value.storage in self._written):
                    return None
        return needed

    def _readers(self, members: Sequence[set[int]]) -> dict[RecordedValue, list[int]]:
        """Every value that crosses, with its readers. Adds to `members` the steps that a stage repeats."""
        steps, crossing = self.recording.steps, dict[RecordedValue, list[int]]()
        for s in range(1, len(members)):
            takes: dict[RecordedValue, None] = {}
            reads = [value for k in sorted(members[s]) for value in self._reads(k).values()]
            for value in [*reads, *self._leaves_at(s)]:
                present = value.kind in ("own", "const") or value.step in members[s]
                if present or value in takes:
                    continue
                again = sorted(self._from_inputs(value.step) or ()) if value.kind == "made" else []
                inputs = {read: None for k in again for read in steps[k].reads.values() if read.kind == "in"}
                # Sending the inputs and repeating the steps is cheaper than sending a larger result.
                if again and sum(read.bytes for read in inputs if read not in takes) < value.bytes:
                    members[s].update(again)
                    takes |= inputs
                else:
                    takes[value] = None
            for value in takes:
                crossing.setdefault(value, []).append(s)
        return crossing

    def _reads(self, k: int) -> Reads:
        """The values that a step reads from its stage, without those that it gets as copies from forward()."""
        captured = self.tail.state_writes.captured.get(k, ())
        return {leaf: value for leaf, value in self.recording.steps[k].reads.items() if leaf not in captured}

    def _leaves_at(self, stage: int) -> Iterable[RecordedValue]:
        # Only the last stage returns values: the result of forward(), or what enters the tail.
        returned = [value for value, _ in self.tail.enters] if self.joins_rows else self.recording.reads.values()
        return returned if stage == len(self.parts) - 1 else ()

    def _source(self, value: RecordedValue) -> int:
        return self._stage_at[value.step] if value.kind == "made" else 0

    def _fill(
        self, stage: int, part: StageProgram, members: Sequence[int], crossing: Mapping[RecordedValue, Sequence[int]]
    ) -> None:
        for value, readers in crossing.items():
            source = self._source(value)
            if stage in readers:
                part.takes.setdefault(source, []).append(value)
            for reader in readers if stage == source else ():
                part.gives.setdefault(reader, []).append(value)
        steps = [self.recording.steps[k] for k in members]
        last: dict[RecordedValue, int] = {}
        for k, step in zip(members, steps, strict=True):
            last.update({value: k for value in step.reads.values() if value.kind in ("in", "made")})
            last.update({value: k for value in step.makes if value is not None})
        stays = {*chain(*part.gives.values()), *self._leaves_at(stage)}
        # Without this, all values of a stage would stay alive until its end, in evaluation too.
        done: defaultdict[int, list[RecordedValue]] = defaultdict(list)
        for value in last.keys() - stays:
            done[last[value]].append(value)
        for k, step in zip(members, steps, strict=True):
            leaves = [self._device[stage] if leaf is HERE else leaf for leaf in step.leaves]
            part.steps.append((k, step, leaves, done[k]))
        part.held = _held([], *chain(*(self._reads(k).values() for k in members)), *self._leaves_at(stage))
        part.blocks = {step.module: step.name for step in steps if step.module is not None}
        held = part.held + (_held(self.prelude) if not stage else [])
        part.owned = {value.key for value in held if value.kind == "own"}
        stored = {storage for step in steps for storage in step.stored}
        # Writes go to clones. The original is an input of the caller, or saved by autograd in the stage that made it.
        comes = [*chain(*part.takes.values()), *(value for value in last if value.kind == "in" and not stage)]
        part.clones = {value for value in comes if value.storage in stored}

    @property
    def joined(self) -> list[CrossingValue]:
        """The values of micro-batches that are joined for the end of forward(), which runs on all rows."""
        values = [value for value, _ in self.tail.enters]
        return [CrossingValue(self._name(value), value.bytes, self._source(value), ()) for value in values]

    def _name(self, value: RecordedValue) -> str:
        if value.kind == "in":
            return f"input {value.key}"
        step = self.recording.steps[value.step]
        return f"{step}[{step.makes.index(value)}]" if len(step.makes) > 1 else str(step)

    def fits(self, leaves: Sequence[Any], owned: Owned) -> bool:
        """Whether forward() takes the branches of this program for these inputs, as far as inputs determine them."""
        with suppress(GuardError):
            self.check_branches(leaves, owned)
            return True
        return False

    def check_branches(self, leaves: Sequence[Any], owned: Owned) -> None:
        """See `fits`. Raises GuardError."""
        if not self.prelude:
            return
        with torch.no_grad():
            values = self.given(leaves, owned, self.prelude)
            for step in self.prelude:
                perform(step, step.leaves, values)

    def given(
        self, leaves: Sequence[Any], owned: Owned, steps: Iterable[Instruction], more: Iterable[RecordedValue] = ()
    ) -> Values:
        """The values before these steps: inputs, and the tensors and constants that steps and `more` read."""
        values: Values = dict(zip(self.recording.inputs, leaves, strict=True))
        _load(values, _held(steps, *more), owned)
        return values

    def run(self, stage: int, values: Values, owned: Owned, captured: Captured, next_layer: NextLayer = None) -> Values:
        """Run one stage on its incoming values. Returns the values that it has at the end. `captured` are copies of
        state, made by forward()."""
        part, device = self.parts[stage], self._device[stage]
        _load(values, part.held, owned)
        for value in part.clones:
            values[value] = values[value].clone()
        for number, step, leaves, done in part.steps:
            try:
                # For random numbers, blocks and steps that draw count as layers.
                if next_layer is not None and (step.draws or step.module is not None):
                    next_layer(number)
                if number in self.tail.state_writes.captured:
                    values.update({step.reads[leaf]: x for leaf, x in captured[number].items()})
                perform(step, leaves, values, device)
            except BaseException as error:
                what = f"block {step.name!r}" if step.module is not None else str(step)
                error.add_note(f"torchweft: in {what} of stage {stage}")
                raise
            for value in done:
                values.pop(value, None)
        return values

    def replay(self, leaves: Sequence[Any], owned: Owned, captured: Captured) -> Any:
        sent: list[Values] = [{} for _ in self.parts]
        sent[0].update(zip(self.recording.inputs, leaves, strict=True))
        for s, part in enumerate(self.parts):
            with moved_to_device(part.blocks, self._device[s]):
                values = self.run(s, sent[s], owned, captured)
            for reader, crossing in part.gives.items():
                sent[reader].update({value: values[value] for value in crossing})
        return self.result(sent[-1])

    @property
    def joins_rows(self) -> bool:
        """Whether the end of forward() runs on all rows. Then the stages return the values that enter it."""
        return self.tail.form is not None

    def result(self, values: Values) -> Any:
        if self.joins_rows:
            return tuple([values[value] for value, _ in self.tail.enters])
        return self.output(values)

    def output(self, values: Values) -> Any:
        """The result of forward(), if `values` has those of the tail too."""
        return unflatten(self.recording.structure, _fill_leaves(self.recording.leaves, self.recording.reads, values))


def perform(step: Instruction, constants: Sequence[Any], values: Values, device: torch.device | None = None) -> None:
    """Run one step on `values`, and add its results to them. Raises GuardError."""
    leaves = _fill_leaves(constants, step.reads, values)
    if device is not None:
        leaves = [moved(x, device) for x in leaves]
    args, kwargs = step.arguments(leaves)
    result = step.call(*args, **kwargs)
    if step.expects is not None:
        _check_equal(step, step.expects[0], result)
        return
    results = [result] if type(result) is Tensor else flatten(result)[0]
    if step.writes:
        results = [*results, *(leaves[k] for k in step.writes)]
    if len(results) != len(step.makes):
        _check_equal(step, f"{len(step.makes)} values", f"{len(results)} values")
    # Python code saw these when the step was recorded, and its decisions are frozen.
    for k, shape in step.shapes.items():
        _check_equal(step, shape, tuple(results[k].shape))
    for k, plain in step.plain:
        _check_equal(step, plain, results[k])
    for value, x in zip(step.makes, results, strict=True):
        if value is not None:
            values[value] = x


def _held(steps: Iterable[Instruction], *more: RecordedValue) -> list[RecordedValue]:
    reads = chain(*(step.reads.values() for step in steps), more)
    return list(dict.fromkeys(value for value in reads if value.kind in ("own", "const")))


def _load(values: Values, held: Iterable[RecordedValue], owned: Owned) -> None:
    for value in held:
        values[value] = value.key if value.kind == "const" else owned(value.key)


def _fill_leaves(constants: Sequence[Any], reads: Reads, values: Values) -> list[Any]:
    leaves = list(constants)
    for k, value in reads.items():
        leaves[k] = values[value]
    return leaves


def moved(leaf: Any, device: torch.device) -> Any:
    """An argument on the device of a stage. Tensors without dimensions can be on any device."""
    return leaf.to(device) if isinstance(leaf, Tensor) and leaf.dim() and leaf.device != device else leaf


def _check_equal(step: Instruction, before: Any, now: Any) -> None:
    """Raise GuardError if Python code sees another value than when the step was recorded."""
    if type(now) is not type(before) or now != before:
        raise GuardError(
            f"the model's code between blocks depends on {step}, which was {before!r} when recorded and is {now!r} "
            f"now, so forward() can take another branch; {step.advice}"
        )


# Copies of parameters that an earlier stage has on another device, by the id() of the parameter. For one step.
Copies = dict[int, Tensor]


class StepPrograms:
    """The programs of one step, one per micro-batch, and the copies of parameters for each stage.

    It goes from stage to stage with the values, so that a recomputation uses the programs and copies of its forward.
    `lent` are the copies and their originals: trainable tensors that a stage can use besides those of its modules.
    `captured` are copies of state, by program. forward() makes them, before the stages run.
    """

    # A plain class. A NamedTuple or dataclass would be a container for pytrees, whose tensors cross between stages.
    __slots__ = ("captured", "copies", "lent", "programs")

    def __init__(self, programs: Sequence[Program], copies: Sequence[Copies], originals: Iterable[Tensor]) -> None:
        self.programs, self.copies = programs, copies
        self.captured: dict[Program, Captured] = {}
        self.lent = [*originals, *(copy for of_stage in copies for copy in of_stage.values())]


class SplitCall(NamedTuple):
    """The main value of the first stage."""

    choice: StepPrograms
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SplitStage(Stage):
    """A stage that runs its part of a program instead of a chain of layers. `turns` is held while modules that other
    stages call as well have copies of parameters."""

    def __init__(
        self,
        index: int,
        blocks: Mapping[nn.Module, str],
        code: InterBlockParameters,
        device: torch.device,
        pairs: Iterable[tuple[int, int]],
        turns: AbstractContextManager[object],
    ) -> None:
        layers = [*((name, block) for block, name in blocks.items()), ("the code between blocks", code)]
        popped, stashed = ([bundle(*pair) for pair in sorted(pairs) if pair[end] == index] for end in (1, 0))
        super().__init__(index, layers, device, popped, stashed)
        self._code, self._turns, self._scanned_copies = code, turns, Copies()
        self._copies_input = False  # a program clones the inputs that it writes to

    def set_tied_copies(self, copies: Copies) -> None:
        """Set the copies of the step that is about to begin, for its `scan`."""
        self._scanned_copies = copies

    def _tracked(
        self, context: MicroBatchContext, main: Any, skips: Any, next_layer: NextLayer
    ) -> tuple[Any, dict[Skip, Any]]:
        program, copies, captured, onward = self._chosen(main, context.micro_batch)
        part = program.parts[self.index]
        values: Values = {}
        if not self.index:
            values.update(zip(program.recording.inputs, flatten((main.args, main.kwargs))[0], strict=True))
        for source, crossing in part.takes.items():
            values.update(zip(crossing, skips[bundle(source, self.index)], strict=True))
        stashed: dict[Skip, Any] = dict.fromkeys(self.stashed, ())
        for copy in copies.values():
            # The copy was allocated on the caller's stream, which must not reuse its memory while this stream reads it.
            if copy.is_cuda:
                record_stream(copy, torch.cuda.current_stream(copy.device))
        with self._turns, self._substituted(copies):
            values = program.run(self.index, values, self._code.get, captured, next_layer)
            for reader, crossing in part.gives.items():
                stashed[bundle(self.index, reader)] = tuple([values[value] for value in crossing])
            last = self.index == len(program.parts) - 1
            return (program.result(values) if last else onward), stashed

    def _chosen(self, main: Any, micro_batch: int) -> tuple[Program, Copies, Captured, Any]:
        """The program of a micro-batch, its copies of parameters and state, and the main value for the next stage."""
        choice: StepPrograms = main if self.index else main.choice
        program = choice.programs[micro_batch]
        return program, choice.copies[self.index], choice.captured.get(program, {}), choice

    def scan(self) -> ModuleScan:
        self._code.refresh()
        with self._turns, self._substituted(self._scanned_copies):
            return super().scan()

    def _substituted(self, copies: Copies) -> AbstractContextManager[None]:
        """Context in which the stage's modules have these copies. Enter it in turns: it looks for parameters then."""
        if not copies:
            return nullcontext()
        slots = parameter_slots(layer for _, layer in self.layers)
        return replaced_in((slot, copies[id(p)]) for slot, p in slots if id(p) in copies)


def bundle(source: int, reader: int) -> Skip:
    # All values that go from one stage to another for one micro-batch have one name.
    return None, f"{source} to {reader}"
