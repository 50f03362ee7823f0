"""How much one frame may ask for. All of it is checked from the header alone, before a byte is allocated.

    bytes on the wire      the frame, its header, the opaque data of a call
    counts                 calls in a frame, tensors in a call, axes of a tensor, elements of a tensor
    bytes once decoded     all tensors of the frame together: compression may not be used to blow up

The limits of a server are its own; a client that keeps to the server's limits is never refused by them.
"""

from dataclasses import dataclass, fields

from weft.core.errors import UsageError, listed
from weft.core.validation import count_fault

MOST_AXES = 64
"""What torch itself can count."""
MOST_FRAME = 0x7FFF_FFFF - (1 << 16)
"""gRPC counts the bytes of a message, which is a frame and its own framing, with 31 bits."""


@dataclass(frozen=True)
class Limits:
    """The caps of one frame. All are inclusive; bytes where the name says so.

    Raises ``UsageError`` for what is no int from 1, and for more than the format can count.
    """

    frame_bytes: int = 64 << 20
    header_bytes: int = 1 << 20
    data_bytes: int = 1 << 20
    decoded_bytes: int = 256 << 20
    calls: int = 256
    tensors: int = 256
    axes: int = 16
    elements: int = 1 << 28
    name_bytes: int = 1024

    def __post_init__(self) -> None:
        seen = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = {name: count_fault(name, value) for name, value in seen.items()}
        faults = [fault for found in wrong.values() for fault in found]
        caps = {"axes": MOST_AXES, "calls": 0xFFFF, "tensors": 0xFFFF, "name_bytes": 0xFFFF, "header_bytes": 0xFFFFFFFF}
        caps["frame_bytes"] = MOST_FRAME
        faults += [
            f"{name} is {seen[name]}, the format ends at {cap}"
            for name, cap in caps.items()
            if not wrong[name] and seen[name] > cap
        ]
        if faults:
            raise UsageError(listed("these limits do not make sense:", faults))


LIMITS = Limits()
"""What holds where nothing else was said."""
