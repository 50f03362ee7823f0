"""Programs for inputs of other sizes, made without a recording.

                12 tokens        15 tokens        now 17 tokens
    block(x)    [2, 12, 64]      [2, 15, 64]      [2, 17, 64]      computed: fixed, or linear in a size of the inputs
    view(x)      2, 12, 4, 16     2, 15, 4, 16     2, 17, 4, 16    taken: what forward() passes for the new inputs

The sizes of all values are computed from those of two recordings or more. forward() then runs with empty tensors of
these sizes, as it does before every step, and shows the plain arguments of its calls. At last the new program runs once
for the inputs, without a graph, which checks every size. So it is the program that a recording of them would have
given. If anything else differs, they are recorded.
"""

from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from torchweft.core.pytree import Structure
from torchweft.pipeline.split.expected import ExpectedCalls, TailNeedsMore, is_plain
from torchweft.pipeline.split.isolation import keep_attributes
from torchweft.pipeline.split.program import Program
from torchweft.pipeline.split.recording import (
    HERE,
    Reads,
    RecordedValue,
    Recording,
    Values,
)
from torchweft.pipeline.split.rows import RowForm, identity, same
from torchweft.pipeline.split.whole_forward import ForwardChanged, OtherBranch, TailDevice, WholeForward, keep_state

_RECORDINGS, _OF_GROUP = 256, 4  # recordings that are kept: all, and those of one group
Sizes = tuple[int, ...]


class RecordingGroup:
    """Recordings of one kind of call with the same steps, for inputs of several sizes."""

    def __init__(self, steps: Hashable) -> None:
        self.steps = steps
        self.recorded: list[tuple[Sizes, Program]] = []
        self.usable = True

    @property
    def form(self) -> RowForm | None:
        return self.recorded[-1][1].tail.form

    @property
    def runs_hooks(self) -> bool:
        return self.recorded[-1][1].expected.runs_hooks

    def take_calls(
        self,
        model: nn.Module,
        leaves: Sequence[Any],
        structure: Structure,
        home: TailDevice,
        open_modules: Collection[nn.Module],
    ) -> Recording | None:
        """The recording of forward() for inputs of other sizes. None if it does something else for them."""
        if (shapes := self._shapes(leaves)) is None:
            return None
        program = self.recorded[-1][1]
        taken = ObservedCalls(model, program, shapes)
        undo = keep_attributes(open_modules), keep_state(taken, program.tail)
        forward = WholeForward(taken, program.tail, taken.rows, None, {}, home, decides=True)
        # The sizes can be wrong, so the code of forward() can raise anything.
        with suppress(Exception, ForwardChanged, OtherBranch, TailNeedsMore):
            try:
                forward.run(model, leaves, structure, open_modules)
            finally:
                for restore in undo:
                    restore()
            return taken.recorded(leaves)
        return None

    def _shapes(self, leaves: Sequence[Any]) -> dict[RecordedValue, Sizes] | None:
        """The shapes of the values of the last recording, for inputs with other sizes. None if they are not known.

        A value of the tail keeps its shape if it is not known: the tail runs as forward() finds it.
        """
        known, now = [sizes for sizes, _ in self.recorded], sizes_of(leaves)
        programs = [program for _, program in self.recorded]
        computed: dict[Sizes, int | None] = {}
        shapes: dict[RecordedValue, Sizes] = {}
        for k, steps in enumerate(zip(*(program.recording.steps for program in programs), strict=True)):
            for values in zip(*(step.makes for step in steps), strict=True):
                value, forms = values[-1], [value and value.form for value in values]
                if not any(forms):
                    continue
                recorded = [form.shape for form in forms if form is not None]
                if value is None or len(recorded) < len(values):
                    return None  # not a tensor each time
                shape: list[int | None] = [None]
                if len(set(map(len, recorded))) == 1:
                    for sizes in zip(*recorded, strict=True):  # of one axis, in all recordings
                        if sizes not in computed:
                            computed[sizes] = _size(known, sizes, now)
                    shape = [computed[sizes] for sizes in zip(*recorded, strict=True)]
                if None not in shape:
                    shapes[value] = tuple([size for size in shape if size is not None])
                elif k in programs[-1].tail.steps:
                    shapes[value] = recorded[-1]
                else:
                    return None
        return shapes


class RecordingGroups:
    """The groups of all kinds of calls, and the programs that were derived from them."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, list[RecordingGroup]] = {}
        self._added = 0
        self._origins: WeakKeyDictionary[Program, RecordingGroup] = WeakKeyDictionary()

    def add(self, kind: Hashable, leaves: Sequence[Any], program: Program) -> None:
        """Note a program that was recorded for these inputs."""
        steps = program.recording.steps
        by_whole = program.tail.form is not None and program.tail.form.by_whole
        # Writes in place: which values share memory can depend on sizes.
        if by_whole or program.recording.aliases or any(step.writes for step in steps):
            return
        if self._added >= _RECORDINGS:
            # They only save recordings, so they can be forgotten at any time.
            self._groups.clear()
            self._added = 0
        self._added += 1
        groups, known = self._groups.setdefault(kind, []), tuple(map(identity, steps))
        group = next((group for group in groups if group.steps == known), None) or RecordingGroup(known)
        groups[:] = [group, *(other for other in groups if other is not group)]
        group.recorded = [*group.recorded[1 - _OF_GROUP :], (sizes_of(leaves), program)]

    def find(self, kind: Hashable) -> list[RecordingGroup]:
        """The groups that programs can be derived from. The one that was recorded last comes first."""
        return [group for group in self._groups.get(kind, ()) if group.usable]

    def add_derived(self, program: Program, group: RecordingGroup) -> None:
        self._origins[program] = group

    def reject(self, program: Any) -> bool:
        """Whether a program was derived. If so, no other one is derived from its group."""
        group = self._origins.get(program) if isinstance(program, Program) else None
        if group is not None:
            group.usable = False
        return group is not None


class ObservedCalls(ExpectedCalls):
    """The calls of a program for inputs of other sizes. Plain arguments are taken and not compared. All else is."""

    def __init__(self, model: nn.Module, program: Program, shapes: Mapping[RecordedValue, Sizes]) -> None:
        super().__init__(model, program.recording, program.tail, program.expected.rows)
        self.runs_hooks = program.expected.runs_hooks
        self._shapes = {self.rows: dict(shapes)}
        self._taken = {k: step.leaves for k, step in enumerate(self.steps)}
        self._result = self.recording.leaves

    def _fault_of_leaves(self, k: int, leaves: Sequence[Any], rows: int) -> str | None:
        """See `ExpectedCalls`."""
        step = self.steps[k]
        taken = list(step.leaves)
        for j, recorded in enumerate(taken):
            if j in step.reads or recorded is HERE:
                continue
            if is_plain(recorded) and is_plain(leaves[j]):
                taken[j] = leaves[j]
            elif not same(recorded, leaves[j]):
                return f"calls {step} with another object"
        self._taken[k] = taken
        return None

    def fault_of_result(self, leaves: Sequence[Any], structure: Structure, values: Values) -> str | None:
        """See `ExpectedCalls`."""
        reads = self.recording.reads
        pairs = zip(self.recording.leaves, leaves, strict=False)
        self._result = [x if k not in reads and is_plain(x) else before for k, (before, x) in enumerate(pairs)]
        same_reads = all(self._is_value(value, leaves[k], values) for k, value in reads.items())
        return None if same_reads and structure == self.recording.structure else "it returns something else"

    def recorded(self, inputs: Sequence[Any]) -> Recording:
        """The recording of the calls that forward() has made for `inputs`."""
        shapes = self._shapes[self.rows]
        renewed: dict[RecordedValue, RecordedValue] = {}
        for value, leaf in zip(self.recording.inputs, inputs, strict=True):
            renewed[value] = replace(value, bytes=leaf.nbytes) if isinstance(leaf, Tensor) else value
        for value, shape in shapes.items():
            if value.form is not None and shape != value.form.shape:
                bytes = prod(shape) * value.form.dtype.itemsize
                renewed[value] = replace(value, form=value.form._replace(shape=shape), bytes=bytes)

        def reads_of(reads: Reads) -> Reads:
            return {k: renewed.get(value, value) for k, value in reads.items()}

        steps = [
            replace(
                step,
                leaves=self._taken[k],
                reads=reads_of(step.reads),
                makes=[value and renewed.get(value, value) for value in step.makes],
                shapes={j: shapes[value] for j in step.shapes if (value := step.makes[j]) is not None},
            )
            for k, step in enumerate(self.steps)
        ]
        return replace(
            self.recording,
            inputs=[renewed[value] for value in self.recording.inputs],
            steps=steps,
            leaves=self._result,
            reads=reads_of(self.recording.reads),
        )


@contextmanager
def checking_sizes(recording: Recording) -> Generator[None]:
    """Context in which each step checks the shapes of all that it makes, and not only those that Python code reads."""
    before = [step.shapes for step in recording.steps]
    for step in recording.steps:
        forms = enumerate(value and value.form for value in step.makes)
        step.shapes = {k: form.shape for k, form in forms if form is not None}
    try:
        yield
    finally:
        for step, shapes in zip(recording.steps, before, strict=True):
            step.shapes = shapes


def sizes_of(leaves: Sequence[Any]) -> Sizes:
    return tuple([size for x in leaves if isinstance(x, Tensor) for size in x.shape])


def _size(known: Sequence[Sizes], recorded: Sizes, now: Sizes) -> int | None:
    """The size of an axis of a value for inputs of sizes `now`, if all that is known allows only one.

    `recorded` are its sizes for inputs of the `known` sizes."""
    found: set[int] = set()
    for k, size in enumerate(now):
        before = [sizes[k] for sizes in known]
        other = next((j for j, x in enumerate(before) if x != before[0]), None)
        if other is None:
            if size != before[0]:
                return None  # nothing shows what depends on it
            continue
        above, below = recorded[other] - recorded[0], before[other] - before[0]
        if all((y - recorded[0]) * below == (x - before[0]) * above for x, y in zip(before, recorded, strict=True)):
            rise, rest = divmod((size - before[0]) * above, below)
            if not rest:
                found.add(recorded[0] + rise)
    if not found and now == known[-1]:
        return recorded[-1]
    return found.pop() if len(found) == 1 else None
