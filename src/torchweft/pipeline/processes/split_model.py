"""A model with split points over ranks: the first stage's rank chooses programs, and all ranks record them together.

    first stage's rank     find a program per micro-batch; if one is missing: announce, and record with the others
    every other rank       follow the announcements, until "go" with the numbers of the programs

A program cannot be sent, because its steps are Python functions. Ranks therefore record equal programs and compare
digests of them. Ranks name a program by its number. The number also goes along the chain of the stages, in the place
of a `StepPrograms`.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] # no public name

from torchweft.core.errors import DeviceError, InPlaceError, SplitError, join_faults
from torchweft.core.pytree import Structure, flatten, unflatten
from torchweft.core.segment import version
from torchweft.pipeline.microbatch import SplitPlan
from torchweft.pipeline.pipeline_plan import Crossing
from torchweft.pipeline.processes.collective_forward import EQUAL_EVERYWHERE, CollectiveCalls, CollectiveRecorder
from torchweft.pipeline.processes.loans import BorrowingStage, Loans
from torchweft.pipeline.processes.ownership import HiddenTensors, Use, find_uses, plan_loans, reject_shared
from torchweft.pipeline.processes.rank_executor import Channel
from torchweft.pipeline.processes.tail_exchange import StopForward, TailExchange
from torchweft.pipeline.split.expected import TailNeedsMore
from torchweft.pipeline.split.model_programs import FollowedRecording, SplitModel, StepChoice
from torchweft.pipeline.split.open_state import PLAIN
from torchweft.pipeline.split.program import Copies, InterBlockParameters, Program, SplitCall, SplitStage, StepPrograms
from torchweft.pipeline.split.program_cache import PROGRAMS, Trials
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.split.recording import Reads, RecordedValue
from torchweft.pipeline.split.row_forms import RecordedCall
from torchweft.pipeline.split.state_writes import Captured
from torchweft.pipeline.split.stated_rule import Numbers
from torchweft.pipeline.split.tail import Tail
from torchweft.pipeline.split.whole_forward import ForwardChanged
from torchweft.pipeline.stage import Stage

CHOICE = "the choice of what a step runs"  # the name of the walk in which ranks choose and record programs


class GroupChange(ForwardChanged):
    """A change of forward() on some rank that all ranks know already, so that they do not agree on it again."""


class TensorPlacement(NamedTuple):
    """The rank of each stage, the rank of each parameter and buffer by name, and those that this rank hides."""

    workers: Sequence[int]
    owners: Mapping[str, int]
    hidden: HiddenTensors
    rank: int
    device: torch.device


class ProcessSplitStage(BorrowingStage, SplitStage):
    _programs: Mapping[int, Program] = MappingProxyType({})

    def set_programs(self, programs: Mapping[int, Program]) -> None:
        self._programs = programs

    def _chosen(self, main: Any, micro_batch: int) -> tuple[Program, Copies, Captured, Any]:
        program = self._programs[main] if self.index else cast(SplitCall, main).choice.programs[micro_batch]
        return program, {}, {}, program.number


class ProcessSplitModel(SplitModel):
    _stage_type = ProcessSplitStage
    loans: Loans  # set by `stages`

    def __init__(self, placement: TensorPlacement, *args: Any, latest: Program | None = None) -> None:
        self._placement = placement
        self._calls = CollectiveCalls(placement.rank, placement.device)
        self._sent_buffers: dict[str, tuple[Tensor, int]] = {}
        self._numbers = count()
        self._by_number: dict[int, Program] = {}
        self._dropped: list[int] = []
        self._written: set[str] = set()  # buffers that the code between blocks writes to
        self._followed: dict[int, FollowedRecording] = {}
        super().__init__(*args)
        # Guards on these run in their stage only, because the first rank cannot evaluate them before a step.
        self._foreign = {name for name, rank in placement.owners.items() if rank != self._first}
        # Every rank has the buffers. Parameters of other ranks are hidden, so they cannot be listed.
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        self._absent = {name for name, rank in placement.owners.items() if rank != placement.rank} - buffers
        self.latest = latest

    @property
    def _first(self) -> int:
        return self._placement.workers[0]

    @property
    def runs_tail(self) -> bool:
        """See `SplitModel.runs_tail`."""
        return self._calls.rank == self._placement.workers[-1]

    def _new_recorder(self) -> ForwardRecorder:
        self._collective_recorder = CollectiveRecorder(self._calls, self.model, self.split, self.devices)
        return self._collective_recorder

    def set_channel(self, channel: Channel, *, shares_output: bool) -> None:
        self._calls.set_channel(channel)
        rank, last = self._calls.rank, self._placement.workers[-1]
        self._new_exchange = partial(
            TailExchange, channel, rank, last, self._placement.device, shares_output=shares_output
        )

    def choose(self, *args: Any, **how: Any) -> StepChoice:
        """See `SplitModel.choose`. The arguments count on the rank of the first stage only."""
        if self._calls.rank != self._first:
            return self._follow_announcements()
        # While programs are recorded, the others follow the announcements. An error ends the walk, so that no rank
        # waits for a "go" that never comes.
        choice = super().choose(*args, **how)
        assert choice.plan is not None
        numbers = [program.number for program in choice.programs]
        reference = None if choice.reference is None else choice.reference.number
        # All ranks run forward(): on all rows if its end does, else on a micro-batch of each program to compare.
        joins = choice.programs[0].joins_rows
        compared = range(len(numbers)) if joins else [*choice.compared().values()]
        pieces = [choice.leaves] if joins else [choice.pieces[i] for i in compared]
        calls = [unflatten(choice.plan.structure, piece) for piece in pieces]
        layout = joins, [choice.plan.sizes[i] for i in compared], list(choice.plan.axes)
        chosen = [numbers[i] for i in compared]
        self._calls.announce("go", choice.scalars, self._dropped, numbers, chosen, reference, calls, *layout)
        self._forget_programs(self._dropped, numbers)
        self._dropped = []
        return choice

    def _follow_announcements(self) -> StepChoice:
        while True:
            action, *content = self._calls.receive_announcement(self._first)
            if action == "go":
                break
            self._perform(action, *content)
        scalars, dropped, numbers, compared, reference, calls, joins, sizes, axes = content
        # At the same point of the step as on the first rank, so that a number means one program on all ranks.
        self._forget_programs(dropped, numbers)
        programs = [self._by_number[number] for number in compared]
        self.latest = programs[0]
        no_copies: list[Copies] = [{} for _ in self.devices]
        call = SplitCall(StepPrograms([], no_copies, ()), (), {})
        leaves, structure = flatten(calls[0])
        plan = SplitPlan(structure, tuple(sizes), tuple(axes))
        pieces = plan.split(leaves) if joins else [flatten(piece)[0] for piece in calls]
        followed = None if reference is None else self._followed[reference]
        return StepChoice(call, scalars, programs, plan, leaves, pieces, followed)

    def run(self, choice: StepChoice, serve: Callable[[Any], Any]) -> Any:
        """See `SplitModel.run`. Every rank compares the calls of forward(). Its end runs on the rank of the last stage,
        and the others get its result."""
        joins = choice.programs[0].joins_rows
        if joins:
            self._reject_tracked_inputs(choice)
        end = self._new_exchange()
        try:
            with self._placement.hidden.placeholders():
                result = super().run(choice, partial(self._serve_together, serve, end))
        except GroupChange:
            raise
        except ForwardChanged as change:
            self._agree(change)
            raise
        except TailNeedsMore as more:
            result = more
        except StopForward:
            result = None
        except BaseException as error:
            end.fail(error)
            raise
        if not joins:
            return result
        return end.share(result, partial(self._keep_more, list(dict.fromkeys(choice.programs))))

    def _reject_tracked_inputs(self, choice: StepChoice) -> None:
        """Raise SplitError if the tail would have a gradient for an input: only one rank would get it."""
        read = choice.programs[0].tail.inputs_read
        tracked = [isinstance(x, Tensor) and x.requires_grad for x in choice.leaves]
        pairs = zip(choice.programs[0].recording.inputs, tracked, strict=True)
        if faults := [f"input {value.key!r}" for value, is_tracked in pairs if is_tracked and value in read]:
            headline = (
                "the end of forward() runs on the rank of the last stage and uses these inputs, which require a "
                "gradient, so only that rank would get its part of the gradient; detach them there, or compute the "
                "loss with loss= and target=:"
            )
            raise SplitError(join_faults(headline, faults))

    def _repeat(self, choice: StepChoice, more: TailNeedsMore, before: Any) -> None:
        """Repeat nothing: the other ranks have completed the stages. See `TailExchange.share`."""

    def _serve_together(self, serve: Callable[[Any], Any], end: "TailExchange", axes: Any) -> Any:
        self._agree(None)
        with self._placement.hidden.hidden():
            joined = serve(axes)
        if axes is None:
            return joined
        end.begin(joined)
        if not end.has_tail:
            raise StopForward
        return joined

    def _agree(self, change: ForwardChanged | None) -> None:
        """Compare with the other ranks whether forward() follows its programs. Raises GroupChange on all."""
        report = None
        if change is not None:
            number = change.program.number if isinstance(change.program, Program) else -1
            report = [number, change.step, str(change)]
        reports = self._calls.compare_reports(report, CHOICE)
        found = next((other for other in reports if other is not None), None)
        if found is not None:
            number, step, words = found
            change = GroupChange(step, words)
            change.program = self._by_number[number] if number >= 0 else next(reversed(self._followed.values()))
            raise change from None

    def note_change(self, trials: Trials, change: ForwardChanged) -> None:
        """See `SplitModel.note_change`. The first rank decides, and the others follow it."""
        if self._calls.rank == self._first:
            super().note_change(trials, change)
        elif not self._groups.reject(change.program):
            change.program.expected.tolerate(change.step)

    def _replace_program(self, old: Program, new: Program) -> None:
        new.number = old.number
        self._by_number[new.number] = new
        if self._calls.rank == self._first:
            super()._replace_program(old, new)

    def _recorded(self, call: RecordedCall) -> Program:
        return self._perform_everywhere("record", *call)

    def _new_reference(self, call: RecordedCall, program: Program) -> FollowedRecording:
        return self._perform_everywhere("follow", program.number, *call)

    def _verify_on(self, program: Program, call: Any) -> None:
        self._perform_everywhere("verify", program.number, call)

    def _run_for_numbers(self, program: Program, call: Any) -> Numbers:
        return self._perform_everywhere("run", program.number, call)

    def _replay(self, program: Program, structure: Structure, leaves: Sequence[Any]) -> Any:
        # Steps of the tail too: each runs on the rank that has its parameters.
        return self._recorder.replay(program, leaves, self.members.find, {})

    def _perform_everywhere(self, action: str, *args: Any) -> Any:
        self._calls.announce(action, *args)
        return self._perform(action, *args)

    def _perform(self, action: str, *args: Any) -> Any:
        # Only parameters of this rank: those of other ranks are None here, and placeholders on meta below.
        if waiting := [name for name, parameter in self.model.named_parameters() if parameter.is_meta]:
            raise DeviceError(
                join_faults("parameters of this rank are still on the meta device; load them before a call:", waiting)
            )
        # The recorder asks modules for their parameters. It finds placeholders of those that other ranks have.
        with self._placement.hidden.placeholders():
            self._calls.set_owners(self._current_owners())
            # Code between blocks can read any buffer, so all ranks need the present values.
            self._exchange_buffers()
            if action == "record":
                return super()._recorded(RecordedCall(*args))
            if action == "follow":
                reference = super()._new_reference(RecordedCall(*args[1:]), self._by_number[args[0]])
                self._reject_lacking(reference.tail)
                while len(self._followed) >= PROGRAMS:
                    del self._followed[next(iter(self._followed))]
                reference.number = next(self._numbers)
                self._followed[reference.number] = reference
                return reference
            if action == "verify":
                return super()._verify_on(self._by_number[args[0]], args[1])
            return super()._run_for_numbers(self._by_number[args[0]], args[1])

    def _reject_lacking(self, tail: Tail) -> None:
        """Raise SplitError if the end of forward() needs a parameter that the rank of the last stage does not have."""
        if self._calls.rank == self._placement.workers[-1] and tail.steps and tail.lacking:
            headline = (
                "the end of forward() runs on the rank of the last stage, but it uses parameters which another rank "
                "has; use them in a block, or let the stages be on one rank:"
            )
            raise SplitError(join_faults(headline, tail.lacking))

    def _compare(self, program: Program) -> None:
        """Raise SplitError on all ranks if their programs differ. Else the program gets its number."""
        self._reject_lacking(program.tail)
        steps = program.recording.steps
        if captured := program.tail.state_writes.captured:
            raise InPlaceError(
                f"{steps[min(captured)]} reads state that forward() writes to afterwards. Over processes, the stages "
                "would see the new numbers; write to it before it is used, or move both into one submodule"
            )
        # This ends the walk. If digests differ, all ranks raise here, and none is left with an open walk.
        reports = self._calls.compare_reports(_digest_steps(program), CHOICE)
        if faults := [(rank, other) for rank, other in enumerate(reports) if other != reports[0]]:
            pairs = zip(reports[0], faults[0][1], strict=False)
            at = next((k for k, (one, other) in enumerate(pairs) if one != other), len(steps))
            raise SplitError(
                f"the ranks {[0, *(rank for rank, _ in faults)]} of the group recorded different programs of the "
                f"forward of {type(self.model).__name__}, which begin to differ at "
                f"{steps[at] if at < len(steps) else 'the end (writes into memory that results of a block share)'}; "
                f"{EQUAL_EVERYWHERE}"
            )
        self._written |= {x.key for step in steps for k in step.writes if (x := step.reads[k]).kind == "own"}
        # All ranks number equal programs alike, because they record them in one order.
        program.number = next(self._numbers)
        self._by_number[program.number] = program

    def _drop(self, program: Program) -> None:
        super()._drop(program)
        self._dropped.append(program.number)

    def _forget_programs(self, dropped: Iterable[int], chosen: Iterable[int]) -> None:
        for number in set(dropped).difference(chosen):
            self._by_number.pop(number, None)

    def _exchange_buffers(self) -> None:
        """Send the buffers of this rank that have changed since they were last sent, and write those of others."""
        buffers, owners, rank = dict(self.model.named_buffers()), self._placement.owners, self._placement.rank
        before = self._sent_buffers
        now = {name: (x, version(x)) for name, x in buffers.items() if owners[name] == rank}
        changed = {
            name: x
            for name, (x, count) in now.items()
            if name not in before or before[name][0] is not x or before[name][1] != count
        }
        self._sent_buffers = now
        # Every rank sends, even if nothing changed: the others do not know that, and receive from all.
        for contents in self._calls.exchange_contents(changed):
            for name, content in contents.items():
                if name not in now:
                    buffers[name].copy_(content)

    def _current_owners(self) -> dict[int, int]:
        return {id(tensor): self._placement.owners[name] for name, tensor in named_tensors(self.model)}

    def homes(self) -> dict[int, int]:
        """See `SplitModel.homes`. Parameters of this rank stay where they were put when the pipe was made."""
        return {key: self._placement.workers.index(rank) for key, rank in self._current_owners().items()}

    def place(self) -> None:
        """Nothing moves: see `homes`."""

    def _reject_shared_buffers(self, uses: Iterable[Use]) -> None:
        """Raise SpecError that names each buffer which stages of several ranks use, and a step writes to."""
        written = {id(module._buffers.get(key)) for module, key in self._collective_recorder.written}
        written |= {id(self.members.find(name)) for name in self._written}
        # Statistics count as written even if no recording was in training mode yet.
        written |= {id(m.running_mean) for m in self.model.modules() if isinstance(m, _NormBase)}
        names = {id(buffer): name for name, buffer in self.model.named_buffers()}
        headline = (
            "buffers that a step writes to cannot be used on several ranks, because each rank would write to a copy; "
            "use them in one submodule, or let the stages be on one rank (split=):"
        )
        tensors = ((id(use.tensor), use.stage) for use in uses)
        shared = ((key, names[key], stage) for key, stage in tensors if key in written and key in names)
        reject_shared(shared, self._placement.workers, headline)

    def stages(self) -> tuple[list[Stage], Crossing]:
        workers, rank, hidden = self._placement.workers, self._placement.rank, self._placement.hidden
        local = [blocks for blocks, worker in zip(self.members.blocks, workers, strict=True) if worker == rank]
        hidden.keep_buffers(module for blocks in local for block in blocks for module in block.modules())
        with hidden.placeholders():
            stages, crossing = super().stages()
            # Without a prefix for the code between blocks: its tables have names of the model.
            layers = [
                [("" if isinstance(layer, InterBlockParameters) else name, layer) for name, layer in stage.layers]
                for stage in stages
            ]
            uses = list(find_uses(layers))
            self._reject_shared_buffers(uses)
            self.loans = plan_loans(uses, self._current_owners(), workers, rank, [("", self.model)])
        for stage in cast("list[ProcessSplitStage]", stages):
            stage.set_programs(self._by_number)
        for _, place in chain.from_iterable(self.loans.places.values()):
            table, key = place.slot
            table[key] = None  # tables of the code between blocks still have the placeholders
        return stages, crossing


def named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _digest_steps(program: Program) -> list[str]:
    """One digest per step, and one of the stages. Equal on two ranks if the programs are."""
    recording = program.recording
    steps = [
        (
            *(step.name, step.where, step.names, str(step.structure), sorted(step.writes), step.draws, step.dynamic),
            [*map(_describe_constant, step.leaves)],
            _describe_reads(step.reads),
            [value and (value.key, value.bytes) for value in step.makes],
            [(k, _describe_constant(leaf)) for k, leaf in step.plain],
            sorted(step.shapes.items()),
            step.expects and _describe_constant(step.expects[0]),
        )
        for step in recording.steps
    ]
    # Clones and members follow from shared memory, which the steps do not show.
    parts = [
        (
            *([number for number, *_ in part.steps], len(part.clones), sorted(part.owned), [*part.blocks.values()]),
            [
                {at: [*map(_describe_value, crossing)] for at, crossing in way.items()}
                for way in (part.takes, part.gives)
            ],
        )
        for part in program.parts
    ]
    leaves = [*map(_describe_constant, recording.leaves)]
    result = program.routes, _describe_reads(recording.reads), leaves, str(recording.structure), recording.cuts
    enters = [(value.step, value.key, axis) for value, axis in program.tail.enters]
    return [hashlib.sha256(repr(part).encode()).hexdigest()[:12] for part in (*steps, (parts, result, enters))]


def _describe_reads(reads: Reads) -> list[tuple[int, str]]:
    return [(k, _describe_value(value)) for k, value in reads.items()]


def _describe_value(value: RecordedValue) -> str:
    return f"{value.kind} {_describe_constant(value.key)} {value.step} {value.bytes}"


def _describe_constant(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    if isinstance(leaf, torch.device):  # without the index, because each rank has a device of its own
        return leaf.type
    return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__qualname__
