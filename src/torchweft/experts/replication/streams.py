"""Streams of states from the leader of an expert to its followers: both ends, and their messages.

    follower A   PullRequest(have 7/100) ────> waiting ── 100 steps more, or 2 s and a step, or the last state ──> due
    follower B   PullRequest(have 7/180) ────> waiting                                                              |
                      ^                               PullResponse, then the bytes in pieces <──────────────────────┘
                      '── loaded: the next request names the version that arrived, so the leader knows when to stop

Followers pull, because a leader that pushes could not know which state a follower has loaded. A stream transfers one
state at a time, in pieces. A follower has one stream and one thread for every server that it follows. After an error
it stops following that expert, and the manager looks up its owner.
"""

import asyncio
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import grpc
import torch

from torchweft.core.errors import WeftError
from torchweft.experts import errors
from torchweft.experts.client.transport import open_channel
from torchweft.experts.fork_guard import GrpcThreads
from torchweft.experts.replication.replica import Replica, ReplicaOptions, StateVersion, newer
from torchweft.experts.tls import check_address, unreachable
from torchweft.experts.wire import Call, Header, Kind, Limits, Received, decode, encode, read_fault, write_fault
from torchweft.experts.wire.service import STATE, token_metadata

_grpc = cast("Any", grpc)
_REFUSED = (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED)
_JOIN = 5.0
TICK = 0.02  # seconds between two checks for due requests
PIECE = 1 << 20  # bytes of one message
_PROGRESS = 0.5  # seconds between two reports of progress
IDLE = 10.0  # seconds without an open request after which a stream ends; a live follower always has one
_MAX_WAIT = 0.2  # longest wait for a running batch, before other requests are attended to
_MOST = (1 << 64) - 1
_REQUEST = struct.Struct("<QQQQQQ")
_RESPONSE = struct.Struct("<BQQQQ16s")

Read = Callable[[], Awaitable[Any]]
Send = Callable[[bytes], Awaitable[Any]]


class PullRequest(NamedTuple):
    """``have``: the follower's version. The next is due after ``steps`` steps, or ``milliseconds`` and any step."""

    # ``token`` other than 0: the sender has claimed the expert with it, so that a newer state is due at once.
    have: StateVersion
    steps: int = 0
    milliseconds: int = 0
    token: int = 0

    def to_bytes(self) -> bytes:
        return _REQUEST.pack(*[min(_MOST, number) for number in (*self.have, *self[1:])])


class UpdateKind(IntEnum):
    """A response is a progress report, says that the follower's state is the newest, or announces a state."""

    PROGRESS = 0
    NOTHING = 1
    STATE = 2


class PullResponse(NamedTuple):
    """``version`` of the leader. With a state: its size in bytes, and their hash (blake2b, 16 bytes)."""

    kind: UpdateKind
    version: StateVersion
    nbytes: int = 0
    digest: bytes = bytes(16)

    def to_bytes(self) -> bytes:
        return _RESPONSE.pack(self.kind, *self.version, *self[2:])


def read_request(data: bytes) -> PullRequest:
    try:
        numbers = _REQUEST.unpack(data)
    except struct.error as reason:
        raise errors.MalformedError(f"a request for a state cannot be read: {reason}", reason="state") from None
    return PullRequest(StateVersion(*numbers[:3]), *numbers[3:])


def read_response(data: bytes) -> PullResponse:
    try:
        kind, *version, nbytes, digest = _RESPONSE.unpack(data)
        return PullResponse(UpdateKind(kind), StateVersion(*version), nbytes, digest)
    except (struct.error, ValueError) as reason:
        raise errors.MalformedError(f"the head of a state cannot be read: {reason}", reason="state") from None


class LeaderStreams:
    def __init__(self, replicas: Mapping[str, Replica], limits: Limits) -> None:
        self._replicas, self._limits = replicas, limits
        self.open: set[_LeaderStream] = set()

    async def serve(self, read: Read, send: Send, admit: Callable[[str], None]) -> None:
        """Serve one follower until its stream ends (``read`` returns None) or has no open request for a while."""
        # ``admit`` raises for an expert whose state this follower is not allowed to have.
        stream = _LeaderStream(self._replicas, self._limits, send)
        self.open.add(stream)
        tasks = [asyncio.create_task(stream.read_requests(read, admit)), asyncio.create_task(stream.answer_requests())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.open.discard(stream)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def followers(self, uid: str) -> dict[str, StateVersion]:
        # A copy of the set, because another thread calls this while the event loop adds and removes streams.
        requests = [stream.waiting.get(uid) for stream in list(self.open)]
        return {
            waiting.follower: waiting.request.have
            for waiting in requests
            if waiting is not None and not waiting.request.token
        }


@dataclass(eq=False)
class _OpenRequest:
    """A request that waits for its state. It stays after the answer, until the next request acknowledges the state."""

    call_id: int
    follower: str
    request: PullRequest
    since: float = field(default_factory=time.monotonic)
    is_answered: bool = False
    _reported_at: float = 0.0
    _reported: StateVersion | None = None

    def is_due(self, version: StateVersion, is_final: bool) -> bool:
        request, have = self.request, self.request.have
        if version == have:
            return False
        if is_final or version.token != have.token or version.steps < have.steps:
            return True
        is_overdue = time.monotonic() >= self.since + request.milliseconds / 1000
        return is_overdue or version.steps - have.steps >= request.steps

    def mark_answered(self) -> None:
        self.is_answered = True

    def begin_report(self, version: StateVersion) -> bool:
        now = time.monotonic()
        if version == self._reported or now < self._reported_at + _PROGRESS:
            return False
        self._reported, self._reported_at = version, now
        return True


class _LeaderStream:
    def __init__(self, replicas: Mapping[str, Replica], limits: Limits, write: Send) -> None:
        self.waiting: dict[str, _OpenRequest] = {}
        # Held from the announcement of a state to its last piece: a follower takes all messages in between as pieces.
        self._sending = asyncio.Lock()
        self._replicas, self._limits, self._write = replicas, limits, write

    async def read_requests(self, read: Read, admit: Callable[[str], None]) -> None:
        while (message := await read()) is not None:
            try:
                calls = decode(message, self._limits)
            except errors.WireError as error:
                return await self._send_error(0, error)
            for call in calls:
                header = call.header
                try:
                    if header.kind is not Kind.STATE:
                        raise errors.MalformedError(f"a call of kind {header.kind.name}, wanted STATE", reason="kind")
                    admit(header.uid)
                    # Replaces the previous request for this expert: that is the acknowledgement of its state.
                    request = read_request(header.data)
                    self.waiting[header.uid] = _OpenRequest(header.call_id, header.client, request)
                except WeftError as error:
                    await self._send_error(header.call_id, error)

    async def answer_requests(self) -> None:
        last = time.monotonic()
        while time.monotonic() < last + IDLE:
            if self.waiting:
                last = time.monotonic()
            for uid, waiting in list(self.waiting.items()):
                if waiting.is_answered:
                    continue
                try:
                    is_closed = await self._attend_request(uid, waiting)
                except WeftError as error:
                    is_closed = True
                    await self._send_error(waiting.call_id, error)
                # A newer request can have replaced this one during the awaits.
                if is_closed and self.waiting.get(uid) is waiting:
                    del self.waiting[uid]
            await asyncio.sleep(TICK)

    async def _attend_request(self, uid: str, waiting: _OpenRequest) -> bool:
        """Answer a request if it is due. Returns whether it is closed, so that it needs no acknowledgement."""
        replica, request = self._replicas.get(uid), waiting.request
        if replica is None:
            raise errors.UnknownExpertError(f"there is no replica of expert {uid!r} at this server")
        if not request.token:
            replica.leadership.check(steps=False)
        version = replica.version
        if request.token and not (newer(version, request.have, request.token) and replica.state.is_loaded):
            await self._send_response(waiting, PullResponse(UpdateKind.NOTHING, version))
            return True
        if request.token or waiting.is_due(version, replica.is_final):
            await self._send_state(waiting, replica)
        elif waiting.begin_report(version):
            await self._send_response(waiting, PullResponse(UpdateKind.PROGRESS, version))
        return False

    async def _send_state(self, waiting: _OpenRequest, replica: Replica) -> None:
        # In a thread, because it waits for the lock of the expert, and the event loop serves all other clients.
        encoded = await asyncio.get_running_loop().run_in_executor(None, replica.state.encode, _MAX_WAIT)
        if encoded is None:  # a batch is running; the next round tries again
            return
        version, data = encoded
        digest = blake2b(data, digest_size=16).digest()
        size = min(PIECE, max(1, self._limits.frame_bytes // 2))
        async with self._sending:
            await self._send_response(waiting, PullResponse(UpdateKind.STATE, version, len(data), digest))
            for start in range(0, len(data), size):
                piece = torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8)
                await self._send_call(Header(kind=Kind.RESULT, call_id=waiting.call_id), piece)
        # Kept in `waiting`: sent is not loaded. Only the next request acknowledges the state.
        waiting.mark_answered()

    async def _send_response(self, waiting: _OpenRequest, response: PullResponse) -> None:
        await self._send_call(Header(kind=Kind.RESULT, call_id=waiting.call_id, data=response.to_bytes()))

    async def _send_error(self, call_id: int, error: BaseException) -> None:
        async with self._sending:
            await self._send_call(Header(kind=Kind.ERROR, call_id=call_id, data=write_fault(error)))

    async def _send_call(self, header: Header, *tensors: torch.Tensor) -> None:
        await self._write(encode([Call(header, tensors)], self._limits))


class FollowerStream:
    """A stream of states from the server at ``address``. ``here`` is the address of the follower."""

    def __init__(self, address: str, here: str, options: ReplicaOptions, limits: Limits) -> None:
        # The address comes from the directory, where others can write.
        check_address(address, options.tls, options.token)
        self.address = address
        self.ended = False
        self._closed = False
        self._follower_address, self._options, self._limits = here, options, limits
        self._call_ids = count(1)
        # By call id. Two threads use it without a lock: each access is one atomic operation of the dictionary.
        self._requested: dict[int, Replica] = {}
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._channel = open_channel(address, options.tls, limits)
        self._grpc_threads = GrpcThreads()
        self._call = self._open_call(self._requests)
        self._thread = threading.Thread(target=self._read_states, name=f"torchweft-follow-{address}", daemon=True)
        self._thread.start()

    @property
    def followed(self) -> set[str]:
        return {replica.uid for replica in list(self._requested.values())}

    def follow(self, replica: Replica) -> None:
        """Request newer states of a replica until an error occurs. It must not be `followed` already."""
        options, call_id = self._options, next(self._call_ids)
        request = PullRequest(replica.version, int(options.follow_steps), int(1000 * options.follow_seconds))
        self._requested[call_id] = replica  # before the request is sent, so that its answer finds the replica
        self._requests.put(self._encode_request(call_id, replica.uid, request))

    def fetch_newest(self, replica: Replica, token: int, timeout: float) -> bool:
        """Load a newer state, if the other server has one, into a claimed replica. Returns whether one was loaded."""
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        requests.put(self._encode_request(1, replica.uid, PullRequest(replica.version, token=token)))
        call = self._open_call(requests, timeout)
        answers = self._decode_answers(call)
        try:
            for answer in answers:
                head = self._read_head(answer)
                if head.kind is UpdateKind.NOTHING:
                    return False
                if head.kind is UpdateKind.STATE:
                    return replica.load(head.version, self._read_state(head, answers), taking_over=True)
        except _grpc.RpcError as error:
            raise self._explain_error(error) from None
        finally:
            call.cancel()
            requests.put(None)
        raise errors.UnreachableError(f"{self.address} ended the stream before its state was complete")

    def close(self) -> None:
        self._closed = True
        self._call.cancel()
        self._requests.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN)
        self._channel.close()
        self._grpc_threads.wait(_JOIN)

    def _open_call(self, requests: "SimpleQueue[bytes | None]", timeout: float | None = None) -> Any:
        method, metadata = self._channel.stream_stream(STATE), token_metadata(self._options.token)
        return self._grpc_threads.stream(method, iter(requests.get, None), metadata=metadata, timeout=timeout)

    def _encode_request(self, call_id: int, uid: str, request: PullRequest) -> bytes:
        data = request.to_bytes()
        header = Header(Kind.STATE, call_id=call_id, uid=uid, client=self._follower_address, data=data)
        return encode([Call(header)], self._limits)

    def _read_states(self) -> None:
        failure: Exception = errors.UnreachableError(f"{self.address} ended the stream of its states")
        answers = self._decode_answers(self._call)
        try:
            for answer in answers:
                replica = self._requested.get(answer.header.call_id)
                if replica is not None:
                    self._handle_answer(replica, answer, answers)
                elif not answer.header.call_id and answer.header.kind is Kind.ERROR:
                    raise read_fault(answer.header.data)
        except _grpc.RpcError as error:
            failure = self._explain_error(error)
        except (WeftError, ValueError) as error:
            failure = error
        finally:
            self.ended = True
            abandoned, self._requested = self._requested, {}
            self._call.cancel()
            self._requests.put(None)
            for replica in () if self._closed else abandoned.values():
                replica.failed(failure)

    def _handle_answer(self, replica: Replica, answer: Received, answers: Iterator[Received]) -> None:
        try:
            head = self._read_head(answer)
            replica.record_report(head.version)
            if head.kind is not UpdateKind.STATE:
                return
            if not replica.load(head.version, self._read_state(head, answers)):
                raise errors.UnreachableError("this server does not follow the expert any more")
            # Only now, after the load: this request acknowledges the state, and the leader may then shut down.
            self.follow(replica)
        except _grpc.RpcError:
            raise
        # Errors of module and optimizer included, because the thread must continue for the other experts.
        except Exception as error:
            replica.failed(error)
        del self._requested[answer.header.call_id]

    def _decode_answers(self, call: Any) -> Iterator[Received]:
        for message in call:
            yield from decode(message, self._limits)

    def _read_head(self, answer: Received) -> PullResponse:
        if answer.header.kind is Kind.ERROR:
            raise read_fault(answer.header.data)
        head, most = read_response(answer.header.data), self._options.state_bytes
        if head.kind is UpdateKind.STATE and not 0 < head.nbytes <= most:
            text = f"{self.address} has a state of {head.nbytes} bytes, at most {most} are allowed; raise state_bytes"
            raise errors.LimitError(text, reason="state_bytes")
        return head

    def _read_state(self, head: PullResponse, answers: Iterator[Received]) -> bytearray:
        """Join the pieces of an announced state, which are the next answers. Never holds more than announced."""
        data = bytearray()
        while len(data) < head.nbytes:
            answer = next(answers, None)
            if answer is None:
                raise errors.UnreachableError(f"{self.address} ended the stream before its state was complete")
            if len(answer.descriptors) != 1:
                text = f"a piece of a state holds {len(answer.descriptors)} tensors, wanted 1"
                raise errors.MalformedError(text, reason="state")
            piece = answer.tensors()[0].numpy().tobytes()
            if len(data) + len(piece) > head.nbytes or not piece:
                text = f"a piece of {len(piece)} bytes after {len(data)} of the {head.nbytes} bytes of a state"
                raise errors.MalformedError(text, reason="state")
            data += piece
        if blake2b(data, digest_size=16).digest() != head.digest:
            raise errors.DamagedError(f"the {len(data)} bytes of a state differ from those that were sent")
        return data

    def _explain_error(self, error: Any) -> WeftError:
        text, tls = str(error.details()), self._options.tls
        if error.code() in _REFUSED:
            return errors.ForbiddenError(f"{self.address} rejects this server: {text}")
        if error.code() is _grpc.StatusCode.UNIMPLEMENTED:
            return errors.UnknownExpertError(f"{self.address} has no replicas (replicas=)")
        return unreachable(self.address, tls, "cannot be followed", text, "this server", "tls= of ReplicaOptions")
