"""The leader's side of replication, and what leader and follower tell each other, as bytes.

    follower A   PullRequest(have 7/100) ────> waiting ── 100 steps more, or 2 s and a step, or the last state ──> due
    follower B   PullRequest(have 7/180) ────> waiting                                                              |
                      ^                               PullResponse, then the bytes in pieces <──────────────────────┘
                      '── the next request says what arrived: so the leader knows when it may stop

A request stays open until there is an answer; in between, the leader sends its progress. One state at a time leaves on
one stream, in pieces, as fast as gRPC takes them; copying it holds the expert up as a checkpoint does.
"""

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from weft.core.errors import WeftError
from weft.experts.errors import MalformedError, UnknownExpertError, WireError
from weft.experts.replication.replica import Replica, StateVersion, newer
from weft.experts.wire import Call, Header, Kind, Limits, decode, encode, write_fault

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
        self._streams: set[_Stream] = set()

    async def serve(self, read: Read, send: Send, admit: Callable[[str], None]) -> None:
        """One follower's stream, until it ends (then ``read`` gives None) or requests nothing for `IDLE` seconds.

        ``admit`` raises for an expert whose state this follower may not have.
        """
        stream = _Stream(self._replicas, self._limits, send)
        self._streams.add(stream)
        tasks = [asyncio.create_task(stream.read(read, admit)), asyncio.create_task(stream.answer())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(stream)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def streams(self) -> int:
        """The number of open streams."""
        return len(self._streams)

    def followers(self, uid: str) -> dict[str, StateVersion]:
        """The followers of this expert, with the version that each has."""
        waiting = [stream.waiting.get(uid) for stream in list(self._streams)]
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
            for uid, waiting in list(self.waiting.items()):
                if waiting.answered:
                    continue
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
