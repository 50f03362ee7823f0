"""A model with split points over ranks: the first stage's rank chooses programs, and all ranks record them together.

    first stage's rank     find a program per micro-batch; if one is missing: announce, and record with the others
    every other rank       follow the announcements, until the word "go" with the numbers of the programs

Ranks name a program by its number. The number also goes along the chain of the stages, in the place of a
`StepPrograms`.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.core.errors import DeviceError, SpecError, SplitError, listed
from weft.core.segment import version
from weft.pipeline.pipeline_plan import Crossing
from weft.pipeline.processes.loans import BorrowingStage, Loan
from weft.pipeline.processes.ownership import HiddenTensors, Use, find_uses, forbid_shared_statistics, plan_loans
from weft.pipeline.processes.rank_executor import Channel
from weft.pipeline.processes.together import EQUAL_EVERYWHERE, Together, TogetherRecorder
from weft.pipeline.split.open_state import PLAIN
from weft.pipeline.split.output_join import Quiet
from weft.pipeline.split.program import Copies, Program, Reads, RecordedValue, SplitCall, SplitStage, StepPrograms
from weft.pipeline.split.record import ForwardRecorder
from weft.pipeline.split.split_pipe import SplitModel
from weft.pipeline.stage import Stage

_WALK = "the choice of what a step runs"


class TensorPlacement(NamedTuple):
    """The rank of each stage, the rank of each parameter and buffer by name, and those that this rank hides."""

    workers: Sequence[int]
    homes: Mapping[str, int]
    hidden: HiddenTensors
    rank: int
    device: torch.device


class ProcessSplitStage(BorrowingStage, SplitStage):
    """A stage that knows programs by their numbers."""

    _programs: Mapping[int, Program] = MappingProxyType({})

    def look_up_in(self, programs: Mapping[int, Program]) -> None:
        """Set the programs that this stage can run, by number."""
        self._programs = programs

    def _chosen(self, main: Any, micro_batch: int) -> tuple[Program, Copies, Any]:
        program = self._programs[main] if self.index else cast(SplitCall, main).choice.programs[micro_batch]
        return program, {}, program.number


class ProcessSplitModel(SplitModel):
    """A model with parameters on several ranks."""

    _stage_type = ProcessSplitStage

    def __init__(self, placement: TensorPlacement, *args: Any, latest: Program | None = None) -> None:
        self._placement, self._first = placement, placement.workers[0]
        self._together = Together(placement.rank, placement.device)
        self._sent_buffers: dict[str, tuple[Tensor, int]] = {}
        self.loans: Sequence[Loan] = ()
        self._numbers = count()
        self._by_number: dict[int, Program] = {}
        self._dropped: list[int] = []
        self._written: set[str] = set()  # buffers that the code between blocks writes to
        super().__init__(*args)
        self._foreign = {name for name, rank in placement.homes.items() if rank != self._first}
        self.latest = latest

    def _new_recorder(self) -> ForwardRecorder:
        self._recorder_here = TogetherRecorder(self._together, self.model, self.split, self.devices)
        return self._recorder_here

    def open(self, channel: Channel) -> None:
        """Open the walk of a step, before `choose`."""
        self._together.open(channel, _WALK)

    def choose(self, *args: Any, **how: Any) -> tuple[SplitCall, str | None]:
        """See `SplitModel.choose`. The arguments count on the rank of the first stage only."""
        if self._together.rank != self._first:
            return self._follow()
        call, scalars = super().choose(*args, **how)
        numbers = [program.number for program in call.choice.programs]
        self._together.announce("go", scalars, self._dropped, numbers)
        self._forget(self._dropped, numbers)
        self._dropped = []
        return call, scalars

    def _follow(self) -> tuple[SplitCall, str | None]:
        """Follow the announcements of the first stage's rank, until it has chosen."""
        actions: dict[str, Callable[..., Any]] = {
            "record": self._record_here,
            "verify": self._verify_here,
            "run": self._run_here,
        }
        while True:
            word, *content = self._together.hear(self._first)
            if word == "go":
                break
            actions[word](*content)
        scalars, dropped, numbers = content
        self._forget(dropped, numbers)
        self.latest = self._by_number[numbers[0]]
        no_copies: list[Copies] = [{} for _ in self.devices]
        return SplitCall(StepPrograms([], no_copies, ()), (), {}), scalars

    def _recorded(self, call: Any, axes: Sequence[int | None]) -> Program:
        self._together.announce("record", call, axes)
        return self._record_here(call, axes)

    def _record_here(self, call: Any, axes: Sequence[int | None]) -> Program:
        if waiting := [name for name, parameter in self.model.named_parameters() if parameter.is_meta]:
            raise DeviceError(
                listed("parameters of this rank are still on the meta device; load them before a call:", waiting)
            )
        with self._shown():
            return super()._recorded(call, axes)

    def _verify_on(self, program: Program, call: Any) -> None:
        self._together.announce("verify", program.number, call)
        self._verify_here(program.number, call)

    def _verify_here(self, number: int, call: Any) -> None:
        with self._shown():
            super()._verify_on(self._by_number[number], call)

    def _run(self, call: Any, quiet: Quiet) -> tuple[Any, bool]:
        self._together.announce("run", call, quiet)
        return self._run_here(call, quiet)

    def _run_here(self, call: Any, quiet: Quiet) -> tuple[Any, bool]:
        with self._shown():
            return super()._run(call, quiet)

    def _compare(self, program: Program) -> None:
        """Raise SplitError on all ranks if their programs differ. Else the program gets its number."""
        steps = program.recording.steps
        reports = self._together.compare(_digests(program), _WALK)
        if faults := [(rank, other) for rank, other in enumerate(reports) if other != reports[0]]:
            pairs = zip(reports[0], faults[0][1], strict=False)
            at = next((k for k, (one, other) in enumerate(pairs) if one != other), len(steps))
            raise SplitError(
                f"the ranks {[0, *(rank for rank, _ in faults)]} of the group recorded different programs of the "
                f"forward of {type(self.model).__name__}, which begin to differ at "
                f"{steps[at] if at < len(steps) else 'the end'}; {EQUAL_EVERYWHERE}"
            )
        self._written |= {x.key for step in steps for k in step.writes if (x := step.reads[k]).kind == "own"}
        program.number = next(self._numbers)
        self._by_number[program.number] = program

    def _drop(self, program: Program) -> None:
        super()._drop(program)
        self._dropped.append(program.number)

    def _forget(self, dropped: Iterable[int], chosen: Iterable[int]) -> None:
        """Forget programs that were dropped, unless this step runs them."""
        for number in set(dropped).difference(chosen):
            self._by_number.pop(number, None)

    @contextmanager
    def _shown(self) -> Generator[None]:
        """Inside, the model has placeholders for parameters of other ranks, and the present values of their buffers."""
        with self._placement.hidden.shown():
            self._together.set_homes(self._ranks())
            self._exchange_buffers()
            yield

    def _exchange_buffers(self) -> None:
        """Send the buffers of this rank that have changed since they were last sent, and write those of others."""
        buffers = dict(self.model.named_buffers())
        mine = {name: each for name, each in buffers.items() if self._placement.homes[name] == self._placement.rank}
        now = {name: (each, version(each)) for name, each in mine.items()}
        changed = [name for name, state in now.items() if not _is_same(self._sent_buffers.get(name), state)]
        self._sent_buffers = now
        for contents in self._together.exchange({name: mine[name] for name in changed}):
            for name, content in contents.items():
                if name not in mine:
                    buffers[name].copy_(content)

    def _ranks(self) -> dict[int, int]:
        """The rank of each parameter and buffer that the model has just now, by its id()."""
        return {id(each): self._placement.homes[name] for name, each in named_tensors(self.model)}

    def homes(self) -> dict[int, int]:
        """See `SplitModel.homes`. Parameters of this rank stay where they were put when the pipe was made."""
        return {key: self._placement.workers.index(rank) for key, rank in self._ranks().items()}

    def place(self) -> None:
        """Nothing moves: see `homes`."""

    def _forbid_shared_writes(self, uses: Iterable[Use]) -> None:
        """Raise SpecError that names each buffer which stages of several ranks use, and a step writes to. Each of the
        ranks has a copy, so one would not see what another writes."""
        written = {id(module._buffers.get(key)) for module, key in self._recorder_here.written}
        written |= {id(self._owner(name)) for name in self._written}
        ranks: dict[int, set[int]] = {}
        for use in uses:
            ranks.setdefault(id(use.tensor), set()).add(self._placement.workers[use.stage])
        shared = {key: sorted(of) for key, of in ranks.items() if len(of) > 1 and key in written}
        buffers = self.model.named_buffers()
        faults = [f"{name}, on the ranks {shared[id(each)]}" for name, each in buffers if id(each) in shared]
        if faults:
            headline = (
                "buffers that a step writes to cannot be used on several ranks, each of which has a copy; use them in "
                "one submodule, or let the stages be on one rank (split=):"
            )
            raise SpecError(listed(headline, faults))

    def stages(self) -> tuple[list[Stage], Crossing]:
        """See `SplitModel.stages`. Stages of this rank get copies of parameters of others by `loans`."""
        workers, rank = self._placement.workers, self._placement.rank
        local = [blocks for blocks, worker in zip(self.blocks, workers, strict=True) if worker == rank]
        self._placement.hidden.keep_buffers(module for blocks in local for each in blocks for module in each.modules())
        with self._placement.hidden.shown():
            made, crossing = super().stages()
            uses = list(find_uses([stage.layers for stage in made]))
            forbid_shared_statistics(uses, workers)
            self._forbid_shared_writes(uses)
            # Slots of the model, because the code between blocks has tables of its own, which are filled at each scan.
            owned = {id(use.tensor): use.slot for use in find_uses([[("", self.model)]])}
            self.loans, slots = plan_loans(uses, self._ranks(), workers, rank, owned)
        for stage in cast("list[ProcessSplitStage]", made):
            stage.look_up_in(self._by_number)
            stage.borrow_into(slots.get(stage.index, ()))
            for _, (table, key) in slots.get(stage.index, ()):
                table[key] = None
        return made, crossing


def named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """All parameters and buffers, under all their names."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _is_same(before: tuple[Tensor, int] | None, now: tuple[Tensor, int]) -> bool:
    """Whether a buffer is the same tensor in the same version."""
    return before is not None and before[0] is now[0] and before[1] == now[1]


def _digests(program: Program) -> list[str]:
    """One digest per step, and one of the values that cross. Equal on two ranks if the programs are."""
    recording = program.recording
    steps = [
        (
            *(step.name, step.where, step.names, str(step.structure), sorted(step.writes), step.draws, step.dynamic),
            [*map(_word, step.leaves)],
            _words(step.reads),
            [value and (value.key, value.bytes) for value in step.makes],
            [(k, _word(leaf)) for k, leaf in step.plain],
            sorted(step.shapes.items()),
            step.expects and _word(step.expects[0]),
        )
        for step in recording.steps
    ]
    parts = [
        (
            [number for number, *_ in part.steps],
            [(stage, [*map(_name, values)]) for stage, values in sorted(part.takes.items())],
            [(stage, [*map(_name, values)]) for stage, values in sorted(part.gives.items())],
            sorted(map(_name, part.clones)),
        )
        for part in program.parts
    ]
    result = _words(recording.reads), [*map(_word, recording.leaves)], str(recording.structure), recording.cuts
    return [hashlib.sha256(repr(each).encode()).hexdigest()[:12] for each in (*steps, (parts, result))]


def _words(reads: Reads) -> list[tuple[int, str]]:
    return [(k, _name(value)) for k, value in reads.items()]


def _name(value: RecordedValue) -> str:
    return f"{value.kind} {_word(value.key)} {value.step} {value.bytes}"


def _word(leaf: Any) -> str:
    """A constant in words that are equal on all ranks."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    if isinstance(leaf, torch.device):
        return leaf.type
    return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__qualname__
