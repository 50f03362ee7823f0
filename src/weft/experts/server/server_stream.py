"""One client's stream: its calls under way, its answers on their way out, and the bytes that all of them may take.

    reader ── calls ──> dispatcher ──> runtime threads ── answer() ──> outbox ──> writer: one frame for all that waits
       |                                                                             |
       '── waits while too much is under way <── room <───────────── sent ───────────'

Answers come in any thread and in any order. What waits when the writer is free leaves in one frame, so many small
answers cost as much as one. A client that does not read its answers stops being read itself, and holds no more than its
bound. A thousand streams within theirs would still fill any machine, so all share one `ByteBudget`:

    open     a stream          MESSAGE_BYTES, which gRPC may hold of it unseen    no room: the stream is turned away
    reserve  a frame in parts  its whole size, before its second part is read     no room: it waits, not long
    admit    a call            its tensors, before one is made                    no room: OverloadError to its author,
                                                                                  QuotaError for its client's share
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from weft.experts.errors import OverloadError, QuotaError
from weft.experts.server.auth import Caller
from weft.experts.server.dispatcher import RequestDispatcher, fault
from weft.experts.server.options import ServerOptions
from weft.experts.task import Results
from weft.experts.wire import Call, Header, Kind, Limits, Received, encode
from weft.experts.wire.service import COALESCED

Send = Callable[[bytes], Awaitable[Any]]


class ByteBudget:
    """Belongs to the thread of the network loop. All numbers are bytes: at ``most``, ``streams`` and ``held``."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self.streams = 0
        self._clients: Counter[str] = Counter()
        self._freed = asyncio.Event()

    def open(self, nbytes: int) -> None:
        """One more stream. Raises ``OverloadError``; one stream alone is let in."""
        if self.streams and self.streams + self.held + nbytes > self.most:
            raise OverloadError(f"{self._taken}; no more clients are let in now, come back later")
        self.streams += nbytes

    def close(self, nbytes: int) -> None:
        """One stream less."""
        self.streams -= nbytes
        self._freed.set()

    async def reserve(self, nbytes: int, client: str, seconds: float) -> None:
        """`admit`, as soon as there is room within ``seconds``."""
        end = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                return self.admit(nbytes, client)
            except (OverloadError, QuotaError) as error:
                self._freed.clear()
                try:
                    await asyncio.wait_for(self._freed.wait(), end - asyncio.get_running_loop().time())
                except TimeoutError:
                    raise error from None

    def admit(self, nbytes: int, client: str) -> None:
        """Hold so many more, for a client that may have three quarters of all.

        Raises ``OverloadError`` or ``QuotaError``; one call alone is let in whatever its size, which has limits.
        """
        share, own = self.most * 3 // 4, self._clients[client]
        if own and nbytes and own + nbytes > share:
            raise QuotaError(
                f"calls under way of client {client!r} take {own} of the {share} bytes that one client may take at "
                f"this server, and {nbytes} more were sent; wait for answers before sending more"
            )
        if self.held and nbytes and self.streams + self.held + nbytes > self.most:
            raise OverloadError(f"{self._taken}, and {nbytes} more were sent; come back later")
        self.held += nbytes
        self._clients[client] += nbytes

    def leave(self, nbytes: int, client: str) -> None:
        """Hold so many less."""
        self.held -= nbytes
        self._clients[client] -= nbytes
        if not self._clients[client]:
            del self._clients[client]
        self._freed.set()

    @property
    def _taken(self) -> str:
        return f"streams and calls under way at this server take {self.streams + self.held} of {self.most} bytes"


class ServerStream:
    """A client's stream. `answer` may be called in any thread, all else belongs to the loop.

    ``budget`` is shared by all connections of a server.
    """

    def __init__(
        self, caller: Caller, dispatcher: RequestDispatcher, options: ServerOptions, budget: ByteBudget
    ) -> None:
        self.caller = caller
        self.calls = self.nbytes = self._held = 0
        self._dispatcher, self._options, self._budget = dispatcher, options, budget
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._outbox: deque[tuple[Call, int]] = deque()
        self._woken = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._finishing = False
        self._futures: set[Future[Results]] = set()

    def take(self, call: Received) -> None:
        """Dispatch a call, and send its answer."""
        cost = sum(max(one.nbytes, one.decoded_bytes) for one in call.descriptors)
        self.calls += 1
        try:
            self._budget.admit(cost, self.caller.principal)
        except (OverloadError, QuotaError) as error:
            self._dispatcher.refuse(call.header.call_id, error, partial(self.answer, cost=0))
            return
        self._held += cost
        with self._lock:
            self.nbytes += cost
        future = self._dispatcher.dispatch(call, self.caller, partial(self.answer, cost=cost))
        if future is not None:
            self._futures.add(future)
            future.add_done_callback(self._futures.discard)

    def answer(self, call: Call, cost: int = -1) -> None:
        """Send an answer. ``cost`` is what its call took; -1: there was no call."""
        with self._lock:
            self._outbox.append((call, cost))
            self.nbytes += _size(call)
            if self._woken:
                return
            self._woken = True
        if threading.get_ident() == self._thread:
            self._wake.set()
        else:
            self._loop.call_soon_threadsafe(self._wake.set)

    async def has_room(self) -> None:
        """Wait until no more is under way than may be."""
        while self.calls >= self._options.connection_calls or self.nbytes >= self._options.connection_bytes:
            self._room.clear()
            await self._room.wait()

    async def write(self, send: Send) -> None:
        """Send answers until `finish` was called and all are out."""
        while not (self._finishing and not self.calls and not self._outbox):
            await self._wake.wait()
            self._wake.clear()
            with self._lock:
                self._woken = False
            while batch := self._batch():
                for frame in _frames([call for call, _ in batch], self._options.limits):
                    await send(frame)
                self._sent(batch)

    def finish(self) -> None:
        """No more calls come: let `write` return when all that were taken are answered."""
        self._finishing = True
        self._wake.set()

    def abandon(self) -> None:
        """The client has gone: remove its waiting calls from the queues."""
        self.caller.stream.ended_at = time.monotonic()
        for future in list(self._futures):
            future.cancel()
        self._budget.leave(self._held, self.caller.principal)
        self._held = 0

    def _batch(self) -> list[tuple[Call, int]]:
        """The answers of the next frame."""
        batch: list[tuple[Call, int]] = []
        total = 0
        while self._outbox and len(batch) < self._options.limits.calls:
            total += _size(self._outbox[0][0])
            if batch and total > COALESCED:
                break
            batch.append(self._outbox.popleft())
        return batch

    def _sent(self, batch: list[tuple[Call, int]]) -> None:
        with self._lock:
            for call, cost in batch:
                self.nbytes -= _size(call) + max(0, cost)
                self.calls -= cost >= 0
        given_back = sum(max(0, cost) for _, cost in batch)
        self._budget.leave(given_back, self.caller.principal)
        self._held -= given_back
        self._room.set()


def goaway() -> Call:
    """Says that no new work is taken here."""
    return Call(Header(kind=Kind.GOAWAY, call_id=0))


def _size(call: Call) -> int:
    return sum(tensor.nbytes for tensor in call.tensors) + len(call.header.data)


def _frames(calls: list[Call], limits: Limits) -> list[bytes]:
    """One message; or, if something in it cannot be sent so, one for each answer, or its error in its place."""
    try:
        return [encode(calls, limits)]
    except Exception as error:
        if len(calls) == 1:
            return [encode([fault(calls[0].header.call_id, error)], limits)]
        return [frame for call in calls for frame in _frames([call], limits)]
