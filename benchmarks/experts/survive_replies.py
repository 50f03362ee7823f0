"""Replies that are lost after the request was handed over: each step is applied once all the same.

by the transport    the request goes to the server over gRPC; its answer, or the wait for it, is thrown away
by a proxy          the connection is cut when the server answers, and made again
"""

import random
import socket
import threading
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Self

from benchmarks.experts.survive_common import Verdict, until
from benchmarks.experts.survive_steps import Count, Trainers, counted, marks
from weft.experts import ExpertBackend
from weft.experts.client import GrpcTransport, TransportStatistics
from weft.experts.server import Server
from weft.experts.wire import Call, LostError, Received

_CHUNK = 1 << 16


class Forgetful:
    """A transport that loses two of three answers: one when it comes, one while the server still works on it."""

    def __init__(self, inner: GrpcTransport) -> None:
        self.lost = 0
        self._inner, self._draw, self._lock = inner, random.Random(5), threading.Lock()

    @property
    def address(self) -> str:
        """See `Transport.address`."""
        return self._inner.address

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """See `Transport.submit`."""
        answer = self._inner.submit(call, timeout)
        with self._lock:
            fate = self._draw.randrange(3)
            self.lost += fate > 0
        if fate == 0:
            return answer
        dropped: Future[Received] = Future()
        error = LostError("the reply was dropped")
        if fate == 1:
            dropped.set_exception(error)
        else:
            answer.add_done_callback(lambda _: dropped.set_exception(error))
        return dropped

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`."""
        return self._inner.statistics()


def dropped(times: int) -> Verdict:
    """Until so many replies were lost."""
    backend = marks(times)
    with Server([backend]) as server, GrpcTransport(server.address) as inner:
        forgetful = Forgetful(inner)
        trainers = Trainers(forgetful, threads=2, most=times * 11 // 20)  # two replies of three are lost
        trainers.join()
    return _verdict("replies dropped by the transport", forgetful.lost, trainers, backend)


class CuttingProxy:
    """Passes bytes on, and cuts a connection at the server's next bytes after `arm`. A context manager."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._armed = threading.Event()
        self._stack, self._threads = ExitStack(), list[threading.Thread]()
        self._begin(self._accept)

    def arm(self) -> None:
        """Cut the next answer off."""
        self._armed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._stack.close()
        for thread in self._threads:
            thread.join(5.0)

    def _begin(self, run: object, *given: object) -> None:
        thread = threading.Thread(target=run, args=given, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                pair = (client, server)
                self._stack.callback(_shut, pair)
                self._begin(self._pass, client, server, pair, False)
                self._begin(self._pass, server, client, pair, True)

    def _pass(self, source: socket.socket, to: socket.socket, pair: tuple[socket.socket, ...], answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                if answers and self._armed.is_set():
                    self._armed.clear()
                    self.cuts += 1
                    break
                to.sendall(data)
        _shut(pair)


def _shut(pair: tuple[socket.socket, ...]) -> None:
    for each in pair:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def cut(times: int) -> Verdict:
    """So many connections cut, one after the other, while trainers go on."""
    backend, pause, draw = marks(1 << 17), threading.Event(), random.Random(9)
    with (
        Server([backend]) as server,
        CuttingProxy(server.address) as proxy,
        GrpcTransport(proxy.address) as transport,
    ):
        trainers = Trainers(transport, threads=2, most=1 << 17)
        for number in range(times):
            told = len(trainers.heard)
            if not until(lambda told=told: len(trainers.heard) > told):  # it is connected again
                break
            pause.wait(draw.random() * 0.005)
            proxy.arm()
            if not until(lambda number=number: proxy.cuts > number):
                break
        trainers.stop()
    return _verdict("connections cut by a proxy when the server answers", proxy.cuts, trainers, backend)


def _verdict(what: str, times: int, trainers: Trainers, backend: ExpertBackend) -> Verdict:
    weight = next(iter(backend.module.parameters())).detach()
    count: Count = counted(weight, backend.steps)
    missing = sum(bool(weight[each.number] != -1) for each in trainers.heard)
    seen = f"{len(trainers.heard)} keys answered, {backend.steps} steps, {count.repeated} keys twice, {missing} never"
    return Verdict(
        what,
        f"{times}",
        "each key one step",
        seen + f"; {len(trainers.faults)} calls failed" * bool(trainers.faults),
        count.good and not missing and not trainers.faults and bool(trainers.heard),
    )
