"""Input sequences, normalised: time first, with known lengths.

    inputs   {"x": T x N x D, "gate": T x N, "dt": T, "name": "run 7"}

    axis 0   time, one length for every tensor           (batch first: axis 1 of tensors with two axes or more)
    axis 1   rows, one number for every tensor that has it; "dt" holds one number per step for all rows
    other    leaves that are not tensors: every step gets them whole

The loop, the plans and the layers all need these facts, so they are established once per call.

A sequence without rows (T x D) is accepted too, as ``torch.func.vmap`` over the batch passes it. Shapes alone cannot
distinguish T x 5 for five rows from T x 5 for one row of width five. ``certain`` states that there are rows, because
the caller referred to them (lengths, mask, reset, batch first). A step's input with two axes makes them likely.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from torchweft.core.errors import UsageError
from torchweft.core.pytree import Structure, flatten, map_leaves, structure_paths
from torchweft.core.validation import Validator

Lengths = Tensor | Sequence[int]  # steps of every row, N integers


@dataclass(frozen=True)
class SequenceInputs:
    """Sequences with time first. ``rows`` is N, or ``None`` where the shapes do not agree on one."""

    leaves: list[Any]
    structure: Structure
    steps: int
    rows: int | None
    certain: bool
    axes: int  # the most axes that an input of one step has
    device: torch.device

    def each_step(self) -> Iterator[list[Any]]:
        # One `unbind` per leaf, whose gradient is one stack. Indexing would add T gradients of size T x N x D.
        columns = [leaf.unbind(0) if isinstance(leaf, Tensor) else [leaf] * self.steps for leaf in self.leaves]
        return (list(step) for step in zip(*columns, strict=True))

    def first_step(self) -> list[Any]:
        return [leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def placeholder_step(self) -> list[Any]:
        """Placeholder for a step, e.g. of an empty sequence: integers are 0 (valid indices), other numbers 0.5."""
        # Norm, sqrt and log have no gradient at 0, 1 or infinity. The step is computed from the sequences, so that
        # gradients of these exist for T = 0.
        return [_placeholder_value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]


def read_inputs(value: Any, *, batch_first: bool, certain: bool, check: Validator) -> SequenceInputs | None:
    """Normalise ``value``. Faults go to ``check``. ``None`` if T or N cannot be determined."""
    # ``certain``: the caller referred to rows, so every tensor with two axes has them.
    leaves, structure = flatten(value)
    names = structure_paths(structure, "inputs")
    tensors = {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)}
    scalars = [name for name, leaf in tensors.items() if leaf.dim() == 0]
    check.mismatch(*(f"{name} has no axes, wanted T x N x ..., time first" for name in scalars))
    if not tensors:
        kinds = sorted({type(leaf).__name__ for leaf in leaves}) or ["nothing"]
        check.mismatch(f"inputs hold no tensor (saw {', '.join(kinds)}), wanted T x N x ..., time first")
    if scalars or not tensors:
        return None
    if batch_first:
        leaves = [_time_first(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = {name: _time_first(leaf) for name, leaf in tensors.items()}
    axes = max(leaf.dim() for leaf in tensors.values()) - 1
    steps = {name: leaf.shape[0] for name, leaf in tensors.items()}
    rows = {name: leaf.shape[1] for name, leaf in tensors.items() if leaf.dim() > 1}
    agree = _check_one_size(steps, f"time (axis {int(batch_first)})", check)
    if certain or axes > 1:
        agree = _check_one_size(rows, f"the batch (axis {1 - int(batch_first)})", check) and agree
    if not agree:
        return None
    counts = list(rows.values())
    device = next(iter(tensors.values())).device
    return SequenceInputs(
        leaves, structure, next(iter(steps.values())), counts[0] if _all_equal(counts) else None, certain, axes, device
    )


def batch_first_again(value: Any, rows: int | None) -> Any:
    """A result's leaf, T x N x ..., with the batch first. A leaf without rows stays as it is."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == rows:
        return value.transpose(0, 1)
    return value


def _placeholder_value(leaf: Tensor) -> Tensor:
    zeros = leaf[:0].sum(0, dtype=leaf.dtype)
    return zeros + 0.5 if leaf.is_floating_point() or leaf.is_complex() else zeros


def _time_first(leaf: Tensor) -> Tensor:
    return leaf.transpose(0, 1) if leaf.dim() > 1 else leaf


def _check_one_size(sizes: dict[str, int], axis: str, check: Validator) -> bool:
    # Whether all sizes are equal. Otherwise a fault names every tensor with its size.
    if not sizes or _all_equal(list(sizes.values())):
        return True
    seen = ", ".join(f"{name} has {size}" for name, size in sizes.items())
    check.mismatch(f"{axis} must have one size everywhere: {seen}")
    return False


def _all_equal(sizes: Sequence[int]) -> bool:
    # Not by a set: under tracing sizes can be symbols, which have no hash.
    return bool(sizes) and all(size == sizes[0] for size in sizes)


def list_some(values: Sequence[str], most: int = 5) -> str:
    rest = len(values) - most
    return ", ".join(values[:most]) + (f" and {rest} more" if rest > 0 else "")


def pack_like(padded: Tensor | None, lengths: Tensor, packed: PackedSequence) -> PackedSequence | None:
    """The inverse of ``pad_packed_sequence``, with the row order of ``packed``. ``None`` stays ``None``."""
    if padded is None:
        return None
    order = packed.sorted_indices
    if order is not None:
        padded, lengths = padded.index_select(1, order), lengths[order.to(lengths.device)]
    data = pack_padded_sequence(padded, lengths).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


@dataclass(frozen=True)
class UnpackedInputs:
    """Inputs with time and batch axes, and the lengths of their rows. `packed` is the original, if it was packed."""

    inputs: Any
    lengths: Lengths | None
    packed: PackedSequence | None = None
    batch_first: bool = False

    def pack_outputs(self, outputs: Any) -> Any:
        packed, lengths = self.packed, self.lengths
        if packed is None or not isinstance(lengths, Tensor):
            return outputs

        def pack_leaf(leaf: Any) -> Any:
            return pack_like(_swap_if(self.batch_first, leaf), lengths, packed) if isinstance(leaf, Tensor) else leaf

        return map_leaves(pack_leaf, outputs)


def unpack_inputs(inputs: Any, lengths: Lengths | None, *, batch_first: bool, who: str) -> UnpackedInputs:
    """Unpack a ``PackedSequence``, batch first if the layers are. Other inputs stay as they are."""
    # Raises ``UsageError`` for a ``PackedSequence`` with lengths.
    if not isinstance(inputs, PackedSequence):
        return UnpackedInputs(inputs, lengths)
    if lengths is not None:
        raise UsageError(f"{who}: lengths were given, but the inputs are a PackedSequence, which has its own")
    padded, lengths = pad_packed_sequence(inputs)
    return UnpackedInputs(_swap_if(batch_first, padded), lengths, inputs, batch_first)


def _swap_if(batch_first: bool, leaf: Tensor) -> Tensor:
    return leaf.transpose(0, 1) if batch_first else leaf
