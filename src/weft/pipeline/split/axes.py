"""Axes of the rows, followed through a recording: a block that has its batch elsewhere computes something else.

in0 (axis 0) --> linear --> tanh --> lstm, batch on axis 1: refused        --> view --> lstm: nobody can see
"""

from collections.abc import Sequence
from typing import NamedTuple

from weft.core.errors import UsageError, listed
from weft.core.pytree import spread
from weft.pipeline.config import (
    OTHER_AXES,
    BatchDims,
    axis_in_words,
    batch_axis,
    flatten_sequential,
    forbid_several_axes,
    keeps_axes,
)
from weft.pipeline.split.program import Instruction, RecordedValue, Recording

_KEEP_AXES = {  # names of torch functions
    *("add", "sub", "mul", "div", "relu", "gelu", "silu", "tanh", "sigmoid", "softmax", "dropout"),
    *("linear", "embedding", "layer_norm", "rms_norm", "float", "to", "clone", "contiguous"),
}


class _Rows(NamedTuple):
    """The axis that holds the rows, and in words the module that is known for it, if there is one."""

    axis: int
    source: str = ""


def check_axes(recording: Recording, axes: Sequence[int | None], dims: BatchDims) -> None:
    """Raise UsageError that names each block whose batch is known to be on another axis than the rows that reach it, or
    than those of the output that it makes. `axes` are those of the inputs."""
    pairs = zip(recording.inputs, axes, strict=True)
    rows = {value: None if axis is None else _Rows(axis) for value, axis in pairs}
    faults: list[str] = []
    for step in recording.steps:
        found = _of_result(step, rows, faults)
        rows.update({value: found for value in step.makes if value is not None and value.key <= 0})
    wanted = spread(dims.outputs, recording.structure, "output")
    for k, value in recording.reads.items():
        if (found := rows.get(value)) and found.source and found.axis != wanted[k]:
            faults.append(f"{found.source}, but it makes the output, joined along axis {wanted[k]}")
    if faults:
        raise UsageError(listed(OTHER_AXES, list(dict.fromkeys(faults))))
    more = [recording.steps[value.step] for value in recording.reads.values() if value.kind == "made" and value.key > 0]
    for step in more if dims.outputs_assumed else ():
        if step.module is not None:
            forbid_several_axes(step.name, step.module)


def _of_result(step: Instruction, rows: dict[RecordedValue, _Rows | None], faults: list[str]) -> _Rows | None:
    """The rows of the first tensor that a step makes. A block that they reach on another axis is added to `faults`."""
    if step.module is None:
        read = {rows.get(value) for value in step.reads.values() if value.kind in ("in", "made")}
        return read.pop() if len({each and each.axis for each in read}) == 1 and step.name in _KEEP_AXES else None
    found = rows.get(step.reads[0]) if 0 in step.reads else None
    for name, layer in flatten_sequential(step.name, step.module):
        own = batch_axis(layer)
        words = axis_in_words(name, layer, own)
        if own is not None and found and found.axis != own:
            faults.append(f"{words}, but it gets the rows on axis {found.axis}")
        if own is not None:
            found = _Rows(own, words)
        elif not keeps_axes(layer):
            found = None
    return found
