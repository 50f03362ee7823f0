"""The gRPC servicer: streams, unary calls, health and reflection, all in one asyncio loop.

    Stream   authenticate ── admit ── read frames ──> ServerStream ──> write frames      until the client ends,
                '── refused before a byte is read        '── a broken frame: error of call 0, and the end
    Info     frame of INFO calls -> frame of answers
    Status   -> JSON, for those with role ADMIN; reads nothing
    State    states of experts, for followers with role ADMIN; see `weft.experts.replication.LeaderStreams`
    grpc.reflection.v1alpha.ServerReflection    as published, for admitted clients
    grpc.health.v1.Health                       Check alone, for everybody; of the whole server, and reads nothing

Every method is a stream to gRPC, also those that clients call as unary: of a unary request gRPC holds the whole before
its handler runs. So of unknown callers only headers are held, and of a client no more than the budget has room for.
Frames are decoded with the server's limits, and nothing that one client sends reaches another stream.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool
from grpc import aio
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from weft.core.errors import UsageError
from weft.experts.errors import OverloadError, QuotaError
from weft.experts.fork_guard import check_fork
from weft.experts.replication import LeaderStreams
from weft.experts.server.auth import Caller, Role, authenticate
from weft.experts.server.dispatcher import RequestDispatcher, fault
from weft.experts.server.options import ServerOptions
from weft.experts.server.server_stream import ByteBudget, ServerStream, goaway
from weft.experts.tls import ServerTls
from weft.experts.wire import (
    Call,
    ForbiddenError,
    Frame,
    Kind,
    MalformedError,
    Received,
    TruncatedError,
    WireError,
    decode,
    encode,
)
from weft.experts.wire.frame import MESSAGE_BYTES
from weft.experts.wire.service import FRAME_BYTES, PROTO, SERVICE, server_options, write_status

_aio = cast("Any", aio)
_grpc = cast("Any", grpc)
_health = cast("Any", health_pb2)
_reflection, _reflection_pb2 = cast("Any", reflection), cast("Any", reflection_pb2)
_HEALTH = cast("Any", health).SERVICE_NAME
_CHECKS, _HOST_CHECKS = 32, 8  # of its health under way, of all and of one host: one that reads no answer stays
_ROOM_SECONDS = 5.0  # that a frame in parts waits for room
_PART_SECONDS = 30.0  # that its next part may take
_START_SECONDS = 30.0  # that listening may take
_STOP_SECONDS = 1.0  # that closing connections may take, after answers have left
_DESCRIPTORS = 64  # that connections leave free: for checkpoints, the log, the directory


class GrpcServer:
    """In a thread of its own, from `start` to `stop`. ``status``: what a status call answers, as JSON."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        options: ServerOptions,
        status: Callable[[], Mapping[str, Any]],
        leader_streams: LeaderStreams | None = None,
    ) -> None:
        self.connections: set[ServerStream] = set()
        self.accepted = self.turned_away = self.broken = 0
        self._dispatcher = dispatcher
        self._options = options
        self.budget = ByteBudget(options.total_bytes)
        self._status = status
        self._leader_streams = leader_streams
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping, self._end = asyncio.Event(), 0.0
        self._checks: list[str] = []  # hosts whose health checks are under way
        names = (SERVICE, _HEALTH, _reflection.SERVICE_NAME)
        self._reflection = _reflection.aio.ReflectionServicer(names, _descriptor_pool())

    def start(self, address: str, tls: ServerTls | None) -> int:
        """Listen; returns the port. Raises ``UsageError`` if the address cannot be had, or a certificate is bad."""
        check_fork("a server")
        port: Future[int] = Future()

        def run() -> None:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                runner.run(self._run(address, tls, port))

        self._thread = threading.Thread(target=run, name="weft-server", daemon=True)
        self._thread.start()
        return port.result(_START_SECONDS)

    def drain(self) -> None:
        """Tell clients that no new work is taken. Waits for none of them."""
        self._call(lambda: [connection.answer(goaway()) for connection in self.connections])

    def stop(self, seconds: float) -> None:
        """Let answers leave, for at most so many seconds, and end all streams and the thread."""
        if threading.current_thread() is self._thread:  # such as a callback of a future
            raise UsageError("a server cannot be ended from within its own network thread")
        self._end = time.monotonic() + seconds
        self._call(self._stopping.set)
        if self._thread is not None:
            self._thread.join(seconds + _STOP_SECONDS)

    def _call(self, act: Callable[[], object]) -> None:
        """Have the loop do this, if it still runs."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(act)

    async def _run(self, address: str, tls: ServerTls | None, port: "Future[int]") -> None:
        """From the start to the stop."""
        self._loop = asyncio.get_running_loop()
        try:
            options = server_options(self._options.limits, _most_connections(self._options.connections))
            server: Any = _aio.server(options=options)
            server.add_generic_rpc_handlers(tuple(self._handlers()))
            found = _listen(server, address, tls)
            await server.start()
        except Exception as error:
            port.set_exception(error)
            return
        port.set_result(found)
        await self._stopping.wait()
        for connection in self.connections:
            connection.finish()
        while self.connections and time.monotonic() < self._end:
            await asyncio.sleep(0.005)
        with suppress(TimeoutError):
            await asyncio.wait_for(server.stop(0), _STOP_SECONDS)
        if ending := asyncio.all_tasks() - {asyncio.current_task()}:  # gRPC ends calls in tasks of its own
            await asyncio.wait(ending, timeout=_STOP_SECONDS)

    def _handlers(self) -> list[Any]:
        stream = _grpc.stream_stream_rpc_method_handler
        ours = {"Stream": stream(self._stream), "Info": stream(self._info), "Status": stream(self._tell_status)}
        if self._leader_streams is not None:
            ours["State"] = stream(self._states)
        reflect = stream(
            self._reflect,
            _reflection_pb2.ServerReflectionRequest.FromString,
            _reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        tables = {
            SERVICE: ours,
            _HEALTH: {"Check": stream(self._check)},
            _reflection.SERVICE_NAME: {"ServerReflectionInfo": reflect},
        }
        return [_grpc.method_handlers_generic_handler(name, table) for name, table in tables.items()]

    # Handlers. What gRPC hands them has no types.

    async def _check(self, _: Any, context: Any) -> None:
        host = Caller("", context.peer()).principal
        if len(self._checks) >= _CHECKS or self._checks.count(host) >= _HOST_CHECKS:
            await context.abort(_grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health checks leave their answer unread")
        self._checks.append(host)
        try:
            kinds = _health.HealthCheckResponse
            status = kinds.SERVING if self._dispatcher.draining is None else kinds.NOT_SERVING
            await context.write(kinds(status=status).SerializeToString())
        finally:
            self._checks.remove(host)

    async def _reflect(self, requests: Any, context: Any) -> AsyncGenerator[Any]:
        async with self._admitted(context, "reflection"):
            async for answer in self._reflection.ServerReflectionInfo(requests, context):
                yield answer

    async def _stream(self, _: Any, context: Any) -> None:
        async with self._admitted(context, "stream") as caller:
            if len(self.connections) >= self._options.connections:
                text = f"{len(self.connections)} clients are connected, and no more are allowed; come back later"
                await self._turn_away(context, text)
            own = sum(each.caller.principal == caller.principal for each in self.connections)
            if own >= self._options.client_connections:
                text = f"client {caller.principal!r} has {own} connections, and one client may have no more; close some"
                await self._turn_away(context, text)
            connection = ServerStream(caller, self._dispatcher, self._options, self.budget)
            self.connections.add(connection)
            self.accepted += 1
            tasks: list[asyncio.Task[None]] = []
            try:
                await context.send_initial_metadata(((FRAME_BYTES, str(self._options.limits.frame_bytes)),))
                if self._dispatcher.draining is not None:
                    connection.answer(goaway())
                both = self._read(connection, context), connection.write(context.write)
                tasks = [asyncio.create_task(each) for each in both]
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

    async def _read(self, connection: ServerStream, context: Any) -> None:
        """Until the client ends its side, or breaks the format."""
        while True:
            try:
                calls = await self._frame(connection.caller.principal, context)
                if calls is None:
                    return
            except (WireError, OverloadError, QuotaError) as error:
                self.broken += isinstance(error, WireError)
                connection.answer(fault(0, error))
                return
            while calls:  # which lets go of each, and so of the frame
                connection.take(calls.pop(0))
            await connection.has_room()

    async def _frame(self, client: str, context: Any) -> list[Received] | None:
        """The calls of the next frame; None at the end. Of one in parts the budget has all before the second is read.

        Raises ``WireError`` for what is no frame, ``OverloadError`` or ``QuotaError`` if there is no room for it.
        """
        part = await _next(context)
        if part is None:
            return None
        frame = Frame(part, self._options.limits)
        if not frame.partial:
            return frame.received()  # which raises if it is cut off
        size = frame.body_bytes
        await self.budget.reserve(size, client, _ROOM_SECONDS)
        try:
            async with asyncio.timeout(self._options.longest_seconds):
                while frame.wanted:
                    part = await asyncio.wait_for(_next(context), _PART_SECONDS)
                    if part is None:
                        break
                    frame.append(part)
            return frame.received()
        except TimeoutError:
            raise TruncatedError(f"a frame of {size} bytes was not sent to its end in time", reason="time") from None
        finally:
            self.budget.leave(size, client)  # its calls are admitted next, before anything else runs

    async def _info(self, _: Any, context: Any) -> None:
        async with self._admitted(context, "info") as caller:
            answers, limits = list[Call](), self._options.limits
            try:
                for call in decode(await _next(context) or b"", limits):
                    if call.header.kind is Kind.INFO:
                        self._dispatcher.dispatch(call, caller, answers.append)
                    else:
                        text = f"a call of kind {call.header.kind.name} where only INFO is answered"
                        answers.append(fault(call.header.call_id, MalformedError(text, reason="kind")))
                answer = encode(answers, limits)
            except WireError as error:
                answer = encode([fault(0, error)], limits)
            await context.write(answer)

    async def _tell_status(self, _: Any, context: Any) -> None:
        async with self._admitted(context, "status") as caller:
            try:
                self._dispatcher.check(caller, "", Role.ADMIN, "the server's status", "STATUS")
            except ForbiddenError as error:
                await context.abort(_grpc.StatusCode.PERMISSION_DENIED, str(error))
            loop = asyncio.get_running_loop()
            await context.write(write_status(json.dumps(await loop.run_in_executor(None, self._status))))

    async def _states(self, _: Any, context: Any) -> None:
        async with self._admitted(context, "state") as caller:
            streams, dispatcher = self._leader_streams, self._dispatcher
            if not dispatcher.access.admits(caller.name, Role.ADMIN):  # before it takes one of the few streams
                text = f"{caller.described} has role ADMIN for no expert, and asked for states, which takes that role"
                dispatcher.audit.refused(caller, "", "STATE", text)
                await context.abort(_grpc.StatusCode.PERMISSION_DENIED, text)
            if streams is None or len(streams.open) >= self._options.connections:
                await context.abort(_grpc.StatusCode.RESOURCE_EXHAUSTED, "too many servers follow this one")
            else:
                check = partial(dispatcher.check, caller, wanted=Role.ADMIN, what="its state", kind="STATE")
                await streams.serve(partial(_next, context), context.write, check)

    @asynccontextmanager
    async def _admitted(self, context: Any, what: str) -> AsyncGenerator[Caller]:
        """The caller. Unknown ones, and those that find no room, are refused before anything of theirs is read."""
        try:
            caller = authenticate(
                self._dispatcher.access, context.auth_context(), context.invocation_metadata(), context.peer()
            )
        except ForbiddenError as error:
            self._dispatcher.audit.refused(Caller("", context.peer()), "", what.upper(), str(error))
            await context.abort(_grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise
        try:
            self.budget.open(MESSAGE_BYTES)
        except OverloadError as error:
            await self._turn_away(context, str(error))
            raise
        try:
            yield caller
        finally:
            self.budget.close(MESSAGE_BYTES)

    async def _turn_away(self, context: Any, why: str) -> None:
        self.turned_away += 1
        await context.abort(_grpc.StatusCode.RESOURCE_EXHAUSTED, why)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that drops what comes after it was closed, instead of raising: all asyncio servers of a process share
    gRPC's poller, where an event of a call that this loop has cancelled would take those of other servers with it."""

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
        with suppress(RuntimeError):
            return super().call_soon_threadsafe(*args, **options)


async def _next(context: Any) -> bytes | None:
    """The next message of a client; None at the end."""
    message = await context.read()
    return None if message is _aio.EOF else message


def _listen(server: Any, address: str, tls: ServerTls | None) -> int:
    """The port at which it listens. Raises ``UsageError``."""
    credentials = None if tls is None else tls.credentials()
    open_port = partial(server.add_secure_port, server_credentials=credentials) if tls else server.add_insecure_port
    try:
        port: int = open_port(address)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the server cannot listen at {address!r}: {error}; is the port taken?") from None
    if not port:
        raise UsageError(f"the server cannot listen at {address!r} with these certificates")
    return port


def _descriptor_pool() -> Any:
    """What reflection shows: the services of this server."""
    pool = cast("Any", descriptor_pool.DescriptorPool)()
    for described in (PROTO, _health.DESCRIPTOR.serialized_pb, _reflection_pb2.DESCRIPTOR.serialized_pb):
        pool.AddSerializedFile(described)
    return pool


def _most_connections(streams: int) -> int:
    """TCP connections at a time: twice the streams, and no more than leaves some descriptors free."""
    limit, used = float("inf"), _DESCRIPTORS
    with suppress(ImportError, OSError):  # a system without such limits, or that does not tell
        from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit  # noqa: PLC0415

        soft = getrlimit(RLIMIT_NOFILE)[0]
        limit = limit if soft == RLIM_INFINITY else soft
        used = len(os.listdir("/proc/self/fd"))
    return max(1, int(min(2 * streams, limit - used - _DESCRIPTORS)))
