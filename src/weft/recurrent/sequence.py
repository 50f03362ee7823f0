"""Input sequences, normalised: time first, with known lengths.

    inputs   {"x": T x N x D, "gate": T x N, "dt": T, "name": "run 7"}

    axis 0   time, one length for every tensor           (batch first: axis 1 of what has two axes or more)
    axis 1   rows, one number for every tensor that has it; "dt" holds one number per step for all rows
    other    leaves that are no tensors: every step gets them whole

A sequence without rows (T x D) is accepted too, as ``torch.func.vmap`` over the batch passes it. Shapes alone cannot
tell whether T x 5 holds five rows or one row of width five. ``certain`` says that there are rows, since the caller
referred to them (lengths, mask, reset, batch first); a step's input with two axes makes them likely.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from weft.core.errors import UsageError
from weft.core.pytree import Structure, flatten, map_leaves, structure_paths
from weft.core.validation import Validator

Lengths = Tensor | Sequence[int]
"""Steps of every row, N integers."""


@dataclass(frozen=True)
class SequenceInputs:
    """Sequences with time first. ``rows`` is N, or ``None`` where the shapes do not agree on any."""

    leaves: list[Any]
    structure: Structure
    steps: int
    rows: int | None
    certain: bool
    axes: int  # the most axes that an input of one step has
    device: torch.device

    def each(self) -> Iterator[list[Any]]:
        """The leaves of every step. One ``unbind`` each: its gradient is one stack, not T sums into T x N x D."""
        columns = [leaf.unbind(0) if isinstance(leaf, Tensor) else [leaf] * self.steps for leaf in self.leaves]
        return (list(step) for step in zip(*columns, strict=True))

    def first(self) -> list[Any]:
        """The leaves of the first step; there must be one."""
        return [leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def blank(self) -> list[Any]:
        """One step that a cell can bear where none is at hand: integers 0, which are indices, and other numbers 0.5.

        Zero, one and infinity are where norms, roots, logarithms and their like have no gradient. The step hangs
        on the sequences, so that their gradients exist where T is 0.
        """
        return [_bearable(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]


def read_inputs(value: Any, *, batch_first: bool, certain: bool, check: Validator) -> SequenceInputs | None:
    """Bring ``value`` into one form; what is wrong goes to ``check``. ``None`` if T or N cannot be told.

    ``certain``: the caller spoke of rows, so every tensor with two axes has them.
    """
    leaves, structure = flatten(value)
    names = structure_paths(structure, "inputs")
    tensors = {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)}
    flat = [name for name, leaf in tensors.items() if leaf.dim() == 0]
    check.mismatch(*(f"{name} has no axes, wanted T x N x ..., time first" for name in flat))
    if not tensors:
        kinds = sorted({type(leaf).__name__ for leaf in leaves}) or ["nothing"]
        check.mismatch(f"inputs hold no tensor (saw {', '.join(kinds)}), wanted T x N x ..., time first")
    if flat or not tensors:
        return None
    if batch_first:
        leaves = [_time_first(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = {name: _time_first(leaf) for name, leaf in tensors.items()}
    axes = max(leaf.dim() for leaf in tensors.values()) - 1
    steps = {name: leaf.shape[0] for name, leaf in tensors.items()}
    rows = {name: leaf.shape[1] for name, leaf in tensors.items() if leaf.dim() > 1}
    agree = _one_size(steps, f"time (axis {int(batch_first)})", check)
    if certain or axes > 1:
        agree = _one_size(rows, f"the batch (axis {1 - int(batch_first)})", check) and agree
    if not agree:
        return None
    known = list(rows.values())
    device = next(iter(tensors.values())).device
    return SequenceInputs(
        leaves, structure, next(iter(steps.values())), known[0] if _alike(known) else None, certain, axes, device
    )


def batch_first_again(value: Any, rows: int | None) -> Any:
    """A result's leaf, T x N x ..., with the batch first; one without rows stays as it is."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == rows:
        return value.transpose(0, 1)
    return value


def _bearable(leaf: Tensor) -> Tensor:
    blank = leaf[:0].sum(0, dtype=leaf.dtype)
    return blank + 0.5 if leaf.is_floating_point() or leaf.is_complex() else blank


def _time_first(leaf: Tensor) -> Tensor:
    return leaf.transpose(0, 1) if leaf.dim() > 1 else leaf


def _one_size(sizes: dict[str, int], what: str, check: Validator) -> bool:
    """Whether all sizes are one; a fault that names every tensor with its size if not."""
    if not sizes or _alike(list(sizes.values())):
        return True
    seen = ", ".join(f"{name} has {size}" for name, size in sizes.items())
    check.mismatch(f"{what} must have one size everywhere: {seen}")
    return False


def _alike(sizes: Sequence[int]) -> bool:
    """Whether there is one size. Under tracing sizes may be symbols, which have no hash."""
    return bool(sizes) and all(size == sizes[0] for size in sizes)


def some(values: Sequence[str], most: int = 5) -> str:
    """The first few of them, and how many more there are."""
    rest = len(values) - most
    return ", ".join(values[:most]) + (f" and {rest} more" if rest > 0 else "")


def pack_like(padded: Tensor | None, lengths: Tensor, packed: PackedSequence) -> PackedSequence | None:
    """The inverse of ``pad_packed_sequence``, with the order of rows that ``packed`` has. ``None`` stays ``None``."""
    if padded is None:
        return None
    order = packed.sorted_indices
    if order is not None:
        padded, lengths = padded.index_select(1, order), lengths[order.to(lengths.device)]
    again = pack_padded_sequence(padded, lengths)
    return PackedSequence(again.data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


@dataclass(frozen=True)
class UnpackedInputs:
    """Inputs with time and batch axes, and the lengths of their rows. `packed` is what they came as, if it was that."""

    inputs: Any
    lengths: Lengths | None
    packed: PackedSequence | None = None
    batch_first: bool = False

    def close(self, outputs: Any) -> Any:
        """Outputs in the form in which the inputs came."""
        packed, lengths = self.packed, self.lengths
        if packed is None or not isinstance(lengths, Tensor):
            return outputs

        def repacked(leaf: Any) -> Any:
            return pack_like(_turned(leaf, self.batch_first), lengths, packed) if isinstance(leaf, Tensor) else leaf

        return map_leaves(repacked, outputs)


def unpack_inputs(inputs: Any, lengths: Lengths | None, *, batch_first: bool, who: str) -> UnpackedInputs:
    """Unpack a ``PackedSequence``, with the batch first if the layers want it so. Other inputs stay as they are.

    Raises ``UsageError`` if there are lengths besides.
    """
    if not isinstance(inputs, PackedSequence):
        return UnpackedInputs(inputs, lengths)
    if lengths is not None:
        raise UsageError(f"{who}: lengths were given, but the inputs are a PackedSequence, which has its own")
    padded, lengths = pad_packed_sequence(inputs)
    return UnpackedInputs(_turned(padded, batch_first), lengths, inputs, batch_first)


def _turned(leaf: Tensor, batch_first: bool) -> Tensor:
    return leaf.transpose(0, 1) if batch_first else leaf
