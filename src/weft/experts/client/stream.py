"""One gRPC stream to a server, from the first try to its end.

    callers ── send ──> queue ──> gRPC's sender: one frame of all that waits ──> server
    callers <── futures <── reader thread: answers by number <────────────────────┘

    opening ── the server says that it listens ──> open ── ends ──> gone: what was sent is lost, the rest never left

Nothing is sent before the server has said that it listens; so a call that was not carried out for sure can be told
from one that may have been. gRPC's own threads send: a round trip takes them two thirds of the time that it takes an
asyncio loop in a thread, and no loop is shared with a server in the same process.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, cast

import grpc

from weft.core.errors import WeftError
from weft.experts.client.pending import Entry, Pending
from weft.experts.errors import OverloadError
from weft.experts.wire import (
    Call,
    ForbiddenError,
    Kind,
    Limits,
    LostError,
    UnreachableError,
    WireError,
    decode,
    encode,
    read_fault,
)
from weft.experts.wire.service import COALESCED, FRAME_BYTES, messages

_grpc = cast("Any", grpc)
_JOIN = 5.0
Start = Callable[[Iterator[bytes]], Any]
"""Starts a call of gRPC that sends what the iterator yields."""
Explain = Callable[[str, str], UnreachableError]
"""The error of a connection that was not made: what could not be done, and what gRPC says."""


class Stream:
    """Carries calls of `Pending` whose ``owner`` it is. ``draining``: the server takes no new work."""

    def __init__(self, start: Start, pending: Pending, limits: Limits, explain: Explain) -> None:
        self.draining = False
        self._explain = explain
        self._unreached: UnreachableError | None = None
        self._pending = pending
        self._limits = limits
        self._queue: SimpleQueue[Entry | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._gone = False
        self._decided = threading.Event()
        self._open = False
        self._fault: WeftError | None = None
        self._call = start(self._frames())
        self._reader = threading.Thread(target=self._read, name=f"weft-stream-{pending.address}", daemon=True)
        self._reader.start()

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self._gone

    def send(self, entry: Entry) -> bool:
        """Take a call along; False if the stream is gone."""
        with self._lock:
            if self._gone:
                return False
            entry.owner = self
            self._queue.put(entry)
            return True

    def close(self) -> None:
        """End it, and wait for its reader."""
        self._call.cancel()
        if threading.current_thread() is not self._reader:
            self._reader.join(_JOIN)

    # The sender, in a thread of gRPC's.

    def _frames(self) -> Iterator[bytes]:
        self._decided.wait()
        kept: Entry | None = None
        while True:
            first = self._queue.get() if kept is None else kept
            if first is None or self._gone:
                return
            batch, kept = self._batch(first)
            for entry in batch:
                entry.sent = True
            yield from self._encoded(batch)

    def _batch(self, first: Entry) -> tuple[list[Entry], Entry | None]:
        """What shares a frame with this call, and what was taken too much."""
        batch, total = [first], _size(first.call)
        while len(batch) < self._limits.calls:
            try:
                entry = self._queue.get_nowait()
            except Empty:
                break
            if entry is None:
                self._queue.put(None)
                break
            total += _size(entry.call)
            if total > COALESCED:
                return batch, entry
            batch.append(entry)
        return batch, None

    def _encoded(self, batch: list[Entry]) -> Iterator[bytes]:
        """One frame, or, if something in it cannot be sent so, one for each call that can."""
        calls = [(entry, _addressed(entry)) for entry in batch if not entry.future.cancelled()]
        if not calls:
            return
        try:
            yield from messages(b"".join(encode([call for _, call in calls], self._limits)))
            return
        except Exception as error:
            if len(calls) == 1:
                self._pending.settle(calls[0][0].number, error)
                return
        for entry, call in calls:
            try:
                message = b"".join(encode([call], self._limits))
            except Exception as error:
                self._pending.settle(entry.number, error)
                continue
            yield from messages(message)

    # The reader, in its own thread.

    def _read(self) -> None:
        error: Any = None
        try:
            metadata = {str(key): value for key, value in self._call.initial_metadata() or ()}
            if FRAME_BYTES in metadata:
                most = min(self._limits.frame_bytes, int(metadata[FRAME_BYTES]))
                self._limits = replace(self._limits, frame_bytes=most)
                self._open = True
                self._decided.set()
            for message in self._call:
                self._received(message)
        except (_grpc.RpcError, WireError, ValueError) as caught:
            error = caught
        finally:
            self._end(error)

    def _received(self, message: bytes) -> None:
        for answer in decode(message, self._limits):
            header = answer.header
            if header.kind is Kind.GOAWAY:
                self.draining = True
            elif header.kind is not Kind.ERROR:
                self._pending.settle(header.call_id, answer)
            elif header.call_id:
                self._pending.settle(header.call_id, read_fault(header.data))
            else:
                self._fault = read_fault(header.data)

    def _end(self, error: Any) -> None:
        with self._lock:
            self._gone = True
        self._call.cancel()
        self._decided.set()
        self._queue.put(None)
        self._pending.fail(self, lambda sent: self._reason(error, sent))

    def _reason(self, error: Any, sent: bool) -> Exception:
        """Why a call has no answer."""
        address = self._pending.address
        code = error.code() if isinstance(error, _grpc.RpcError) else None
        text = str(error.details() if code is not None else error or "the server closed the stream")
        if code in (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED):
            return ForbiddenError(f"{address} refuses this client: {text}")
        if not self._open and code is _grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadError(f"{address} takes no more clients: {text}")
        if not self._open:
            if self._unreached is None:  # found out once: it may have to ask
                self._unreached = self._explain("cannot be reached", text)
            return type(self._unreached)(str(self._unreached))
        if not sent:
            return UnreachableError(f"{address} cannot be reached: {text}")
        why = text if self._fault is None else f"the server could not read what it was sent: {self._fault}"
        return LostError(f"the connection to {address} ended before the answer came: {why}")


def _addressed(entry: Entry) -> Call:
    """The call with its number, and what is left of its time now."""
    left = max(0, int((entry.deadline - time.monotonic()) * 1000))
    return entry.call.addressed(entry.number, left)


def _size(call: Call) -> int:
    return sum(tensor.nbytes for tensor in call.tensors)
