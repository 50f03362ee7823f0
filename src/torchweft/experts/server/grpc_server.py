"""The gRPC server: streams, unary calls, health and reflection, all in one asyncio loop.

    Stream   authenticate ── admit ── read frames ──> ServerStream ──> write frames      until the client ends,
                '── rejected before a byte is read       '── an invalid frame: error of call 0, and the end
    Info     frame of INFO calls -> frame of answers
    Status   -> JSON, for role ADMIN; reads no message
    Operate  request -> results of an operation, for role ADMIN at its expert; see operations.py
    State    states of experts, for followers with role ADMIN; see `weft.experts.replication.LeaderStreams`
    grpc.reflection.v1alpha.ServerReflection    as published, for admitted clients
    grpc.health.v1.Health                       Check alone, for everybody; of the whole server; reads no message

Calls of Info, Status, Operate and reflection are short: a message must arrive within 10 s, and each client has a few at
a time.

For gRPC every method is a stream, also those that clients call as unary: gRPC reads a unary request completely before
it calls the handler. With streams, it holds only the headers of unknown callers, and of a client no more than the
budget has room for.
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

from torchweft.core.errors import UsageError
from torchweft.experts import errors
from torchweft.experts.address import probe_address
from torchweft.experts.fork_guard import check_fork
from torchweft.experts.replication import LeaderStreams
from torchweft.experts.server.auth import Caller, Role, authenticate
from torchweft.experts.server.dispatcher import RequestDispatcher, error_call
from torchweft.experts.server.operations import Operations
from torchweft.experts.server.options import ServerOptions
from torchweft.experts.server.server_stream import ByteBudget, NetworkLoop, ServerStream, next_message
from torchweft.experts.tls import ServerTls
from torchweft.experts.wire import Call, Header, Kind, decode, encode, service
from torchweft.experts.wire.frame import MESSAGE_BYTES

_aio = cast("Any", aio)
_grpc = cast("Any", grpc)
_health = cast("Any", health_pb2)
_reflection, _reflection_pb2 = cast("Any", reflection), cast("Any", reflection_pb2)
_HEALTH = cast("Any", health).SERVICE_NAME
# Health checks that can run at a time, in all and for one host: a client that does not read its answer keeps one open.
_CHECKS, _HOST_CHECKS = 32, 8
# Calls of Info, Status and reflection that one client can have open, and the seconds for each message of a request. An
# open call holds the bytes of a stream. Without these limits, one client could keep out others without sending a byte.
_CLIENT_REQUESTS = 64
_REQUEST_SECONDS = 10.0
_OPERATION_SECONDS = 60.0  # for an operation without a deadline
_START_SECONDS = 30.0  # for the start of listening
_STOP_SECONDS = 1.0  # for closing connections, after answers have left
_DESCRIPTORS = 64  # file descriptors reserved for checkpoints, the log and the directory
_GOAWAY = Call(Header(kind=Kind.GOAWAY))


class GrpcServer:
    """The network thread, from `start` to `stop`."""

    def __init__(self, address: str, tls: ServerTls | None, options: ServerOptions, handlers: "GrpcHandlers") -> None:
        self.handlers = handlers
        self.port = 0  # 0 before the start
        self._address, self._tls, self._options = address, tls, options
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping, self._deadline = asyncio.Event(), 0.0

    @property
    def address(self) -> str:
        return f"{self._address.rpartition(':')[0]}:{self.port}" if self.port else self._address

    @property
    def authenticates(self) -> bool:
        return self._tls is not None and self._tls.authority is not None

    def start(self) -> None:
        check_fork("a server")
        listening: Future[int] = Future()

        def run() -> None:
            with asyncio.Runner(loop_factory=NetworkLoop) as runner:
                runner.run(self._serve(listening))

        self._thread = threading.Thread(target=run, name="torchweft-server", daemon=True)
        self._thread.start()
        self.port = listening.result(_START_SECONDS)

    def announce_end(self) -> None:
        self._call_in_loop(self.handlers.announce_end)

    def stop(self, seconds: float) -> None:
        if threading.current_thread() is self._thread:  # e.g. in the callback of a future
            raise UsageError("a server cannot be ended from within its own network thread")
        self._deadline = time.monotonic() + seconds
        self._call_in_loop(self._stopping.set)
        if self._thread is not None:
            self._thread.join(seconds + _STOP_SECONDS)

    def _call_in_loop(self, act: Callable[[], object]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(act)

    async def _serve(self, listening: "Future[int]") -> None:
        self._loop = asyncio.get_running_loop()
        try:
            options = service.server_options(self._options.limits, _max_connections(self._options.connections))
            options += service.age_options(self._options.connection_age_seconds)
            server: Any = _aio.server(options=options)
            server.add_generic_rpc_handlers(tuple(self.handlers.tables()))
            port = _listen(server, self._address, self._tls)
            await server.start()
        except Exception as error:
            listening.set_exception(error)
            return
        listening.set_result(port)
        await self._stopping.wait()
        connections = self.handlers.connections
        while connections and time.monotonic() < self._deadline:
            for connection in connections:  # every time, because clients open new ones until the port is closed
                connection.finish()
            await asyncio.sleep(0.005)
        with suppress(TimeoutError):
            # With a grace, clients get a GOAWAY without an error. For one with an error, gRPC prints a line on the
            # client's stderr. Only calls that are still open make it wait.
            await asyncio.wait_for(server.stop(_STOP_SECONDS / 4), _STOP_SECONDS)
        # gRPC ends calls in tasks of its own, which must not be destroyed with the loop.
        if ending := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(ending, timeout=_STOP_SECONDS)


class GrpcHandlers:
    """Handlers of all methods, and the open connections. Everything belongs to the network loop.

    ``status``: data of a status call, as JSON values.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        options: ServerOptions,
        status: Callable[[], Mapping[str, Any]],
        leader_streams: LeaderStreams | None,
        operations: Operations,
    ) -> None:
        self.connections: set[ServerStream] = set()
        self.budget = ByteBudget(options.total_bytes)
        self.leader_streams = leader_streams
        self._accepted = self._turned_away = self._broken = 0
        self._dispatcher, self._options, self._status, self._operations = dispatcher, options, status, operations
        self._checks: list[str] = []  # hosts whose health checks are running
        self._requests: list[str] = []  # clients whose short calls are running
        names = (service.SERVICE, _HEALTH, _reflection.SERVICE_NAME)
        self._reflection = _reflection.aio.ReflectionServicer(names, _descriptor_pool())

    def tables(self) -> list[Any]:
        stream = _grpc.stream_stream_rpc_method_handler
        methods = {"Stream": stream(self._serve_stream), "Info": stream(self._answer_info)}
        methods |= {"Status": stream(self._send_status), "Operate": stream(self._operate)}
        if self.leader_streams is not None:
            methods["State"] = stream(self._serve_states)
        reflect = stream(
            self._reflect,
            _reflection_pb2.ServerReflectionRequest.FromString,
            _reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        services = {
            service.SERVICE: methods,
            _HEALTH: {"Check": stream(self._check_health)},
            _reflection.SERVICE_NAME: {"ServerReflectionInfo": reflect},
        }
        return [_grpc.method_handlers_generic_handler(name, table) for name, table in services.items()]

    def counts(self) -> dict[str, int]:
        # By the names in `ServerStatistics`. Any thread can call this, so the set is copied first.
        connections = list(self.connections)
        return {
            "connections": len(connections),
            "calls": sum(connection.calls for connection in connections),
            "nbytes": sum(connection.nbytes for connection in connections),
            "accepted": self._accepted,
            "turned_away": self._turned_away,
            "broken": self._broken + sum(connection.is_broken for connection in connections),
        }

    def announce_end(self) -> None:
        for connection in self.connections:
            connection.send(_GOAWAY)

    # The handlers. gRPC passes arguments without types.

    async def _check_health(self, _: Any, context: Any) -> None:
        host = Caller("", context.peer()).principal
        if len(self._checks) >= _CHECKS or self._checks.count(host) >= _HOST_CHECKS:
            await context.abort(_grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health checks leave their answer unread")
        # Counted until the answer was read, because an unread answer keeps its call and its memory.
        self._checks.append(host)
        try:
            response = _health.HealthCheckResponse
            status = response.SERVING if self._dispatcher.draining is None else response.NOT_SERVING
            await context.write(response(status=status).SerializeToString())
        finally:
            self._checks.remove(host)

    async def _reflect(self, _: Any, context: Any) -> None:
        async def requests() -> AsyncGenerator[Any]:
            while (message := await _next_request(context)) is not None:
                yield message

        async with self._admit_request(context, "reflection"):
            async for answer in self._reflection.ServerReflectionInfo(requests(), context):
                await context.write(answer)

    async def _serve_stream(self, _: Any, context: Any) -> None:
        async with self._admit_caller(context, "stream") as caller:
            await self._check_connections(caller, context)
            connection = ServerStream(caller, self._dispatcher, self._options, self.budget)
            self.connections.add(connection)
            self._accepted += 1
            try:
                await context.send_initial_metadata(((service.FRAME_BYTES, str(self._options.limits.frame_bytes)),))
                if self._dispatcher.draining is not None:
                    connection.send(_GOAWAY)
                await connection.serve(partial(next_message, context), context.write)
            finally:
                self.connections.discard(connection)
                self._broken += connection.is_broken
                connection.abandon()

    async def _check_connections(self, caller: Caller, context: Any) -> None:
        if len(self.connections) >= self._options.connections:
            text = f"{len(self.connections)} clients are connected, and no more are allowed; come back later"
            await self._turn_away(context, text)
        count = sum(connection.caller.principal == caller.principal for connection in self.connections)
        if count >= self._options.client_connections:
            text = f"client {caller.principal!r} has {count} connections, and one client may have no more; close some"
            await self._turn_away(context, text)

    async def _answer_info(self, _: Any, context: Any) -> None:
        async with self._admit_request(context, "info") as caller:
            answers, limits = list[Call](), self._options.limits
            try:
                for call in decode(await _next_request(context) or b"", limits):
                    if call.header.kind is Kind.INFO:
                        self._dispatcher.dispatch(call, caller, answers.append)
                    else:
                        text = f"a call of kind {call.header.kind.name} where only INFO is answered"
                        answers.append(error_call(call.header.call_id, errors.MalformedError(text, reason="kind")))
                frame = encode(answers, limits)
            except errors.WireError as error:
                frame = encode([error_call(0, error)], limits)
            await context.write(frame)

    async def _send_status(self, _: Any, context: Any) -> None:
        async with self._admit_request(context, "status") as caller:
            try:
                self._dispatcher.check_role(caller, "", Role.ADMIN, "the server's status", "STATUS")
            except errors.ForbiddenError as error:
                await context.abort(_grpc.StatusCode.PERMISSION_DENIED, str(error))
            # In a thread of the pool: with many experts, JSON would block the loop for all clients.
            loop = asyncio.get_running_loop()
            await context.write(service.write_status(json.dumps(await loop.run_in_executor(None, self._status))))

    async def _operate(self, _: Any, context: Any) -> None:
        async with self._admit_request(context, "operation") as caller:
            message = await _next_request(context)
            data = memoryview(b"")
            try:
                operation = service.read_operation(message or b"")
                what = f"the operation {operation.name!r}"
                self._dispatcher.check_role(caller, operation.uid, Role.ADMIN, what, operation.name.upper())
                seconds = min(context.time_remaining() or _OPERATION_SECONDS, self._options.longest_seconds)
                # In a thread of the pool, because an operation waits for the batch that runs, and for the disk.
                work = partial(self._operations.run, operation, caller.described, seconds)
                results, data = await asyncio.get_running_loop().run_in_executor(None, work)
                await context.write(service.write_operation_reply(results=results))
            except Exception as error:  # also of users' modules
                await context.write(service.write_operation_reply(error=error))
            size = min(MESSAGE_BYTES, max(1, self._options.limits.frame_bytes // 2))
            for start in range(0, len(data), size):
                await context.write(service.write_operation_reply(data=data[start : start + size]))

    async def _serve_states(self, _: Any, context: Any) -> None:
        async with self._admit_caller(context, "state") as caller:
            streams, dispatcher = self.leader_streams, self._dispatcher
            # Checked before the stream counts as open, because the number of open streams is small.
            if not dispatcher.access.admits(caller.name, Role.ADMIN):
                text = f"{caller.described} has role ADMIN for no expert, and asked for states, which takes that role"
                dispatcher.audit.refused(caller, "", "STATE", text)
                await context.abort(_grpc.StatusCode.PERMISSION_DENIED, text)
            if streams is None or len(streams.open) >= self._options.connections:
                await context.abort(_grpc.StatusCode.RESOURCE_EXHAUSTED, "too many servers follow this one")
            else:
                check = partial(dispatcher.check_role, caller, wanted=Role.ADMIN, what="its state", kind="STATE")
                await streams.serve(partial(next_message, context), context.write, check)

    @asynccontextmanager
    async def _admit_caller(self, context: Any, what: str) -> AsyncGenerator[Caller]:
        # Authenticates, and counts the stream in the budget. Nothing is read from a caller that is rejected.
        try:
            caller = authenticate(
                self._dispatcher.access, context.auth_context(), context.invocation_metadata(), context.peer()
            )
        except errors.ForbiddenError as error:
            self._dispatcher.audit.refused(Caller("", context.peer()), "", what.upper(), str(error))
            await context.abort(_grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise
        try:
            self.budget.add_stream(MESSAGE_BYTES, caller.principal)
        except (errors.OverloadError, errors.QuotaError) as error:
            await self._turn_away(context, str(error))
            raise
        try:
            yield caller
        finally:
            self.budget.remove_stream(MESSAGE_BYTES, caller.principal)

    @asynccontextmanager
    async def _admit_request(self, context: Any, what: str) -> AsyncGenerator[Caller]:
        # An answer that the client does not read has no time limit, because gRPC cannot end a call during a write. The
        # number of such calls is limited.
        async with self._admit_caller(context, what) as caller:
            if self._requests.count(caller.principal) >= _CLIENT_REQUESTS:
                text = f"client {caller.principal!r} has {_CLIENT_REQUESTS} calls of this kind open, the most for one"
                await self._turn_away(context, f"{text}; end some of them first")
            self._requests.append(caller.principal)
            try:
                yield caller
            except TimeoutError:
                text = f"no message of this call of {what} arrived for {_REQUEST_SECONDS:g} s"
                await context.abort(_grpc.StatusCode.DEADLINE_EXCEEDED, text)
            finally:
                self._requests.remove(caller.principal)

    async def _turn_away(self, context: Any, why: str) -> None:
        self._turned_away += 1
        await context.abort(_grpc.StatusCode.RESOURCE_EXHAUSTED, why)


async def _next_request(context: Any) -> Any:
    async with asyncio.timeout(_REQUEST_SECONDS):
        return await next_message(context)


def _listen(server: Any, address: str, tls: ServerTls | None) -> int:
    credentials = None if tls is None else tls.credentials()
    # gRPC would also find out, but prints a line to stderr and does not say why.
    probe_address(address)
    open_port = partial(server.add_secure_port, server_credentials=credentials) if tls else server.add_insecure_port
    try:
        port: int = open_port(address)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the server cannot listen at {address!r}: {error}; is the port taken?") from None
    if not port:
        raise UsageError(f"the server cannot listen at {address!r} with these certificates")
    return port


def _descriptor_pool() -> Any:
    pool = cast("Any", descriptor_pool.DescriptorPool)()
    for file in (service.PROTO, _health.DESCRIPTOR.serialized_pb, _reflection_pb2.DESCRIPTOR.serialized_pb):
        pool.AddSerializedFile(file)
    return pool


def _max_connections(streams: int) -> int:
    # Twice the streams, unless that leaves too few file descriptors for checkpoints and the directory.
    limit, used = float("inf"), _DESCRIPTORS
    with suppress(ImportError, OSError):  # a system without such limits, or without /proc
        from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit  # noqa: PLC0415

        soft = getrlimit(RLIMIT_NOFILE)[0]
        limit = limit if soft == RLIM_INFINITY else soft
        used = len(os.listdir("/proc/self/fd"))
    return max(1, int(min(2 * streams, limit - used - _DESCRIPTORS)))
