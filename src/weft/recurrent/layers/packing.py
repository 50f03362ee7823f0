"""Packed sequences for a layer of layers: opened once on the way in, packed once on the way out.

A single network opens and packs by itself. Several of them would do so once each.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from weft.core.errors import UsageError
from weft.core.tree import map_leaves
from weft.recurrent.packed import pack_like, unpack
from weft.recurrent.rows import Lengths


@dataclass(frozen=True)
class Opened:
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

        def closed(leaf: Any) -> Any:
            return pack_like(_turned(leaf, self.batch_first), lengths, packed) if isinstance(leaf, Tensor) else leaf

        return map_leaves(closed, outputs)


def opened(inputs: Any, lengths: Lengths | None, *, batch_first: bool, who: str) -> Opened:
    """Unpack a ``PackedSequence``, with the batch first if the layers want it so. Other inputs stay as they are.

    Raises ``UsageError`` if there are lengths besides.
    """
    if not isinstance(inputs, PackedSequence):
        return Opened(inputs, lengths)
    if lengths is not None:
        raise UsageError(f"{who}: lengths were given, but the inputs are a PackedSequence, which has its own")
    padded, lengths = unpack(inputs)
    return Opened(_turned(padded, batch_first), lengths, inputs, batch_first)


def _turned(leaf: Tensor, batch_first: bool) -> Tensor:
    return leaf.transpose(0, 1) if batch_first else leaf
