"""``PackedSequence`` in, ``PackedSequence`` out.

Torch packs rows of different length step by step, longest row first, without padding. Here such a sequence is
padded on the way in, with its lengths known, and the outputs are packed on the way out, with the same sizes and
the same order of rows. States go in and come out in the user's order of rows, as with ``torch.nn.LSTM``.
"""

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


def unpack(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """T x N x ... in the user's order of rows, and the lengths (on the CPU)."""
    return pad_packed_sequence(packed)


def pack_like(padded: Tensor | None, lengths: Tensor, packed: PackedSequence) -> PackedSequence | None:
    """The inverse of :func:`unpack`, with the order of rows that ``packed`` has. ``None`` stays ``None``."""
    if padded is None:
        return None
    order = packed.sorted_indices
    if order is not None:
        padded, lengths = padded.index_select(1, order), lengths[order.to(lengths.device)]
    again = pack_padded_sequence(padded, lengths)
    return PackedSequence(again.data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
