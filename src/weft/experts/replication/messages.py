"""Messages of replication: what leader and follower tell each other about the version of a state, as bytes.

    StateVersion(token 7, steps 20)  <  StateVersion(token 7, steps 21)  <  StateVersion(token 12, steps 15)

A later owner has a larger token, so its state is the newer one even if it has fewer steps: what the earlier owner
stepped beyond it never reached any later owner. Tokens of different epochs of the directory have no order; see `newer`.

    follower   PullRequest: the version that it has, and when it wants more
    leader     PullResponse: its version, and how many bytes follow
"""

from dataclasses import astuple, dataclass
from enum import IntEnum
from struct import Struct, error

from weft.experts.discovery.fencing import epoch_of
from weft.experts.wire import MalformedError

_REQUEST = Struct("<QQQQQQ")
_RESPONSE = Struct("<BQQQQ16s")
_MOST = (1 << 64) - 1


@dataclass(frozen=True, order=True, slots=True)
class StateVersion:
    """``token`` of the owner under whom the state was made, its optimizer ``steps`` and backward ``batches``."""

    token: int = 0
    steps: int = 0
    batches: int = 0


def newer(one: StateVersion, other: StateVersion, token: int) -> bool:
    """Whether state ``one`` is newer than ``other``, for a server that claimed the expert with ``token``.

    States of the epoch in which ``token`` was granted go before all others: their owners had what there was of these.
    Of two other epochs it is not known which was later; then the steps decide.
    """
    epochs = epoch_of(one.token), epoch_of(other.token)
    if epochs[0] == epochs[1]:
        return one > other
    if epoch_of(token) in epochs:
        return epochs[0] == epoch_of(token)
    return (one.steps, one.batches) > (other.steps, other.batches)


class UpdateKind(IntEnum):
    """Kinds of a response: the leader's progress, nothing newer than the follower has, or the head of a state."""

    PROGRESS = 0
    NOTHING = 1
    STATE = 2


@dataclass(frozen=True, slots=True)
class PullRequest:
    """``have``: the follower's version. It wants more after ``steps`` steps, or ``milliseconds`` and any step.

    ``token`` not 0: the sender has claimed the expert with it, and wants at once whatever is newer.
    """

    have: StateVersion
    steps: int = 0
    milliseconds: int = 0
    token: int = 0

    def to_bytes(self) -> bytes:
        """The data of a call of kind STATE."""
        numbers = (*astuple(self.have), self.steps, self.milliseconds, self.token)
        return _REQUEST.pack(*[min(_MOST, number) for number in numbers])


@dataclass(frozen=True, slots=True)
class PullResponse:
    """``version`` of the leader; with a state, its size in bytes and their hash (blake2b, 16 bytes)."""

    kind: UpdateKind
    version: StateVersion
    nbytes: int = 0
    digest: bytes = bytes(16)

    def to_bytes(self) -> bytes:
        """The data of a result."""
        return _RESPONSE.pack(self.kind, *astuple(self.version), self.nbytes, self.digest)


def read_request(data: bytes) -> PullRequest:
    """The inverse of `PullRequest.to_bytes`. Raises ``MalformedError`` for other bytes."""
    try:
        token, steps, batches, *wanted = _REQUEST.unpack(data)
    except error as reason:
        raise MalformedError(f"a request for a state cannot be read: {reason}", reason="state") from None
    return PullRequest(StateVersion(token, steps, batches), *wanted)


def read_response(data: bytes) -> PullResponse:
    """The inverse of `PullResponse.to_bytes`. Raises ``MalformedError`` for other bytes."""
    try:
        kind, token, steps, batches, nbytes, digest = _RESPONSE.unpack(data)
        return PullResponse(UpdateKind(kind), StateVersion(token, steps, batches), nbytes, digest)
    except (error, ValueError) as reason:
        raise MalformedError(f"the head of a state cannot be read: {reason}", reason="state") from None
