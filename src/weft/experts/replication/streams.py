"""Streams of states from the leader of an expert to its followers: both sides, and what they tell each other.

    follower A   PullRequest(have 7/100) ────> waiting ── 100 steps more, or 2 s and a step, or the last state ──> due
    follower B   PullRequest(have 7/180) ────> waiting                                                              |
                      ^                               PullResponse, then the bytes in pieces <──────────────────────┘
                      '── loaded: the next request says what arrived, so the leader knows when it may stop

A request stays open until there is an answer; in between, the leader sends its progress. One state at a time leaves on
one stream, in pieces, as fast as gRPC takes them; copying it holds the expert up as a checkpoint does. A follower has
one stream and one thread for every server that it follows; after an error it follows that expert no more, and the
manager looks up its owner. A server that has just claimed an expert looks for a newer state by `FollowerStream.newest`.
"""

import asyncio
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import grpc
import torch

from weft.core.errors import WeftError
from weft.experts.client.transport import open_channel, unreachable
from weft.experts.errors import (
    DamagedError,
    ForbiddenError,
    LimitError,
    MalformedError,
    UnknownExpertError,
    UnreachableError,
    WireError,
)
from weft.experts.fork_guard import GrpcThreads
from weft.experts.replication.replica import Replica, ReplicaOptions, StateVersion, newer
from weft.experts.tls import check_address
from weft.experts.wire import Call, Header, Kind, Limits, Received, decode, encode, read_fault, write_fault
from weft.experts.wire.service import AUTHORIZATION, BEARER, STATE

_grpc = cast("Any", grpc)
_REFUSED = (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED)
_JOIN = 5.0
TICK = 0.02  # seconds between two looks at which requests are due
PIECE = 1 << 20  # bytes of one message
_PROGRESS = 0.5  # seconds between two reports of progress
IDLE = 10.0  # seconds without a request after which a stream ends; a follower always has one open
_MAX_WAIT = 0.2  # seconds that a batch under way may hold a state up before others go first
_MOST = (1 << 64) - 1
_REQUEST = struct.Struct("<QQQQQQ")
_RESPONSE = struct.Struct("<BQQQQ16s")

Read = Callable[[], Awaitable[Any]]
Send = Callable[[bytes], Awaitable[Any]]


class PullRequest(NamedTuple):
    """``have``: the follower's version. It wants more after ``steps`` steps, or ``milliseconds`` and any step.

    ``token`` not 0: the sender has claimed the expert with it, and wants at once whatever is newer.
    """

    have: StateVersion
    steps: int = 0
    milliseconds: int = 0
    token: int = 0

    def to_bytes(self) -> bytes:
        """The data of a call of kind STATE."""
        return _REQUEST.pack(*[min(_MOST, number) for number in (*self.have, *self[1:])])


class UpdateKind(IntEnum):
    """Kinds of a response: the leader's progress, nothing newer than the follower has, or the head of a state."""

    PROGRESS = 0
    NOTHING = 1
    STATE = 2


class PullResponse(NamedTuple):
    """``version`` of the leader; with a state, its size in bytes and their hash (blake2b, 16 bytes)."""

    kind: UpdateKind
    version: StateVersion
    nbytes: int = 0
    digest: bytes = bytes(16)

    def to_bytes(self) -> bytes:
        """The data of a result."""
        return _RESPONSE.pack(self.kind, *self.version, *self[2:])


def read_request(data: bytes) -> PullRequest:
    """The inverse of `PullRequest.to_bytes`. Raises ``MalformedError`` for other bytes."""
    try:
        numbers = _REQUEST.unpack(data)
    except struct.error as reason:
        raise MalformedError(f"a request for a state cannot be read: {reason}", reason="state") from None
    return PullRequest(StateVersion(*numbers[:3]), *numbers[3:])


def read_response(data: bytes) -> PullResponse:
    """The inverse of `PullResponse.to_bytes`. Raises ``MalformedError`` for other bytes."""
    try:
        kind, *version, nbytes, digest = _RESPONSE.unpack(data)
        return PullResponse(UpdateKind(kind), StateVersion(*version), nbytes, digest)
    except (struct.error, ValueError) as reason:
        raise MalformedError(f"the head of a state cannot be read: {reason}", reason="state") from None


class LeaderStreams:
    """Answers followers. ``replicas`` are the server's."""

    def __init__(self, replicas: Mapping[str, Replica], limits: Limits) -> None:
        self._replicas = replicas
        self._limits = limits
        self.open: set[_Stream] = set()

    async def serve(self, read: Read, send: Send, admit: Callable[[str], None]) -> None:
        """One follower's stream, until it ends (then ``read`` gives None) or requests nothing for `IDLE` seconds.

        ``admit`` raises for an expert whose state this follower may not have.
        """
        stream = _Stream(self._replicas, self._limits, send)
        self.open.add(stream)
        tasks = [asyncio.create_task(stream.read(read, admit)), asyncio.create_task(stream.answer())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.open.discard(stream)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def followers(self, uid: str) -> dict[str, StateVersion]:
        """The followers of this expert, with the version that each has."""
        waiting = [stream.waiting.get(uid) for stream in list(self.open)]
        return {each.follower: each.request.have for each in waiting if each is not None and not each.request.token}


@dataclass(eq=False)
class _Waiting:
    """One open request."""

    call_id: int
    follower: str
    request: PullRequest
    since: float
    reported_at: float = 0.0
    reported: StateVersion | None = None
    answered: bool = False

    def is_due(self, version: StateVersion, final: bool) -> bool:
        """Whether the follower is to get a state now. ``final``: there will be no later one."""
        request, have = self.request, self.request.have
        if version == have:
            return False
        if final or version.token != have.token or version.steps < have.steps:
            return True
        late = time.monotonic() >= self.since + request.milliseconds / 1000
        return late or version.steps - have.steps >= request.steps


class _Stream:
    """One follower's: its open requests, by expert."""

    def __init__(self, replicas: Mapping[str, Replica], limits: Limits, write: Send) -> None:
        self.waiting: dict[str, _Waiting] = {}
        self._sending = asyncio.Lock()  # nothing comes between the head of a state and its pieces
        self._replicas, self._limits, self._write = replicas, limits, write

    async def read(self, read: Read, admit: Callable[[str], None]) -> None:
        """Take requests, until there are no more."""
        while (message := await read()) is not None:
            try:
                calls = decode(message, self._limits)
            except WireError as error:
                return await self._fail(0, error)
            for call in calls:
                header = call.header
                try:
                    if header.kind is not Kind.STATE:
                        raise MalformedError(f"a call of kind {header.kind.name}, wanted STATE", reason="kind")
                    admit(header.uid)
                    request = read_request(header.data)
                    self.waiting[header.uid] = _Waiting(header.call_id, header.client, request, time.monotonic())
                except WeftError as error:
                    await self._fail(header.call_id, error)

    async def answer(self) -> None:
        """Answer requests, until there is none for a while."""
        last = time.monotonic()
        while time.monotonic() < last + IDLE:
            if self.waiting:
                last = time.monotonic()
            for uid, waiting in [(uid, each) for uid, each in self.waiting.items() if not each.answered]:
                try:
                    done = await self._attend(uid, waiting)
                except WeftError as error:
                    done = True
                    await self._fail(waiting.call_id, error)
                if done and self.waiting.get(uid) is waiting:
                    del self.waiting[uid]
            await asyncio.sleep(TICK)

    async def _attend(self, uid: str, waiting: _Waiting) -> bool:
        """Answer one request, if that is due; whether it is done with."""
        replica, request = self._replicas.get(uid), waiting.request
        if replica is None:
            raise UnknownExpertError(f"there is no replica of expert {uid!r} here")
        if not request.token:
            replica.leadership.check(steps=False)
        version = replica.version
        if request.token and not (newer(version, request.have, request.token) and replica.has_state):
            await self._respond(waiting, PullResponse(UpdateKind.NOTHING, version))
            return True
        if request.token or waiting.is_due(version, replica.final):
            await self._send_state(waiting, replica)
        elif version != waiting.reported and time.monotonic() >= waiting.reported_at + _PROGRESS:
            waiting.reported, waiting.reported_at = version, time.monotonic()
            await self._respond(waiting, PullResponse(UpdateKind.PROGRESS, version))
        return False

    async def _send_state(self, waiting: _Waiting, replica: Replica) -> None:
        encoded = await asyncio.get_running_loop().run_in_executor(None, replica.encode, _MAX_WAIT)
        if encoded is None:  # a batch is under way; look again
            return
        version, data = encoded
        digest = blake2b(data, digest_size=16).digest()
        size = min(PIECE, max(1, self._limits.frame_bytes // 2))
        async with self._sending:
            await self._respond(waiting, PullResponse(UpdateKind.STATE, version, len(data), digest))
            for start in range(0, len(data), size):
                piece = torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8)
                await self._send(Header(kind=Kind.RESULT, call_id=waiting.call_id), piece)
        waiting.answered = True  # it stays in the list until the next one: only that says what has arrived

    async def _respond(self, waiting: _Waiting, response: PullResponse) -> None:
        await self._send(Header(kind=Kind.RESULT, call_id=waiting.call_id, data=response.to_bytes()))

    async def _fail(self, call_id: int, error: BaseException) -> None:
        async with self._sending:
            await self._send(Header(kind=Kind.ERROR, call_id=call_id, data=write_fault(error)))

    async def _send(self, header: Header, *tensors: torch.Tensor) -> None:
        await self._write(encode([Call(header, tensors)], self._limits))


class FollowerStream:
    """A stream of states from the server at ``address``. ``here`` is the follower's own address.

    Raises ``UsageError`` for an address that is not one of ``tls.servers``, and where a token would go in plain text.
    """

    def __init__(self, address: str, here: str, options: ReplicaOptions, limits: Limits) -> None:
        check_address(address, options.tls, options.token)
        self.address = address
        self.ended = False
        self._closed = False
        self._here = here
        self._options = options
        self._limits = limits
        self._call_ids = count(1)
        self._requested: dict[int, Replica] = {}  # by call id; of two threads, which read and write it in one step each
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._channel = open_channel(address, options.tls, limits)
        self._grpc_threads = GrpcThreads()
        self._call = self._open(self._requests)
        self._thread = threading.Thread(target=self._run, name=f"weft-follow-{address}", daemon=True)
        self._thread.start()

    @property
    def followed(self) -> set[str]:
        """The experts that are followed here."""
        return {replica.uid for replica in list(self._requested.values())}

    def follow(self, replica: Replica) -> None:
        """Request all that is newer than what is here, until an error comes. Not for one that is `followed`."""
        options, call_id = self._options, next(self._call_ids)
        request = PullRequest(replica.version, int(options.follow_steps), int(1000 * options.follow_seconds))
        self._requested[call_id] = replica
        self._requests.put(self._encode(call_id, replica.uid, request))

    def newest(self, replica: Replica, token: int, timeout: float) -> bool:
        """Request once, having claimed it with this token; whether a newer state came and was loaded.

        Raises the other side's errors, and ``UnreachableError``.
        """
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        requests.put(self._encode(1, replica.uid, PullRequest(replica.version, token=token)))
        call = self._open(requests, timeout)
        answers = self._answers(call)
        try:
            for answer in answers:
                head = self._read_head(answer)
                if head.kind is UpdateKind.NOTHING:
                    return False
                if head.kind is UpdateKind.STATE:
                    return replica.load(head.version, self._read_state(head, answers), taking_over=True)
        except _grpc.RpcError as error:
            raise self._failure(error) from None
        finally:
            call.cancel()
            requests.put(None)
        raise UnreachableError(f"{self.address} ended the stream before the state was here")

    def close(self) -> None:
        """End it, and wait for its thread. What was followed here has not failed by that."""
        self._closed = True
        self._call.cancel()
        self._requests.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN)
        self._channel.close()
        self._grpc_threads.wait(_JOIN)

    def _open(self, requests: "SimpleQueue[bytes | None]", timeout: float | None = None) -> Any:
        """A stream that sends what is put into ``requests``, until None."""
        token = self._options.token
        metadata = () if token is None else ((AUTHORIZATION, f"{BEARER}{token}"),)
        method, sent = self._channel.stream_stream(STATE), iter(requests.get, None)
        return self._grpc_threads.stream(method, sent, metadata=metadata, timeout=timeout)

    def _encode(self, call_id: int, uid: str, request: PullRequest) -> bytes:
        header = Header(kind=Kind.STATE, call_id=call_id, uid=uid, client=self._here, data=request.to_bytes())
        return encode([Call(header)], self._limits)

    def _run(self) -> None:
        failure: Exception = UnreachableError(f"{self.address} ended the stream of its states")
        answers = self._answers(self._call)
        try:
            for answer in answers:
                replica = self._requested.get(answer.header.call_id)
                if replica is not None:
                    self._attend(replica, answer, answers)
                elif not answer.header.call_id and answer.header.kind is Kind.ERROR:
                    raise read_fault(answer.header.data)
        except _grpc.RpcError as error:
            failure = self._failure(error)
        except (WeftError, ValueError) as error:
            failure = error
        finally:
            self.ended = True
            left, self._requested = self._requested, {}
            self._call.cancel()
            self._requests.put(None)
            for replica in () if self._closed else left.values():
                replica.failed(failure)

    def _attend(self, replica: Replica, answer: Received, answers: Iterator[Received]) -> None:
        """Note the leader's progress; or load the state that follows and request the next one; or note what failed."""
        try:
            head = self._read_head(answer)
            replica.owner_version, replica.heard_at = head.version, time.monotonic()
            if head.kind is not UpdateKind.STATE:
                return
            if not replica.load(head.version, self._read_state(head, answers)):
                raise UnreachableError("it is not followed any more")
            replica.failure = None
            self.follow(replica)
        except _grpc.RpcError:
            raise
        except Exception as error:  # also what module and optimizer raise; the thread goes on for the other experts
            replica.failed(error)
        del self._requested[answer.header.call_id]

    def _answers(self, call: Any) -> Iterator[Received]:
        for message in call:
            yield from decode(message, self._limits)

    def _read_head(self, answer: Received) -> PullResponse:
        if answer.header.kind is Kind.ERROR:
            raise read_fault(answer.header.data)
        head, most = read_response(answer.header.data), self._options.state_bytes
        if head.kind is UpdateKind.STATE and not 0 < head.nbytes <= most:
            raise LimitError(
                f"{self.address} has a state of {head.nbytes} bytes, at most {most} are allowed; raise state_bytes",
                reason="state_bytes",
            )
        return head

    def _read_state(self, head: PullResponse, answers: Iterator[Received]) -> bytearray:
        """The state whose head has come: its pieces are the next answers. No more is held than the head said.

        Raises ``MalformedError``, ``DamagedError`` and ``UnreachableError``.
        """
        data = bytearray()
        while len(data) < head.nbytes:
            answer = next(answers, None)
            if answer is None:
                raise UnreachableError(f"{self.address} ended the stream before the state was here")
            if len(answer.descriptors) != 1:
                raise MalformedError("a piece of a state holds one tensor", reason="state")
            piece = answer.tensors()[0].numpy().tobytes()
            if len(data) + len(piece) > head.nbytes or not piece:
                raise MalformedError("the pieces of a state are not as long as its head said", reason="state")
            data += piece
        if blake2b(data, digest_size=16).digest() != head.digest:
            raise DamagedError(f"the {len(data)} bytes of a state are not those that were sent")
        return data

    def _failure(self, error: Any) -> WeftError:
        """The reason of an ``RpcError``: refused, or not reached, with the certificates in use."""
        text, tls = str(error.details()), self._options.tls
        if error.code() in _REFUSED:
            return ForbiddenError(f"{self.address} refuses this server: {text}")
        if error.code() is _grpc.StatusCode.UNIMPLEMENTED:
            return UnknownExpertError(f"{self.address} has no replicas (replicas=)")
        return unreachable(self.address, tls, "cannot be followed", text, "this server", "tls= of ReplicaOptions")
