"""A way to experts in this process, without a network: the same frames, handed over as bytes.

submit ── encode ── decode ──> handler ── answer ── encode ── decode ──> future

For tests, and for trying out on one machine what will be remote. As nothing but bytes goes over, neither side can
write into the other's tensors.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from weft.core.errors import WeftError
from weft.experts.client.pending import Pending
from weft.experts.client.transport import TransportStatistics
from weft.experts.fork_guard import finalizer
from weft.experts.wire import LIMITS, Call, Kind, Limits, Received, decode, encode, read_fault

Handler = Callable[[Received, Callable[[Call], None]], Any]
"""Takes a call and a function for its one answer, such as ``server.handler()``."""


class LocalTransport:
    """A `Transport` to a handler. A context manager."""

    def __init__(self, handler: Handler, *, name: str = "here", limits: Limits = LIMITS) -> None:
        self._handler = handler
        self._limits = limits
        self._pending = Pending(name)
        self._finalizer = finalizer(self, self._pending.close)

    @property
    def address(self) -> str:
        """Its name."""
        return self._pending.address

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """See `Transport.submit`."""
        entry = self._pending.open(call, timeout)
        try:
            message = b"".join(encode([call.addressed(entry.number, int(timeout * 1000))], self._limits))
            (received,) = decode(message, self._limits)
        except WeftError as error:
            self._pending.settle(entry.number, error)
            return entry.future
        entry.sent = True
        self._handler(received, partial(_answered, self._pending, self._limits, entry.number))
        return entry.future

    def close(self) -> None:
        """See `Transport.close`."""
        self._finalizer()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`."""
        calls, answered, waiting, failed = self._pending.numbers()
        return TransportStatistics(self.address, calls, answered, waiting, failed, 1)

    def __enter__(self) -> "LocalTransport":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _answered(pending: Pending, limits: Limits, number: int, answer: Call) -> None:
    try:
        (received,) = decode(b"".join(encode([answer], limits)), limits)
        outcome = read_fault(received.header.data) if received.header.kind is Kind.ERROR else received
    except WeftError as error:
        outcome = error
    pending.settle(number, outcome)
