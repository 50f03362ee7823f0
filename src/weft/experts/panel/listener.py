"""A very small HTTP server in an asyncio loop: one request per connection, with a bound on whatever a stranger can do.

    connect ── more than 64? 503 ── head within 5 s and 8 KiB ── respond ── sent within 10 s ── close
                                        '── else 408, 431, 400 ...

Written here, on asyncio's streams, because so little is wanted: GET and HEAD, no body, no kept connections. A thread
per connection (http.server) is what slow clients would fill, and a framework would be one more dependency to keep
safe. It runs in a loop of its own and not in gRPC's, so that a flood of requests takes turns with other requests only.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from weft.core.errors import UsageError
from weft.experts.panel.answer import Answer, plain
from weft.experts.panel.request import HEAD_BYTES, RefusedRequest, Request, parse

_LINGER_BYTES, _LINGER_SECONDS = 1 << 16, 1.0  # of what a refused client still sends


@dataclass(frozen=True)
class Bounds:
    """Connections at a time; seconds that a client may take to send its head, and to take its answer."""

    connections: int = 64
    head_seconds: float = 5.0
    send_seconds: float = 10.0


class Listener:
    """Made, started and stopped in the loop's thread. ``respond`` must neither wait nor take long."""

    def __init__(self, respond: Callable[[Request], Answer], bounds: Bounds | None = None) -> None:
        self._respond = respond
        self._bounds = bounds or Bounds()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ``UsageError`` if the address cannot be had."""
        try:
            most = self._bounds.connections
            self._server = await asyncio.start_server(self._accept, host, port, limit=HEAD_BYTES, backlog=most)
        except OSError as error:
            raise UsageError(f"the panel cannot listen at {host}:{port}: {error}; is the port taken?") from None
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def stop(self) -> None:
        """Listen no more, and leave whoever is connected."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = len(self._tasks) >= self._bounds.connections
        if full:
            writer.write(plain(503, "too many clients are connected; come back later").to_bytes())
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            refused = await self._exchange(reader, writer)
            await asyncio.wait_for(writer.drain(), self._bounds.send_seconds)
            if refused:
                await _linger(reader, writer)
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), self._bounds.send_seconds)
        except (OSError, TimeoutError):  # the client went, or takes nothing
            return
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read a request and write its answer; whether it was refused before it was read to its end."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._bounds.head_seconds)
            request = parse(head)
        except asyncio.IncompleteReadError:
            return False  # it said nothing, or half of it
        except RefusedRequest as error:
            writer.write(plain(error.status, str(error)).to_bytes())
            return True
        except asyncio.LimitOverrunError:
            writer.write(plain(431, f"the head of a request takes at most {HEAD_BYTES} bytes").to_bytes())
            return True
        except TimeoutError:
            writer.write(plain(408, f"no request came within {self._bounds.head_seconds:g} s").to_bytes())
            return True
        try:
            answer = self._respond(request)
        except Exception as error:  # a fault here; the next request may do better
            answer = plain(500, f"the status cannot be told: {type(error).__name__}")
        writer.write(answer.to_bytes(bare=request.method == "HEAD"))
        return False


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take what still comes, for a while: closing on it would reset the connection before the answer was read."""
    with suppress(OSError, TimeoutError):
        writer.write_eof()
        async with asyncio.timeout(_LINGER_SECONDS):
            left = _LINGER_BYTES
            while left > 0 and (chunk := await reader.read(4096)):
                left -= len(chunk)
