"""The tail of forward(): the steps at its end that join rows. They run once per step of training, on all rows.

    embed  block  add  block  head | view  cross_entropy  mean
    the stages, on micro-batches   | the tail: the model's own Python, on the joined values

A loss is rarely a mean of the losses of micro-batches: a mask leaves out unequal numbers of tokens, classes have
weights, rows are compared with each other. So such code is not cut. It is found by dependence, not by position:

    makes rows      a block with parameters, or a function that reads a parameter, whose result has rows
    loses rows      a step that makes a value without rows from values with rows
    tail            steps that lose rows, unless a step that makes rows needs them; all that depends on these; and all
                    after the last step that makes rows

So a loss between two blocks (deep supervision) is in the tail, and a tied ``F.linear(x, embedding.weight)`` is not.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from torchweft.core.errors import BatchError, join_faults
from torchweft.pipeline.split.recording import RecordedValue, Recording
from torchweft.pipeline.split.rows import NONE, RowForm, RowKind
from torchweft.pipeline.split.state_writes import StateWrites

# The way of a step in forward() on all rows: it is answered by a tensor without numbers, because the stages run it; it
# runs here too, because the tail needs its result and it depends on inputs and parameters only; or it is in the tail.
Way = Literal["answer", "here", "tail"]


class EnteringValue(NamedTuple):
    """A value that enters the tail, and the axis along which its micro-batches are joined. None: it depends on no row,
    so the value of the first micro-batch is taken."""

    value: RecordedValue
    axis: int | None


class Tail:
    """The division of a recording into stages and tail. Without a `form`, the tail is empty: stages run all of it."""

    def __init__(
        self,
        recording: Recording,
        axes: Sequence[int | None],
        form: RowForm | None,
        absent: Collection[str] = frozenset(),
    ) -> None:
        """`axes` are the axes of the rows in the inputs. `absent` are parameters that another process has. Raises
        BatchError for values that enter, but cannot be joined."""
        self._steps, self.form, self.axes = recording.steps, form, axes
        self._derived = self._find_derived(recording, axes)
        self._of_model = self._find_of_model()
        self.pure = self._find_pure()  # steps that depend on inputs and parameters only
        self.steps: set[int] = set()
        self.enters: list[EnteringValue] = []
        self._after_loss = self._find_after_loss()
        if form is not None:
            rows_end = 1 + max(filter(self._makes_rows, range(len(self._steps))), default=-1)
            needed = self._needed(k for k in range(rows_end) if self._makes_rows(k) or self._decides(k))
            self.steps = self._find_tail(rows_end, needed)
            entering = self._entering(recording, form.wanted)
            while more := {v.step for v in entering if self._regroups(v)} - needed:
                self.steps |= more
                self._add_dependent(self.steps)
                entering = self._entering(recording, form.wanted)
            self.enters = self._joined(entering)
        self.state_writes = StateWrites(self._steps, self.steps, self.is_of_state, self._needed)
        here = self.state_writes.steps | self.state_writes.before | self._find_here(recording, absent)
        self.ways: list[Way] = [
            "tail" if k in self.steps else "here" if k in here else "answer" for k in range(len(self._steps))
        ]
        outside = (k for k, way in enumerate(self.ways) if way != "answer")
        self.inputs_read = {v for k in outside for v in self._steps[k].reads.values() if v.kind == "in"}
        self.last_answered = max((k for k, way in enumerate(self.ways) if way == "answer"), default=-1)

    def kind_of(self, value: RecordedValue) -> RowKind:
        step = self._steps[value.step]
        if self.form is None:
            return NONE
        return self.form.kinds_of(value.step, len(step.makes))[step.makes.index(value)]

    def is_of_state(self, k: int) -> bool:
        """Whether a step depends on no row."""
        return self._derived.isdisjoint(self._steps[k].reads.values())

    def _find_derived(self, recording: Recording, axes: Sequence[int | None]) -> set[RecordedValue]:
        """The values that depend on rows."""
        derived = {value for value, axis in zip(recording.inputs, axes, strict=True) if axis is not None}
        for k, step in enumerate(self._steps):
            made = [value for value in step.makes if value is not None]
            by_shape = self.form is not None and any(kind != NONE for kind in self.form.kinds_of(k, len(step.makes)))
            if by_shape or not derived.isdisjoint(step.reads.values()):
                derived.update(made)
        return derived

    def _find_of_model(self) -> set[RecordedValue]:
        """Values made from tensors of the model alone, such as a transposed weight."""
        found: set[RecordedValue] = set()
        for step in self._steps:
            reads = step.reads.values()
            if step.module is None and reads and all(v.kind in ("own", "const") or v in found for v in reads):
                found.update(value for value in step.makes if value is not None)
        return found

    def _find_after_loss(self) -> set[RecordedValue]:
        """Values that depend on a step that loses rows."""
        found: set[RecordedValue] = set()
        for k, step in enumerate(self._steps if self.form is not None else ()):
            if self._loses_rows(k) or not found.isdisjoint(step.reads.values()):
                found.update(value for value in step.makes if value is not None)
        return found

    def _find_pure(self) -> set[int]:
        """Steps that depend on inputs and parameters only, and write at most to tensors that such steps make."""
        pure = {k for k, step in enumerate(self._steps) if step.module is None and not step.draws}
        while True:
            written = {storage for k, step in enumerate(self._steps) if k not in pure for storage in step.stored}
            made = {v.storage for k in pure for v in self._steps[k].makes if v is not None and v.key >= 0}
            wrong = {k for k in pure if not self._is_pure(k, pure, written, made)}
            if not wrong:
                return pure
            pure -= wrong

    def _is_pure(self, k: int, pure: set[int], written: set[int], made: set[int | None]) -> bool:
        step = self._steps[k]
        if not step.stored <= made or any(step.reads[j].kind != "made" for j in step.writes if j in step.reads):
            return False
        values = (*step.reads.values(), *(value for value in step.makes if value is not None))
        return all(
            (v.kind != "made" or v.step in pure or v.step == k) and (v.kind == "own" or v.storage not in written)
            for v in values
        )

    def _makes_rows(self, k: int) -> bool:
        step = self._steps[k]
        if step.module is None:
            trained = any(value.kind == "own" or value in self._of_model for value in step.reads.values())
        else:
            # A block without parameters, such as dropout at the end, unless it depends on a step that loses rows.
            trained = any(True for _ in (*step.module.parameters(), *step.module.buffers()))
            trained = trained or self._after_loss.isdisjoint(step.reads.values())
        return trained and any(value and self.kind_of(value).name in ("rows", "several") for value in step.makes)

    def _loses_rows(self, k: int) -> bool:
        made = [value for value in self._steps[k].makes if value in self._derived and value.form is not None]
        lost = [self.kind_of(value).name in ("none", "mixed") for value in made]
        # A block that also makes values with rows stays in the stages.
        together = all if self._steps[k].module is not None else any
        return k not in self.pure and bool(made) and together(lost)

    def _decides(self, k: int) -> bool:
        return self._steps[k].expects is not None

    def _needed(self, steps: Iterable[int]) -> set[int]:
        """These steps and all that they depend on."""
        needed = set(steps)
        for k in sorted(range(len(self._steps)), reverse=True):
            if k in needed:
                needed.update(value.step for value in self._steps[k].reads.values() if value.kind == "made")
        return needed

    def _find_tail(self, rows_end: int, needed: set[int]) -> set[int]:
        tail = {k for k in range(len(self._steps)) if self._loses_rows(k)} - needed
        tail.update(range(rows_end, len(self._steps)))
        self._add_dependent(tail)
        return tail

    def _add_dependent(self, tail: set[int]) -> None:
        for k, step in enumerate(self._steps):
            if any(value.kind == "made" and value.step in tail for value in step.reads.values()):
                tail.add(k)

    def _entering(self, recording: Recording, wanted: Collection[tuple[int, int]]) -> list[RecordedValue]:
        inside = self.steps | self.pure
        reads = [value for k in sorted(self.steps) for value in self._steps[k].reads.values()]
        more = [value for k, leaf in wanted if (value := self._steps[k].makes[leaf]) is not None]
        entering = [v for v in (*reads, *recording.reads.values(), *more) if v.kind == "made" and v.step not in inside]
        return list(dict.fromkeys(entering))

    def _regroups(self, value: RecordedValue) -> bool:
        """Whether a value is made by a function that only regroups rows, which the tail can do as well."""
        return self.kind_of(value).name == "several" and self._steps[value.step].module is None

    def _joined(self, entering: Iterable[RecordedValue]) -> list[EnteringValue]:
        joined: list[EnteringValue] = []
        faults = [
            f"{step} returns {plain!r} together with tensors"
            for k, step in enumerate(self._steps)
            for leaf, plain in (step.plain if step.module is not None and k not in self.steps else ())
            if self.form is not None and self.form.plain.get((k, leaf)) in ("proportional", "unknown")
        ]
        for value in entering:
            step, kind = self._steps[value.step], self.kind_of(value)
            if value.form is None:
                faults.append(f"{step} returns an object that is not a tensor")
            elif kind.name in ("rows", "several"):
                joined.append(EnteringValue(value, kind.axis))
            elif kind == NONE and value not in self._derived and not step.draws:
                joined.append(EnteringValue(value, None))
            else:
                why = step.opened and f"; {step.opened}"
                faults.append(f"{step} makes a tensor of shape {value.form.shape}{why}")
        if faults:
            headline = (
                "these values of the stages depend on rows but do not have one row for each that comes in, and the end "
                "of forward() or the caller uses them. No rule would join their micro-batches exactly. Compute them in "
                "the code between blocks, from values with rows; or leave them out (a balancing loss of experts is "
                "often an option of the config); or state how the numbers of micro-batches are combined: "
                "loss_reduction='mean' (by rows) or 'sum', with verify=False, because that is not the model's number:"
            )
            raise BatchError(join_faults(headline, faults))
        return joined

    def _find_here(self, recording: Recording, absent: Collection[str]) -> set[int]:
        """Steps that forward() runs itself before the tail, because the tail needs their results."""
        read = [v for k in self.steps for v in self._steps[k].reads.values()]
        read += recording.reads.values() if self.form is not None else ()
        wanted = {value.step for value in read if value.kind == "made"}
        # Decisions by state, which can have changed; and those by inputs, because those of all rows count in the tail.
        decisions = [k for k in range(len(self._steps)) if self._decides(k)]
        wanted.update(k for k in decisions if self.steps or self.is_of_state(k))
        here = self._needed(wanted & self.pure) & self.pure
        # All that writes to the same tensors, too.
        while True:
            storages = {v.storage for k in here for v in self._steps[k].makes if v is not None}
            writers = {k for k in self.pure if not self._steps[k].stored.isdisjoint(storages)}
            if writers <= here:
                break
            here = self._needed(here | writers) & self.pure
        # A process that lacks a parameter does not run what depends on it. It does not run the tail either.
        lacking: set[int] = set()
        for k in sorted(here | self.steps):
            step = self._steps[k]
            reads = step.reads.values()
            inside = step.module is not None and any(name.startswith(f"{step.name}.") for name in absent)
            if inside or any(v.key in absent if v.kind == "own" else v.step in lacking for v in reads):
                lacking.add(k)
        self.lacking = [str(self._steps[k]) for k in sorted(lacking)]
        return here - self.steps - lacking
