"""What a result says beside its tensors: how far the expert is, and how far of that is safe.

step 40      in the header: optimizer steps taken
durable 35   a crash of the server loses at most the steps 36 to 40; None: it keeps no checkpoints
incarnation  another number after every start of the server: sums of mini-batches do not outlive one
"""

import struct
from dataclasses import dataclass

from weft.experts.wire.errors import MalformedError

_FORMAT = struct.Struct("<QQ")
_NEVER = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """See the drawing above; ``incarnation`` is below 2**64."""

    durable: int | None
    incarnation: int

    def to_bytes(self) -> bytes:
        """16 bytes, the data of a result."""
        return _FORMAT.pack(_NEVER if self.durable is None else self.durable, self.incarnation)


def read_receipt(data: bytes) -> Receipt:
    """The inverse. Raises ``MalformedError`` for other bytes."""
    if len(data) != _FORMAT.size:
        raise MalformedError(f"a receipt of {len(data)} bytes, wanted {_FORMAT.size}", reason="receipt")
    durable, incarnation = _FORMAT.unpack(data)
    return Receipt(None if durable == _NEVER else durable, incarnation)
