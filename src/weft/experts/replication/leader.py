"""The leader's side of replication: which follower has which version, and when it gets a newer one.

    follower A   PullRequest(have 7/100) ────> waiting ── 100 steps more, or 2 s and a step, or the last state ──> due
    follower B   PullRequest(have 7/180) ────> waiting                                                              |
                      ^                                            head, then the bytes in pieces <────────────────┘
                      '── the next request says what arrived: so the leader knows when it may stop

A request stays open until there is an answer; in between, the leader sends its progress. One state at a time leaves on
one stream, in pieces, as fast as gRPC takes them; copying it holds the expert up as a checkpoint does.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from weft.core.errors import WeftError
from weft.experts.replication.messages import PullRequest, PullResponse, StateVersion, UpdateKind, newer, read_request
from weft.experts.replication.replica import Replica
from weft.experts.wire import (
    Call,
    Header,
    Kind,
    Limits,
    MalformedError,
    UnknownExpertError,
    WireError,
    decode,
    encode,
    write_fault,
)

TICK = 0.02  # seconds between two looks at which requests are due
PIECE = 1 << 20  # bytes of one message
_PROGRESS = 0.5  # seconds between two reports of progress
IDLE = 10.0  # seconds without a request after which a stream ends; a follower always has one open
_MAX_WAIT = 0.2  # seconds that a batch under way may hold a state up before others go first

Read = Callable[[], Awaitable[Any]]
Send = Callable[[bytes], Awaitable[Any]]


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


@dataclass(eq=False)
class _Stream:
    """One follower's: its open requests, by expert."""

    write: Send
    limits: Limits
    waiting: dict[str, _Waiting] = field(default_factory=dict[str, _Waiting])

    async def respond(self, call_id: int, response: PullResponse) -> None:
        await self.send(Header(kind=Kind.RESULT, call_id=call_id, data=response.to_bytes()))

    async def fail(self, call_id: int, error: BaseException) -> None:
        await self.send(Header(kind=Kind.ERROR, call_id=call_id, data=write_fault(error)))

    async def send(self, header: Header, *tensors: torch.Tensor) -> None:
        await self.write(encode([Call(header, tensors)], self.limits))


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
        stream = _Stream(send, self._limits)
        self._streams.add(stream)
        tasks = [asyncio.create_task(self._read(stream, read, admit)), asyncio.create_task(self._answer(stream))]
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

    async def _read(self, stream: _Stream, read: Read, admit: Callable[[str], None]) -> None:
        while (message := await read()) is not None:
            try:
                calls = decode(message, self._limits)
            except WireError as error:
                await stream.fail(0, error)
                return
            for call in calls:
                header = call.header
                try:
                    if header.kind is not Kind.STATE:
                        raise MalformedError(f"a call of kind {header.kind.name}, wanted STATE", reason="kind")
                    admit(header.uid)
                    request = read_request(header.data)
                    stream.waiting[header.uid] = _Waiting(header.call_id, header.client, request, time.monotonic())
                except WeftError as error:
                    await stream.fail(header.call_id, error)

    async def _answer(self, stream: _Stream) -> None:
        """Answer requests, until there is none for a while."""
        last = time.monotonic()
        while time.monotonic() < last + IDLE:
            if stream.waiting:
                last = time.monotonic()
            for uid, waiting in list(stream.waiting.items()):
                if waiting.answered:
                    continue
                try:
                    done = await self._attend(stream, uid, waiting)
                except WeftError as error:
                    done = True
                    await stream.fail(waiting.call_id, error)
                if done and stream.waiting.get(uid) is waiting:
                    del stream.waiting[uid]
            await asyncio.sleep(TICK)

    async def _attend(self, stream: _Stream, uid: str, waiting: _Waiting) -> bool:
        """Answer one request, if that is due; whether it is done with."""
        replica, request = self._replicas.get(uid), waiting.request
        if replica is None:
            raise UnknownExpertError(f"there is no replica of expert {uid!r} here")
        if not request.token:
            replica.leadership.check(steps=False)
        version = replica.version
        if request.token and not (newer(version, request.have, request.token) and replica.has_state):
            await stream.respond(waiting.call_id, PullResponse(UpdateKind.NOTHING, version))
            return True
        if request.token or _due(waiting, version, replica.final):
            await self._send_state(stream, waiting, replica)
        elif version != waiting.reported and time.monotonic() >= waiting.reported_at + _PROGRESS:
            waiting.reported, waiting.reported_at = version, time.monotonic()
            await stream.respond(waiting.call_id, PullResponse(UpdateKind.PROGRESS, version))
        return False

    async def _send_state(self, stream: _Stream, waiting: _Waiting, replica: Replica) -> None:
        encoded = await asyncio.get_running_loop().run_in_executor(None, replica.encode, _MAX_WAIT)
        if encoded is None:  # a batch is under way; look again
            return
        version, data = encoded
        digest = blake2b(data, digest_size=16).digest()
        await stream.respond(waiting.call_id, PullResponse(UpdateKind.STATE, version, len(data), digest))
        size = min(PIECE, max(1, self._limits.frame_bytes // 2))
        for start in range(0, len(data), size):
            piece = torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8)
            await stream.send(Header(kind=Kind.RESULT, call_id=waiting.call_id), piece)
        waiting.answered = True  # it stays in the list until the next one: only that says what has arrived


def _due(waiting: _Waiting, version: StateVersion, final: bool) -> bool:
    """Whether a follower is to get a state now. ``final``: there will be no later one."""
    request, have = waiting.request, waiting.request.have
    if version == have:
        return False
    if final or version.token != have.token or version.steps < have.steps:
        return True
    late = time.monotonic() >= waiting.since + request.milliseconds / 1000
    return late or version.steps - have.steps >= request.steps
