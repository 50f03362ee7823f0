"""Fencing: a token for each ownership, by which the writes of a replaced owner are refused.

    A owns with token 7 ... A stalls, its lease ends ... B owns with token 12, writes ... A wakes up and writes: 7 < 12

Only the receiver of a write can tell: A itself still believes that it is the owner. So a follower, a store, or a
server that takes state over keeps the largest token it has seen for each expert. A token has two parts:

    20 bits   epoch     a random number that the directory draws when it begins
    44 bits   number    the revision of the claim, which only grows within one epoch

    7/2003  <  7/2010        within one epoch the larger token is the later owner's
    7/2003  ?  9/120         the directory lost its data and began anew, or is another one: no comparison of numbers
                             tells which is later. Only the directory does, by what it grants and lists now

So a token of another epoch than the known owner's is refused until the directory was heard. A write never changes the
epoch. Epoch 0 is that of tokens from elsewhere, such as a test: only their numbers are compared.
"""

import secrets

from weft.experts.errors import FencedError

_BITS = 44
_NUMBERS = (1 << _BITS) - 1
_EPOCHS = 1 << 20


def new_epoch() -> int:
    """A number for a directory that begins; never 0."""
    return 1 + secrets.randbelow(_EPOCHS - 1)


def token_of(epoch: int, number: int) -> int:
    """The token that was granted in this epoch at this revision. It is below 2**64."""
    return (epoch % _EPOCHS) << _BITS | number


def epoch_of(token: int) -> int:
    """The epoch in which it was granted; 0: not known."""
    return token >> _BITS


def number_of(token: int) -> int:
    """The part of a token that is shown to people: it grows at every claim within one epoch."""
    return token & _NUMBERS


def later(token: int, known: int) -> bool:
    """Whether ``token`` is surely of a later owner than ``known``: larger, and of the same epoch."""
    return epoch_of(token) == epoch_of(known) and token > known


def replaced(token: int, known: int) -> bool:
    """Whether a receiver that knows the owner with token ``known`` refuses one with ``token``. 0 refuses nobody."""
    epochs = epoch_of(token), epoch_of(known)
    return number_of(token) < number_of(known) if 0 in epochs or epochs[0] == epochs[1] else True


class Fence:
    """The largest token seen for one expert. Its caller holds a lock.

    Example:
        >>> from weft.experts.discovery import Fence
        >>> fence = Fence("ffn.0")
        >>> fence.largest is None  # nothing seen yet
        True
    """

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self.largest: int | None = None

    def admit(self, token: int) -> None:
        """Let a write of the owner with ``token`` pass. Raises ``FencedError`` if a newer owner wrote before."""
        largest = token if self.largest is None else self.largest
        if replaced(token, largest):
            why = f"is old: an owner with token {number_of(largest)} wrote since"
            if epoch_of(token) != epoch_of(largest):
                why = f"is of another epoch of the directory than the known owner's, {number_of(largest)}"
            raise FencedError(
                f"token {number_of(token)} for expert {self._uid!r} {why}. Stop stepping it; claim it again if it is "
                "free"
            )
        self.largest = token

    def listed(self, token: int, *, granted: bool = False) -> bool:
        """The directory lists the owner with ``token``; whether it has begun anew since the one before.

        Then that one's token counts no more. ``granted``: it was granted just now, so that even a smaller one is the
        later one. Otherwise the listing may be outdated, and a smaller token of the same epoch changes nothing.
        """
        largest = self.largest
        if largest is None or later(token, largest):
            self.largest = token
            return False
        anew = granted or epoch_of(token) != epoch_of(largest)
        if anew:
            self.largest = token
        return anew
