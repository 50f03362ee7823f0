"""A model with split points: its programs, and the runs of forward() that choose, compare and finish them.

mini-batch --> micro-batches --> key (structure, shapes, arguments, flags) --> guards on inputs --> program
                                   |                                                              |
                                   +-- not found: record, verify on another micro-batch  <--------+
program --> forward() on all rows compares its calls --> fits: the stages, then the tail
                    |                                             |
                    +-- does not: another program of the key, or a new recording
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchweft.core.errors import BatchError, GuardError, SplitError, add_advice
from torchweft.core.pytree import Structure, broadcast_prefix, flatten, register_dataclasses, unflatten
from torchweft.core.rng import generators_of, get_states, set_states
from torchweft.core.segment import version
from torchweft.pipeline.config import BatchDims
from torchweft.pipeline.microbatch import NoChunk, SplitPlan, plan_split
from torchweft.pipeline.pipeline_plan import Crossing
from torchweft.pipeline.skip import Skippable
from torchweft.pipeline.split.auto import Arguments
from torchweft.pipeline.split.axes import check_axes
from torchweft.pipeline.split.expected import ExpectedCalls, TailNeedsMore
from torchweft.pipeline.split.isolation import copies, keep_attributes, undisturbed
from torchweft.pipeline.split.lengths import RecordingGroup, RecordingGroups, checking_sizes, sizes_of
from torchweft.pipeline.split.members import StageMembers
from torchweft.pipeline.split.open_state import PLAIN
from torchweft.pipeline.split.program import Program, SplitCall, SplitStage
from torchweft.pipeline.split.program_cache import PROGRAMS, ProgramCache, Trials
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.split.recording import Devices, Recording
from torchweft.pipeline.split.row_forms import LongerRecording, RecordedCall, RowForms, drop_copies
from torchweft.pipeline.split.rows import RowForm, identity
from torchweft.pipeline.split.state_writes import Captured
from torchweft.pipeline.split.stated_rule import Numbers, Reduction, StatedRule, run_for_numbers
from torchweft.pipeline.split.tail import Tail
from torchweft.pipeline.split.verify import verify
from torchweft.pipeline.split.whole_forward import ForwardChanged, OtherBranch, TailDevice, WholeForward, keep_state
from torchweft.pipeline.stage import Stage

_ENOUGH = 3  # compared programs of a group


class FollowedRecording:
    """A recording that forward() follows on all rows, while the stages run programs of other recordings."""

    def __init__(self, tail: Tail, expected: ExpectedCalls) -> None:
        self.tail, self.expected = tail, expected
        self.number = 0  # identifies it in messages between ranks


class StepChoice(NamedTuple):
    """The programs of one step, one per micro-batch, and its arguments: all leaves, and those of each micro-batch."""

    call: SplitCall
    scalars: Reduction | None
    programs: Sequence[Program] = ()
    plan: SplitPlan | None = None
    leaves: Sequence[Any] = ()
    pieces: Sequence[Sequence[Any]] = ()
    reference: FollowedRecording | None = None

    def compared(self) -> dict[Program, int]:
        """The programs with calls of forward() that those of the first one do not imply, and a micro-batch of each."""
        first = self.programs[0]
        others = {program: i for i, program in enumerate(self.programs) if program is not first}
        return {first: 0, **{p: i for p, i in others.items() if not p.expected.implied_by(first.expected)}}


class SplitModel:
    """A model with split points: its programs, and its stages. Raises SplitError for names that are not modules."""

    _stage_type = SplitStage
    _foreign: Collection[str] = frozenset()  # see `Program`
    _absent: Collection[str] = frozenset()  # see `Tail`

    def __init__(self, model: nn.Module, split: Sequence[str], devices: Devices, dims: BatchDims) -> None:
        if any(isinstance(module, Skippable) for module in model.modules()):
            raise SplitError("skippable layers declare the values that cross; leave split= out, and give balance=")
        self.model, self.split, self.devices = model, list(split), list(devices)
        self._dims = dims
        self._rules: dict[Hashable, StatedRule] = {}
        self.recordings = 0
        self.latest: Program | None = None
        self.members = StageMembers(model, self.devices)
        self._recorder = self._new_recorder()
        self._programs = ProgramCache(type(model).__name__)
        self._forms = RowForms(self._recorder)
        self._references: dict[Hashable, FollowedRecording] = {}
        self._groups = RecordingGroups()

    @property
    def runs_tail(self) -> bool:
        """Whether the end of forward() runs in this process."""
        return True

    def _new_recorder(self) -> ForwardRecorder:
        return ForwardRecorder(self.model, self.split, self.devices)

    def choose(
        self, args: Any, kwargs: dict[str, Any], chunks: int, axis: Any, trials: Trials, *,
        check: bool, graph: bool, outputs: bool, stated: Reduction | None = None,
    ) -> StepChoice:  # fmt: skip
        """A program for each micro-batch. Programs that are missing are recorded.

        `axis` is the axis of the rows, an int or nested as ``(args, kwargs)``. With `check`, new programs are compared
        with the plain forward. With `graph`, copies stay connected with their originals. With `outputs`, the caller
        gets the result of forward(). `stated` is the rule for numbers in it, if one is stated. Raises BatchError if the
        mini-batch cannot be cut or its values cannot be joined, SplitError for code that cannot be recorded and for
        programs that compute other values.
        """
        register_dataclasses((args, kwargs))
        whole = _broadcast_whole((args, kwargs), axis)
        plan, leaves = plan_split(whole, chunks, axis=axis)
        arguments, pieces = unflatten(plan.structure, leaves), plan.split(leaves)
        joins = outputs and stated is None and len(plan.sizes) > 1
        settings = joins, self._settings()
        keys: dict[int, Hashable] = {}
        chosen: list[Program] = []
        for i, (rows, piece) in enumerate(zip(plan.sizes, pieces, strict=True)):
            if rows not in keys:
                keys[rows] = (plan.structure, *map(_leaf_key, piece))
            program = self._programs.find((settings, keys[rows]), piece, self.members.find, trials.excluded)
            if program is None:
                call = RecordedCall(arguments, plan.sizes, plan.axes, i, joins, check)
                program = self._add_program(call, piece, keys[rows])
                settings = joins, self._settings()  # the first run can have changed some
                trials.recorded[program] = i
            chosen.append(program)
        if check:
            self._verify(chosen, trials.recorded, plan.structure, pieces)
        self.latest = chosen[0]
        scalars = stated if outputs and len(plan.sizes) > 1 else None
        if scalars is not None and check and chosen[0].recording.has_scalars:
            plain = [x for x in leaves if isinstance(x, PLAIN) and not isinstance(x, slice)]
            self._rule_of((_kind(settings, plan.structure, leaves), *plain), scalars, chosen[0]).check(
                plan, leaves, pieces
            )
        reference = None
        if chosen[0].tail.form is not None and chosen[0].tail.form.by_whole:
            whole_call = RecordedCall(arguments, plan.sizes, plan.axes, 0, joins, check)
            reference = self._find_reference(whole_call, chosen[0], trials)
        call = SplitCall(self.members.programs_of_step(chosen, graph=graph), *whole)
        return StepChoice(call, scalars, chosen, plan, leaves, pieces, reference)

    def _find_reference(self, call: RecordedCall, program: Program, trials: Trials) -> FollowedRecording:
        """The recording of all rows, of a model that takes another path for every number of rows."""
        leaves, structure = flatten(call.arguments)
        key = self._settings(), structure, *map(_leaf_key, leaves)
        reference = self._references.get(key)
        if reference is None or reference in trials.excluded:
            while len(self._references) >= PROGRAMS:
                del self._references[next(iter(self._references))]
            self._references[key] = reference = self._new_reference(call, program)
            trials.recorded[reference] = 0
        partners = cast(RowForm, reference.tail.form).partners
        entering = [[(v.step, v.key, axis) for v, axis in tail.enters] for tail in (reference.tail, program.tail)]
        if [(partners.get(k), key, axis) for k, key, axis in entering[0]] != entering[1]:
            raise SplitError(
                f"forward() of {type(self.model).__name__} does not call the same blocks and functions for all rows as "
                "for a micro-batch, and its end uses other values of them; move code that depends on the number of "
                "rows into a submodule, or use chunks=1"
            )
        return reference

    def _new_reference(self, call: RecordedCall, program: Program) -> FollowedRecording:
        recording = self._recorder.record(*call.arguments, keep=True)
        rows = sum(call.sizes)
        form = RowForm(recording, program.recording, rows, program.expected.rows, by_whole=True)
        tail = Tail(recording, call.axes, form, self._absent)
        drop_copies(recording)
        return FollowedRecording(tail, ExpectedCalls(self.model, recording, tail, rows))

    def run(self, choice: StepChoice, serve: Callable[[Any], Any]) -> Any:
        """Run one step: forward() on all rows, in which `serve` runs the stages; or `serve` after a comparison. It gets
        the axes of the values that enter the tail, or None if stages run all of forward().

        Raises ForwardChanged if a program does not fit, TailNeedsMore if the stages have to keep more values, and
        BatchError if micro-batches take paths that cannot be joined.
        """
        assert choice.plan is not None
        first, *others = dict.fromkeys(choice.programs)
        captured = choice.call.choice.captured
        captured.update({program: {} for program in (first, *others)})
        compared = choice.compared()
        for program in others:
            if program in compared:
                self._compare_calls(program, choice.pieces[compared[program]], choice.plan.structure, captured[program])
            else:
                captured[program] = captured[first]
        if not first.joins_rows:
            self._compare_calls(first, choice.pieces[0], choice.plan.structure, captured[first], writes=True)
            return serve(None)
        _reject_other_forms(choice.programs)
        buffers = [version(buffer) for buffer in self.model.buffers()]
        sources = generators_of(self.devices)
        states = get_states(sources)
        axes = tuple([axis for _, axis in first.tail.enters])
        try:
            return self._follow_first_fitting([first, *others], choice, partial(serve, axes))
        except TailNeedsMore as more:
            self._repeat(choice, more, (buffers, sources, states))
            raise

    def _repeat(self, choice: StepChoice, more: TailNeedsMore, before: Any) -> None:
        """Prepare to repeat a step, because its tail needs a value that the stages did not keep.

        `before` holds the versions of buffers, the generators and their states from before the step. Raises BatchError
        if it cannot be repeated.
        """
        buffers, sources, states = before
        used = choice.programs[0].recording.steps[more.place[0]]
        self._keep_more(list(dict.fromkeys(choice.programs)), more)
        if buffers != [version(buffer) for buffer in self.model.buffers()]:
            raise BatchError(
                f"the end of forward() now uses {used}, which it did not use when it was recorded. The stages have run "
                "without keeping it, and have changed buffers, so this step cannot be repeated. Nothing else has "
                "changed: later steps will keep it"
            ) from None
        set_states(sources, states)

    def _follow_first_fitting(self, programs: Sequence[Program], choice: StepChoice, serve: Callable[[], Any]) -> Any:
        """Follow the first program with the decisions of all rows, as far as inputs make them. Else the first one."""
        assert choice.plan is not None
        rows, structure = sum(choice.plan.sizes), choice.plan.structure
        captured = choice.call.choice.captured
        first, reference = programs[0], choice.reference
        several = reference is None and len({_decisions(program) for program in programs}) > 1
        if several or reference is not None:
            # On all rows, forward() can follow another recording than this one, which then would not be compared.
            self._compare_calls(first, choice.pieces[0], structure, captured[first])
        if reference is not None:
            return self._follow(reference, rows, serve, choice.leaves, structure, {})
        for program in programs if several else ():
            with suppress(OtherBranch):
                return self._follow(program, rows, serve, choice.leaves, structure, captured[program], decides=True)
        return self._follow(first, rows, serve, choice.leaves, structure, captured[first])

    def _follow(
        self,
        program: Program | FollowedRecording,
        rows: int,
        serve: Callable[[], Any] | None,
        leaves: Sequence[Any],
        structure: Structure,
        captured: Captured,
        *,
        decides: bool = False,
    ) -> Any:
        home = TailDevice(self.devices[-1], self._recorder.mixed, hides=bool(self._absent))
        forward = WholeForward(program.expected, program.tail, rows, serve, captured, home, decides=decides)
        try:
            return forward.run(self.model, leaves, structure, self._recorder.modules.open)
        except ForwardChanged as change:
            change.program = change.program or program
            raise

    def _compare_calls(
        self,
        program: Program,
        piece: Sequence[Any],
        structure: Structure,
        captured: Captured,
        *,
        writes: bool = False,
    ) -> None:
        """Compare the calls of forward() for one micro-batch with a program. With `writes`, this is the one call of
        forward() in this step, so what it writes stays."""
        restore = (
            [] if writes else [keep_attributes(self._recorder.modules.open), keep_state(program.expected, program.tail)]
        )
        try:
            self._follow(program, program.expected.rows, None, piece, structure, captured)
        finally:
            for undo in restore:
                undo()

    def note_change(self, trials: Trials, change: ForwardChanged) -> None:
        """Exclude a program that forward() does not follow in this step. Raises SplitError if it is a new one."""
        program = cast("Program | FollowedRecording", change.program)
        if self._groups.reject(program) or program not in trials.recorded:
            trials.excluded.add(program)
        elif not program.expected.tolerate(change.step):
            raise SplitError(
                f"forward() of {type(self.model).__name__} does not do the same for all rows as for a micro-batch, or "
                f"does something else in every run: {change}. Move code that depends on the number of rows, or on "
                "state that changes in every run, into a submodule"
            ) from None

    def _keep_more(self, programs: Sequence[Program], more: TailNeedsMore) -> None:
        """Let a value enter the tail that was not used by it so far, in these and in later programs of the form."""
        form = programs[0].tail.form
        assert form is not None
        form.wanted.add(more.place)
        for program in programs:
            if program.tail.form is form:
                tail = Tail(program.recording, program.tail.axes, form, self._absent)
                self._replace_program(program, self._new_program(program.recording, tail, program.expected.rows))

    def _replace_program(self, old: Program, new: Program) -> None:
        self._programs.replace(old, new)

    def _add_program(self, call: RecordedCall, piece: Sequence[Any], shape: Hashable) -> Program:
        program = self._recorded(call)
        settings = call.joins, self._settings()
        steps = [(step.name, step.where, id(step.module)) for step in program.recording.steps]
        form = _kind(settings, program.recording.structure, piece), *steps
        if (oldest := self._programs.add((settings, shape), program, form, piece)) is not None:
            self._drop(oldest)
        return program

    def _recorded(self, call: RecordedCall) -> Program:
        """A new program for one micro-batch, derived from others if possible. The stages are prepared for it."""
        piece = call.piece
        leaves, structure = flatten(piece)
        program = self._derived(call, leaves, structure)
        if program is None:
            self.recordings += 1
            recording = self._recorder.record(*piece, keep=call.joins)
            check_axes(recording, call.axes, self._dims)
            tail = self._tail_of(recording, call) if call.joins else Tail(recording, call.axes, None, self._absent)
            program = self._new_program(recording, tail, call.rows)
            self._compare(program)
            self._find_hooks(program, piece)
            self._groups.add(self._kind_of_group(call, leaves, structure), leaves, program)
        if self.members.add(program):
            self.place()
        return program

    def _kind_of_group(self, call: RecordedCall, leaves: Sequence[Any], structure: Structure) -> Hashable:
        # Without the attributes that were read: a program is derived for other numbers in them, too.
        kind = _kind(self._settings()[:-1], structure, leaves)
        placed = [(x.requires_grad, x.device) for x in leaves if isinstance(x, Tensor)]
        special = [min(size, 2) for size in sizes_of(leaves)]  # to PyTorch, 0 and 1 are not like other sizes
        return call.joins, call.rows, kind, *placed, *special

    def _derived(self, call: RecordedCall, leaves: Sequence[Any], structure: Structure) -> Program | None:
        """A program for one micro-batch that follows from those of other sizes."""
        home = TailDevice(self.devices[-1], self._recorder.mixed, hides=bool(self._absent))
        open_modules = self._recorder.modules.open
        found: tuple[RecordingGroup, Recording] | None = None
        for group in self._groups.find(self._kind_of_group(call, leaves, structure)):
            if (recording := group.take_calls(self.model, leaves, structure, home, open_modules)) is not None:
                found = group, recording
                break
        # All ranks derive it, or none does.
        if self._recorder.agree_on(None if found is not None else "another path") is not None or found is None:
            return None
        group, recording = found
        program = self._new_program(recording, Tail(recording, call.axes, group.form, self._absent), call.rows)
        program.expected.runs_hooks = group.runs_hooks
        try:
            quiet = undisturbed(self.model, self.devices, open_modules)
            with quiet, torch.no_grad(), checking_sizes(recording):
                self._recorder.run_stages(program, copies(leaves), self.members.find)
        except GuardError:
            return None
        self._compare(program)
        self._groups.add_derived(program, group)
        return program

    def _tail_of(self, recording: Recording, call: RecordedCall) -> Tail:
        """The tail of a recording. Raises BatchError if a row before it depends on other rows."""
        form, longer = self._forms.find(recording, call)
        if form is None:
            whole = self._recorder.record(*call.arguments, keep=True)
            form = RowForm(recording, whole, call.rows, sum(call.sizes), by_whole=True)
            longer = LongerRecording(whole, call.arguments, call.start)
        try:
            tail = Tail(recording, call.axes, form, self._absent)
            if longer is not None and call.check:
                self._forms.reject_mixed(recording, longer, tail, call)
        except BaseException:
            self._forms.forget(form)
            raise
        drop_copies(recording)
        return tail

    def _find_hooks(self, program: Program, call: Any) -> None:
        """Find out whether forward() needs the hooks of its blocks. Some libraries collect hidden states by hooks."""
        if not program.recording.has_hooks:
            return
        leaves, structure = flatten(call)
        for runs_hooks in (False, True):
            program.expected.runs_hooks = runs_hooks
            # Without its hooks, forward() can lack what they collect, and then it does something else, or raises.
            with (
                undisturbed(self.model, self.devices, self._recorder.modules.open),
                suppress(ForwardChanged, Exception),
            ):
                self._compare_calls(program, copies(leaves), structure, {})
                return
        program.expected.runs_hooks = False

    def _new_program(self, recording: Recording, tail: Tail, rows: int) -> Program:
        expected = ExpectedCalls(self.model, recording, tail, rows)
        return Program(recording, self.devices, tail, expected, self._foreign)

    def _compare(self, program: Program) -> None:
        """Raise SplitError if another process has recorded another program."""

    def _rule_of(self, kind: Hashable, stated: Reduction, program: Program) -> StatedRule:
        if kind not in self._rules:
            while len(self._rules) >= PROGRAMS:
                del self._rules[next(iter(self._rules))]
            run = partial(self._run_for_numbers, program)
            self._rules[kind] = StatedRule(type(self.model).__name__, stated, run)
        return self._rules[kind]

    def _run_for_numbers(self, program: Program, call: Any) -> Numbers:
        return run_for_numbers(self._recorder, program.recording, call)

    def _verify_on(self, program: Program, call: Any) -> None:
        verify(self._recorder, program, partial(self._replay, program, flatten(call)[1]), *call)

    def _replay(self, program: Program, structure: Structure, leaves: Sequence[Any]) -> Any:
        """Run a program and the tail for one micro-batch, as a step does."""

        captured: Captured = {}

        def stages() -> Any:
            return self._recorder.replay(program, leaves, self.members.find, captured)

        serve = stages if program.joins_rows else None
        result = self._follow(program, program.expected.rows, serve, leaves, structure, captured)
        return stages() if serve is None else result

    def _drop(self, program: Program) -> None:
        self._programs.drop(program)

    def _verify(
        self, chosen: Sequence[Program], recorded: dict[Program, int], structure: Structure, pieces: Sequence[Any]
    ) -> None:
        """Compare new programs with the plain forward, on another micro-batch than the recorded one. If the mini-batch
        has no other, compare on the recorded one now, and again on the next micro-batch."""
        # A few programs of a group are compared for all of it. Each step compares the calls of forward() anyway.
        due = [p for p in dict.fromkeys(chosen) if not p.verified and p.group.verified < _ENOUGH]
        for program in due:
            at = [i for i, of_micro_batch in enumerate(chosen) if of_micro_batch is program]
            other = [i for i in at if i != recorded.get(program)]
            try:
                self._verify_on(program, unflatten(structure, pieces[(other or at)[-1]]))
            except (ForwardChanged, TailNeedsMore) as change:
                # State has changed since the recording, or the tail takes another branch for this micro-batch. The run
                # of this step finds out what that means for all rows, and the next step compares again.
                if isinstance(change, ForwardChanged) and program in recorded and not self._groups.reject(program):
                    self._drop(program)
                    raise SplitError(
                        f"forward() of {type(self.model).__name__} does something else in every run: {change}; move "
                        "code that depends on state which changes in every run into a submodule"
                    ) from None
                continue
            # An interrupt too: a program must not be trusted if its comparison did not end.
            except BaseException as error:
                add_advice(error)
                self._drop(program)
                program.group.restart()
                raise
            if other:
                program.mark_verified()

    def _settings(self) -> tuple[Hashable, ...]:
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


def _kind(settings: Hashable, structure: Structure, leaves: Sequence[Any]) -> Hashable:
    """The kind of a call. Calls that differ only in sizes have the same kind."""
    kinds = [(x.dtype, x.dim()) if isinstance(x, Tensor) else cast("type[Any]", type(x)) for x in leaves]
    return settings, structure, *kinds


def _decisions(program: Program) -> Hashable:
    return tuple([step.expects for step in program.recording.steps])


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


def _reject_other_forms(programs: Sequence[Program]) -> None:
    """Raise BatchError if the values that enter the tail differ in number or form between micro-batches."""
    forms: dict[Program, list[Any]] = {}
    for program in programs:
        if program not in forms:
            entering = [(value, axis, value.form) for value, axis in program.tail.enters]
            forms[program] = [(axis, form and (len(form.shape), form.dtype)) for _, axis, form in entering]
    first = programs[0]
    for program, of_program in forms.items():
        if of_program != forms[first]:
            pairs = zip(first.recording.steps, program.recording.steps, strict=False)
            one, other = next(((x, y) for x, y in pairs if identity(x) != identity(y)), (first, program))
            raise BatchError(
                f"micro-batches take other paths through forward(): one comes to {one}, another one to {other}. So the "
                "values that its end uses differ in number or form, and cannot be joined; move the decision before it "
                "into a submodule, or make it outside and pass its result as an argument"
            )
