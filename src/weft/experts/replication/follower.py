"""The follower's side of replication: one stream and one thread for every server that is followed.

    follow(replica) ── PullRequest ──> stream ──> leader
                                         |
    reader thread   <── head, pieces ── checked, loaded ── PullRequest again: this is what arrived ──> leader
                    <── an error: that expert is followed no more; the manager looks up its owner

`newest` requests once and waits: for a server that has just claimed an expert, and looks for a newer state elsewhere.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import count
from queue import SimpleQueue
from typing import Any, cast

import grpc

from weft.core.errors import WeftError
from weft.core.validation import Validator, token_fault
from weft.experts.client.transport import open_channel, unreachable
from weft.experts.errors import DamagedError, ForbiddenError, LimitError, MalformedError, UnreachableError
from weft.experts.fork_guard import GrpcThreads
from weft.experts.replication.leader import PullRequest, PullResponse, UpdateKind, read_response
from weft.experts.replication.replica import Replica
from weft.experts.tls import ClientTls, check_address
from weft.experts.wire import Call, Header, Kind, Limits, Received, UnknownExpertError, decode, encode, read_fault
from weft.experts.wire.service import AUTHORIZATION, BEARER, STATE

_grpc = cast("Any", grpc)
_JOIN = 5.0
_REFUSED = (_grpc.StatusCode.UNAUTHENTICATED, _grpc.StatusCode.PERMISSION_DENIED)


@dataclass(frozen=True)
class ReplicaOptions:
    """Which experts of a server are replicas, and how closely a follower keeps to the owner.

    A follower is behind by at most ``follow_steps`` steps or ``follow_seconds``, whichever comes first, and what one
    transfer takes: so much may be lost when an owner dies. An owner that shuts down loses nothing.

    Args:
    experts: patterns (``*``, ``?``, ``[ab]``) of the names of experts that other servers have too.
    follow_seconds: after so long a follower fetches the state of an owner that has stepped.
    follow_steps: after so many steps it fetches at once.
    first_seconds: how long a server waits, when it starts, for the owners' states; then it starts without.
    state_bytes: of one expert's state at most; more is refused before it is held.
    tls, token: how this server proves itself to the others, where it needs `Role.ADMIN`; see `GrpcTransport`.

    Raises ``UsageError`` that lists all invalid values.

    Example:
        >>> from weft.experts.replication import ReplicaOptions
        >>> closely = ReplicaOptions(["ffn.*"], follow_seconds=1.0)  # weft.Server(..., replicas=closely)
    """

    experts: Sequence[str] = ("*",)
    follow_seconds: float = 2.0
    follow_steps: int = 100
    first_seconds: float = 10.0
    state_bytes: int = 16 << 30
    tls: ClientTls | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        with Validator("invalid replica options") as check:
            for name in ("follow_seconds", "first_seconds"):
                check.seconds(name, getattr(self, name))
            for name in ("follow_steps", "state_bytes"):
                check.count(name, getattr(self, name))
            check.add(*token_fault(self.token))
            some: Any = self.experts
            valid = not isinstance(some, str) and bool(some) and all(isinstance(each, str) and each for each in some)
            check.that(valid, f"experts is {some!r}, wanted a list of patterns such as ['ffn.*']")

    def covers(self, uid: str) -> bool:
        """Whether this expert is a replica."""
        return any(fnmatchcase(uid, pattern) for pattern in self.experts)


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
