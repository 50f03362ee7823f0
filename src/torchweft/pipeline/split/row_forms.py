"""The row forms of a model's programs: recorded once per form of a program, and checked for rows that are mixed."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core.errors import BatchError, SplitError, join_faults
from torchweft.core.pytree import unflatten
from torchweft.pipeline.microbatch import SplitPlan
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.split.recording import (
    Recording,
)
from torchweft.pipeline.split.rows import RowForm, find_mixed_rows, identity, more_rows
from torchweft.pipeline.split.tail import Tail


class RowsOfCall(NamedTuple):
    """One micro-batch with that many `rows`. `check`: whether its rows are compared with those of a longer one."""

    plan: SplitPlan
    piece: Sequence[Any]
    rows: int
    check: bool

    def taken(self, index: Sequence[int]) -> Any:
        """The arguments with these rows of the micro-batch."""
        pairs = zip(self.piece, self.plan.axes, strict=True)
        leaves = [x if axis is None else _taken(x, axis, index) for x, axis in pairs]
        return unflatten(self.plan.structure, leaves)


class RowForms:
    def __init__(self, recorder: ForwardRecorder) -> None:
        self._recorder = recorder
        self._known: dict[Hashable, RowForm] = {}
        self._second: dict[RowForm, tuple[Recording, Sequence[int]]] = {}  # until its rows were compared

    def find(self, recording: Recording, call: RowsOfCall) -> RowForm:
        """The form of a recording, by a second one with more rows if it is a new form. Raises SplitError if forward()
        takes another path for every other number of rows."""
        key = tuple(map(identity, recording.steps))
        if key in self._known:
            return self._known[key]
        fault: Exception | None = None
        for more, index in more_rows(call.rows):
            try:
                args, kwargs = call.taken(index)
                second = self._recorder.record(args, kwargs, keep=True)
            except Exception as error:  # of the user's code, which can need an even number of rows, say
                fault = fault or error
                continue
            form = RowForm(recording, second, call.rows, more)
            if any(_is_trained(step.module) for step in recording.steps[form.compared :]):
                continue  # the paths part before the end of the blocks
            self._known[key], self._second[form] = form, (second, index)
            return form
        error = SplitError(
            f"forward() of {type(self._recorder.model).__name__} does not call the same blocks for {call.rows} rows as "
            f"for {call.rows + 3}, {call.rows + 4} and {3 * call.rows + 3}, so its values cannot be followed by rows; "
            "move code that depends on the number of rows into a submodule, or use chunks=1"
        )
        raise error from fault

    def reject_mixed(self, recording: Recording, tail: Tail, call: RowsOfCall) -> None:
        """Raise BatchError if a row of a value before the tail depends on other rows of the mini-batch."""
        form = tail.form
        if form is None or form not in self._second:
            return
        second, index = self._second.pop(form)
        # Without steps that depend on inputs only: a range over the rows of a mini-batch, say, is no value of a block.
        before = [k for k in range(form.compared) if k not in tail.steps | tail.pure]
        try:
            if not call.check:
                return
            faults, unproven = find_mixed_rows(recording, second, form, call.rows, before, training=True)
            if faults or unproven:
                # Dropout differs between two recordings, and a batch norm uses the rows of its batch. So the blocks
                # run in eval mode, and then both have the same values.
                first, second = (self._record_in_eval(call.taken(rows)) for rows in (range(call.rows), index))
                if (
                    list(map(identity, first.steps))
                    == list(map(identity, recording.steps))
                    == list(map(identity, second.steps))
                ):
                    faults, unproven = find_mixed_rows(first, second, form, call.rows, before, training=False)
            regrouped = [value for value, _ in tail.enters if tail.kind_of(value).name == "several"]
            places = {(value.step, value.key) for value in regrouped} & unproven
            faults += [
                f"{recording.steps[k]}: whether rows of its result stay together is not known" for k, _ in places
            ]
            if faults:
                headline = (
                    "a row of these values depends on other rows of the mini-batch, so micro-batches would give other "
                    "results than all rows. Let the code between blocks compute each row for itself, or move this to "
                    "the end of forward(), which runs on all rows; use chunks=1 for such a model; verify=False skips "
                    "this comparison:"
                )
                raise BatchError(join_faults(headline, faults))
        except BaseException:
            self._known = {key: known for key, known in self._known.items() if known is not form}
            raise
        finally:
            for of_recording in (recording, second):
                for step in of_recording.steps:
                    for value in step.makes:
                        if value is not None:
                            value.kept = None

    def _record_in_eval(self, call: Any) -> Recording:
        """Record with all modules in eval mode that are not open."""
        modules = [m for m in self._recorder.model.modules() if m not in self._recorder.modules.open and m.training]
        try:
            for module in modules:  # not eval(), which a model can override, and which would reach open modules
                module.training = False
            return self._recorder.record(*call, keep=True)
        finally:
            for module in modules:
                module.training = True


def _taken(x: Tensor, axis: int, index: Sequence[int]) -> Tensor:
    taken = x.detach().index_select(axis, torch.tensor(list(index), device=x.device))
    return taken.requires_grad_(x.requires_grad)


def _is_trained(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in (*module.parameters(), *module.buffers()))
