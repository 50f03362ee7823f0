"""The follower's side of the stream of states: one stream and one thread for every server that is followed.

    follow(replica) ── Ask ──> stream ──> owner
                                 |
    reader thread   <── head, pieces ── checked, loaded ── Ask again: this is what arrived ──> owner
                    <── an error: that expert is followed no more; the keeper looks who owns it now

`newest` asks once and waits: for who has just claimed an expert, and looks whether another replica is further.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from queue import SimpleQueue
from typing import Any, cast

import grpc

from weft.core.errors import WeftError
from weft.experts.client.transport import open_channel
from weft.experts.errors import DamagedError
from weft.experts.fork_guard import GrpcThreads
from weft.experts.replica.mark import Ask, News, Told, read_told
from weft.experts.replica.options import ReplicaOptions
from weft.experts.replica.refusal import refusal
from weft.experts.replica.replica import Replica
from weft.experts.tls import check_address
from weft.experts.wire import (
    Call,
    Header,
    Kind,
    LimitError,
    Limits,
    MalformedError,
    Received,
    UnreachableError,
    decode,
    encode,
    read_fault,
)
from weft.experts.wire.service import AUTHORIZATION, BEARER, STATE

_grpc = cast("Any", grpc)
_JOIN = 5.0


@dataclass
class _Arriving:
    """A state of which a part is here. No more is held than its head said, and than is allowed."""

    told: Told
    data: bytearray = field(default_factory=bytearray)

    def add(self, answer: Received) -> bool:
        """One more piece; whether that was the last. Raises ``MalformedError`` and ``DamagedError``."""
        if len(answer.descriptors) != 1:
            raise MalformedError("a piece of a state holds one tensor", reason="state")
        piece = answer.tensors()[0].numpy().tobytes()
        if len(self.data) + len(piece) > self.told.nbytes or not piece:
            raise MalformedError("the pieces of a state are not as long as its head said", reason="state")
        self.data += piece
        if len(self.data) < self.told.nbytes:
            return False
        if blake2b(self.data, digest_size=16).digest() != self.told.digest:
            raise DamagedError(f"the {len(self.data)} bytes of a state are not those that were sent")
        return True


class Link:
    """To the server at ``address``. ``me`` is the follower's own address.

    Raises ``UsageError`` for an address that is not one of ``servers`` of the options' ``tls``, and where a token would
    go in plain text.
    """

    def __init__(self, address: str, me: str, options: ReplicaOptions, limits: Limits) -> None:
        self.address = address
        self.gone = False
        self._closed = False
        self._me = me
        self._options = options
        self._limits = limits
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._asked: dict[int, Replica] = {}
        self._arriving: dict[int, _Arriving] = {}
        self._questions: SimpleQueue[bytes | None] = SimpleQueue()
        check_address(address, options.tls, options.token)
        self._channel = open_channel(address, options.tls, limits)
        self._grpc_threads = GrpcThreads()
        method = self._channel.stream_stream(STATE)
        self._call = self._grpc_threads.stream(method, self._sent(), metadata=_metadata(options))
        self._thread = threading.Thread(target=self._run, name=f"weft-follow-{address}", daemon=True)
        self._thread.start()

    @property
    def followed(self) -> set[str]:
        """The experts that are followed here."""
        with self._lock:
            return {replica.uid for replica in self._asked.values()}

    def follow(self, replica: Replica) -> None:
        """Ask for all that is newer than what is here, until an error comes. It is followed already: no matter."""
        if not self.gone and replica.uid not in self.followed:
            self._ask(replica)

    def close(self) -> None:
        """End it, and wait for its thread. What was followed here has not failed by that."""
        self._closed = True
        self._call.cancel()
        self._questions.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN)
        self._channel.close()
        self._grpc_threads.wait(_JOIN)

    def newest(self, replica: Replica, token: int, timeout: float) -> bool:
        """Ask once, as who has claimed it with this token; whether a newer state came and was loaded.

        Raises what the other side answers, and ``UnreachableError``.
        """
        data = Ask(replica.mark, token=token).to_bytes()
        questions: SimpleQueue[bytes | None] = SimpleQueue()
        questions.put(self._question(1, replica.uid, data))
        method = self._channel.stream_stream(STATE)
        questioned = iter(questions.get, None)
        call = self._grpc_threads.stream(method, questioned, metadata=_metadata(self._options), timeout=timeout)
        arriving: _Arriving | None = None
        try:
            for message in call:
                for answer in decode(message, self._limits):
                    if arriving is None:
                        told = self._head(answer)
                        if told.news is News.NOTHING:
                            return False
                        arriving = _Arriving(told) if told.news is News.STATE else None
                    elif arriving.add(answer):
                        return replica.receive(arriving.told.mark, bytes(arriving.data), taking_over=True)
        except _grpc.RpcError as error:
            raise refusal(error, self.address, self._options.tls) from None
        finally:
            call.cancel()
            questions.put(None)
        raise UnreachableError(f"{self.address} ended the stream before the state was here")

    # The sender, in a thread of gRPC's.

    def _sent(self) -> Iterator[bytes]:
        while (question := self._questions.get()) is not None:
            yield question

    def _ask(self, replica: Replica) -> None:
        options, number = self._options, next(self._numbers)
        ask = Ask(replica.mark, int(options.follow_steps), int(1000 * options.follow_seconds))
        with self._lock:
            self._asked[number] = replica
        self._questions.put(self._question(number, replica.uid, ask.to_bytes()))

    def _question(self, number: int, uid: str, data: bytes) -> bytes:
        header = Header(kind=Kind.STATE, call_id=number, uid=uid, client=self._me, data=data)
        return b"".join(encode([Call(header)], self._limits))

    # The reader, in its own thread.

    def _run(self) -> None:
        failure: Exception = UnreachableError(f"{self.address} ended the stream of its states")
        try:
            for message in self._call:
                for answer in decode(message, self._limits):
                    self._received(answer)
        except _grpc.RpcError as error:
            failure = refusal(error, self.address, self._options.tls)
        except (WeftError, ValueError) as error:
            failure = error
        finally:
            with self._lock:
                self.gone = True
                left, self._asked = list(self._asked.values()), {}
            self._call.cancel()
            self._questions.put(None)
            for replica in [] if self._closed else left:
                replica.failed(failure)

    def _received(self, answer: Received) -> None:
        number = answer.header.call_id
        with self._lock:
            replica = self._asked.get(number)
        if replica is None:
            if not number and answer.header.kind is Kind.ERROR:
                raise read_fault(answer.header.data)
            return
        try:
            if not self._taken_in(number, replica, answer):
                return
            again = True
            replica.failure = None
        except Exception as error:  # also what module and optimizer raise; the thread goes on for the other experts
            replica.failed(error)
            again = False
        with self._lock:
            self._asked.pop(number, None)
            self._arriving.pop(number, None)
        if again:
            self._ask(replica)

    def _taken_in(self, number: int, replica: Replica, answer: Received) -> bool:
        """Whether the state is here, and loaded."""
        arriving = self._arriving.get(number)
        if arriving is None:
            told = self._head(answer)
            replica.told(told.mark)
            if told.news is News.STATE:
                self._arriving[number] = _Arriving(told)
            return False
        if not arriving.add(answer):
            return False
        if not replica.receive(arriving.told.mark, bytes(arriving.data)):
            raise UnreachableError("it is not followed any more")
        return True

    def _head(self, answer: Received) -> Told:
        if answer.header.kind is Kind.ERROR:
            raise read_fault(answer.header.data)
        told = read_told(answer.header.data)
        most = self._options.state_bytes
        if told.news is News.STATE and not 0 < told.nbytes <= most:
            raise LimitError(
                f"{self.address} has a state of {told.nbytes} bytes, at most {most} are allowed; raise state_bytes",
                reason="state_bytes",
            )
        return told


def _metadata(options: ReplicaOptions) -> tuple[tuple[str, str], ...]:
    return () if options.token is None else ((AUTHORIZATION, f"{BEARER}{options.token}"),)
