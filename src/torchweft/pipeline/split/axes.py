"""Axes of the rows, followed through a recording, because a block with its batch on another axis computes other values.

in0 (axis 0) --> linear --> tanh --> lstm, batch on axis 1: rejected       --> view --> lstm: not known
"""

from collections.abc import Sequence
from typing import NamedTuple

from torchweft.core.errors import UsageError, join_faults
from torchweft.core.pytree import broadcast_prefix
from torchweft.pipeline.config import (
    OTHER_AXES,
    BatchDims,
    axis_in_words,
    batch_axis,
    flatten_sequential,
    keeps_axes,
    reject_several_axes,
)
from torchweft.pipeline.split.recording import Instruction, RecordedValue, Recording

_KEEP_AXES = {  # names of torch functions
    *("add", "sub", "mul", "div", "relu", "gelu", "silu", "tanh", "sigmoid", "softmax", "dropout"),
    *("linear", "embedding", "layer_norm", "rms_norm", "float", "to", "clone", "contiguous"),
}


class _Rows(NamedTuple):
    """The axis of the rows, and the description of the module that defines it, if there is one."""

    axis: int
    source: str = ""


def check_axes(recording: Recording, axes: Sequence[int | None], dims: BatchDims) -> None:
    """Raise UsageError that names each block whose batch is known to be on another axis than the rows of its input, or
    of the output that it makes. `axes` are the axes of the inputs."""
    pairs = zip(recording.inputs, axes, strict=True)
    rows = {value: None if axis is None else _Rows(axis) for value, axis in pairs}
    faults: list[str] = []
    for step in recording.steps:
        of_result = _rows_of_result(step, rows, faults)
        # The first leaf and writes in place. Other leaves, such as states of an LSTM, have their batch elsewhere.
        rows.update({value: of_result for value in step.makes if value is not None and value.key <= 0})
    output_axes = broadcast_prefix(dims.outputs, recording.structure, "output")
    for k, value in recording.reads.items():
        if (of_output := rows.get(value)) and of_output.source and of_output.axis != output_axes[k]:
            faults.append(f"{of_output.source}, but it makes the output, joined along axis {output_axes[k]}")
    if faults:
        raise UsageError(join_faults(OTHER_AXES, list(dict.fromkeys(faults))))
    more = [recording.steps[value.step] for value in recording.reads.values() if value.kind == "made" and value.key > 0]
    for step in more if dims.outputs_assumed else ():
        if step.module is not None:
            reject_several_axes(step.name, step.module)


def _rows_of_result(step: Instruction, rows: dict[RecordedValue, _Rows | None], faults: list[str]) -> _Rows | None:
    """The rows of the first tensor that a step makes. Blocks that get them on another axis are added to `faults`."""
    if step.module is None:
        read = {rows.get(value) for value in step.reads.values() if value.kind in ("in", "made")}
        same_axis = len({of_value and of_value.axis for of_value in read}) == 1
        return read.pop() if same_axis and step.name in _KEEP_AXES else None
    current = rows.get(step.reads[0]) if 0 in step.reads else None
    for name, layer in flatten_sequential(step.name, step.module):
        own = batch_axis(layer)
        words = axis_in_words(name, layer, own)
        if own is not None and current and current.axis != own:
            faults.append(f"{words}, but it gets the rows on axis {current.axis}")
        if own is not None:
            current = _Rows(own, words)
        elif not keeps_axes(layer):
            current = None
    return current
