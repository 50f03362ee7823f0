"""Client that sends arbitrary bytes, for tests that servers survive them."""

import queue
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from torchweft.experts.wire import Call, Received, decode, encode
from torchweft.experts.wire.service import STREAM

PATIENCE = 10.0


class RawStream:
    def __init__(self, channel: Any, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(STREAM)(iter(self._queue.get, None), timeout=PATIENCE, metadata=metadata)

    def send(self, *messages: bytes | Call) -> None:
        for message in messages:
            self._queue.put(message if isinstance(message, bytes) else encode([message]))

    def receive(self) -> list[Received]:
        return decode(next(self._call))

    def ended(self) -> Any:
        """Status with which the server ends the stream. Earlier answers are skipped."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            pass
        return self._call.code()

    def finish(self) -> None:
        self._queue.put(None)

    def close(self) -> None:
        self._queue.put(None)
        self._call.cancel()


@contextmanager
def raw_stream(address: str, metadata: Sequence[tuple[str, str]] = ()) -> Generator[RawStream]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options) as channel:
        stream = RawStream(channel, metadata)
        try:
            yield stream
        finally:
            stream.close()
