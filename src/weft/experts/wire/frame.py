"""Frames: calls of one client, packed into one message, and unpacked on the other side.

    Call(Header(FORWARD, 7, "ffn.3"), [x])  ─┐                                    ┌─ Received(header, descriptors)
    Call(Header(BACKWARD, 8, ...), [x, g])  ─┴─ encode ──> buffers ── decode ─────┴─ Received   .tensors()  .into(outs)

    | preamble | call 7, x | call 8, x, g | padding |  bytes of x .. | bytes of x .. | bytes of g .. |
    |<------------- header, see header.py --------->|<------------- body, 16-aligned --------------->|

Raw bytes behind a small typed header; no pickle, no eval, and nothing is allocated before the header was checked.
A frame that breaks the format is refused whole: past a fault nothing in it can be believed. All its calls are of
one client, so nobody else pays.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from weft.core.errors import UsageError
from weft.experts.compression import Compression
from weft.experts.errors import LimitError
from weft.experts.wire.header import MAGIC, PREAMBLE, VERSION, Descriptor, Header, Kind, aligned, write_call
from weft.experts.wire.limits import LIMITS, Limits
from weft.experts.wire.parse import parse
from weft.experts.wire.tensors import Bytes as Body
from weft.experts.wire.tensors import into, memory, to_bytes, to_tensor

Bytes = bytes | bytearray | memoryview


class Call(NamedTuple):
    """One call to send: its header, its tensors in flat order, and how each may be compressed (empty: none is)."""

    header: Header
    tensors: Sequence[Tensor] = ()
    compressions: Sequence[Compression] = ()

    def addressed(self, number: int, deadline_ms: int) -> "Call":
        """The same call, to be answered under this number and within so many milliseconds."""
        return Call(self.header._replace(call_id=number, deadline_ms=deadline_ms), self.tensors, self.compressions)


class Received(NamedTuple):
    """One call that arrived. Its tensors are described, and made only when asked for; ``body`` has their bytes."""

    header: Header
    descriptors: tuple[Descriptor, ...]
    body: Body

    def tensors(self, *, copy: bool = False) -> list[Tensor]:
        """The tensors on the CPU, as sent. Without ``copy`` they are views of the message where they can be.

        Raises ``MalformedError`` where the bytes of a bool are neither 0 nor 1.
        """
        made = [to_tensor(self.body, one) for one in self.descriptors]
        return [tensor.clone() for tensor in made] if copy else made

    def into(self, outs: Sequence[Tensor]) -> None:
        """Write the tensors into ``outs``, such as rows of a batch buffer, of the same shapes and dtypes.

        Raises ``SpecError`` that lists every out that does not fit, ``MalformedError`` as `tensors` does; then
        nothing was written.
        """
        into(self.body, self.descriptors, outs)


def encode(calls: Sequence[Call], limits: Limits = LIMITS) -> list[bytes | memoryview]:
    """One frame with all ``calls``, as buffers to be sent one after the other (``b"".join`` makes one message).

    The buffers look into the tensors where they can: do not write into these before the buffers were used.
    Raises ``UsageError`` for what cannot be sent and ``LimitError`` for what is larger than ``limits``.
    """
    if not calls:
        raise UsageError("a frame holds at least one call, and none was given")
    if len(calls) > limits.calls:
        raise LimitError(f"{len(calls)} calls in a frame, at most {limits.calls} are allowed", reason="calls")
    heads: list[bytes] = []
    body: list[bytes | memoryview] = []
    offset = decoded = 0
    for call in calls:
        descriptors: list[Descriptor] = []
        for tensor, how in zip(call.tensors, _compressions(call), strict=True):
            done, buffers = to_bytes(tensor, how)
            nbytes = sum(map(len, buffers))
            descriptors.append(Descriptor(tensor.dtype, tuple(tensor.shape), done, nbytes, offset))
            body += buffers
            if padding := aligned(nbytes) - nbytes:
                body.append(bytes(padding))
            offset += nbytes + padding
            decoded += tensor.nbytes
        heads.append(write_call(call.header, descriptors, limits))
    _check_frame(calls, sum(map(len, heads)), offset, decoded, limits)
    header = b"".join(heads)
    preamble = PREAMBLE.pack(MAGIC, VERSION, 0, len(calls), len(header), offset)
    head_bytes = len(preamble) + len(header)
    return [preamble, header, bytes(aligned(head_bytes) - head_bytes), *body]


def decode(message: Bytes, limits: Limits = LIMITS) -> list[Received]:
    """The calls of one whole frame. Tensors are views of ``message``: see `tensors.py` for who may write into them.

    Raises ``MalformedError``, ``TruncatedError`` or ``LimitError`` before anything is allocated, and nothing else,
    whatever the bytes are.
    """
    flat = memoryview(message).cast("B")
    parsed, start = parse(flat, limits)
    body = memory(flat, start)
    return [Received(header, descriptors, body) for header, descriptors in parsed]


def _compressions(call: Call) -> Sequence[Compression]:
    if not call.compressions:
        return [Compression.NONE] * len(call.tensors)
    if len(call.compressions) != len(call.tensors):
        raise UsageError(f"{len(call.tensors)} tensors, and compressions for {len(call.compressions)}")
    return call.compressions


def _check_frame(calls: Sequence[Call], header: int, body: int, decoded: int, limits: Limits) -> None:
    total = aligned(PREAMBLE.size + header) + body
    if header <= limits.header_bytes and total <= limits.frame_bytes and decoded <= limits.decoded_bytes:
        return
    sizes = {"header_bytes": header, "frame_bytes": total, "decoded_bytes": decoded}
    for name, seen in sizes.items():
        if seen > getattr(limits, name):
            raise LimitError(
                f"{name} of {_named(calls)}: {seen}, at most {getattr(limits, name)} are allowed; send fewer rows at a "
                "time, compress them with a Policy, or allow more in the limits= of both ends (GrpcTransport or "
                "Connections, and ServerOptions)",
                reason=name,
            )


def _named(calls: Sequence[Call]) -> str:
    """What a frame holds, in words."""
    header = calls[0].header
    if len(calls) > 1:
        return f"{len(calls)} calls together"
    what = "answer" if header.kind is Kind.RESULT else header.kind.name.lower()
    return f"the {what} of expert {header.uid!r}" if header.uid else f"one {what}"
