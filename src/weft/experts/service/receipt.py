"""What a result says beside its tensors: how far the expert is, and how far of that is safe.

step 40      in the header: optimizer steps taken
durable 35   a crash of the server loses at most the steps 36 to 40; None: it keeps no checkpoints
incarnation  another number after every start of the server, and when it takes a replica over: sums of mini-batches
             do not outlive one
token 12     the fencing token of the expert's owner; 0: it has no replicas. In a call: the largest that its author
             knows, so that an owner that was replaced hears of it
"""

import struct
from dataclasses import dataclass
from functools import lru_cache

from weft.experts.errors import MalformedError

_FORMAT = struct.Struct("<QQQ")
_NEVER = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """See the drawing above; ``incarnation`` is below 2**64."""

    durable: int | None
    incarnation: int
    token: int = 0

    def to_bytes(self) -> bytes:
        """24 bytes, the data of a result."""
        return _FORMAT.pack(_NEVER if self.durable is None else self.durable, self.incarnation, self.token)


@lru_cache(256)  # every answer has one, and most say what the one before said
def read_receipt(data: bytes) -> Receipt:
    """The inverse. Raises ``MalformedError`` for other bytes."""
    if len(data) != _FORMAT.size:
        raise MalformedError(f"a receipt of {len(data)} bytes, wanted {_FORMAT.size}", reason="receipt")
    durable, incarnation, token = _FORMAT.unpack(data)
    return Receipt(None if durable == _NEVER else durable, incarnation, token)
