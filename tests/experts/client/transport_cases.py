"""Transports for tests that hold for all of them: gRPC, within the process, and a fake that loses messages."""

import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torchweft.experts import ExpertBackend
from torchweft.experts.client import GrpcTransport, LocalTransport, Transport, TransportStatistics
from torchweft.experts.errors import LostError
from torchweft.experts.server import Server
from torchweft.experts.wire import Call, Kind, Received, decode, encode, read_fault

WAYS = ("grpc", "local", "fake")


class FakeTransport:
    """Transport that answers in the caller's thread. ``lose`` lists the losses of the next calls: "request" (the server
    never sees it), "reply" (the server executes the call, and the caller gets `LostError`), or "" (no loss).
    """

    def __init__(self, server: Server) -> None:
        self.lose: list[str] = []
        self.seen: list[Call] = []
        self._handler = server.handler()
        self._lock = threading.Lock()
        self._closed = False

    address = "fake"

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        with self._lock:
            if self._closed:
                raise ValueError("closed")
            self.seen.append(call)
            number, fate = len(self.seen), self.lose.pop(0) if self.lose else ""
        future: Future[Received] = Future()
        if fate == "request":
            future.set_exception(LostError("the request was dropped"))
            return future
        header = call.header._replace(call_id=number, deadline_ms=int(timeout * 1000))
        (received,) = decode(encode([call._replace(header=header)]))

        def reply(answer: Call) -> None:
            (back,) = decode(encode([answer]))
            if fate == "reply":
                future.set_exception(LostError("the reply was dropped"))
            elif back.header.kind is Kind.ERROR:
                future.set_exception(read_fault(back.header.data))
            else:
                future.set_result(back)

        self._handler(received, reply)
        return future

    def close(self) -> None:
        self._closed = True

    def statistics(self) -> TransportStatistics:
        return TransportStatistics("fake", len(self.seen), 0, 0, {}, 0)


@contextmanager
def reached(way: str, *backends: ExpertBackend, **options: Any) -> Generator[tuple[Server, Transport]]:
    """Server with these experts, and a transport to it."""
    with Server(backends, **options) as server:
        transport = make_transport(way, server)
        try:
            yield server, transport
        finally:
            transport.close()


def make_transport(way: str, server: Server) -> Transport:
    if way == "grpc":
        return GrpcTransport(server.address)
    return LocalTransport(server.handler()) if way == "local" else FakeTransport(server)
