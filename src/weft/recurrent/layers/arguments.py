"""What goes into a drop-in of torch.nn: checked, and brought into one form.

    input   T x N x D,  N x T x D (batch_first),  T x D (one row),  PackedSequence      ->   T x N x D, lengths
    hx      (layers * directions) x N x H each,  without N for one row,  or None        ->   one state per network

Where torch.nn would raise, so does this, with all that is wrong at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from weft.core.errors import SpecError, listed
from weft.recurrent.packed import pack_like, unpack


class LayerInputError(SpecError, ValueError, RuntimeError):
    """Arguments of a layer do not fit. It is whatever torch.nn's layers raise for such a fault."""


class Arguments(NamedTuple):
    """Time first, with rows; `lengths` (on the CPU) only where they differ from T; states per network, or None."""

    x: Tensor
    lengths: Tensor | None
    states: list[tuple[Tensor, ...]]
    packed: PackedSequence | None
    batched: bool

    def repacked(self, x: Tensor) -> PackedSequence | None:
        """T x N x ... in the form of the input, where that was packed."""
        if self.packed is None:
            return None
        lengths = unpack(self.packed)[1] if self.lengths is None else self.lengths
        return pack_like(x, lengths, self.packed)


def read(layer: nn.RNNBase, weight: Tensor, input: Any, hx: Any, widths: Sequence[int]) -> Arguments:
    """Check `input` and `hx` against the layer, of which `weight` is one; states have these `widths`.

    Raises LayerInputError that lists all that is wrong.
    """
    faults: list[str] = []
    packed = input if isinstance(input, PackedSequence) else None
    data: Any = input if packed is None else packed.data
    if not isinstance(data, Tensor):
        faults.append(f"input is of type {type(data).__name__}, wanted a tensor or a PackedSequence")
        _raise(layer, faults)
    _check_input(layer, weight, data, packed is not None, faults)
    batched = packed is not None or data.dim() != 2
    parts = None
    if data.dim() in (2, 3):
        rows = _rows(layer, data, packed) if batched else None
        parts = _parts(layer, hx, widths, rows, data, faults)
    if faults:
        _raise(layer, faults)
    lengths = None
    if packed is not None:
        x, lengths = unpack(packed)
        lengths = lengths if int(lengths.min()) < len(x) else None
    elif batched:
        x = data.transpose(0, 1) if layer.batch_first else data
    else:
        x = data.unsqueeze(1)
    return Arguments(x, lengths, _states(layer, x, parts, widths, batched), packed, batched)


def _raise(layer: nn.RNNBase, faults: list[str]) -> None:
    raise LayerInputError(listed(f"{type(layer).__name__} cannot run on these arguments:", faults))


def _rows(layer: nn.RNNBase, data: Tensor, packed: PackedSequence | None) -> int:
    return data.shape[0 if layer.batch_first else 1] if packed is None else int(packed.batch_sizes[0])


def _check_input(layer: nn.RNNBase, weight: Tensor, data: Tensor, packed: bool, faults: list[str]) -> None:
    axes = "N x T x D" if layer.batch_first else "T x N x D"
    if data.dim() not in ((2,) if packed else (2, 3)):
        wanted = "packed rows of width D" if packed else f"{axes}, or T x D for one row"
        faults.append(f"input has shape {tuple(data.shape)}, wanted {wanted}")
    elif data.shape[-1] != layer.input_size:
        faults.append(f"input has shape {tuple(data.shape)}, wanted {layer.input_size} (input_size) as its last size")
    if data.dtype != weight.dtype and not torch.is_autocast_enabled(data.device.type):
        faults.append(
            f"input is {data.dtype}, the weights are {weight.dtype}; convert the input with .to({weight.dtype}) "
            f"or the layer with .to({data.dtype})"
        )
    if data.device != weight.device:
        faults.append(f"input is on {data.device}, the weights are on {weight.device}")


def _parts(
    layer: nn.RNNBase, hx: Any, widths: Sequence[int], rows: int | None, data: Tensor, faults: list[str]
) -> list[Tensor] | None:
    """The tensors of `hx`; None if there are none."""
    if hx is None:
        return None
    found = cast("Sequence[Any]", hx if len(widths) > 1 else [hx])
    names = ["hx[0]", "hx[1]"] if len(widths) > 1 else ["hx"]
    if not isinstance(found, (tuple, list)) or len(found) != len(widths):
        faults.append(f"hx is of type {type(hx).__name__}, wanted the pair (h_0, c_0)")
        return None
    first = layer.num_layers * (2 if layer.bidirectional else 1)
    for name, part, width in zip(names, found, widths, strict=True):
        wanted = (first, width) if rows is None else (first, rows, width)
        axes = "layers * directions x " + ("H" if rows is None else "N x H")
        if not isinstance(part, Tensor):
            faults.append(f"{name} is of type {type(part).__name__}, wanted a tensor")
            continue
        if tuple(part.shape) != wanted:
            faults.append(f"{name} has shape {tuple(part.shape)}, wanted {axes} = {wanted}")
        if part.dtype != data.dtype and not torch.is_autocast_enabled(data.device.type):
            faults.append(f"{name} is {part.dtype}, the input is {data.dtype}")
        if part.device != data.device:
            faults.append(f"{name} is on {part.device}, the input is on {data.device}")
    return [part for part in found if isinstance(part, Tensor)]


def _states(
    layer: nn.RNNBase, x: Tensor, parts: list[Tensor] | None, widths: Sequence[int], batched: bool
) -> list[tuple[Tensor, ...]]:
    """The initial state of every network; zeros where none was given."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    if parts is None:
        zeros = tuple(x.new_zeros(x.shape[1], width) for width in widths)
        return [zeros] * count
    columns = [(part if batched else part.unsqueeze(1)).unbind(0) for part in parts]
    return [tuple(column) for column in zip(*columns, strict=True)]
