"""The owner's side of the stream of states: who has what, and who is due for more.

    follower A   Ask(have 7/100) ────> waiting ── 100 steps more, or 2 s and a step, or the last state ──> due
    follower B   Ask(have 7/180) ────> waiting                                                              |
                      ^                                            head, then the bytes in pieces <────────┘
                      '── the next question says what arrived: so the owner knows when it may let go

A question stays open until there is an answer, so nobody asks in vain; between, the owner tells how far it is. One
state at a time leaves on one stream, in pieces, as fast as gRPC takes them; taking it holds the expert up for the
time of a copy, as a checkpoint does.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from weft.core.errors import WeftError
from weft.experts.replica.mark import Ask, Mark, News, Told, newer, read_ask
from weft.experts.replica.replica import Replica
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

TICK = 0.02  # seconds between two looks at who is due
PIECE = 1 << 20  # bytes of one message
_TELL = 0.5  # seconds between two words on how far the owner is
IDLE = 10.0  # seconds without a question after which a stream ends; a follower always has one open
_PATIENCE = 0.2  # seconds that a batch under way may hold a state up before others go first

Read = Callable[[], Awaitable[Any]]
Send = Callable[[bytes], Awaitable[Any]]


@dataclass(eq=False)
class _Waiting:
    """One open question."""

    number: int
    follower: str
    ask: Ask
    since: float
    told_at: float = 0.0
    told: Mark | None = None
    answered: bool = False


class Feed:
    """Answers followers. ``replicas`` are the server's."""

    def __init__(self, replicas: Callable[[], Mapping[str, Replica]], limits: Limits) -> None:
        self._replicas = replicas
        self._limits = limits
        self._streams: set[_Stream] = set()

    async def serve(self, read: Read, send: Send, admit: Callable[[str], None]) -> None:
        """One follower's stream, until it ends (then ``read`` gives None) or asks nothing for `IDLE` seconds.

        ``admit`` raises for an expert whose state this follower may not have.
        """
        stream = _Stream(send, self._limits)
        self._streams.add(stream)
        tasks = [asyncio.create_task(self._read(stream, read, admit)), asyncio.create_task(self._tell(stream))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(stream)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def streams(self) -> int:
        """How many servers ask here now."""
        return len(self._streams)

    def followers(self, uid: str) -> dict[str, Mark]:
        """Who follows this expert now, and what each has."""
        waiting = [stream.waiting.get(uid) for stream in list(self._streams)]
        return {each.follower: each.ask.have for each in waiting if each is not None and not each.ask.token}

    async def _read(self, stream: "_Stream", read: Read, admit: Callable[[str], None]) -> None:
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
                    waiting = _Waiting(header.call_id, header.client, read_ask(header.data), time.monotonic())
                    stream.waiting[header.uid] = waiting
                except WeftError as error:
                    await stream.fail(header.call_id, error)

    async def _tell(self, stream: "_Stream") -> None:
        """Answer questions, until there is none for a while."""
        asked = time.monotonic()
        while time.monotonic() < asked + IDLE:
            if stream.waiting:
                asked = time.monotonic()
            for uid, waiting in list(stream.waiting.items()):
                try:
                    await self._attend(stream, uid, waiting)
                except WeftError as error:
                    stream.done(uid, waiting)
                    await stream.fail(waiting.number, error)
            await asyncio.sleep(TICK)

    async def _attend(self, stream: "_Stream", uid: str, waiting: _Waiting) -> None:
        if waiting.answered:
            return
        replica, ask = self._replicas().get(uid), waiting.ask
        if replica is None:
            raise UnknownExpertError(f"there is no replica of expert {uid!r} here")
        if not ask.token:
            replica.standing.check(steps=False)
        mark = replica.mark
        if ask.token and not (newer(mark, ask.have, ask.token) and replica.has_state):
            stream.done(uid, waiting)
            await stream.say(waiting.number, Told(News.NOTHING, mark))
        elif ask.token or _due(waiting, mark, replica.final):
            await self._send(stream, uid, waiting, replica)
        elif mark != waiting.told and time.monotonic() >= waiting.told_at + _TELL:
            waiting.told, waiting.told_at = mark, time.monotonic()
            await stream.say(waiting.number, Told(News.PROGRESS, mark))

    async def _send(self, stream: "_Stream", uid: str, waiting: _Waiting, replica: Replica) -> None:
        taken = await asyncio.get_running_loop().run_in_executor(None, replica.take, _PATIENCE)
        if taken is None:  # a batch is under way; look again
            return
        mark, data = taken
        digest = blake2b(data, digest_size=16).digest()
        await stream.say(waiting.number, Told(News.STATE, mark, len(data), digest))
        size = min(PIECE, max(1, self._limits.frame_bytes // 2))
        for start in range(0, len(data), size):
            piece = torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8)
            await stream.send(Call(Header(kind=Kind.RESULT, call_id=waiting.number), [piece]))
        waiting.answered = True  # it stays in the list until the next one: only that says what has arrived


class _Stream:
    """One follower's: what it waits for, by expert."""

    def __init__(self, send: Send, limits: Limits) -> None:
        self.waiting: dict[str, _Waiting] = {}
        self._send = send
        self._limits = limits

    def done(self, uid: str, waiting: _Waiting) -> None:
        if self.waiting.get(uid) is waiting:
            del self.waiting[uid]

    async def say(self, number: int, told: Told) -> None:
        await self.send(Call(Header(kind=Kind.RESULT, call_id=number, data=told.to_bytes())))

    async def fail(self, number: int, error: BaseException) -> None:
        await self.send(Call(Header(kind=Kind.ERROR, call_id=number, data=write_fault(error))))

    async def send(self, call: Call) -> None:
        await self._send(b"".join(encode([call], self._limits)))


def _due(waiting: _Waiting, mark: Mark, final: bool) -> bool:
    """Whether a follower is to get a state now. ``final``: there will be no later one."""
    ask, have = waiting.ask, waiting.ask.have
    if mark == have:
        return False
    if final or mark.token != have.token or mark.steps < have.steps:
        return True
    late = time.monotonic() >= waiting.since + ask.milliseconds / 1000
    return late or mark.steps - have.steps >= ask.steps
