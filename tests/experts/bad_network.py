"""A TCP proxy that behaves as bad networks do: it delays, stalls, cuts connections, and swallows what they carry.

    client ──> proxy ──> server       every piece of bytes, in either direction, draws its fate:
           <──       <──              late by a while    cut, perhaps in the middle    silent from now on

A silent connection is half open: what is sent on it vanishes, and neither side is told, until ``silent_seconds`` are
over. What befalls a connection depends on the seed, its number and how its bytes came in pieces.
"""

import asyncio
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Self, cast

_PIECE = 1 << 16
_FOR_EVER = float("inf")


@dataclass(frozen=True)
class Weather:
    """What happens to each piece of bytes.

    ``late``: the mean of its delay in seconds, drawn from an exponential distribution. ``cut``, ``silent``: how likely
    it is that its connection ends there, or goes silent. ``stall``: how likely it waits ``stall_seconds`` more.
    """

    late: float = 0.0
    cut: float = 0.0
    silent: float = 0.0
    silent_seconds: float = _FOR_EVER
    stall: float = 0.0
    stall_seconds: float = 0.0

    def delay(self, draw: Random) -> float:
        """Seconds for one piece."""
        late = draw.expovariate(1 / self.late) if self.late else 0.0
        return late + self.stall_seconds * (draw.random() < self.stall)


CALM = Weather()


class BadNetwork:
    """A proxy to ``address`` (host:port). A context manager; ``weather`` may be set at any time.

    ``connections``, ``cuts`` and ``silences`` count what has happened.
    """

    def __init__(self, address: str, weather: Weather = CALM, seed: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self.weather = weather
        self.connections = self.cuts = self.silences = 0
        self._server, self._seed = (host, int(port)), seed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._there = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bad-network")

    def __enter__(self) -> Self:
        self._thread.start()
        self._there.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._serve())  # which cancels what is left of the connections

    async def _serve(self) -> None:
        self._serving: asyncio.Task[Any] = cast("asyncio.Task[Any]", asyncio.current_task())
        self._there.set()
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
            back, there = await asyncio.open_connection(*self._server)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self, writer, there)
        ways = (reader, there, Random(f"{self._seed}/{number}/to")), (back, writer, Random(f"{self._seed}/{number}"))
        try:
            await asyncio.gather(*(link.carry(*way) for way in ways))
        except OSError:
            pass  # it was cut, or ended by itself
        finally:
            link.end()


class _Link:
    """One connection, to both sides."""

    def __init__(self, network: BadNetwork, *ends: asyncio.StreamWriter) -> None:
        self._network, self._ends, self._silent = network, ends, False
        self._over = asyncio.Event()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, draw: Random) -> None:
        """One direction, until its source ends."""
        network = self._network
        while piece := await reader.read(_PIECE):
            weather = network.weather
            await asyncio.sleep(weather.delay(draw))
            fate = draw.random()
            if self._silent:
                continue
            if fate < weather.cut:
                network.cuts += 1
                writer.write(piece[: draw.randrange(len(piece))])
                raise ConnectionResetError
            if fate < weather.cut + weather.silent:
                network.silences += 1
                self._silent = True
                if weather.silent_seconds < _FOR_EVER:
                    asyncio.get_running_loop().call_later(weather.silent_seconds, self.end)
                continue
            writer.write(piece)
            await writer.drain()
        if self._silent:  # its other end is not told that this one went
            await self._over.wait()
        raise ConnectionResetError

    def end(self) -> None:
        """Both sides hear of it."""
        self._over.set()
        for each in self._ends:
            each.transport.abort()
