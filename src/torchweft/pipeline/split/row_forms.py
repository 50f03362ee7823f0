"""The row forms of a model's programs: recorded once per form of a program, and checked for rows that are mixed."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.errors import BatchError, join_faults
from torchweft.core.pytree import flatten, unflatten
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.split.recording import Instruction, Recording
from torchweft.pipeline.split.rows import FRONT, RowForm, find_mixed_rows, identity, more_rows
from torchweft.pipeline.split.tail import Tail


class RecordedCall(NamedTuple):
    """A micro-batch to record: its `number` among those of these `sizes`, and the arguments of the mini-batch,
    nested as ``(args, kwargs)``. `axes` are the axes of their rows. With `joins`, the end of forward() runs on all
    rows. With `check`, rows are compared with those of a longer micro-batch."""

    arguments: Any
    sizes: Sequence[int]
    axes: Sequence[int | None]
    number: int
    joins: bool
    check: bool

    @property
    def rows(self) -> int:
        return self.sizes[self.number]

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.number])

    @property
    def piece(self) -> Any:
        """The arguments of the micro-batch."""
        leaves, structure = flatten(self.arguments)
        pairs = zip(leaves, self.axes, strict=True)
        return unflatten(structure, [x if k is None else x.narrow(k, self.start, self.rows) for x, k in pairs])

    @property
    def neighbour(self) -> "RecordedCall":
        """The next micro-batch, or the one before the last one."""
        return self._replace(number=self.number + 1 if self.number + 1 < len(self.sizes) else self.number - 1)

    def with_neighbour(self) -> Any:
        """The arguments of this micro-batch and its neighbour."""
        leaves, structure = flatten(self.arguments)
        start, rows = min(self.start, self.neighbour.start), self.rows + self.neighbour.rows
        pairs = zip(leaves, self.axes, strict=True)
        return unflatten(structure, [x if k is None else x.narrow(k, start, rows) for x, k in pairs])

    def taken(self, index: Sequence[int]) -> Any:
        """The arguments with these rows of the micro-batch."""
        leaves, structure = flatten(self.piece)
        pairs = zip(leaves, self.axes, strict=True)
        return unflatten(structure, [x if axis is None else _taken(x, axis, index) for x, axis in pairs])


class LongerRecording(NamedTuple):
    """A recording of more rows than a micro-batch has, its arguments, and the rows before those of the micro-batch."""

    recording: Recording
    call: Any
    front: int


class RowForms:
    def __init__(self, recorder: ForwardRecorder) -> None:
        self._recorder = recorder
        self._known: dict[Hashable, RowForm | None] = {}

    def find(self, recording: Recording, call: RecordedCall) -> tuple[RowForm | None, LongerRecording | None]:
        """The form of a recording, and if it is a new one, the second recording that it comes from. The form is None if
        forward() takes another path for every other number of rows."""
        key = tuple(map(identity, recording.steps))
        if key not in self._known:
            for more, index in more_rows(call.rows):
                # The user's code can need an even number of rows, say. Over processes an error ends the recording on
                # all of them, because the others wait for the results of the one that raised.
                with suppress(Exception) if self._recorder.alone else nullcontext():
                    taken = call.taken(index)
                    second = self._recorder.record(*taken, keep=True)
                    form = RowForm(recording, second, call.rows, more)
                    if not any(map(_is_trained, recording.steps[len(form.partners) :])):
                        self._known[key] = form
                        return form, LongerRecording(second, taken, FRONT)
            self._known[key] = None
        return self._known[key], None

    def forget(self, form: RowForm) -> None:
        self._known = {key: known for key, known in self._known.items() if known is not form}

    def reject_mixed(self, recording: Recording, longer: LongerRecording, tail: Tail, call: RecordedCall) -> None:
        """Raise BatchError if a row of a value before the tail depends on other rows of the mini-batch."""
        form = tail.form
        assert form is not None
        # Without steps that depend on inputs only: a range over the rows of a mini-batch, say, is no value of a block.
        before = [k for k in form.partners if k not in tail.steps | tail.pure]
        faults, unproven = self._find_mixed(recording, longer, form, before, call)
        if not faults and not form.by_whole:
            faults = self._find_mixed_with_neighbour(recording, before, call)
        regrouped = [value for value, _ in tail.enters if tail.kind_of(value).name == "several"]
        places = {(value.step, value.key) for value in regrouped} & unproven
        faults += [f"{recording.steps[k]}: whether rows of its result stay together is not known" for k, _ in places]
        if faults:
            headline = (
                "a row of these values depends on other rows of the mini-batch, so micro-batches would give other "
                "results than all rows. Let the code between blocks compute each row for itself, or move this to the "
                "end of forward(), which runs on all rows; use chunks=1 for such a model; verify=False skips this "
                "comparison:"
            )
            raise BatchError(join_faults(headline, faults))

    def _find_mixed_with_neighbour(self, recording: Recording, steps: Sequence[int], call: RecordedCall) -> list[str]:
        """The first step with rows that differ if the rows of another micro-batch are added, in words."""
        # Rows that are there twice change no largest value. Of two micro-batches, one lacks the largest value of both.
        neighbour = call.neighbour
        together = call.with_neighbour()
        both = self._recorder.record(*together, keep=True)
        alone = self._recorder.record(*neighbour.piece, keep=True)
        start = min(call.start, neighbour.start)
        for one, of_call in ((recording, call), (alone, neighbour)):
            # They can take another branch, so only the steps before it are compared.
            beginning = RowForm(one, both, of_call.rows, call.rows + neighbour.rows)
            equal = RowForm(recording, one, call.rows, of_call.rows).partners
            compared = [k for k in steps if k in beginning.partners and k in equal]
            longer = LongerRecording(both, together, of_call.start - start)
            if faults := self._find_mixed(one, longer, beginning, compared, of_call)[0]:
                return faults
        return []

    def _find_mixed(
        self, recording: Recording, longer: LongerRecording, form: RowForm, steps: Sequence[int], call: RecordedCall
    ) -> tuple[list[str], set[tuple[int, int]]]:
        """See `find_mixed_rows`."""
        rows, front = call.rows, longer.front
        found = find_mixed_rows(recording, longer.recording, form, rows, steps, training=True, front=front)
        if found != ([], set()):
            # Dropout differs between two recordings, and a batch norm uses the rows of its batch. So the blocks run in
            # eval mode, and then both have the same values.
            others = self._record_in_eval(recording, longer, call)
            if others is not None:
                return find_mixed_rows(*others, form, rows, steps, training=False, front=front)
        return found

    def _record_in_eval(
        self, first: Recording, longer: LongerRecording, call: RecordedCall
    ) -> tuple[Recording, Recording] | None:
        """Both recordings with all modules in eval mode that are not open. None if they have other steps then."""
        modules = [m for m in self._recorder.model.modules() if m not in self._recorder.modules.open and m.training]
        calls = call.taken(range(call.rows)), longer.call
        try:
            for module in modules:  # not eval(), which a model can override, and which would reach open modules
                module.training = False
            one, other = (self._recorder.record(*each, keep=True) for each in calls)
        finally:
            for module in modules:
                module.training = True
        pairs = (first, one), (longer.recording, other)
        if any(list(map(identity, x.steps)) != list(map(identity, y.steps)) for x, y in pairs):
            return None
        return one, other


def drop_copies(recording: Recording) -> None:
    for step in recording.steps:
        for value in step.makes:
            if value is not None:
                value.kept = None


def _taken(x: Tensor, axis: int, index: Sequence[int]) -> Tensor:
    taken = x.detach().index_select(axis, torch.tensor(list(index), device=x.device))
    return taken.requires_grad_(x.requires_grad)


def _is_trained(step: Instruction) -> bool:
    if step.module is None:
        return any(value.kind == "own" for value in step.reads.values())
    return any(True for _ in (*step.module.parameters(), *step.module.buffers()))
