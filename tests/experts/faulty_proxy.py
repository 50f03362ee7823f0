"""TCP proxy that delays, stalls, cuts or silences connections, reproducibly by a seed.

Each piece of data has its own delay, but pieces stay in order. A silent connection is half open: data sent on it is
lost, and neither side is notified until ``silent_seconds`` have passed.
"""

import asyncio
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, Self, cast

_PIECE = 1 << 16
_FOR_EVER = float("inf")
_AHEAD = 64  # limit of pieces in flight per direction


@dataclass(frozen=True)
class NetworkFaults:
    """``late``: mean delay of a piece in seconds, exponentially distributed. ``cut``, ``silent``: probability that the
    connection ends or goes silent at a piece. ``stall``: probability of an additional delay of ``stall_seconds``.
    ``least``: minimal bytes of a piece that is counted and can be lost, which excludes HTTP/2 control frames.
    """

    late: float = 0.0
    cut: float = 0.0
    silent: float = 0.0
    silent_seconds: float = _FOR_EVER
    stall: float = 0.0
    stall_seconds: float = 0.0
    least: int = 0

    def delay(self, draw: Random) -> float:
        late = draw.expovariate(1 / self.late) if self.late else 0.0
        return late + self.stall_seconds * (draw.random() < self.stall)


NO_FAULTS = NetworkFaults()


class FaultyProxy:
    """Proxy to ``address``. ``network_faults`` can be set at any time. Counts ``connections``, ``cuts``, ``silences``,
    pieces sent by clients (``asked``), and pieces of either direction that never arrived (``lost``).
    """

    def __init__(self, address: str, network_faults: NetworkFaults = NO_FAULTS, seed: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self.network_faults = network_faults
        self.connections = self.cuts = self.silences = self.asked = self.lost = 0
        self._server, self._seed = (host, int(port)), seed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bad-network")

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._serve())  # the runner cancels the remaining connection tasks

    async def _serve(self) -> None:
        self._serving: asyncio.Task[Any] = cast("asyncio.Task[Any]", asyncio.current_task())
        self._started.set()
        tasks: set[asyncio.Task[None]] = set()
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            self.connections += 1
            task = asyncio.create_task(self._connected(client, self.connections))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _connected(self, client: socket.socket, number: int) -> None:
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._server)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self, writer, server_writer)
        requests = link.carry(reader, server_writer, Random(f"{self._seed}/{number}/to"), asks=True)
        replies = link.carry(server_reader, writer, Random(f"{self._seed}/{number}"))
        directions = [asyncio.create_task(requests), asyncio.create_task(replies)]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            link.end()
            for direction in directions:
                direction.cancel()


class _Piece(NamedTuple):
    """Bytes and the random values drawn on their arrival. ``due``: time of the event loop."""

    data: bytes
    due: float
    fate: float
    where: float


class _Link:
    def __init__(self, network: FaultyProxy, *ends: asyncio.StreamWriter) -> None:
        self._network, self._ends, self._silent = network, ends, False
        self._over = asyncio.Event()

    async def carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, draw: Random, *, asks: bool = False
    ) -> None:
        """Forward one direction until its source ends or the connection is cut."""
        under_way: asyncio.Queue[_Piece | None] = asyncio.Queue(_AHEAD)
        taking = asyncio.create_task(self._take(reader, under_way, draw, asks))
        try:
            with suppress(OSError):
                await self._give(under_way, writer)
        finally:
            taking.cancel()

    async def _take(
        self, reader: asyncio.StreamReader, under_way: "asyncio.Queue[_Piece | None]", draw: Random, asks: bool
    ) -> None:
        clock = asyncio.get_running_loop().time
        with suppress(OSError):
            while data := await reader.read(_PIECE):
                network_faults = self._network.network_faults
                self._network.asked += asks and len(data) >= network_faults.least
                await under_way.put(_Piece(data, clock() + network_faults.delay(draw), draw.random(), draw.random()))
        await under_way.put(None)

    async def _give(self, under_way: "asyncio.Queue[_Piece | None]", writer: asyncio.StreamWriter) -> None:
        clock, network = asyncio.get_running_loop().time, self._network
        while piece := await under_way.get():
            await asyncio.sleep(piece.due - clock())
            network_faults = network.network_faults
            counts = len(piece.data) >= network_faults.least
            if self._silent:
                network.lost += counts
            elif counts and piece.fate < network_faults.cut:
                network.cuts, network.lost = network.cuts + 1, network.lost + 1
                writer.write(piece.data[: int(piece.where * len(piece.data))])
                return
            elif counts and piece.fate < network_faults.cut + network_faults.silent:
                network.lost += 1
                self._fall_silent(network_faults.silent_seconds)
            else:
                writer.write(piece.data)
                await writer.drain()
        if self._silent:  # the other end is not notified that this one closed
            await self._over.wait()

    def _fall_silent(self, seconds: float) -> None:
        self._network.silences += 1
        self._silent = True
        if seconds < _FOR_EVER:
            asyncio.get_running_loop().call_later(seconds, self.end)

    def end(self) -> None:
        self._over.set()
        for writer in self._ends:
            writer.transport.abort()
