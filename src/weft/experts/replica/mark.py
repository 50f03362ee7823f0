"""How far a state is, and what owner and follower say to each other about it, as bytes.

    Mark(token 7, steps 20)  <  Mark(token 7, steps 21)  <  Mark(token 12, steps 15)

A later owner has a larger token, so its state is the newer one even if it has fewer steps: what the earlier owner
stepped beyond it was never seen by anybody who took over. Tokens of different lives of the directory have no order;
see `newer`.

    follower   Ask: the mark that it has, and when it wants more      owner   Told: a mark, and how many bytes follow
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from weft.experts.discovery.fencing import epoch_of
from weft.experts.wire import MalformedError

_ASK = struct.Struct("<QQQQQQB")
_TOLD = struct.Struct("<QQQQ16sB")
_MOST = (1 << 64) - 1


@dataclass(frozen=True, order=True, slots=True)
class Mark:
    """``token`` of the owner under whom the state was made, its optimizer ``steps`` and backward ``batches``."""

    token: int = 0
    steps: int = 0
    batches: int = 0


def newer(one: Mark, other: Mark, token: int) -> bool:
    """Whether state ``one`` is newer than ``other``, for who has claimed the expert with ``token``.

    What was made in the life of the directory that granted that, goes before all that was made in others: its owners
    had what there was of these. Of two other lives it is not known which was later; then it is the steps.
    """
    lives = epoch_of(one.token), epoch_of(other.token)
    if lives[0] == lives[1]:
        return one > other
    if epoch_of(token) in lives:
        return lives[0] == epoch_of(token)
    return (one.steps, one.batches) > (other.steps, other.batches)


class News(IntEnum):
    """What an owner tells: how far it is now, that there is nothing newer, or the head of a state."""

    PROGRESS = 0
    NOTHING = 1
    STATE = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """``have``: what the follower has. It wants more after ``steps`` steps, or ``milliseconds`` and any step.

    ``token`` not 0: whoever asks has claimed the expert with it, and wants at once whatever is newer.
    """

    have: Mark
    steps: int = 0
    milliseconds: int = 0
    token: int = 0

    def to_bytes(self) -> bytes:
        """49 bytes, the data of a call of kind STATE."""
        have = self.have
        numbers = (have.token, have.steps, have.batches, self.steps, self.milliseconds, self.token)
        return _ASK.pack(*[min(_MOST, number) for number in numbers], 0)


@dataclass(frozen=True, slots=True)
class Told:
    """``mark`` of the owner; with a state, its size in bytes and their hash (blake2b, 16 bytes)."""

    news: News
    mark: Mark
    nbytes: int = 0
    digest: bytes = bytes(16)

    def to_bytes(self) -> bytes:
        """49 bytes, the data of a result."""
        mark = self.mark
        return _TOLD.pack(mark.token, mark.steps, mark.batches, self.nbytes, self.digest, self.news)


def read_ask(data: bytes) -> Ask:
    """The inverse of `Ask.to_bytes`. Raises ``MalformedError`` for other bytes."""
    if len(data) != _ASK.size:
        raise MalformedError(f"who asks for a state sends {_ASK.size} bytes, not {len(data)}", reason="state")
    token, steps, batches, after, milliseconds, mine, zero = _ASK.unpack(data)
    if zero:
        raise MalformedError(f"the reserved byte of a question for a state is {zero}, wanted 0", reason="state")
    return Ask(Mark(token, steps, batches), after, milliseconds, mine)


def read_told(data: bytes) -> Told:
    """The inverse of `Told.to_bytes`. Raises ``MalformedError`` for other bytes."""
    if len(data) != _TOLD.size:
        raise MalformedError(f"the head of a state has {_TOLD.size} bytes, not {len(data)}", reason="state")
    token, steps, batches, nbytes, digest, news = _TOLD.unpack(data)
    if news not in {int(each) for each in News}:
        raise MalformedError(f"news of kind {news} are not known", reason="state")
    return Told(News(news), Mark(token, steps, batches), nbytes, digest)
