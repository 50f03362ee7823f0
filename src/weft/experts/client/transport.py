"""How calls get to experts and answers back: one small protocol, whatever is behind it.

    submit(call, timeout) ──> future of the answer, or of the error that came instead      GrpcTransport, LocalTransport

Every future comes to an end: with an answer, with an error of the other side, with `LostError` or `UnreachableError`
when the way is gone, with `DeadlineError` when the time is up, or at `close`. A transport calls nobody's experts in
particular and repeats nothing; that is for who knows what may be repeated, see `weft.experts.client.line`.

One protocol for the real, the local and the fake is httpx's idea.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from weft.experts.wire import Call, Received


@dataclass(frozen=True)
class TransportStatistics:
    """``calls`` submitted so far; ``waiting`` of them have no answer yet; ``failed`` counts errors by class.

    ``streams``: how many times a connection was made.
    """

    address: str
    calls: int
    answered: int
    waiting: int
    failed: Mapping[str, int]
    streams: int


@runtime_checkable
class Transport(Protocol):
    """A way to one server. All methods may be called in any thread."""

    @property
    def address(self) -> str:
        """Where it leads, for errors and statistics."""
        ...

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """Send a call; never waits. Its ``call_id`` and ``deadline_ms`` are set on the way.

        The tensors are not to be written to before the future is done. Callbacks of the future run in a thread of
        the transport and must not wait. Raises ``UsageError`` after `close`.
        """
        ...

    def close(self) -> None:
        """Fail what waits with ``LostError``, and end all threads. May be called twice."""
        ...

    def statistics(self) -> TransportStatistics:
        """What was sent so far, and what waits."""
        ...
