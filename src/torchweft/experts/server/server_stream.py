"""One client's stream: its running calls, its outgoing answers, and the bytes that all streams can take.

    reader ── calls ──> dispatcher ──> runtime threads ── send() ──> outbox ──> writer: one frame for all that waits
       |                                                                           |
       '── waits while too much is running <── room <───────────── sent ───────────'

Answers come in any thread and in any order. The writer packs all waiting answers into one frame, so many small answers
cost as much as one. The server stops reading a client that does not read its answers, so each stays within its bound.
A thousand streams within their bounds would still exhaust any machine. Therefore all share one `ByteBudget`:

    add_stream  a stream         MESSAGE_BYTES, which gRPC can hold of it unseen   no room: the stream is rejected
                                                                                   with the error of a call, below
    reserve     a frame in parts its whole size, before its second part is read    no room: it waits, not long
    admit       a call           its tensors, before the first is made             no room: OverloadError to its author,
                                                                                   QuotaError for its client's share
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, cast

from grpc import aio

from torchweft.experts.errors import OverloadError, QuotaError, TruncatedError, WireError
from torchweft.experts.server.auth import Caller
from torchweft.experts.server.dispatcher import RequestDispatcher, error_call
from torchweft.experts.server.options import ServerOptions
from torchweft.experts.task import Results
from torchweft.experts.wire import Call, Frame, Limits, Received, encode
from torchweft.experts.wire.service import COALESCED

_aio = cast("Any", aio)
Read = Callable[[], Coroutine[Any, Any, Any]]  # the next message, None at the end
Write = Callable[[bytes], Awaitable[Any]]
_ROOM_SECONDS = 5.0  # that a frame in parts waits for room
_PART_SECONDS = 30.0  # for its next part


class ByteBudget:
    """Bytes of all streams and calls of a server. Not locked: it belongs to the network loop."""

    def __init__(self, most: int) -> None:
        self.most, self.held, self.streams = most, 0, 0
        self._clients: Counter[str] = Counter()  # bytes of calls
        self._client_streams: Counter[str] = Counter()  # bytes of streams
        self._freed = asyncio.Event()

    def add_stream(self, nbytes: int, client: str) -> None:
        """Count one more stream of a client. Raises as `admit`, but never for the only stream of a client."""
        share, own = self.most * 3 // 4, self._client_streams[client]
        if own and own + self._clients[client] + nbytes > share:
            raise QuotaError(
                f"streams and calls of client {client!r} take {own + self._clients[client]} of the {share} bytes that "
                "one client may take at this server; close some before you open more"
            )
        if self.streams and self.streams + self.held + nbytes > self.most:
            raise OverloadError(f"{self._usage}; no more clients are let in now, come back later")
        self.streams += nbytes
        self._client_streams[client] += nbytes

    def remove_stream(self, nbytes: int, client: str) -> None:
        self.streams -= nbytes
        self._client_streams[client] -= nbytes
        if not self._client_streams[client]:
            del self._client_streams[client]
        self._freed.set()

    async def reserve(self, nbytes: int, client: str, seconds: float) -> None:
        """`admit`, but wait for room for at most ``seconds`` before it raises."""
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
        """Hold ``nbytes`` more for a client. Raises ``OverloadError`` or ``QuotaError``."""
        share, own = self.most * 3 // 4, self._clients[client]
        # The first call of a client is exempt, as is the only call below. Otherwise a large call could never run.
        if own and nbytes and own + nbytes > share:
            raise QuotaError(
                f"running calls of client {client!r} take {own} of the {share} bytes that one client may take at "
                f"this server, and {nbytes} more were sent; wait for answers before sending more"
            )
        if self.held and nbytes and self.streams + self.held + nbytes > self.most:
            raise OverloadError(f"{self._usage}, and {nbytes} more were sent; come back later")
        self.held += nbytes
        self._clients[client] += nbytes

    def release(self, nbytes: int, client: str) -> None:
        self.held -= nbytes
        self._clients[client] -= nbytes
        if not self._clients[client]:
            del self._clients[client]
        self._freed.set()

    @property
    def _usage(self) -> str:
        return f"streams and running calls at this server take {self.streams + self.held} of {self.most} bytes"


class NetworkLoop(asyncio.SelectorEventLoop):
    # All asyncio servers of a process share gRPC's poller. It also delivers late events to loops that were closed, and
    # an exception there would lose the events of the other servers.
    def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
        with suppress(RuntimeError):
            return super().call_soon_threadsafe(*args, **options)


class _Outbox:
    """Answers that wait for the writer of one stream. `add` is thread-safe; the loop of the constructor takes them."""

    # ``nbytes``: of the answers, and of the calls of the stream that are not answered yet. ``wake``: set by `add`.
    def __init__(self) -> None:
        self.nbytes = 0
        self.wake = asyncio.Event()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._answers: deque[tuple[Call, int]] = deque()
        self._woken = False  # since the writer last looked
        self._lock = threading.Lock()  # guards `nbytes`, `_answers` and `_woken`

    def __bool__(self) -> bool:
        return bool(self._answers)

    def count_bytes(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes

    def add(self, answer: Call, cost: int) -> None:
        with self._lock:
            self._answers.append((answer, cost))
            self.nbytes += _answer_bytes(answer)
            if self._woken:
                return
            self._woken = True
        # One wake-up per frame: `call_soon_threadsafe` writes to a pipe, which costs more than a small answer.
        if threading.get_ident() == self._thread:
            self.wake.set()
        else:
            self._loop.call_soon_threadsafe(self.wake.set)

    async def wait(self) -> None:
        await self.wake.wait()
        self.wake.clear()
        # Reset before the answers are read: one that comes after the last read then wakes the loop again.
        with self._lock:
            self._woken = False

    def next_batch(self, most: int) -> list[tuple[Call, int]]:
        """Remove at most ``most`` answers that share a frame. Each comes with the cost of its call."""
        batch: list[tuple[Call, int]] = []
        total = 0
        while self._answers and len(batch) < most:
            total += _answer_bytes(self._answers[0][0])
            if batch and total > COALESCED:
                break
            batch.append(self._answers.popleft())
        return batch


class ServerStream:
    """A client's stream. `send` is thread-safe; everything else belongs to the network loop."""

    # ``budget`` is shared by all streams of a server. ``calls`` are not answered yet.
    def __init__(
        self, caller: Caller, dispatcher: RequestDispatcher, options: ServerOptions, budget: ByteBudget
    ) -> None:
        self.caller = caller
        self.calls = self._held = 0
        self.is_broken = False  # it has sent an invalid frame
        self._dispatcher, self._options, self._budget = dispatcher, options, budget
        self._outbox = _Outbox()
        self._room = asyncio.Event()
        self._finishing = False
        self._futures: set[Future[Results]] = set()

    @property
    def nbytes(self) -> int:
        return self._outbox.nbytes

    async def serve(self, read: Read, write: Write) -> None:
        """Answer the calls of all frames, until the client ends its side or sends an invalid frame."""
        reader, writer = asyncio.create_task(self._read_calls(read)), asyncio.create_task(self.write_answers(write))
        try:
            await asyncio.wait([reader, writer], return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and reader.exception() is None:  # no more calls come: answer the rest
                self.finish()
                await writer
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    def dispatch_call(self, call: Received) -> None:
        cost = sum(max(tensor.nbytes, tensor.decoded_bytes) for tensor in call.descriptors)
        self.calls += 1
        try:
            self._budget.admit(cost, self.caller.principal)
        except (OverloadError, QuotaError) as error:
            self._dispatcher.answer_error(call.header.call_id, error, partial(self.send, cost=0))
            return
        self._held += cost
        self._outbox.count_bytes(cost)
        future = self._dispatcher.dispatch(call, self.caller, partial(self.send, cost=cost))
        if future is not None:
            self._futures.add(future)
            future.add_done_callback(self._futures.discard)

    def send(self, answer: Call, cost: int = -1) -> None:
        """Queue an answer. ``cost``: the bytes that its call holds; -1: it does not answer a call."""
        self._outbox.add(answer, cost)

    async def wait_for_room(self) -> None:
        while self.calls >= self._options.connection_calls or self.nbytes >= self._options.connection_bytes:
            self._room.clear()
            await self._room.wait()

    async def _read_calls(self, read: Read) -> None:
        while True:
            try:
                calls = await self._read_frame(read)
                if calls is None:
                    return
            except (WireError, OverloadError, QuotaError) as error:
                self.is_broken = isinstance(error, WireError)
                self.send(error_call(0, error))
                return
            while calls:  # popped, because every call refers to the memory of the whole frame
                self.dispatch_call(calls.pop(0))
            await self.wait_for_room()

    async def _read_frame(self, read: Read) -> list[Received] | None:
        """The calls of the next frame; None at the end of the stream. Raises as `decode`, and `ByteBudget.reserve`."""
        part = await read()
        if part is None:
            return None
        frame = Frame(part, self._options.limits)
        if not frame.can_continue:
            return frame.received()
        # The whole frame is counted before its second part is read.
        size, client = frame.body_bytes, self.caller.principal
        await self._budget.reserve(size, client, _ROOM_SECONDS)
        try:
            async with asyncio.timeout(self._options.longest_seconds):
                while frame.missing_bytes:
                    part = await asyncio.wait_for(read(), _PART_SECONDS)
                    if part is None:
                        break
                    frame.append(part)
            return frame.received()  # raises if the client ended the stream within the frame
        except TimeoutError:
            raise TruncatedError(f"a frame of {size} bytes was not sent in time", reason="time") from None
        finally:
            # Released before the calls are admitted one by one. Nothing else runs in the loop between the two.
            self._budget.release(size, client)

    async def write_answers(self, write: Write) -> None:
        while not self._finishing or self.calls or self._outbox:
            await self._outbox.wait()
            while batch := self._outbox.next_batch(self._options.limits.calls):
                for frame in _encode_frames([call for call, _ in batch], self._options.limits):
                    await write(frame)
                self._release_sent(batch)

    def finish(self) -> None:
        """Announce that no more calls come, so that `write_answers` returns after the last answer."""
        self._finishing = True
        self._outbox.wake.set()

    def abandon(self) -> None:
        self.caller.stream.end()
        for future in list(self._futures):  # a copy, because a cancelled future removes itself
            future.cancel()
        # Answers of running calls can still come. `_release_sent` is never called again, so this is the last release.
        self._budget.release(self._held, self.caller.principal)
        self._held = 0

    def _release_sent(self, batch: list[tuple[Call, int]]) -> None:
        self.calls -= sum(cost >= 0 for _, cost in batch)
        released = sum(max(0, cost) for _, cost in batch)
        self._outbox.count_bytes(-released - sum(_answer_bytes(call) for call, _ in batch))
        self._budget.release(released, self.caller.principal)
        self._held -= released
        self._room.set()


def _answer_bytes(call: Call) -> int:
    return sum(tensor.nbytes for tensor in call.tensors) + len(call.header.data)


def _encode_frames(calls: list[Call], limits: Limits) -> list[bytes]:
    # If one frame for all fails, each gets its own, with an error in place of an invalid answer.
    try:
        return [encode(calls, limits)]
    except Exception as error:
        if len(calls) == 1:
            return [encode([error_call(calls[0].header.call_id, error)], limits)]
        return [frame for call in calls for frame in _encode_frames([call], limits)]


async def next_message(context: Any) -> Any:
    message = await context.read()
    return None if message is _aio.EOF else message
