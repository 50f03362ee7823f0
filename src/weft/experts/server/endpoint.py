"""The server's gRPC side: streams, unary calls, health and reflection, all in one asyncio loop.

    Stream   who is it? ── admitted ── read frames ──> Connection ──> write frames       until the client ends,
                '── no: refused before a frame is read       '── a broken frame: error of call 0, and the end
    Info     frame of INFO calls -> frame of answers
    Status   -> JSON, for those with role ADMIN
    State    states of experts, for servers that follow and have role ADMIN; see `weft.experts.replica.Feed`
    grpc.health.v1.Health, grpc.reflection.v1alpha.ServerReflection     as published

What a stranger sends is decoded with the server's limits, and nothing that it can send reaches another stream.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from weft.core.errors import UsageError, listed
from weft.experts.replica import Feed
from weft.experts.server.access import Caller, Role
from weft.experts.server.budget import Budget
from weft.experts.server.connection import Connection, goaway
from weft.experts.server.desk import Desk, fault
from weft.experts.server.identity import identify
from weft.experts.server.options import ServerOptions, ServerTls
from weft.experts.server.tls import server_credentials
from weft.experts.service.address import address_fault
from weft.experts.service.forks import use_grpc
from weft.experts.service.names import FRAME_BYTES, SERVICE, server_options
from weft.experts.wire import Call, ForbiddenError, Kind, MalformedError, WireError, decode, encode

_aio = cast("Any", aio)
_grpc = cast("Any", grpc)
_health = cast("Any", health_pb2)
_HEALTH = 0.2  # seconds in which health checks are told that the server ends


class Endpoint:
    """Made, started and stopped in the loop's thread.

    Args:
        desk: takes the calls.
        options: limits.
        status: what a status call answers, as JSON.
        feed: gives states away; None: nobody may ask.
    """

    def __init__(
        self,
        desk: Desk,
        options: ServerOptions,
        status: Callable[[], Mapping[str, Any]],
        feed: Feed | None = None,
    ) -> None:
        self.connections: set[Connection] = set()
        self.accepted = self.turned_away = self.broken = 0
        self._desk = desk
        self._options = options
        self.budget = Budget(options.total_bytes)
        self._status = status
        self._feed = feed
        self._server: Any = None
        self._health: Any = None

    async def start(self, address: str, tls: ServerTls | None) -> int:
        """Listen; returns the port. Raises ``UsageError`` if the address cannot be had, or a certificate is bad."""
        faults = address_fault("address", address, free=True)
        if faults:
            raise UsageError(listed("the server cannot listen like this:", faults))
        use_grpc("a server")
        server: Any = _aio.server(options=server_options(self._options.limits))
        server.add_generic_rpc_handlers((self._handlers(),))
        self._health = cast("Any", health).aio.HealthServicer()
        cast("Any", health_pb2_grpc).add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, cast("Any", health).SERVICE_NAME, cast("Any", reflection).SERVICE_NAME)
        cast("Any", reflection).enable_server_reflection(names, server)
        credentials = None if tls is None else server_credentials(tls)
        try:
            port: int = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"the server cannot listen at {address!r}: {error}; is the port taken?") from None
        if not port:
            raise UsageError(f"the server cannot listen at {address!r} with these certificates")
        await self._serving(True)
        await server.start()
        self._server = server
        return port

    async def drain(self) -> None:
        """Tell clients and health checks that no new work is taken, whether or not they listen."""
        for connection in self.connections:
            connection.answer(goaway())
        # grpc_health writes to its watchers while it holds the lock that setting a status takes: one that reads
        # nothing (a flow-control window of 0) would block this for ever.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._serving(False), _HEALTH)

    async def stop(self, seconds: float) -> None:
        """Let answers leave, for at most so many seconds, and end all streams."""
        for connection in self.connections:
            connection.finish()
        end = asyncio.get_running_loop().time() + seconds
        while self.connections and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.005)
        if self._server is not None:
            await self._server.stop(0)

    def _handlers(self) -> Any:
        table = {
            "Stream": _grpc.stream_stream_rpc_method_handler(self._stream),
            "Info": _grpc.unary_unary_rpc_method_handler(self._info),
            "Status": _grpc.unary_unary_rpc_method_handler(self._tell_status),
        }
        if self._feed is not None:
            table["State"] = _grpc.stream_stream_rpc_method_handler(self._states)
        return _grpc.method_handlers_generic_handler(SERVICE, table)

    async def _serving(self, yes: bool) -> None:
        kinds = _health.HealthCheckResponse
        status = kinds.SERVING if yes else kinds.NOT_SERVING
        await asyncio.gather(*[self._health.set(name, status) for name in ("", SERVICE)])

    # Handlers. What gRPC hands them has no types.

    async def _stream(self, _: Any, context: Any) -> None:
        caller = await self._admitted(context, "stream")
        if len(self.connections) >= self._options.connections:
            self.turned_away += 1
            text = f"{len(self.connections)} clients are connected, and no more are allowed; come back later"
            await context.abort(_grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        own = sum(each.caller.principal == caller.principal for each in self.connections)
        if own >= self._options.client_connections:
            self.turned_away += 1
            text = f"client {caller.principal!r} has {own} connections, and one client may have no more; close some"
            await context.abort(_grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        connection = Connection(caller, self._desk, self._options, self.budget)
        self.connections.add(connection)
        self.accepted += 1
        tasks: list[asyncio.Task[None]] = []
        try:
            await context.send_initial_metadata(((FRAME_BYTES, str(self._options.limits.frame_bytes)),))
            if self._desk.draining is not None:
                connection.answer(goaway())
            tasks = [
                asyncio.create_task(self._read(connection, context)),
                asyncio.create_task(connection.write(context.write)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done() and tasks[0].exception() is None:
                connection.finish()
                await tasks[1]
        finally:
            self.connections.discard(connection)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            connection.abandon()

    async def _read(self, connection: Connection, context: Any) -> None:
        """Until the client ends its side, or breaks the format."""
        while True:
            message = await context.read()
            if message is _aio.EOF:
                return
            try:
                calls = decode(message, self._options.limits)
            except WireError as error:
                self.broken += 1
                connection.answer(fault(0, error))
                return
            for call in calls:
                connection.take(call)
            await connection.has_room()

    async def _info(self, message: bytes, context: Any) -> bytes:
        """Answers for every call of one frame; kinds other than INFO get an error."""
        caller = await self._admitted(context, "info")
        limits = self._options.limits
        answers: list[Call] = []
        try:
            for call in decode(message, limits):
                if call.header.kind is Kind.INFO:
                    self._desk.take(call, caller, answers.append)
                else:
                    text = f"a call of kind {call.header.kind.name} where only INFO is answered"
                    answers.append(fault(call.header.call_id, MalformedError(text, reason="kind")))
            return b"".join(encode(answers, limits))
        except WireError as error:
            return b"".join(encode([fault(0, error)], limits))

    async def _tell_status(self, message: bytes, context: Any) -> bytes:
        caller = await self._admitted(context, "status")
        try:
            self._desk.access.check(caller, "", Role.ADMIN, "the server's status")
        except ForbiddenError as error:
            self._desk.audit.refused(caller, "", "STATUS", str(error))
            await context.abort(_grpc.StatusCode.PERMISSION_DENIED, str(error))
        loop = asyncio.get_running_loop()
        return json.dumps(await loop.run_in_executor(None, self._status)).encode()

    async def _states(self, _: Any, context: Any) -> None:
        caller = await self._admitted(context, "state")
        if not self._desk.access.admits(caller.name, Role.ADMIN):  # before it takes one of the few streams
            text = f"client {caller.name!r} has role ADMIN for no expert, and asked for states, which takes that role"
            self._desk.audit.refused(caller, "", "STATE", text)
            await context.abort(_grpc.StatusCode.PERMISSION_DENIED, text)

        def admit(uid: str) -> None:
            try:
                self._desk.access.check(caller, uid, Role.ADMIN, "its state")
            except ForbiddenError as error:
                self._desk.audit.refused(caller, uid, "STATE", str(error))
                raise

        async def read() -> bytes | None:
            message = await context.read()
            return None if message is _aio.EOF else message

        if self._feed is not None:
            if self._feed.streams >= self._options.connections:
                await context.abort(_grpc.StatusCode.RESOURCE_EXHAUSTED, "too many servers follow this one")
            await self._feed.serve(read, context.write, admit)

    async def _admitted(self, context: Any, what: str) -> Caller:
        """Who calls; strangers are refused here, before anything of theirs is read."""
        try:
            return identify(self._desk.access, context.auth_context(), context.invocation_metadata(), context.peer())
        except ForbiddenError as error:
            self._desk.audit.refused(Caller("", context.peer()), "", what.upper(), str(error))
            await context.abort(_grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise
